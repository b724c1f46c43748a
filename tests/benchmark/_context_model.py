"""A model of ring attention in zigzag order, for any number of ranks, from times of its steps and of a transfer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
    """Latency and rate, from the times of a small and a large transfer."""
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


class RingModel:
    """Measures each time that it needs once."""

    def __init__(self, device: torch.device, dtype: torch.dtype, head_dim: int, clock: Clock) -> None:
        self.device, self.dtype, self.head_dim, self.clock = device, dtype, head_dim, clock
        self.steps: dict[tuple[Any, ...], Steps] = {}

    @cached_property
    def link(self) -> Link:
        return measured_link(self.device, self.clock)

    def ms(self, ranks: int, tokens: int, heads: tuple[int, ...], causal: bool, backward: bool) -> float:
        """Milliseconds of a rank with so many tokens. K and V are sent during a step. In backward their gradients are, too, in
        float32, and once more after the last step. (Calls on parts, without positions, send them in the type of K: half of that.)
        """
        steps = self.measured_steps(tokens, heads, causal, backward)
        sums = 2 * tokens * heads[1] * self.head_dim * 4 if backward else 0
        keys = 2 * tokens * heads[1] * self.head_dim * self.dtype.itemsize
        hidden = max(steps.other, self.link.ms(keys + sums))
        return steps.own + (ranks - 1) * hidden + (self.link.ms(sums) if backward and ranks > 1 else 0)

    def measured_steps(self, tokens: int, heads: tuple[int, ...], causal: bool, backward: bool) -> Steps:
        key = tokens, heads, causal, backward
        if key not in self.steps:
            q, k = (torch.randn(1, tokens, n, self.head_dim, device=self.device).to(self.dtype) for n in heads)
            self.steps[key] = measured_steps(q, k, self.clock, backward, causal)
        return self.steps[key]
