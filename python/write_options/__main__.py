"""Writes the options (libflash/_option_list.py) and the structs of the C header to the places that repeat them in another
language: signatures, calls, structs of Cython, classes of types, attributes of the JAX adapter.

    python python/write_options            write, and name the files that changed
    python python/write_options --check    only name the files that would change; fails if there are any

The files stay readable as they are: nothing is generated when libflash is built. The documentation, the checks and the arithmetic
of a new option are written by hand.
"""

from __future__ import annotations

import sys

from option_places import ROOT, changed, option_list


def main() -> int:
    found = changed(option_list())
    check = sys.argv[1:] == ["--check"]
    for path, text in found.items():
        print(path.relative_to(ROOT))
        if not check:
            path.write_text(text)
    return 1 if check and found else 0


if __name__ == "__main__":
    sys.exit(main())
