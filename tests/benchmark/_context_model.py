"""A model of ring attention in zigzag order, for any number of ranks, from times of its steps and of a transfer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from _plain_ring import pass_on

import libflash

Clock = Callable[[Callable[[], object]], float]  # milliseconds of a call


@dataclass(frozen=True)
class Link:
    """Milliseconds of a transfer to the next rank, while another one arrives: latency + bytes / rate."""

    latency: float
    bytes_per_ms: float

    def ms(self, sent: int) -> float:
        return self.latency + sent / self.bytes_per_ms


def measured_link(device: torch.device, clock: Clock) -> Link:
    """From a small and a large transfer."""
    sizes = (1 << 10, 1 << 27 if device.type == "cuda" else 1 << 22)

    def transfer(x: torch.Tensor) -> None:
        for request in pass_on((x,))[1]:
            request.wait()

    small, large = (clock(lambda n=n: transfer(torch.empty(n, dtype=torch.uint8, device=device))) for n in sizes)
    return Link(small, (sizes[1] - sizes[0]) / max(large - small, 1e-6))


@dataclass(frozen=True)
class Steps:
    """Milliseconds of a rank's step with its own keys, and with another rank's. If causal, half of the pairs are visible
    in either.
    """

    own: float
    other: float


def measured_steps(q: torch.Tensor, k: torch.Tensor, clock: Clock, backward: bool, causal: bool) -> Steps:
    """q, k: (1, tokens of a rank, heads, head_dim)."""
    others = k[:, : k.shape[1] // 2] if causal else k

    def step(keys: torch.Tensor, masked: bool) -> float:
        out, lse = libflash.attention(q, keys, keys, causal=masked, return_lse=True)
        if backward:
            return clock(lambda: libflash.attention_backward(out, q, keys, keys, out, lse, causal=masked))
        return clock(lambda: libflash.attention(q, keys, keys, causal=masked, return_lse=True))

    return Steps(step(k, causal), step(others, False))


def predicted_ms(ranks: int, k: torch.Tensor, steps: Steps, link: Link, backward: bool) -> float:
    """K and V travel during a step. In backward their gradients do so too, in float32, and once more after the last step."""
    keys = 2 * k.numel() * k.element_size()
    sums = 2 * k.numel() * 4 if backward else 0
    hidden = max(steps.other, link.ms(keys + sums))
    return steps.own + (ranks - 1) * hidden + (link.ms(sums) if backward and ranks > 1 else 0)
