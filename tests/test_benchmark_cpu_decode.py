"""cpu_decode.py: bytes that are counted, results that are compared before anything is timed, and the lines it prints."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from benchmark_program import program

import libflash

pytest.importorskip("torch")  # of cpu_attention, for the name of the processor

HEADS_K, DIM, BATCH, KEYS = 8, 128, 8, 64


def test_bytes_are_those_of_caches_and_scales() -> None:
    rows = BATCH * KEYS * HEADS_K
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        found = {one.name: one for one in program("cpu_decode").contenders(dtype, KEYS)}
        for name in ("plain", "packed", "pages", "ragged pages"):
            assert found[name].bytes == 2 * rows * DIM * size
        for code in ("e4m3", "e5m2", "int8"):
            assert found[f"{code}, scales of heads"].bytes == 2 * rows * DIM
            assert found[f"{code}, scales of rows"].bytes == 2 * rows * (DIM + 4)
        assert {one.keys for one in found.values()} == {BATCH * KEYS}


def test_ratios() -> None:
    """Half the bytes in three quarters of the time: 2/3 of the rate, 4/3 of the keys."""
    benchmark = program("cpu_decode")
    calls = [benchmark.Contender("plain", lambda: None, 1000, 10), benchmark.Contender("codes", lambda: None, 500, 10)]
    plain, codes = benchmark.figures(calls, {"plain": 4.0, "codes": 3.0})
    assert (plain["ratio"], plain["per_key"]) == (1, 1)
    assert codes["ratio"] == pytest.approx(2 / 3)
    assert codes["per_key"] == pytest.approx(4 / 3)
    assert codes["gb_s"] == pytest.approx(500 / 3 / 1e9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["packed", "ragged pages", "int8, scales of rows", "e4m3, ragged pages"])
def test_a_wrong_result_is_not_timed(dtype: str, name: str) -> None:
    benchmark = program("cpu_decode")
    calls = benchmark.contenders(dtype, KEYS)
    benchmark.compare(calls)
    at = [one.name for one in calls].index(name)
    right = calls[at].call()
    calls[at] = dataclasses.replace(calls[at], call=lambda: right + np.asarray(1, right.dtype))
    with pytest.raises(SystemExit, match=r"the result differs by .* nothing is timed"):
        benchmark.compare(calls)


def test_what_it_prints(capsys: pytest.CaptureFixture) -> None:
    try:
        assert program("cpu_decode").main(["--quick", "--rounds", "1", "--types", "float16"]) == 0
    finally:
        libflash.set_num_threads(0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| q | cache | ms | GB/s | ratio | per key |"
    assert re.fullmatch(r"\| float16 \| plain \| \d+\.\d\d \| \d+\.\d \| 1\.00 \| 1\.00 \|", lines[4])
    assert len(lines) == 4 + 4 + 3 * 2 + 1
