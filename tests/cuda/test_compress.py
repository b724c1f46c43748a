"""Block masks as lists, against NumPy: every shape, odd addresses, row or column lists alone, guarded outputs, attention with the
lists.

The same cases run on the CPU and on a GPU, if there is one.
"""

from __future__ import annotations

import ctypes as c

import abi
import numpy as np
import pytest
from case import Case
from gpu_kernels import TYPES, device_of, parameters, supporting, with_cpu
from memory_harness import Guarded

import libflash

torch = pytest.importorskip("torch")
from gpu_case import problem, same_sums  # noqa: E402  (needs torch)
from gpu_memory import GuardedOnGpu  # noqa: E402

FORMS = ("row_counts", "row_indices", "col_counts", "col_indices")
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NO_GPU)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def random_mask(shape: tuple[int, ...], density: float = 0.5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) < density


def kept_first(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The number of kept entries of each row, and their indices in ascending order, then 0."""
    counts = mask.sum(axis=-1, dtype=np.int32)
    order = np.argsort(~mask, axis=-1, kind="stable").astype(np.int32)
    return counts, np.where(np.arange(mask.shape[-1]) < counts[..., None], order, np.int32(0))


def wanted_lists(mask: np.ndarray) -> dict[str, np.ndarray]:
    return dict(zip(FORMS, (*kept_first(mask), *kept_first(mask.swapaxes(2, 3))), strict=True))


def check(lists: libflash.BlockMask, mask: np.ndarray) -> None:
    for name, wanted in wanted_lists(mask).items():
        got = getattr(lists, name)
        assert got.dtype == torch.int32, name
        np.testing.assert_array_equal(got.cpu().numpy(), wanted, name)


SHAPES = [
    *(
        (1, 1, rows, cols)
        for rows, cols in ((1, 1), (1, 31), (31, 1), (32, 32), (33, 31), (7, 64), (65, 97), (3, 1025), (257, 2))
    ),
    *((2, 3, rows, cols) for rows, cols in ((1, 1), (5, 33), (40, 13))),
    (7, 1, 9, 9),
    (1, 5, 6, 100),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("density", [0.0, 0.03, 0.5, 1.0])
def test_shapes(device: str, shape: tuple[int, ...], density: float) -> None:
    mask = random_mask(shape, density)
    check(libflash.compress_block_mask(torch.from_numpy(mask).to(device)), mask)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (2, 2, 0, 0)], ids=str)
def test_nothing_kept_where_nothing_is(device: str, shape: tuple[int, ...]) -> None:
    """Without columns the row counts are still written, and without rows the column counts."""
    guarded_compress(np.ones(shape, bool), device)


@pytest.mark.parametrize("shape", [(1, 300, 300, 5), (2, 1, 3, 300_000), (70_000, 1, 2, 3), (1, 3, 200_001, 1)], ids=str)
def test_many_lines(device: str, shape: tuple[int, ...]) -> None:
    """More rows, columns or matrices than 16 bits count, and than thread blocks do."""
    mask = random_mask(shape)
    check(libflash.compress_block_mask(torch.from_numpy(mask).to(device)), mask)


def test_any_byte_but_zero_keeps_the_block(device: str) -> None:
    values = np.random.default_rng(1).integers(0, 256, (1, 2, 33, 40), np.uint8) * random_mask((1, 2, 33, 40))
    assert len(np.unique(values)) > 200
    check(libflash.compress_block_mask(torch.from_numpy(values).to(device).view(torch.bool)), values != 0)


def test_a_slice_at_an_odd_address(device: str) -> None:
    mask = random_mask((5, 1, 7, 9))
    whole = torch.from_numpy(mask).to(device)
    for first in range(1, 5):
        check(libflash.compress_block_mask(whole[first:]), mask[first:])


def test_strides_of_single_entries_mean_nothing(device: str) -> None:
    mask = random_mask((1, 1, 6, 35))
    odd = torch.from_numpy(mask).to(device).as_strided((1, 1, 6, 35), (3, 0, 35, 1))
    check(libflash.compress_block_mask(odd), mask)


VIEWS = {
    "repeated heads": lambda x: x[:, :1].expand(-1, 3, -1, -1),
    "repeated rows": lambda x: x[:, :, :1].expand(-1, -1, 8, -1),
    "transposed": lambda x: x.transpose(2, 3),
    "every other column": lambda x: x[..., ::2],
    "part of the rows": lambda x: x[:, :, 1:],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_refused_until_copied(device: str, name: str) -> None:
    view = VIEWS[name](torch.from_numpy(random_mask((2, 3, 8, 40))).to(device))
    with pytest.raises(libflash.InvalidError, match="block_mask: must be contiguous"):
        libflash.compress_block_mask(view)
    check(libflash.compress_block_mask(view.contiguous()), view.cpu().numpy())


def guarded_compress(mask: np.ndarray, device: str, shift: int = 0, left_out: str = "") -> None:
    """A call of the C interface with poisoned outputs between guard bands, without the pair of lists that starts with
    `left_out`.
    """
    place = GuardedOnGpu if device == "cuda" else Guarded
    given = place(mask, shift=shift)
    wanted = {name: x for name, x in wanted_lists(mask).items() if not left_out or not name.startswith(left_out)}
    made = {name: place(np.empty(x.shape, np.int32), output=True, shift=shift) for name, x in wanted.items()}
    lists = abi.BlockLists(**{name: one.view for name, one in made.items()})
    abi.check(abi.lib.flash_block_mask_compress(abi.pointer(given.view), c.byref(lists), None))
    given.check()
    for name, one in made.items():
        one.name = name
        one.check()
        np.testing.assert_array_equal(one.array, wanted[name], name)


@pytest.mark.parametrize("left_out", ["", "row", "col"])
@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 33), (1, 2, 70, 31)], ids=str)
def test_only_the_lists_are_written(device: str, shape: tuple[int, ...], shift: int, left_out: str) -> None:
    guarded_compress(random_mask(shape), device, shift, left_out)


BLOCKS = {"": "one mask for all", "b": "a mask for each batch", "h": "a mask for each head", "bh": "a mask for each"}


@pytest.mark.parametrize("letters", BLOCKS, ids=BLOCKS.values())
@pytest.mark.parametrize("kernel", parameters(supporting(with_cpu("backward"), block_mask="")))
def test_attention_with_the_lists(kernel: dict, letters: str) -> None:
    """Forward and backward with the lists have the bits of those with the dense mask."""
    sizes = {"batch": 2, "seqlen_q": 700, "seqlen_k": 1030, "heads_q": 4, "heads_k": 2, "head_dim": kernel["head_dim"]}
    case = Case(f"compress-{letters}", TYPES[kernel["dtype"]], causal=True, block_mask=letters, **sizes)
    p = problem(case, device_of(kernel))
    dense = p.options["block_mask"]
    assert not dense.all()
    results, ordered = [], kernel["backend"] != "sm90"  # which has no fixed order with lists
    for blocks in (dense, libflash.compress_block_mask(dense)):
        p.options["block_mask"] = blocks
        o, lse = p.forward()
        results.append({"o": o, "lse": lse} | p.backward(o, lse, kernel["name"], deterministic=ordered))
    for name, wanted in results[0].items():
        assert same_sums(results[1][name], wanted, ordered or name != "dq"), name


# Only on a GPU.


@pytest.fixture
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def test_kernel_is_listed_and_usable(cuda: None) -> None:
    rows = {kernel["name"]: kernel for kernel in libflash.info()["kernels"]}
    assert rows["compress_any"]["usable"], rows["compress_any"]["why_not"]


@pytest.mark.parametrize("given", [False, True], ids=["current stream", "given stream"])
def test_stream(cuda: None, given: bool) -> None:
    """A mask that earlier work on the stream writes late: the kernel waits for it, the call does not."""
    mask = random_mask((2, 4, 50, 60))
    source = torch.from_numpy(mask).cuda()
    late = torch.zeros_like(source)
    libflash.compress_block_mask(late)  # the first launch loads the module
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(source)
        lists = None if given else libflash.compress_block_mask(late)
    if given:
        lists = libflash.compress_block_mask(late, stream=stream)
    assert not stream.query(), "the call returned only after its work was done"
    stream.synchronize()
    check(lists, mask)


def test_cuda_graph(cuda: None) -> None:
    mask = torch.zeros((2, 3, 20, 45), dtype=torch.bool, device="cuda")
    libflash.compress_block_mask(mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lists = libflash.compress_block_mask(mask)
    for seed in range(3):
        other = random_mask((2, 3, 20, 45), seed=seed)
        mask.copy_(torch.from_numpy(other))
        graph.replay()
        check(lists, other)


def test_cupy(cuda: None) -> None:
    cupy = pytest.importorskip("cupy")
    mask = random_mask((2, 3, 20, 45))
    lists = libflash.compress_block_mask(cupy.asarray(mask))
    for name, wanted in wanted_lists(mask).items():
        got = getattr(lists, name)
        assert type(got) is cupy.ndarray, name
        np.testing.assert_array_equal(cupy.asnumpy(got), wanted, name)


@pytest.mark.long
def test_offsets_beyond_32_bits(cuda: None) -> None:
    """A mask of a little over 2^31 blocks, and lists of as many entries; a few are kept, some of them in the last row and
    column.
    """
    rows, cols = 2**16 + 1, 2**15
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of GPU memory")
    mask = torch.zeros((1, 1, rows, cols), dtype=torch.bool, device="cuda")
    kept = {(0, 5), (rows - 1, 0), (rows - 1, 33), (7, cols - 1), (rows - 1, cols - 1)}
    for row, col in kept:
        mask[0, 0, row, col] = True
    lists = libflash.compress_block_mask(mask)
    del mask
    for counts, indices, lines in (
        (lists.row_counts, lists.row_indices, sorted(kept)),
        (lists.col_counts, lists.col_indices, sorted((col, row) for row, col in kept)),
    ):
        assert int(counts.sum()) == len(kept)
        for line in {line for line, _ in lines}:
            wanted = [at for of, at in lines if of == line]
            assert int(counts[0, 0, line]) == len(wanted)
            assert indices[0, 0, line, : len(wanted)].tolist() == wanted
        assert sum(int((part != 0).sum()) for part in indices[0, 0].split(4096)) == sum(at != 0 for _, at in lines)
    del lists, counts, indices
    torch.cuda.empty_cache()
