"""`python -m libflash demo`: exact attention over a long real text, beside standard attention in NumPy.

The rooms: `text` cuts Python's own documentation into words; `model` turns words into queries, keys and values; `measure`
runs one method over the last n words in a process of its own, weighs it (`memory`) and compares it with float64 (`standard`,
which also holds the textbook method); `schedule` says which lengths; `ask` continues a phrase word by word from the whole
text; `report`, `table`, `chart` and `progress` show it; `command` puts it together. Needs NumPy; the chart needs matplotlib.
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
