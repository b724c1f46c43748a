"""Wraps Markdown at 130 columns: paragraphs and list items that have a longer line. Other paragraphs stay as they are.

Tables, code, headings and what scripts write (between <!-- name --> and <!-- /name -->) are left alone.

    python tests/build/wrap_documents.py FILE...
"""

from __future__ import annotations

import pathlib
import re
import sys
import textwrap
from collections.abc import Iterator

COLUMNS = 130
ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s+")
APART = re.compile(r"\s*$|\s*\||#|\s*<!--")  # lines that belong to no paragraph
SPECIAL = re.compile(r"\s*(?:[-+*#>]|\d+[.)])(?:\s|$)")  # at the start of a line it would begin a list, a heading or a quote
CODE = re.compile(r"`[^`]{1,70}`")  # stays on one line
KEPT_SPACE = "\x01"


def parts(text: str) -> Iterator[tuple[bool, list[str]]]:
    """The document in pieces: (True, the lines of a paragraph or list item) or (False, [a line of something else])."""
    block: list[str] = []
    fenced, generated = False, False
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        begins, ends = re.match(r"<!-- [\w-]+ -->$", line), re.match(r"<!-- /[\w-]+ -->$", line)
        generated = bool(begins) or (generated and not ends)
        apart = fence or fenced or generated or APART.match(line)
        if block and (apart or ITEM.match(line)):
            yield True, block
            block = []
        if apart:
            yield False, [line]
        else:
            block.append(line)
        fenced ^= fence
    if block:
        yield True, block


def wrapped(block: list[str]) -> list[str]:
    """In lines of at most COLUMNS, indented as the second line was, or as the text of an item."""
    item = ITEM.match(block[0])
    first = item[0] if item else re.match(r"\s*", block[0])[0]  # type: ignore[index]
    later = " " * len(first) if item or len(block) == 1 else re.match(r"\s*", block[1])[0]  # type: ignore[index]
    words = " ".join([block[0][len(first) :].strip(), *(line.strip() for line in block[1:])])
    words = CODE.sub(lambda code: code[0].replace(" ", KEPT_SPACE), words)
    lines = textwrap.wrap(
        words, COLUMNS, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
    for i in range(1, len(lines)):
        while SPECIAL.match(lines[i]):
            lines[i - 1], last = lines[i - 1].rsplit(" ", 1)
            lines[i] = f"{later}{last} {lines[i].strip()}"
    return [line.replace(KEPT_SPACE, " ") for line in lines]


def wrap(text: str) -> str:
    lines: list[str] = []
    for is_text, block in parts(text):
        too_long = is_text and any(len(line) > COLUMNS for line in block)
        lines += wrapped(block) if too_long else block
    return "\n".join(lines) + "\n"


def long_lines(text: str) -> list[int]:
    """Numbers of the lines of paragraphs and list items that are too long."""
    numbers, number = [], 0
    for is_text, block in parts(text):
        for line in block:
            number += 1
            if is_text and len(line) > COLUMNS:
                numbers.append(number)
    return numbers


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = pathlib.Path(name)
        path.write_text(wrap(path.read_text()))
