"""The table with one line for each length, and figures with readable units."""

from __future__ import annotations

import dataclasses

from libflash.demo.measure import Measurement

WIDTHS = (6, 9, 8, 8, 10, 8, 8, 7, 8)
HEADINGS = ("words", "time", "memory", "error", "time", "memory", "error", "faster", "guessed")
GROUP = sum(WIDTHS[1:4]) + 2, sum(WIDTHS[4:7]) + 2  # columns of one method
RULE = "-" * (sum(WIDTHS) + len(WIDTHS) - 1)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Both methods at one length: a line of the table."""

    seqlen: int
    standard: Measurement | str  # str: why it did not run
    libflash: Measurement | str


def heading() -> str:
    standard = " standard attention, NumPy ".center(GROUP[0] - 1, "-")
    own = " libflash ".center(GROUP[1] - 3, "-")
    return "\n".join([" " * (WIDTHS[0] + 2) + standard + " " * 4 + own, line(HEADINGS), RULE])


def comparison_line(comparison: Comparison) -> str:
    standard, own = (
        line(cells(m), first) if isinstance(m, Measurement) else f"{m:>{width}}"
        for m, first, width in ((comparison.standard, 1, GROUP[0]), (comparison.libflash, 4, GROUP[1]))
    )
    return " ".join([line([str(comparison.seqlen)]), standard, own, line([faster(comparison), guessed(comparison)], 7)])


def cells(m: Measurement) -> list[str]:
    return [time_text(m.seconds), bytes_text(m.memory_bytes), f"{m.error:.1e}"]


def line(texts: list[str] | tuple[str, ...], first: int = 0) -> str:
    return " ".join(f"{text:>{width}}" for text, width in zip(texts, WIDTHS[first:], strict=False))


def faster(comparison: Comparison) -> str:
    if isinstance(comparison.standard, str) or isinstance(comparison.libflash, str):
        return "-"
    return f"{comparison.standard.seconds / comparison.libflash.seconds:.1f} x"


def guessed(comparison: Comparison) -> str:
    known = comparison.libflash if isinstance(comparison.libflash, Measurement) else comparison.standard
    return f"{100 * known.guessed:.0f} %" if isinstance(known, Measurement) else "-"


def time_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"


def bytes_text(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB" if count >= 1e7 else f"{count / 1e6:.1f} MB"


def measurements(comparisons: list[Comparison], method: str) -> list[Measurement]:
    found = [getattr(comparison, method) for comparison in comparisons]
    return [m for m in found if isinstance(m, Measurement)]
