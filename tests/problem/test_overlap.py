"""Overlap of strided tensors, compared with the sets of their bytes."""

from __future__ import annotations

import ctypes as c
import itertools
import random

import pytest
from host_library import compile_host

WRAPPER = """
#include "problem/overlap.h"
using namespace libflash;
static Footprint footprint(int64_t at, int ndim, const int64_t* shape, const int64_t* stride) {
    TensorView view;
    view.data = reinterpret_cast<void*>(at);
    view.dtype = DType::bf16;
    view.ndim = ndim;
    for (int i = 0; i < ndim; ++i) {
        view.shape[i] = shape[i];
        view.stride[i] = stride[i];
    }
    return footprint_of(view);
}
extern "C" int apart(int64_t a, int an, const int64_t* as, const int64_t* at,
                     int64_t b, int bn, const int64_t* bs, const int64_t* bt) {
    return disjoint(footprint(a, an, as, at), footprint(b, bn, bs, bt));
}
extern "C" int apart_itself(int ndim, const int64_t* shape, const int64_t* stride) {
    return disjoint_elements(footprint(4096, ndim, shape, stride));
}
"""

View = tuple[int, tuple[int, ...], tuple[int, ...]]  # address, shape, strides in elements of two bytes


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> c.CDLL:
    return compile_host(tmp_path_factory.mktemp("overlap"), WRAPPER, "problem/overlap.cpp")


def longs(values: tuple[int, ...]) -> c.Array:
    return (c.c_int64 * max(len(values), 1))(*values)


def starts(view: View) -> list[int]:
    at, shape, stride = view
    return [at + 2 * sum(i * s for i, s in zip(index, stride, strict=True)) for index in itertools.product(*map(range, shape))]


def bytes_of(view: View) -> set[int]:
    return {byte for start in starts(view) for byte in (start, start + 1)}


def apart(lib: c.CDLL, one: View, other: View) -> bool:
    arguments = [x for at, shape, stride in (one, other) for x in (c.c_int64(at), len(shape), longs(shape), longs(stride))]
    return bool(lib.apart(*arguments))


def random_view(rng: random.Random) -> View:
    ndim = rng.randint(0, 4)
    shape = tuple(rng.choice([1, 2, 3, 4]) for _ in range(ndim))
    return 4096 + rng.randint(0, 60), shape, tuple(rng.choice([0, 1, 2, 3, 4, 6, 8, 12, 24]) for _ in shape)


def test_never_says_apart_of_what_meets(lib: c.CDLL) -> None:
    rng = random.Random(1)
    both = [0, 0]
    for _ in range(20_000):
        one, other = random_view(rng), random_view(rng)
        overlap = not bytes_of(one).isdisjoint(bytes_of(other))
        both[overlap] += 1
        if apart(lib, one, other):
            assert not overlap, (one, other)
        assert apart(lib, one, other) == apart(lib, other, one)
    assert min(both) > 2000


def test_never_says_injective_of_what_repeats(lib: c.CDLL) -> None:
    rng = random.Random(2)
    for _ in range(20_000):
        _, shape, stride = random_view(rng)
        all_bytes = [byte for start in starts((0, shape, stride)) for byte in (start, start + 1)]
        if lib.apart_itself(len(shape), longs(shape), longs(stride)):
            assert len(set(all_bytes)) == len(all_bytes), (shape, stride)


def slices(shape: tuple[int, ...], axis: int, cuts: tuple[int, ...], order: tuple[int, ...]) -> list[View]:
    """Views of one contiguous buffer, cut along an axis; `order` is the memory order of the buffer's axes."""
    stride, size = [0] * len(shape), 1
    for i in reversed(order):
        stride[i], size = size, size * shape[i]
    ends = (0, *itertools.accumulate(cuts))
    return [
        (4096 + 2 * a * stride[axis], (*shape[:axis], b - a, *shape[axis + 1 :]), tuple(stride))
        for a, b in itertools.pairwise(ends)
    ]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
@pytest.mark.parametrize("axis", range(4))
def test_slices_of_one_buffer_are_apart(lib: c.CDLL, axis: int, order: tuple[int, ...]) -> None:
    """dq, dk and dv inside one packed tensor, along any axis, whatever the layout."""
    shape = tuple(6 if i == axis else n for i, n in enumerate((2, 5, 3, 4)))
    parts = slices(shape, axis, (3, 1, 2), order)
    for one, other in itertools.combinations(parts, 2):
        assert bytes_of(one).isdisjoint(bytes_of(other))
        assert apart(lib, one, other)
    for _, size, stride in parts:
        assert lib.apart_itself(4, longs(size), longs(stride))


def test_slices_with_padded_batches_are_apart(lib: c.CDLL) -> None:
    """The batch stride is no multiple of the row stride: only a single batch entry can be compared row by row."""
    row, batch = 3 * 4 * 8, 5 * 3 * 4 * 8 + 7
    parts = [(4096 + 2 * n * 32, (2, 5, 4, 8), (batch, row, 8, 1)) for n in range(3)]
    for one, other in itertools.combinations(parts, 2):
        assert apart(lib, one, other)
    moved = (parts[1][0] - 2, *parts[1][1:])
    assert not apart(lib, parts[0], moved)


def test_exact_ranges(lib: c.CDLL) -> None:
    one = (4096, (10,), (1,))
    assert apart(lib, one, (4096 + 20, (10,), (1,)))
    assert not apart(lib, one, (4096 + 19, (10,), (1,)))
    assert not apart(lib, one, one)
    assert not apart(lib, one, (4096 + 10, (), ()))


def test_huge_strides_do_not_overflow(lib: c.CDLL) -> None:
    big = 1 << 60
    one, other = (4096, (2, 3), (big, 1)), (4096 + 6, (2, 3), (big, 1))
    assert apart(lib, one, other)
    assert not apart(lib, one, (4096 + 4, (2, 3), (big, 1)))
