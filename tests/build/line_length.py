"""Lines of code and comments have at most 130 columns. ruff checks Python files.

python tests/build/line_length.py [FILE...]    names longer lines, exit code 1; without files: all that git tracks
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

COLUMNS = 130
SUFFIXES = {".h", ".c", ".cpp", ".cu", ".cuh", ".cmake", ".table", ".pyx", ".pxd", ".pxi", ".pyi"}


def long_lines(path: pathlib.Path) -> list[str]:
    lines = path.read_text().splitlines()
    return [f"{path}:{number}: {len(line)} columns" for number, line in enumerate(lines, 1) if len(line) > COLUMNS]


def tracked() -> list[str]:
    return subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True, text=True).stdout.split("\0")


def main() -> int:
    paths = map(pathlib.Path, sys.argv[1:] or tracked())
    found = [line for path in paths if path.suffix in SUFFIXES and path.is_file() for line in long_lines(path)]
    print("\n".join(found), end="\n" * bool(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
