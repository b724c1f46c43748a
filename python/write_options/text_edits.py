"""Edits of a text: each finds its place by the text before it, and replaces what follows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

WIDTH = 130
Edit = Callable[[str], str]


def wrapped(head: str, items: Iterable[str], indent: str, tail_width: int) -> str:
    """`head` and the items, with commas, on lines that are as full as they may be; after the last follow `tail_width` columns."""
    items = list(items)
    lines, line = [], head
    for n, item in enumerate(items):
        text = item + (", " if n < len(items) - 1 else "")
        room = WIDTH - (0 if n < len(items) - 1 else tail_width)
        if len(line) + len(text.rstrip()) > room and line.strip():
            lines.append(line.rstrip())
            line = indent
        line += text
    return "\n".join([*lines, line])


def closing(text: str, start: int, last: str) -> int:
    """The index of `last` outside of the brackets that are opened after `start`."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] == last and depth == 0:
            return i
        depth += (text[i] in "([") - (text[i] in ")]")
    raise SystemExit(f"no {last!r} after {text[start - 40 : start]!r}")


def after(before: str, items: Iterable[str], last: str = ")") -> Edit:
    """Replaces the list from `before`, which occurs once, to `last`."""

    def edit(text: str) -> str:
        if text.count(before) != 1:
            raise SystemExit(f"{before!r} occurs {text.count(before)} times; it must occur once")
        start = text.index(before) + len(before)
        end = closing(text, start, last)
        begin = text.rfind("\n", 0, start) + 1
        broken = re.search(r"\n( *)", text[start:end])
        line_end = text.find("\n", end)
        tail = text[end : line_end if line_end >= 0 else len(text)]
        made = wrapped(text[begin:start], items, broken[1] if broken else " " * (start - begin), len(tail))
        return text[:begin] + made + text[end:]

    return edit


def lines_between(before: str, end: str, lines: Iterable[str]) -> Edit:
    """Replaces the lines between two texts, the first of which occurs once."""

    def edit(text: str) -> str:
        if text.count(before) != 1:
            raise SystemExit(f"{before!r} occurs {text.count(before)} times; it must occur once")
        start = text.index(before) + len(before)
        return text[:start] + "".join(f"{line}\n" for line in lines) + text[text.index(end, start) :]

    return edit


def run_of_lines(inside: str, pattern: str, lines: Iterable[str]) -> Edit:
    """Replaces the first lines after `inside` that match the pattern and follow one another."""

    def edit(text: str) -> str:
        start = text.index(inside)
        found = re.compile(rf"(?:^{pattern}\n)+", re.M).search(text, start)
        if not found:
            raise SystemExit(f"no line {pattern!r} after {inside!r}")
        return text[: found.start()] + "".join(f"{line}\n" for line in lines) + text[found.end() :]

    return edit


def keywords(function: str, lines: Iterable[str]) -> Edit:
    """Replaces the arguments after `*` of a function of Python, one on a line."""

    def edit(text: str) -> str:
        start = text.index("    *,\n", text.index(f"\ndef {function}(")) + len("    *,\n")
        return text[:start] + "".join(f"{line}\n" for line in lines) + text[text.index(") -> ", start) :]

    return edit


def python_literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
