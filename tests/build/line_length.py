"""Lines of code, comments and documents (except tables and code in them) have at most 130 columns. ruff checks Python files.

python tests/build/line_length.py [FILE...]    names longer lines, exit code 1; without files: all that git tracks
python tests/build/wrap_documents.py FILE...   wraps documents
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

import wrap_documents

COLUMNS = 130
SUFFIXES = {".h", ".c", ".cpp", ".cu", ".cuh", ".cmake", ".table", ".pyx", ".pxd", ".pxi", ".pyi", ".md"}


def long_lines(path: pathlib.Path) -> list[str]:
    text = path.read_text()
    lines = text.splitlines()
    numbers = wrap_documents.long_lines(text) if path.suffix == ".md" else range(1, len(lines) + 1)
    return [f"{path}:{number}: {len(lines[number - 1])} columns" for number in numbers if len(lines[number - 1]) > COLUMNS]


def tracked() -> list[str]:
    return subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True, text=True).stdout.split("\0")


def found_in(names: list[str]) -> list[str]:
    paths = map(pathlib.Path, names)
    return [line for path in paths if path.suffix in SUFFIXES and path.is_file() for line in long_lines(path)]


def main() -> int:
    found = found_in(sys.argv[1:] or tracked())
    print("\n".join(found), end="\n" * bool(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
