"""Drafts for speculative decoding without a second model: what followed the last tokens where the text had them before."""

from __future__ import annotations

import dataclasses

MOST_NODES = 31  # bits of a word, without the sign


@dataclasses.dataclass
class Tree:
    """Tokens that may follow, node 0 being the last token of the text. A parent comes before its children."""

    tokens: list[int]
    parents: list[int]  # -1 for node 0

    @property
    def depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    def words(self) -> list[int]:
        """Row i of tree_mask: bit j says that node i sees node j, an ancestor or itself. At most MOST_NODES nodes."""
        rows: list[int] = []
        for node, parent in enumerate(self.parents):
            rows.append((0 if parent < 0 else rows[parent]) | 1 << node)
        return rows

    def child(self, node: int, token: int) -> int | None:
        for other, parent in enumerate(self.parents):
            if parent == node and self.tokens[other] == token:
                return other
        return None

    def add(self, continuation: list[int], most: int) -> None:
        node = 0
        for token in continuation:
            below = self.child(node, token)
            if below is None:
                if len(self.tokens) == most:
                    return
                below = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
            node = below


def draft(text: list[int], most: int, depth: int, longest: int = 4) -> Tree:
    """A tree of at most `most` nodes. Continuations after longer matches come first, and later ones before earlier ones."""
    tree = Tree([text[-1]], [-1])
    for length in range(min(longest, len(text) - 1), 1, -1):
        end = text[-length:]
        for start in range(len(text) - length - 1, -1, -1):
            if len(tree.tokens) >= most:
                return tree
            if text[start : start + length] == end:
                tree.add(text[start + length : start + length + depth], most)
    return tree
