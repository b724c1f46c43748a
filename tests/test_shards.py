"""Parts of a problem: keys in several calls, each of which continues the previous one; sums of gradients; float32 in between."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
import tolerance
from case import Case, Inputs
from harness import BFLOAT16, assert_close, assert_same_bits, cpu_kernels, empty_like, qkv, random
from reference import backward_part, forward
from rounding import DTYPES
from test_scalar import assert_agree

import libflash

ISAS = cpu_kernels()
# Any option but those that count keys of the tensor (bias, mask, block mask) may come with parts of the keys.
OPTIONS = [
    {"causal": True},
    {"causal": True, "window_size": (33, -1), "sink": True},
    {"window_size": (9, 30), "alibi": "bh"},
    {"dropout_p": 0.25, "seed": 5, "sink": True, "dlse": True},
    {"causal": True, "softcap": 5.0, "dropout_p": 0.5, "dlse": True},
    {"sink": True, "alibi": "h", "causal": True, "dropout_p": 0.5, "seed": 2**40, "dlse": True},
]
WHOLE = [
    Case(f"parts-{n}-{dtype}", dtype, 2, 70, 150, 4, 2, 40, **options) for n, options in enumerate(OPTIONS) for dtype in DTYPES
]
PARTS = [np.arange(0, 64), np.arange(0), np.arange(64, 65), np.arange(66, 150, 2), np.arange(67, 150, 2), np.array([65])]


@dataclasses.dataclass
class Part:
    """Some keys of a problem, with the options of the call for them."""

    k: np.ndarray
    v: np.ndarray
    options: dict


def parts_of(x: Inputs, as_rows: bool) -> list[Part]:
    """The keys in PARTS. The positions of rows are aligned bottom-right with all keys."""
    rows, keys = x.q.shape[1], x.k.shape[1]
    made = []
    for number, part in enumerate(PARTS):
        options = {name: value for name, value in x.options.items() if name != "learnable_sink" or number == 0}
        options |= {"row_begin": keys - rows}
        if as_rows:
            options["column_positions"] = np.tile(part.astype(np.int32), (len(x.k), 1))
        else:
            step = int(part[1] - part[0]) if len(part) > 1 else 1
            options |= {"column_begin": int(part[0]) if len(part) else 0, "column_step": step}
        made.append(Part(np.ascontiguousarray(x.k[:, part]), np.ascontiguousarray(x.v[:, part]), options))
    return made


def with_aligned_positions(x: Inputs) -> dict:
    """Options of the oracle for the whole problem, whose dropout counts rows by position like that of the parts."""
    return x.options | {"row_begin": x.k.shape[1] - x.q.shape[1], "column_begin": 0}


@cache
def expected(case: Case) -> tolerance.Expected:
    x = case.inputs()
    return tolerance.expect(x.q, x.k, x.v, dout=x.dout, dlse=x.dlse, **with_aligned_positions(x))


def wide(x: np.ndarray) -> np.dtype:
    return np.dtype(np.float64 if x.dtype == np.float64 else np.float32)


def forward_in_parts(x: Inputs, parts: list[Part], kernel: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    out = np.full((*x.q.shape[:3], x.v.shape[3]), np.nan, wide(x.q))
    lse = np.full((len(x.q), x.q.shape[2], x.q.shape[1]), np.nan, wide(x.q))
    for number, part in enumerate(parts):
        libflash.attention(x.q, part.k, part.v, out=out, lse=lse, resume=number > 0, kernel=kernel, **part.options)
    return out, lse


@pytest.mark.parametrize("as_rows", [False, True], ids=["numbers", "rows"])
@pytest.mark.parametrize("case", WHOLE, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_calls_that_go_on_give_the_whole_result(case: Case, isa: str, as_rows: bool) -> None:
    x = case.inputs()
    out, lse = forward_in_parts(x, parts_of(x, as_rows), f"forward_cpu_{isa}")
    tolerance.check({"o": out.astype(x.q.dtype), "lse": lse}, expected(case), label=str(case))
    if case.dtype == "fp64" and isa == "scalar":
        wanted, wanted_lse = forward(x.q, x.k, x.v, **with_aligned_positions(x))
        assert_agree(out, wanted, "o")
        assert_agree(lse, wanted_lse, "lse")


def test_the_oracle_goes_on_from_an_earlier_result() -> None:
    for case in WHOLE[3 :: len(DTYPES)]:
        x = case.inputs()
        result = None
        for part in parts_of(x, as_rows=True):
            result = forward(x.q, part.k, part.v, earlier=result, **part.options)
        for got, wanted in zip(result, forward(x.q, x.k, x.v, **with_aligned_positions(x)), strict=True):
            assert_agree(got, wanted, str(case))


@pytest.mark.parametrize("case", WHOLE, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_gradients_of_the_parts_add_up(case: Case, isa: str) -> None:
    """Also: delta is written by the first call and read by the others, and each part has the gradients of its keys."""
    x = case.inputs()
    options = with_aligned_positions(x)
    out, lse = libflash.attention(x.q, x.k, x.v, return_lse=True, kernel=f"forward_cpu_{isa}", **options)
    total = {name: np.full(a.shape, np.nan, wide(a)) for name, a in (("dq", x.q), ("dk", x.k), ("dv", x.v))}
    delta = np.full(lse.shape, np.nan, lse.dtype)
    if case.sink:
        total["dsink"] = empty_like(x.options["learnable_sink"])
    for number, (part, at) in enumerate(zip(parts_of(x, as_rows=False), PARTS, strict=True)):
        dk, dv = (np.zeros(a.shape, wide(a)) for a in (part.k, part.v))
        if number == 0:
            read = {"out": out, "dlse": x.dlse, "dsink": total.get("dsink")}
        else:
            read = {"out": np.full_like(out, np.nan), "add": True}
        libflash.attention_backward(
            x.dout, x.q, part.k, part.v, read.pop("out"), lse, dq=total["dq"], dk=dk, dv=dv, delta=delta,
            kernel=f"backward_cpu_{isa}", **read, **part.options,
        )  # fmt: skip
        total["dk"][:, at], total["dv"][:, at] = dk, dv
        if case.dtype == "fp64" and isa == "scalar":
            o64, lse64 = forward(x.q, x.k, x.v, **options)
            exact = backward_part(x.dout, x.q, part.k, part.v, o64, lse64, dlse=x.dlse, **part.options)
            scale = max(np.abs(a).max(initial=1) for a in (x.q, x.k, x.v, x.dout)) ** 3
            assert_agree(dk, exact.dk, "dk", scale)
            assert_agree(dv, exact.dv, "dv", scale)
    rounded = {name: a if name == "dsink" else a.astype(x.q.dtype) for name, a in total.items()}
    tolerance.check(rounded, expected(case), label=str(case))
    wanted = (x.dout.astype(np.float64) * out.astype(np.float64)).sum(-1).transpose(0, 2, 1)
    assert_close(delta, np.where(np.isfinite(lse), wanted - (0 if x.dlse is None else x.dlse), 0).astype(delta.dtype), "delta")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "scalar"])  # which rounds from float64
def test_float32_results_are_those_before_the_last_rounding(isa: str, dtype: str) -> None:
    x = Case(f"wide-{dtype}", dtype, 2, 33, 70, 4, 2, 24, causal=True).inputs()
    forward_kernel, backward_kernel = f"forward_cpu_{isa}", f"backward_cpu_{isa}"
    narrow, lse = libflash.attention(x.q, x.k, x.v, causal=True, return_lse=True, kernel=forward_kernel)
    out = np.full(narrow.shape, np.nan, np.float32)
    libflash.attention(x.q, x.k, x.v, causal=True, out=out, kernel=forward_kernel)
    assert_same_bits(out.astype(x.q.dtype), narrow)
    assert not np.array_equal(out, narrow.astype(np.float32))
    arguments = (x.dout, x.q, x.k, x.v, narrow, lse)
    grads = libflash.attention_backward(*arguments, causal=True, kernel=backward_kernel)
    made = {name: np.full(a.shape, np.nan, np.float32) for name, a in zip(("dq", "dk", "dv"), (x.q, x.k, x.v), strict=True)}
    libflash.attention_backward(*arguments, causal=True, kernel=backward_kernel, **made)
    for name, gradient in zip(made, grads, strict=True):
        assert_same_bits(made[name].astype(x.q.dtype), gradient, name)
    twice = {name: a.copy() for name, a in made.items()}
    libflash.attention_backward(*arguments, causal=True, kernel=backward_kernel, add=True, **twice)
    for name, gradient in twice.items():
        np.testing.assert_array_equal(gradient, 2 * made[name])


@pytest.mark.parametrize("isa", ISAS)
def test_a_continuation_ignores_what_rows_without_keys_hold(isa: str) -> None:
    q, k, v = qkv(sq=6, sk=6)
    kernel = f"forward_cpu_{isa}"
    wanted, wanted_lse = libflash.attention(q, k, v, causal=True, return_lse=True, kernel=kernel)
    out, lse = np.full(wanted.shape, np.nan, np.float32), np.full(wanted_lse.shape, -np.inf, np.float32)
    libflash.attention(q, k, v, causal=True, out=out, lse=lse, resume=True, kernel=kernel)
    assert_same_bits(out, wanted)
    assert_same_bits(lse, wanted_lse)
    # No key of the next call is visible: nothing changes.
    libflash.attention(q, k, v, causal=True, column_begin=6, out=out, lse=lse, resume=True, kernel=kernel)
    assert_same_bits(out, wanted)
    assert_same_bits(lse, wanted_lse)
    out[:], lse[:] = np.nan, -np.inf
    libflash.attention(q, k, v, causal=True, column_begin=6, out=out, lse=lse, resume=True, kernel=kernel)
    assert not out.any()
    assert np.isneginf(lse).all()
    lse[0, 1, 2] = np.nan  # NaN spreads in its row, and nowhere else
    libflash.attention(q, k, v, causal=True, out=out, lse=lse, resume=True, kernel=kernel)
    assert np.isnan(out[0, 2, 1]).all()
    assert np.isnan(out).sum() == out.shape[3]
    assert np.isnan(lse).sum() == 1


def test_dropout_of_some_heads_and_sequences_is_that_of_all() -> None:
    q, k, v = (random(3, 20, 6, 8, seed=n, dtype="float64") for n in range(3))
    options = {"dropout_p": 0.5, "seed": 9, "offset": 2}
    whole = libflash.attention(q, k, v, **options)
    heads = []
    for h in (0, 2, 4):
        some = (x[:, :, h : h + 2] for x in (q, k, v))
        heads.append(libflash.attention(*some, head_begin=h, heads_total=6, **options))
    assert_same_bits(np.concatenate(heads, axis=2), whole)
    order = np.array([2, 0, 1], np.int32)
    assert_same_bits(libflash.attention(q[order], k[order], v[order], sequence_numbers=order, **options), whole[order])


def test_python_refusals_and_explain() -> None:
    q, k, v = qkv()
    out, lse = libflash.attention(q, k, v, return_lse=True)
    with pytest.raises(libflash.InvalidError, match=r"resume needs out and lse.*lse is None"):
        libflash.attention(q, k, v, out=out, resume=True)
    with pytest.raises(libflash.InvalidError, match=r"add needs dq, dk and dv.*dq is None"):
        libflash.attention_backward(q, q, k, v, out, lse, add=True)
    with pytest.raises(libflash.InvalidError, match="sm_margin is -1"):
        libflash.attention(q, k, v, sm_margin=-1)
    with pytest.raises(libflash.InvalidError, match='causal_align="top_left" has no meaning with positions of rows'):
        libflash.attention(q, k, v, causal=True, causal_align="top_left", row_begin=0)
    half = [x.astype(BFLOAT16) for x in (q, k, v)]
    sums = [np.zeros(x.shape, x.dtype) for x in half]
    with pytest.raises(libflash.InvalidError, match="dq: must be float32 with add=True"):
        libflash.attention_backward(half[0], *half, half[0], lse, dq=sums[0], dk=sums[1], dv=sums[2], add=True)
    assert libflash.explain(q, k, v, sm_margin=4).count("sm_margin 4 (no effect on the CPU)") == 1
    text = libflash.explain(q, k, v, row_begin=7, column_positions=np.zeros((1, 56), np.int32), resume=True)
    assert "row 0 at 7, column each at its own position, continues" in text
    assert "adds" in libflash.explain(*half, op="backward", add=True)


def test_torch_refuses_shard_options_with_gradients_by_name() -> None:
    torch = pytest.importorskip("torch")
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    for options in ({"row_begin": 3}, {"resume": True}, {"column_step": 2}, {"row_positions": torch.arange(4).reshape(1, 4)}):
        with pytest.raises(libflash.UnsupportedError, match=next(iter(options))):
            libflash.attention(q, q, q, **options)
