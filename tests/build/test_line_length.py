"""The check of line lengths, and wrap_documents.py, which wraps documents without changing their words."""

from __future__ import annotations

import pathlib

import line_length
import wrap_documents

LONG = "word " * 40 + "end"


def test_a_long_line_of_a_document_is_found(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.md"
    path.write_text(f"short\n\n- {LONG}\n\n| {LONG} |\n\n```\n{LONG}\n```\n<!-- table -->\n{LONG}\n<!-- /table -->\n")
    assert line_length.found_in([str(path)]) == [f"{path}:3: 205 columns"]


def test_wrapping_keeps_words_and_what_is_no_text() -> None:
    code = "`a b c d e f g h i j k l m n o p q r s t u v w x y z`"
    document = f"# {LONG}\n\n1. {LONG} {code} {LONG}\n   second line\n\n| {LONG} |\n```\n{LONG}\n```\n\nshort\nlines\n"
    text = wrap_documents.wrap(document)
    assert text.split() == document.split()
    assert text.endswith(f"\n\n| {LONG} |\n```\n{LONG}\n```\n\nshort\nlines\n")
    assert code in text
    lines = text.splitlines()[2 : text.splitlines().index(f"| {LONG} |") - 1]
    assert all(len(line) <= 130 for line in lines)
    assert [line[:3] for line in lines] == ["1. "] + ["   "] * (len(lines) - 1)


def test_no_line_begins_like_a_list() -> None:
    text = wrap_documents.wrap("x" * 125 + " word - minus " + "y " * 10 + "\n")
    assert text.startswith("x" * 125 + "\n")
    assert text.splitlines()[1].startswith("word - minus")
