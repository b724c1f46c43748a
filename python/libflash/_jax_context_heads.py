"""The exchange of heads for tokens (DeepSpeed-Ulysses, arXiv 2309.14509) by XLA's all-to-all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._context_choice import key_heads_repeated
from ._context_layout import Layout
from ._jax_calls import Options

Array = jax.Array
all_to_all: Callable[..., Array] = jax.lax.all_to_all


@dataclass(frozen=True)
class Heads:
    """A mesh axis whose devices have some tokens with all heads before the exchange, and all tokens of the axis with some heads
    after it. `axis` None: one device, nothing to exchange. In tensors the tokens come before the heads, except in lse."""

    axis: str | None
    size: int
    heads_q: int
    heads_k: int
    layout: Layout

    @property
    def repeat(self) -> int:
        """How often each key head is repeated so that every device has the key heads of its query heads."""
        return 1 if self.size == 1 else key_heads_repeated(self.heads_q, self.heads_k, self.size)

    def to_heads(self, x: Array, repeat: int = 1) -> Array:
        if self.size == 1:
            return x
        x = jnp.repeat(x, repeat, axis=x.ndim - 2) if repeat > 1 else x
        joined = all_to_all(x, self.axis, split_axis=x.ndim - 2, concat_axis=x.ndim - 3, tiled=True)
        return jnp.take(joined, self._order(), axis=x.ndim - 3, unique_indices=True)

    def to_tokens(self, x: Array) -> Array:
        return x if self.size == 1 else self._back(x, x.ndim - 3, x.ndim - 2)

    def lse_to_tokens(self, x: Array) -> Array:
        return x if self.size == 1 else self._back(x, x.ndim - 1, x.ndim - 2)

    def share(self, x: Array) -> Array:
        """This device's part of an array with one number for each query head."""
        if self.size == 1:
            return x
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.axis) * self.part, self.part)

    def call(self, function: Callable[..., Any], options: Options, *arrays: Any) -> Any:
        """function(options, *arrays), with dropout's numbers of this device's heads. These numbers are static, so there is one
        branch for each device."""
        if self.size == 1 or not options.dropout_p:
            return function(options, *arrays)

        def branch(device: int) -> Callable[..., Any]:
            numbers = options._replace(head_begin=device * self.part, heads_total=self.heads_q)
            return lambda *x: function(numbers, *x)

        return jax.lax.switch(jax.lax.axis_index(self.axis), [branch(n) for n in range(self.size)], *arrays)

    @property
    def part(self) -> int:
        return self.heads_q // self.size

    def _order(self) -> np.ndarray:
        """The order by position of the exchanged tokens, which arrive device by device. It is the same for every set of devices,
        because a later device of a ring has later tokens of each chunk."""
        return np.argsort(np.concatenate([self.layout.local_tokens((n,)).tokens for n in range(self.size)]), kind="stable")

    def _back(self, x: Array, tokens: int, heads: int) -> Array:
        x = jnp.take(x, np.argsort(self._order()), axis=tokens, unique_indices=True)
        return all_to_all(x, self.axis, split_axis=tokens, concat_axis=heads, tiled=True)
