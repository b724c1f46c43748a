"""The hint of libflash.decode that neighbouring sequences have the same first keys in the same pages."""

from __future__ import annotations


def groups_of(pages: list[list[int]], cached: list[int], size: int) -> tuple[list[int], list[int]]:
    """(shared_groups, shared_lens) of sequences with these pages of `size` rows and these numbers of cached keys. Neighbours with
    the same first page are one group; they share the pages up to the first different one.
    """
    groups, lengths = [0], []
    for end in range(1, len(pages) + 1):
        first = groups[-1]
        if end < len(pages) and pages[end][:1] == pages[first][:1]:
            continue
        members = pages[first:end]
        same = 0
        if len(members) > 1:
            while all(same < len(own) and own[same] == members[0][same] for own in members):
                same += 1
        groups.append(end)
        lengths.append(min(same * size, *cached[first:end]) if same else 0)
    return groups, lengths
