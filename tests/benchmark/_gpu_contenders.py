"""The implementations that are timed on a GPU: PyTorch's (FlashAttention-2, cuDNN; in float32 memory-efficient attention),
FlashAttention-3 where its module flash_attn_interface can be imported, and libflash, each as a call that a CUDA graph can
capture.

libflash is timed with the kernel that it chooses; if that is no sm80 kernel, also with an sm80 kernel, which has the algorithm
and the instructions of FlashAttention-2.

Backward computes the gradients of q, k and v only. The forward pass runs once, when the call is made. PyTorch runs backward on
the stream of its forward pass, which must therefore be the stream of the capture.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import torch
from _cells import Cell
from torch.nn.attention import SDPBackend, sdpa_kernel

import libflash

DEVICE = "cuda"  # the tests of this program put "cpu" here
FAMILY = "sm80"  # and here too
OURS, HELD = "libflash", "libflash sm80"  # libflash's choice; restricted to FAMILY
SDPA = {
    "fa2": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
FA3 = "fa3"
PEERS = (*SDPA, FA3)
RESULTS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}

Call = Callable[[], tuple[torch.Tensor, ...]]  # tensors of (batch, seqlen, heads, head_dim), named in RESULTS


@dataclasses.dataclass(frozen=True)
class Problem:
    """One cell's tensors, (batch, seqlen, heads, head_dim)."""

    cell: Cell
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor


def problem(cell: Cell, keys: int | None = None, key_heads: int | None = None) -> Problem:
    """Random-normal values; `keys` and `key_heads` if they are others than those of the queries."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    of_queries, of_keys = (cell.seqlen, cell.heads), (keys or cell.seqlen, key_heads or cell.heads)

    def normal(rows: int, heads: int) -> torch.Tensor:
        x = torch.randn((cell.batch, rows, heads, cell.head_dim), generator=generator, device=DEVICE)
        return x.to(getattr(torch, cell.dtype))

    return Problem(cell, *(normal(*size) for size in (of_queries, of_keys, of_keys, of_queries)))


def swapped(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Swap heads and rows, PyTorch's order of dimensions, without a copy."""
    return tuple(x.transpose(1, 2) for x in tensors)


def sdpa_options(p: Problem) -> dict[str, bool]:
    return {"is_causal": p.cell.causal, "enable_gqa": p.q.shape[2] != p.k.shape[2]}


def forward_sdpa(p: Problem, backend: SDPBackend, **more: object) -> Call:
    """`more`: further options of the call."""
    q, k, v = swapped(p.q, p.k, p.v)
    options = sdpa_options(p) | more

    def call() -> tuple[torch.Tensor, ...]:
        with sdpa_kernel(backend):
            return swapped(torch.nn.functional.scaled_dot_product_attention(q, k, v, **options))

    return call


def backward_sdpa(p: Problem, backend: SDPBackend, **more: object) -> Call:
    inputs = tuple(x.requires_grad_() for x in swapped(p.q.detach(), p.k.detach(), p.v.detach()))
    (dout,) = swapped(p.dout)
    with torch.enable_grad(), sdpa_kernel(backend):
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, **sdpa_options(p), **more)
    return lambda: swapped(*torch.autograd.grad(out, inputs, dout, retain_graph=True))


def flash_attention_3() -> Callable[..., torch.Tensor] | None:
    """Its attention function, or None if it is not installed."""
    try:
        import flash_attn_interface
    except ImportError:
        return None
    return flash_attn_interface.flash_attn_func


def forward_fa3(p: Problem) -> Call:
    attention = flash_attention_3()
    return lambda: (attention(p.q, p.k, p.v, causal=p.cell.causal),)


def backward_fa3(p: Problem) -> Call:
    attention, inputs = flash_attention_3(), tuple(x.detach().requires_grad_() for x in (p.q, p.k, p.v))
    with torch.enable_grad():
        out = attention(*inputs, causal=p.cell.causal)
    return lambda: torch.autograd.grad(out, inputs, p.dout, retain_graph=True)


def forward_libflash(p: Problem, kernel: str | None, backend: str | None = None, **more: object) -> Call:
    """`more`: further options of the call."""
    options = {"causal": p.cell.causal, "kernel": kernel, "backend": backend, **more}
    out = torch.empty_like(p.q)
    return lambda: (libflash.attention(p.q, p.k, p.v, out=out, **options),)


def backward_libflash(
    p: Problem, kernel: str | None, backend: str | None = None, given: dict[str, object] | None = None, **more: object
) -> Call:
    """`given`: further options of both passes; `more`: of the backward call."""
    options = {"causal": p.cell.causal, **(given or {})}
    out, lse = libflash.attention(p.q, p.k, p.v, return_lse=True, **options)
    options |= {"kernel": kernel, "backend": backend, **more}
    made = {f"d{name}": torch.empty_like(x) for name, x in (("q", p.q), ("k", p.k), ("v", p.v))}
    return lambda: libflash.attention_backward(p.dout, p.q, p.k, p.v, out, lse, **made, **options)


PEER_CALLS = {"forward": (forward_sdpa, forward_fa3), "backward": (backward_sdpa, backward_fa3)}
OWN_CALLS = {"forward": forward_libflash, "backward": backward_libflash}


def own_choice(p: Problem, **more: object) -> str:
    """The family of the kernel that libflash chooses for this problem; `more`: further options of the call."""
    text = libflash.explain(p.q, p.k, p.v, causal=p.cell.causal, op=p.cell.direction, **more)
    found = re.search(r"^kernel +\w+, backend (\w+)$", text, re.MULTILINE)
    if not found:
        raise ValueError(f"explain names no kernel: {text}")
    return found[1]


def contenders(p: Problem, kernel: str | None) -> dict[str, Callable[[], Call]]:
    """Peers first, libflash last; restricted to a family only if that gives another kernel than libflash's choice or `kernel`."""
    (sdpa, fa3), ours = PEER_CALLS[p.cell.direction], OWN_CALLS[p.cell.direction]
    peers = ("efficient",) if p.cell.dtype == "float32" else ("fa2", "cudnn")
    found: dict[str, Callable[[], Call]] = {peer: lambda peer=peer: sdpa(p, SDPA[peer]) for peer in peers}
    if p.cell.dtype != "float32" and flash_attention_3():
        found[FA3] = lambda: fa3(p)
    if kernel is None and own_choice(p) != FAMILY:
        found[HELD] = lambda: ours(p, None, FAMILY)
    return found | {OURS: lambda: ours(p, kernel)}


def measured_against(peer: str, ms: dict[str, float]) -> str:
    """FlashAttention-2 is compared with the sm80 kernels, the other peers with libflash's choice."""
    return HELD if peer == "fa2" and HELD in ms else OURS
