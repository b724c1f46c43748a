"""The hash of the sources that evidence is about: those that determine what a GPU computes, as a compiler sees them.

All files under libflash/ and include/ except libflash/cpu/, which CI tests itself, documents (*.md) and hidden files, which no
compiler reads. Comments and white space between words do not count.
New files count before they are committed, so that evidence taken just before a commit holds after it. Where there is no git
(a source archive, a copy on another machine) the folders are walked; both ways give the same list.

    python tests/evidence/sources.py            print the hash
    python tests/evidence/sources.py --list     print hash and path of each file
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("libflash", "include")
LEFT_OUT = "libflash/cpu/"
NOT_COMPILED = (".so", ".o", ".a", ".pyc", ".pyo", ".pyd", ".md")
C_FILES = (".h", ".cpp", ".cuh", ".cu", ".c", ".h.in")
HASH_FILES = (".cmake", ".table", ".txt")  # a comment begins with '#'
# A literal is kept unchanged; a comment counts as a space.
C_TOKENS = re.compile(r'(?P<kept>"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')|//(?:\\\n|[^\n])*|/\*.*?\*/', re.DOTALL)
HASH_TOKENS = re.compile(r'(?P<kept>"(?:\\.|[^"\\])*")|#[^\n]*', re.DOTALL)


def listed_by_git(root: pathlib.Path) -> list[str] | None:
    """Tracked files, and new ones that are not ignored; None where `root` is no checkout."""
    try:
        top = git(root, "rev-parse", "--show-toplevel").decode().rstrip("\n")
        if pathlib.Path(top).resolve() != root.resolve():
            return None  # an archive unpacked inside someone else's repository
        found = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *FOLDERS)
    except (OSError, subprocess.CalledProcessError):
        return None
    return sorted(set(found.decode().split("\0")) - {""})


def git(root: pathlib.Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", root, *arguments], check=True, capture_output=True).stdout


def found_by_walking(root: pathlib.Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for folder in FOLDERS for path in (root / folder).rglob("*"))


def files(root: pathlib.Path = ROOT) -> list[str]:
    """Paths relative to the root, sorted."""
    listed = listed_by_git(root)
    return [path for path in (found_by_walking(root) if listed is None else listed) if counts(root, path)]


def counts(root: pathlib.Path, path: str) -> bool:
    parts = path.split("/")
    hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
    return not (path.startswith(LEFT_OUT) or hidden or path.endswith(NOT_COMPILED)) and (root / path).is_file()


def compiled_text(path: pathlib.Path) -> bytes:
    """The file without comments, empty lines and repeated spaces."""
    tokens = C_TOKENS if path.name.endswith(C_FILES) else HASH_TOKENS if path.name.endswith(HASH_FILES) else None
    if tokens is None:
        return path.read_bytes()
    text = tokens.sub(lambda found: found["kept"] or " ", path.read_text())
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line).encode()


def file_digest(path: pathlib.Path) -> str:
    return hashlib.sha256(compiled_text(path)).hexdigest()


def digest(root: pathlib.Path = ROOT) -> str:
    """Changes when a file changes, or is added, removed or renamed."""
    total = hashlib.sha256()
    for path in files(root):
        total.update(f"{file_digest(root / path)}  {path}\n".encode())
    return total.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="hash and path of each file")
    if parser.parse_args().list:
        print("\n".join(f"{file_digest(ROOT / path)}  {path}" for path in files()))
    else:
        print(digest())
    return 0


if __name__ == "__main__":
    sys.exit(main())
