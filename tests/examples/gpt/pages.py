"""Which pages of a cache belong to which text. Texts that begin alike share the pages that they fill.

A page is shared only while it is full, and then never written again. Its name is the whole text up to its end, so that equal
names mean equal keys. Pages that no request has any more stay until others are needed, the oldest first.
"""

from __future__ import annotations

Name = tuple[int, ...]


class Pages:
    def __init__(self, number: int, size: int, share: bool) -> None:
        self.size, self.share = size, share
        self.free = list(range(number))
        self.users = [0] * number
        self.names: dict[int, Name] = {}
        self.known: dict[Name, int] = {}
        self.kept: dict[int, None] = {}  # without a user, but with a name

    @property
    def available(self) -> int:
        return len(self.free) + len(self.kept)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def beginning(self, text: list[int]) -> list[int]:
        """The pages that hold the beginning of this text. One token at least is left to compute."""
        found = []
        for end in range(self.size, len(text), self.size):
            page = self.known.get(tuple(text[:end]))
            if page is None:
                break
            found.append(page)
        return found

    def use(self, page: int) -> None:
        self.kept.pop(page, None)
        self.users[page] += 1

    def new(self) -> int:
        if not self.free:
            oldest = next(iter(self.kept))
            del self.kept[oldest], self.known[self.names.pop(oldest)]
            self.free.append(oldest)
        page = self.free.pop()
        self.users[page] = 1
        return page

    def name(self, page: int, text: list[int]) -> None:
        """Record that a page is full and ends this text. If another page has the same text, that one stays recorded."""
        name = tuple(text)
        if self.share and page not in self.names and name not in self.known:
            self.names[page], self.known[name] = name, page

    def leave(self, page: int) -> None:
        self.users[page] -= 1
        if self.users[page] == 0:
            if page in self.names:
                self.kept[page] = None
            else:
                self.free.append(page)
