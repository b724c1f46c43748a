"""Two new rows for one slot of a cache: on a GPU each element is that of one of them, and nothing else changes. The CPU refuses
such a call.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_kernels import device_of, in_place_of, kernels, of_many_rows, parameters

import libflash

torch = pytest.importorskip("torch")
from gpu_case import bits, same_bits  # noqa: E402  (needs torch)
from gpu_codes import TORCH_CODES  # noqa: E402
from gpu_decode import KERNELS_AND_MANY_ROWS, ints, normal  # noqa: E402

every_kernel = pytest.mark.parametrize("kernel", parameters([*KERNELS_AND_MANY_ROWS, in_place_of("decode")]))
writers = pytest.mark.parametrize("kernel", parameters([*kernels("cache_write"), in_place_of("cache_write")]))
CODES = ["", "e4m3", "int8"]
PAGES, PAGE, HEADS, DIM = 12, 16, 2, 64

Tensors = dict[str, torch.Tensor]


def storage(kernel: dict, code: str) -> Tensors:
    """Pages; with codes also scales of rows, which are computed and written."""
    pages = {name: normal(kernel, PAGES, PAGE, HEADS, DIM, seed=seed) for name, seed in (("k_cache", 1), ("v_cache", 2))}
    if not code:
        return pages
    scales = {name: torch.full((PAGES, PAGE, HEADS), 0.1, device=device_of(kernel)) for name in ("k_scale", "v_scale")}
    return {name: (20 * x.float()).clamp(-100, 100).to(TORCH_CODES[code]) for name, x in pages.items()} | scales


def copied(x: Tensors) -> Tensors:
    return {name: y.clone() for name, y in x.items()}


def is_one_of(got: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((bits(got) == bits(one)) | (bits(got) == bits(other))).all())


def check(after: Tensors, before: Tensors, either: list[Tensors]) -> None:
    """Each element is as after a call that writes only one of the rows; where neither call writes, as before."""
    for name, x in after.items():
        one, other = (run[name] for run in either)
        assert not same_bits(one, before[name])
        assert not same_bits(one, other)
        assert is_one_of(x, one, other), name


@every_kernel
@pytest.mark.parametrize("append", [1, 3])
@pytest.mark.parametrize("code", CODES)
def test_decode(kernel: dict, code: str, append: int) -> None:
    """Sequences 0 and 1 have the same pages. The third is as in a call without them."""
    if code and (kernel["dtype"] == "f32" or of_many_rows(kernel)):
        pytest.skip("the kernel has no caches of 8 bits")
    before, lengths = storage(kernel, code), ints(kernel, 20, 20, 30)
    q = normal(kernel, 3, min(append, 2), 4, DIM, seed=3)  # one row: the attention kernel itself appends
    news = {name: normal(kernel, 3, append, HEADS, DIM, seed=seed) for name, seed in (("k", 4), ("v", 5))}
    table = ints(kernel, *[3, 1, 5], *[3, 1, 5], *[0, 4, 2]).view(3, 3)

    def run(*sequences: int) -> tuple[torch.Tensor, Tensors]:
        own, these = copied(before), list(sequences)
        given = {name: x[these] for name, x in news.items()}
        out = libflash.decode(q[these], **own, **given, cache_seqlens=lengths[these], block_table=table[these],
                              split_size=128, kernel=kernel["name"])  # fmt: skip
        return out, own

    if device_of(kernel) == "cpu":
        with pytest.raises(libflash.InvalidError, match="must not"):
            run(0, 1, 2)
    either = [run(*pair) for pair in ((0, 2), (1, 2))]
    out, after = run(0, 1, 2) if device_of(kernel) == "cuda" else either[0]
    check(after, before, [own for _, own in either])
    assert same_bits(out[-1], either[0][0][-1])
    assert same_bits(out[-1], either[1][0][-1])
    assert out.isfinite().all()


@writers
@pytest.mark.parametrize("code", CODES)
def test_cache_write(kernel: dict, code: str) -> None:
    """Rows 0 and 2."""
    kernel = kernel | {"dtype": "f16"}  # one kernel takes all types
    before = storage(kernel, code)
    rows = {name: normal(kernel, 4, HEADS, DIM, seed=seed) for name, seed in (("k", 4), ("v", 5))}
    slots = (37, 5, 37, 100)

    def run(*which: int) -> Tensors:
        own, these = copied(before), list(which)
        given: dict[str, Any] = {name: x[these] for name, x in rows.items()}
        libflash.cache_write(**given, **own, slots=ints(kernel, *[slots[i] for i in which]), kernel=kernel["name"])
        return own

    if device_of(kernel) == "cpu":
        with pytest.raises(libflash.InvalidError, match="slots: "):
            run(0, 1, 2, 3)
    either = [run(0, 1, 3), run(1, 2, 3)]
    after = run(0, 1, 2, 3) if device_of(kernel) == "cuda" else either[0]
    check(after, before, either)
