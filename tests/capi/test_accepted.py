"""Unusual calls that are correct and must not be refused. Their results are compared with those of a usual call."""

from __future__ import annotations

import ctypes as c
import itertools
from typing import Any

import abi
import numpy as np
import pytest
from bad_cases import (
    DV,
    HK,
    HQ,
    SK,
    SQ,
    B,
    Case,
    D,
    build,
    call,
    decode,
    explain,
    floats,
    instead,
    ints,
    options_of,
    poisoned,
    query,
)

ODD = (1 << 62, -1, 0, 12345)


def run(case: Case) -> dict[str, bytes]:
    assert call(case) == abi.OK, abi.last_error()
    return {name: case.arrays[name].tobytes() for name in case.outputs}


@pytest.mark.parametrize("function", ["forward", "backward", "decode"])
@pytest.mark.parametrize("stride", ODD)
def test_strides_of_single_elements_mean_nothing(function: str, stride: int) -> None:
    """Every dimension of size 1 gets an absurd stride: the same bits."""

    def one_head(case: Case) -> Case:
        shapes = {name: tuple(view.shape[: view.ndim]) for name, view in case.tensors.items()}
        for name, shape in shapes.items():
            small = (1, *shape[1:]) if name == "lse" else (1, *shape[1:2], 1, *shape[3:])
            if name == "lse":
                small = (1, 1, SQ)
            instead(name, lambda small=small: floats(*small))(case)
        if function == "decode":
            case.options = {"flags": abi.CAUSAL}
        return case

    plain, odd = one_head(build(function, "dense")), one_head(build(function, "dense"))
    for view in odd.tensors.values():
        for i in range(view.ndim):
            if view.shape[i] == 1:
                view.stride[i] = stride
    assert run(plain) == run(odd)


def empty(case: Case, **sizes: int) -> Case:
    """The case with some sizes 0, and NULL for every tensor without elements."""
    b, sq, sk, hq, hk = (sizes.get(n, v) for n, v in (("b", B), ("sq", SQ), ("sk", SK), ("hq", HQ), ("hk", HK)))
    shapes = {
        "q": (b, sq, hq, D), "k": (b, sk, hk, D), "v": (b, sk, hk, DV), "out": (b, sq, hq, DV), "dout": (b, sq, hq, DV),
        "lse": (b, hq, sq), "dq": (b, sq, hq, D), "dk": (b, sk, hk, D), "dv": (b, sk, hk, DV),
    }  # fmt: skip
    for name in list(case.tensors):
        make = poisoned if name in case.outputs else floats
        instead(name, lambda make=make, name=name: make(*shapes[name]))(case)
        if 0 in shapes[name]:
            case.tensors[name].data = None
    return case


@pytest.mark.parametrize("function", ["forward", "backward"])
@pytest.mark.parametrize(
    "sizes", [{"b": 0}, {"sq": 0}, {"sk": 0}, {"sq": 0, "sk": 0}, {"hq": 0}, {"hq": 0, "hk": 0}], ids="-".join
)
def test_sizes_of_zero(function: str, sizes: dict[str, int]) -> None:
    case = empty(build(function, "dense"), **sizes)
    run(case)
    if function == "forward" and sizes == {"sk": 0}:
        assert not case.arrays["out"].any()
        assert (case.arrays["lse"] == -np.inf).all()
    if function == "backward":
        for name in case.outputs:
            assert not case.arrays[name].any(), name


def test_gradients_in_one_buffer() -> None:
    """dq, dk and dv as slices of one tensor: the same bits as separate tensors."""
    apart, packed = build("backward", "dense"), build("backward", "dense")
    for case in (apart, packed):
        for name in ("q", "dq", "k", "dk"):
            instead(name, lambda name=name: (poisoned if name[0] == "d" else floats)(B, SK, HQ, D))(case)
        for name in ("v", "dv", "out", "dout"):
            instead(name, lambda name=name: (poisoned if name == "dv" else floats)(B, SK, HQ, D))(case)
        instead("lse", lambda: floats(B, HQ, SK))(case)
    buffer = poisoned(B, SK, 3, HQ, D)
    for n, name in enumerate(("dq", "dk", "dv")):
        packed.arrays[name] = buffer[:, :, n]
        packed.tensors[name] = abi.tensor(buffer[:, :, n])
    assert run(apart) == run(packed)


@pytest.mark.parametrize("function", ["forward", "backward"])
def test_inputs_may_be_one(function: str) -> None:
    """Self attention of one tensor: inputs may share memory."""
    case = build(function, "dense")
    for name in ("q", "k", "v", "out", "dout"):
        if name in case.tensors and name not in case.outputs:
            instead(name, lambda: floats(B, SQ, HQ, D))(case)
    for name in list(case.outputs):
        instead(name, lambda name=name: poisoned(*((B, HQ, SQ) if name == "lse" else (B, SQ, HQ, D))))(case)
    for name in ("k", "v"):
        case.tensors[name].data = case.tensors["q"].data
    run(case)


@pytest.mark.parametrize(
    ("function", "base"), [("forward", "packed"), ("backward", "blocks"), ("decode", "paged"), ("decode", "dense")]
)
def test_queries_read_nothing(function: str, base: str) -> None:
    """Invalid data pointers, in arguments and options: the workspace query gives the same size, and explain succeeds."""
    case = build(function, base)
    status, size = query(case, options_of(case))
    assert status == abi.OK
    views: list[abi.Tensor] = [v for v in (*case.tensors.values(), *case.options.values()) if isinstance(v, abi.Tensor)]
    if lists := case.options.get("block_lists"):
        views += [lists.row_counts, lists.row_indices, lists.col_counts, lists.col_indices]
    for data in (None, 1 << 12):
        for view in views:
            view.data = data
        assert query(case, options_of(case)) == (abi.OK, size)
        assert explain(case, options_of(case)) == abi.OK, abi.last_error()


@pytest.mark.parametrize("function", ["forward", "backward", "decode"])
def test_workspace_of_exactly_the_size(function: str) -> None:
    case = build(function, "dense")
    case.short_workspace = "exact"
    run(case)


@pytest.mark.parametrize("function", ["forward", "backward"])
@pytest.mark.parametrize(
    "options",
    [
        {"flags": abi.SCALE, "softmax_scale": 0.0},
        {"flags": abi.SCALE, "softmax_scale": -2.5},
        {"flags": abi.WINDOW, "window_left": -1, "window_right": -1},
        {"flags": abi.WINDOW | abi.CAUSAL, "window_left": 2, "window_right": 5},
        {"flags": abi.WINDOW, "window_left": 2**63 - 1, "window_right": 2**63 - 1},
        {"flags": abi.TOP_LEFT},
        {"window_left": -1, "window_right": -1},
        {"softcap": 1e30},
        {"softcap": 1e-3},
        {"dropout_p": 0.999, "seed": 2**64 - 1, "offset": 2**64 - 1},
        {"num_splits": 1024},
        {"num_threads": 4096},
        {"tile_q": 1, "tile_k": 512},
        {"max_seqlen_q": 2**63 - 1, "max_seqlen_k": 1},
        {"flags": abi.DETERMINISTIC},
        {"backend": b"cpu"},
    ],
    ids=str,
)
def test_limits_of_options(function: str, options: dict[str, Any]) -> None:
    case = build(function, "dense")
    case.options.update(options)
    run(case)


@pytest.mark.parametrize("function", ["forward", "backward"])
def test_larger_bound_of_packed_lengths(function: str) -> None:
    case = build(function, "packed")
    case.options.update(max_seqlen_q=1000, max_seqlen_k=4)
    same = build(function, "packed")
    assert run(case) == run(same)


@pytest.mark.parametrize(
    "shape", [(), (7,), (1,), (5, 7), (5, 1), (1, 7), (4, 5, 7), (1, 5, 7), (2, 1, 1, 7), (2, 4, 5, 7), (1, 1, 1, 1)]
)
@pytest.mark.parametrize("name", ["bias", "mask"])
@pytest.mark.parametrize("function", ["forward", "backward"])
def test_shapes_of_bias_and_mask(function: str, name: str, shape: tuple[int, ...]) -> None:
    """Dimensions aligned to the right and broadcast where 1: the same bits as the full tensor."""
    small = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    small = small > -1 if name == "mask" else small
    short, full = build(function, "dense"), build(function, "dense")
    short.option(name, np.array(small))
    full.option(name, np.ascontiguousarray(np.broadcast_to(small, (B, HQ, SQ, SK))))
    if function == "backward" and name == "bias":
        short.option("dbias", poisoned(*shape), output=True)
    expected = run(full)
    assert {k: v for k, v in run(short).items() if k != "dbias"} == expected


@pytest.mark.parametrize("dtype", [np.float32, abi.ml_dtypes.bfloat16])
@pytest.mark.parametrize("function", ["forward", "backward"])
def test_slopes_for_each_batch_entry(function: str, dtype: Any) -> None:
    one, two = build(function, "bf16"), build(function, "bf16")
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], dtype)
    one.option("alibi_slopes", slopes)
    two.option("alibi_slopes", np.stack([slopes, slopes]))
    assert run(one) == run(two)


def usable(operation: str) -> list[bytes]:
    return [k.name for k in abi.kernels() if k.usable and k.backend == b"cpu" and k.operation == operation.encode()]


@pytest.mark.parametrize(("function", "name"), [(f, n) for f in ("forward", "backward", "decode", "merge") for n in usable(f)])
def test_every_usable_kernel_can_be_asked_for(function: str, name: bytes) -> None:
    case = build(function, "dense")
    case.options["kernel"] = name
    run(case)


def test_cache_of_keys_that_are_values() -> None:
    """Without new rows the caches are only read, and may share memory."""
    case = decode("dense")
    case.options = {"flags": abi.CAUSAL}
    case.outputs = ["out", "lse"]
    case.tensors["v_cache"].data = case.tensors["k_cache"].data
    run(case)


def test_caches_without_rows_have_no_address() -> None:
    """Also with more channels of values than of keys: v_cache is then no view of k_cache."""
    case = decode("dense")
    for name, channels in (("k_cache", D), ("v_cache", D + 1)):
        instead(name, lambda channels=channels: floats(B, 0, HK, channels))(case)
        case.tensors[name].data = None
    instead("out", lambda: poisoned(B, SQ, HQ, D + 1))(case)
    case.options = {}
    run(case)
    assert not case.arrays["out"].any()


@pytest.mark.parametrize("rows", [0, 12])
def test_caches_of_equal_strides_without_addresses(rows: int) -> None:
    """The scales of groups of channels of the keys do not divide the channels of the values. Without addresses, in the query and
    where there are no rows, the caches could be one, which would need v_scale; but they need not be.
    """
    case = decode("dense")
    for name, channels in (("k_cache", D), ("v_cache", DV)):
        view = case.put(name, floats(B, rows, HK, D))
        view.shape[3] = channels
        if rows == 0:
            view.data = None
    case.options = {}
    case.option("k_scale", np.ones((B, rows, HK, 2), np.float32))
    assert query(case, options_of(case))[0] == abi.OK, abi.last_error()
    run(case)


def test_table_entries_past_the_keys_are_not_read() -> None:
    case, same = build("decode", "paged"), build("decode", "paged")
    case.option("cache_seqlens", ints(1, 5))
    same.option("cache_seqlens", ints(1, 5))
    case.option("block_table", np.array([[0, -1, 2**31 - 1], [3, 4, -(2**31)]], np.int32))
    assert run(case) == run(same)


def test_pages_may_be_shared_for_reading() -> None:
    case = build("decode", "paged")
    case.option("block_table", np.array([[0, 1, 2], [0, 4, 5]], np.int32))
    run(case)


def test_entries_past_a_count_are_not_read() -> None:
    case = build("forward", "blocks")
    case.arrays["row_counts"][...] = 0
    case.arrays["row_indices"][...] = 2**31 - 1
    run(case)
    assert not case.arrays["out"].any()


@pytest.mark.parametrize("pair", ["rows", "cols"])
def test_one_pair_of_lists(pair: str) -> None:
    """Compression to the row lists or the column lists alone; the others stay zero."""
    case, whole = build("compress", "dense"), build("compress", "dense")
    for one in (case, whole):
        one.arrays["block_mask"][:, :, 1, ::2] = False
    left_out = [name for name in case.outputs if not name.startswith(pair[:3])]
    for name in left_out:
        setattr(case.lists, name, abi.Tensor())
    written, expected = run(case), run(whole)
    for name in case.outputs:
        if name in left_out:
            assert (np.frombuffer(written[name], np.int32) == -7).all()
        else:
            assert written[name] == expected[name]


def test_compressed_lists() -> None:
    mask = np.random.default_rng(5).random((2, 3, 4, 5)) < 0.4
    _, (row_counts, row_indices, col_counts, col_indices) = abi.compress(mask)
    for b, h in itertools.product(range(2), range(3)):
        for counts, indices, dense in ((row_counts, row_indices, mask[b, h]), (col_counts, col_indices, mask[b, h].T)):
            for i, line in enumerate(dense):
                assert indices[b, h, i, : counts[b, h, i]].tolist() == np.flatnonzero(line).tolist()


def test_merge_of_the_most_parts() -> None:
    outs, lses = [floats(3, 2, 4) for _ in range(64)], [floats(2, 3) for _ in range(64)]
    out, lse = poisoned(3, 2, 4), poisoned(2, 3)
    abi.merge(outs, lses, out, lse)
    np.testing.assert_allclose(out, outs[0], rtol=1e-5)
    np.testing.assert_allclose(lse, lses[0] + np.log(64), rtol=1e-5)


def test_size_of_the_query_is_all_that_is_written() -> None:
    case = build("forward", "dense")
    sizes = (c.c_size_t * 3)(7, 7, 7)
    views = map(abi.pointer, case.tensors.values())
    second = c.cast(c.addressof(sizes) + 8, c.POINTER(c.c_size_t))
    assert abi.lib.flash_attention_forward_workspace_size(*views, None, second) == abi.OK
    assert (sizes[0], sizes[2]) == (7, 7)
