"""A boolean mask in memory of any kind: loads of several keys of a row give the bits of loads of single ones."""

from __future__ import annotations

import pytest
from case import Case
from gpu_kernels import TYPES, device_of, parameters, supports, widths, with_cpu

torch = pytest.importorskip("torch")
from gpu_case import problem, same_bits  # noqa: E402  (needs torch)

import libflash  # noqa: E402

ROWS, KEYS = 150, 208  # several tiles; rows of the mask that are multiples of 16 bytes
NAMES = ("q", "k", "v")


def in_wider_rows(mask: torch.Tensor, extra: int, before: int = 0) -> torch.Tensor:
    """The same values in rows with further bytes, which are all true."""
    shape = (*mask.shape[:-1], before + mask.shape[-1] + extra)
    wide = torch.ones(shape, dtype=torch.bool, device=mask.device)
    inner = wide[..., before : before + mask.shape[-1]]
    inner.copy_(mask)
    return inner


MEMORY = {
    "rows of a multiple of 4 bytes": lambda mask: in_wider_rows(mask, 4),
    "rows of an odd number of bytes": lambda mask: in_wider_rows(mask, 1),
    "begins at a multiple of 4 bytes": lambda mask: in_wider_rows(mask, 12, 4),
    "begins at an odd address": lambda mask: in_wider_rows(mask, 15, 1),
    "keys far apart": lambda mask: mask.transpose(2, 3).contiguous().transpose(2, 3),
}
# Keys of the problem (the last tile of keys may be incomplete, or have fewer than 16 keys), and whether all rows share a mask.
PROBLEMS = {"whole tiles": (KEYS, False), "a part of 16 keys": (KEYS - 7, False), "one row": (KEYS, True)}


def gradients(case: Case, kernel: dict, mask: torch.Tensor) -> list[torch.Tensor]:
    p = problem(case, device_of(kernel))
    options = {"mask": mask, "causal": True}
    out, lse = libflash.attention(p.q, p.k, p.v, return_lse=True, **options)
    options |= {"kernel": kernel["name"], "deterministic": supports(kernel, case, deterministic=True)}
    return list(libflash.attention_backward(p.dout, p.q, p.k, p.v, out, lse, **options)[:3])


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("kernel", parameters(with_cpu("backward")))
def test_gradients_do_not_depend_on_the_memory_of_the_mask(kernel: dict, name: str) -> None:
    keys, shared = PROBLEMS[name]
    rows = 1 if shared else ROWS
    case = Case("mask-rows", TYPES[kernel["dtype"]], 2, ROWS, keys, **widths(kernel), heads_q=2, heads_k=1, mask="bhqk")
    if not supports(kernel, case):
        pytest.skip("the kernel has no masks")
    device = device_of(kernel)
    random = torch.Generator(device).manual_seed(5)
    mask = torch.rand(2, 2, rows, keys, device=device, generator=random) < 0.7
    mask[..., : keys // 3] = True  # rows see a key
    whole = in_wider_rows(mask, -keys % 16)  # rows of a multiple of 16 bytes
    wanted = gradients(case, kernel, whole.expand(-1, -1, ROWS, -1))
    without = gradients(case, kernel, torch.ones_like(mask).expand(-1, -1, ROWS, -1))
    assert not any(same_bits(one, other) for one, other in zip(wanted, without, strict=True))
    for memory, changed in MEMORY.items():
        found = gradients(case, kernel, changed(mask).expand(-1, -1, ROWS, -1))
        for which, one, other in zip(NAMES, wanted, found, strict=True):
            assert same_bits(one, other), f"d{which}: {memory}"
