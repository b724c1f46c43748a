"""`python -m libflash conformance`: the tests of libflash for any implementation of attention.

It needs NumPy, and ml_dtypes for bf16.

The oracle: `reference` (attention), `reference_decode` (KV cache, merge), `reference_tangent` (forward mode and second
derivatives), with `visibility` and `dropout_mask`; it shares no code with the library. The problems: `cases` and `decode_cases`
list them, `case` builds one, with the values of `fills` and `structured`; `checks` has further tests, with inputs of their own.
The rule that results must satisfy: `tolerance`, with `error_bounds`, `tangent_bounds`, `rounding` and `eager`.

A run: `target` is what is tested, `targets` the adapters, `needs` says what a call needs of them. `items` lists everything
to run; an `item` is one such test, whose run gives an `outcome`. `summary` counts, `report` prints, `command` does all of it.

libflash's own tests use the same cases, checks and rule (tests/short_names).
"""

import sys

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """0: everything that applies holds; 1: something fails; 2: bad options or a missing package; 130: interrupted."""
    try:
        from libflash.conformance import command  # libflash itself does not need NumPy

        return command.main(sys.argv[1:] if argv is None else argv)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] == "libflash":
            raise
        print(f"libflash conformance: needs {missing.name}, which this Python does not have", file=sys.stderr)
        return 2
