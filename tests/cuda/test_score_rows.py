"""A bias or a boolean mask in memory of any kind: loads of several keys of a row give the bits of loads of single ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from case import Case
from gpu_kernels import TYPES, device_of, parameters, supports, widths, with_cpu

torch = pytest.importorskip("torch")
from gpu_case import problem, same_bits  # noqa: E402  (needs torch)

import libflash  # noqa: E402

ROWS, KEYS = 150, 208  # several tiles; rows of a multiple of 16 elements


def in_wider_rows(scores: torch.Tensor, extra: int, before: int = 0) -> torch.Tensor:
    """The same values in rows with further elements, which are all one."""
    shape = (*scores.shape[:-1], before + scores.shape[-1] + extra)
    wide = torch.ones(shape, dtype=scores.dtype, device=scores.device)
    inner = wide[..., before : before + scores.shape[-1]]
    inner.copy_(scores)
    return inner


MEMORY = {
    "rows of a multiple of 4 elements": lambda scores: in_wider_rows(scores, 4),
    "rows of an odd number of elements": lambda scores: in_wider_rows(scores, 1),
    "begins at a multiple of 4 elements": lambda scores: in_wider_rows(scores, 12, 4),
    "begins at an odd element": lambda scores: in_wider_rows(scores, 15, 1),
    "keys far apart": lambda scores: scores.transpose(2, 3).contiguous().transpose(2, 3),
}
# Keys of the problem (the last tile of keys may be incomplete, or have fewer than 16 keys), and whether all rows share a mask.
PROBLEMS = {
    "whole tiles": (256, False),
    "whole 16 keys": (KEYS, False),
    "a part of 16 keys": (KEYS - 7, False),
    "one row": (KEYS, True),
}
KINDS = {"mask": torch.bool, "bias": None, "float32 bias": torch.float32}  # None: the type of q


def of_kind(kind: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    random = torch.Generator(like.device).manual_seed(5)
    if kind != "mask":
        return torch.randn(shape, device=like.device, generator=random).to(KINDS[kind] or like.dtype)
    mask = torch.rand(shape, device=like.device, generator=random) < 0.7
    mask[..., : shape[-1] // 3] = True  # rows see a key
    return mask


def forward(kernel: dict, case: Case) -> Callable[[dict], list[torch.Tensor]]:
    p = problem(case, device_of(kernel))
    return lambda given: list(libflash.attention(p.q, p.k, p.v, return_lse=True, causal=True, kernel=kernel["name"], **given))


def backward(kernel: dict, case: Case) -> Callable[[dict], list[torch.Tensor]]:
    p = problem(case, device_of(kernel))

    def gradients(given: dict) -> list[torch.Tensor]:
        options = {"causal": True, **given}
        out, lse = libflash.attention(p.q, p.k, p.v, return_lse=True, **options)
        options |= {"kernel": kernel["name"], "deterministic": supports(kernel, case, deterministic=True)}
        return list(libflash.attention_backward(p.dout, p.q, p.k, p.v, out, lse, **options)[:3])

    return gradients


CALLS = {"forward": forward, "backward": backward}
KERNELS = [kernel for name in CALLS for kernel in parameters(with_cpu(name))]


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_results_do_not_depend_on_the_memory(kernel: dict, kind: str, name: str) -> None:
    keys, shared = PROBLEMS[name]
    rows, option = 1 if shared else ROWS, "mask" if kind == "mask" else "bias"
    shape = {"heads_q": 2, "heads_k": 1, option: "bhqk"}
    case = Case("score-rows", TYPES[kernel["dtype"]], 2, ROWS, keys, **widths(kernel), **shape)
    if not supports(kernel, case):
        pytest.skip("the kernel has no such option")
    if kind == "float32 bias" and kernel["dtype"] not in ("f16", "bf16"):
        pytest.skip("a bias has the type of q or is float32")
    call = CALLS[kernel["operation"]](kernel, case)
    scores = of_kind(kind, (2, 2, rows, keys), problem(case, device_of(kernel)).q)

    def results(of_rows: torch.Tensor) -> list[torch.Tensor]:
        return call({option: of_rows.expand(-1, -1, ROWS, -1)})

    wanted = results(in_wider_rows(scores, -keys % 16))  # rows of a multiple of 16 elements
    without = results(torch.ones_like(scores))
    assert not any(same_bits(one, other) for one, other in zip(wanted, without, strict=True))
    for memory, changed in MEMORY.items():
        found = results(changed(scores))
        for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
            assert same_bits(one, other), f"result {number}: {memory}"
