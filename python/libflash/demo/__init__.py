"""`python -m libflash demo`: exact attention over a long real text, compared with standard attention in NumPy.

The modules: `text` splits Python's own documentation into words. `model` makes queries, keys and values from words. `measure`
runs one method over the last n words in a process of its own, measures its memory (`memory`) and compares the result with
float64 (`standard`, which also has the textbook method). `schedule` chooses the lengths. `ask` continues a phrase word by word
from the whole text. `report`, `table`, `chart` and `progress` print and draw. `command` runs all of it. The demo needs NumPy,
its chart matplotlib.
"""

import sys

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """0: done and right; 1: a result was wrong or a step failed; 2: bad options or something missing; 130: interrupted."""
    try:
        from libflash.demo import command  # libflash itself does not need NumPy
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] == "libflash":
            raise
        print(f"libflash demo: needs {missing.name}, which this Python does not have", file=sys.stderr)
        return 2
    return command.main(sys.argv[1:] if argv is None else argv)
