"""Forward and backward of every listed case, by every CPU kernel that this machine can run, against the float64 reference."""

from __future__ import annotations

import abi
import cases
import numpy as np
import pytest
from case import Case, Inputs
from harness import BFLOAT16, assert_same_bits, cpu_kernels, empty_like, run, run_forward

import libflash

CPU = [
    (case, isa) for case in [*cases.quick(), *cases.shards()] for isa in cpu_kernels()
]  # kernels in the inner loop: the reference is computed once per case


@pytest.mark.parametrize(("case", "isa"), CPU, ids=[f"{case}-{isa}" for case, isa in CPU])
def test_case(case: Case, isa: str) -> None:
    case.check(**run(case, isa))


def small_tile_cases() -> list[Case]:
    """Every fourth pair of options, and shapes with partial tiles."""
    quick = cases.quick()
    pairs = [case for case in quick if case.name.startswith("pairs-")][::4]
    shapes = [case for case in quick if case.name.startswith(("size-17x64", "size-65x64", "size-31x31", "exact-", "poison-"))]
    return [*pairs, *shapes[::3], *cases.shards()[::4]]


SMALL = [
    (case, isa, tiles)
    for index, case in enumerate(small_tile_cases())
    for isa in cpu_kernels()
    for tiles in [((2, 3), (3, 2), (16, 16), (1, 1), (5, 32))[index % 5]]
]


@pytest.mark.parametrize(("case", "isa", "tiles"), SMALL, ids=[f"{c}-{i}-{t[0]}x{t[1]}" for c, i, t in SMALL])
def test_small_tiles(case: Case, isa: str, tiles: tuple[int, int]) -> None:
    """Tiny problems that cross every tile boundary."""
    case.check(**run_tiled(case, isa, tiles))


def run_tiled(case: Case, isa: str, tiles: tuple[int, int]) -> dict[str, np.ndarray]:
    """Like harness.run, with a given tile size, which only the C interface allows."""
    x = case.inputs()
    options = c_options(x) | {"tile_q": tiles[0], "tile_k": tiles[1]}
    rows = x.q.shape[:-1]
    made = {
        "o": np.full((*rows, x.v.shape[-1]), np.nan, x.q.dtype),
        "lse": np.full(
            rows[::-1] if case.packed else (rows[0], rows[2], rows[1]),
            np.nan,
            np.float64 if x.q.dtype == np.float64 else np.float32,
        ),
        "dq": empty_like(x.q),
        "dk": empty_like(x.k),
        "dv": empty_like(x.v),
    }
    abi.forward(x.q, x.k, x.v, made["o"], made["lse"], kernel=f"forward_cpu_{isa}".encode(), **options)
    for name, given in {"dbias": "bias", "dsink": "learnable_sink"}.items():
        if given in x.options:
            made[name] = options[name] = empty_like(x.options[given])
    if x.dlse is not None:
        options["dlse"] = x.dlse
    outputs = (made["dq"], made["dk"], made["dv"])
    abi.backward(x.dout, x.q, x.k, x.v, made["o"], made["lse"], *outputs, kernel=f"backward_cpu_{isa}".encode(), **options)
    return made


def c_options(x: Inputs) -> dict:
    """The fields of the C options for Python's keywords."""
    given = dict(x.options)
    flags = abi.CAUSAL if given.pop("causal", False) else 0
    if given.pop("causal_align", "bottom_right") == "top_left":
        flags |= abi.TOP_LEFT
    if "window_size" in given:
        flags |= abi.WINDOW
        given["window_left"], given["window_right"] = given.pop("window_size")
    if "softmax_scale" in given:
        flags |= abi.SCALE
    if any(name.startswith(("row_", "column_")) for name in given):
        flags |= abi.POSITIONS
    for name in ("row_begin", "column_begin"):
        if isinstance(given.get(name), np.ndarray):
            given[f"{name}s"] = given.pop(name)
    return {"flags": flags, **given}


def test_both_faces_agree() -> None:
    """Cython and ctypes give the same results."""
    for case in [case for case in cases.quick() if case.name.startswith("only-")][::3]:
        x = case.inputs()
        o, lse = run_forward(x).values()
        other_o, other_lse = empty_like(o), empty_like(lse)
        abi.forward(x.q, x.k, x.v, other_o, other_lse, **c_options(x))
        assert_same_bits((o if o.dtype != BFLOAT16 else o.view("u2")), other_o if o.dtype != BFLOAT16 else other_o.view("u2"))
        assert_same_bits(lse, other_lse, str(case))


@pytest.mark.long
@pytest.mark.parametrize("case", cases.long(), ids=str)
def test_long_case(case: Case) -> None:
    case.check(**run(case))


def test_a_wrong_result_is_found() -> None:
    """The check fails for a dropped key, a lost row of dv, and a scale that is wrong by 1%."""
    case = cases.by_name("only-visible-1")
    x = case.inputs()
    right = run(case)
    case.check(**right)
    dropped = libflash.attention(x.q, x.k[:, 1:], x.v[:, 1:], **x.options)
    scaled = libflash.attention(x.q, x.k, x.v, **x.options, softmax_scale=1.01 / np.sqrt(x.q.shape[-1]))
    lost = right["dv"].copy()
    lost[0, 3, 0] = 0
    for name, wrong in {"o": dropped, "dv": lost}.items():
        with pytest.raises(AssertionError):
            case.check(**{name: wrong})
    with pytest.raises(AssertionError):
        case.check(o=scaled)
