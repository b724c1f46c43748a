"""Attention of a device's rows over the keys of all devices of a mesh axis: keys are passed from device to device, or gathered.

ring: in step t device r computes with the keys of device r - t, which that device sends to it directly. Steps in which no device
has a visible key are omitted, and pairs of devices without a visible pair of row and key send nothing, so that with a window only
neighbours send. Each step computes a part of out in lse's type; the parts are merged. In backward, each step computes, from out
and lse of the whole rows, its part of dq, and dk and dv of its keys; dk and dv are sent back to the keys' device in lse's type
and added step by step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._context_layout import Layout, LocalTokens
from ._jax_calls import BACKWARD, FORWARD, POSITIONS, Options, lse_dtype, of_heads, vary, varying_axes
from ._jax_context_heads import Heads
from ._jax_merge import merge
from ._jax_primitives import bind, call_of
from ._jax_reverse_only import reverse_only

Array = jax.Array
Extras = dict[str, Array]
ppermute: Callable[..., Array] = jax.lax.ppermute
psum_scatter: Callable[..., Array] = jax.lax.psum_scatter


@dataclass(frozen=True)
class Ring:
    """A mesh axis; `axis` None: one device. `heads`: the axis along which heads were exchanged before."""

    axis: str | None
    size: int
    heads: Heads
    layout: Layout
    window: tuple[int, int]  # keys that a row sees to the left and right; -1: all
    scheme: str

    def members(self, device: int) -> tuple[int, ...]:
        """The shards whose tokens a device has after the exchange of heads."""
        return tuple(device * self.heads.size + n for n in range(self.heads.size))

    def local_tokens(self) -> list[LocalTokens]:
        return [self.layout.local_tokens(self.members(device)) for device in range(self.size)]

    def sees(self, step: int) -> list[bool]:
        """For each device: whether one of its rows sees a key of the device `step` before it."""
        return [
            self.layout.sees(self.members(device), self.members((device - step) % self.size), self.window)
            for device in range(self.size)
        ]

    def device(self) -> Any:
        return jax.lax.axis_index(self.axis) if self.axis else 0

    # -- positions of rows and keys

    def side(self, name: str, held: list[LocalTokens], device: Any, q: Array) -> Extras:
        """The options of one side, "q" or "k", for the tokens of a device."""
        packed = self.layout.cu_seqlens is not None
        options = {f"cu_seqlens_{name}": self._of(device, [p.cu_seqlens for p in held])} if packed else {}
        if self.size == 1:  # all rows and all keys: their numbers are their positions
            return options
        found = self._of(device, [p.positions for p in held])
        if not packed:
            found = jnp.broadcast_to(found, (q.shape[0], found.shape[0]))
        return options | {"row_positions" if name == "q" else "column_positions": found}

    def _of(self, device: Any, tables: list[np.ndarray]) -> Array:
        if len(tables) == 1:
            return jnp.asarray(tables[0], np.int32)
        return jnp.take(jnp.asarray(np.stack(tables), np.int32), device, axis=0)

    def options(self, options: Options) -> Options:
        return options if self.size == 1 else options._replace(flags=options.flags | POSITIONS)

    # -- what is sent

    def send(self, step: int, arrays: Any, *, back: bool = False) -> Any:
        """Send to the devices that see this device's keys in a step; `back`: from them to this device. Others receive zeros."""
        pairs = [((device - step) % self.size, device) for device, sees in enumerate(self.sees(step)) if sees]
        pairs = [(b, a) for a, b in pairs] if back else pairs
        return jax.tree.map(lambda x: ppermute(x, self.axis, pairs), arrays)

    def where_seen(self, step: int, compute: Any, arrays: tuple[Any, ...], empty: tuple[tuple[Any, Any, float], ...]) -> Any:
        """compute(*arrays) on the devices that see a key in a step; on other devices, arrays with the shapes, types and values of
        `empty`."""
        sees = self.sees(step)
        if all(sees):
            return compute(*arrays)
        axes = varying_axes(arrays)

        def nothing(*unused: Any) -> Any:
            return [vary(jnp.full(shape, value, dtype), axes) for shape, dtype, value in empty]

        return jax.lax.cond(jnp.asarray(sees)[self.device()], compute, nothing, *arrays)


def without_forward_mode(ring: Ring, options: Options, q: Array, k: Array, v: Array, extras: Extras) -> tuple[Any, ...]:
    """The arrays, with forward mode refused for those that have gradients."""
    scheme = repr(ring.scheme) + (" and dropout_p" if options.dropout_p else "")
    if "learnable_sink" in extras:
        extras = extras | {"learnable_sink": reverse_only(scheme, extras["learnable_sink"])}
    return reverse_only(scheme, q), reverse_only(scheme, k), reverse_only(scheme, v), extras


def gathered_attention(ring: Ring, options: Options, q: Array, k: Array, v: Array, extras: Extras) -> tuple[Array, Array]:
    """All keys in one call: (out, lse)."""
    if ring.size > 1:
        return _gathered(ring, options, *without_forward_mode(ring, options, q, k, v, extras))
    extras = extras | whole_sides(ring, q)
    if options.dropout_p and ring.heads.size > 1:  # the tangents do not support head_begin
        return _once(ring, options, *without_forward_mode(ring, options, q, k, v, extras))
    out, lse = forward(ring, options, q, k, v, extras)
    return out, lse


def whole_sides(ring: Ring, q: Array) -> Extras:
    """The positions of this device's rows and of the keys of all devices."""
    everything = ring.layout.local_tokens(tuple(range(ring.size * ring.heads.size)))
    return ring.side("q", ring.local_tokens(), ring.device(), q) | ring.side("k", [everything], 0, q)


def order_of_gathered(ring: Ring) -> np.ndarray:
    """The order by position of tokens that arrive device by device."""
    return np.argsort(np.concatenate([p.tokens for p in ring.local_tokens()]), kind="stable")


def gather(ring: Ring, x: Array) -> Array:
    """The tokens of all devices in their order."""
    axis = x.ndim - 3
    return jnp.take(
        jax.lax.all_gather(x, ring.axis, axis=axis, tiled=True), order_of_gathered(ring), axis=axis, unique_indices=True
    )


def scatter_sum(ring: Ring, x: Array) -> Array:
    """The sum over all devices, for this device's tokens."""
    axis = x.ndim - 3
    x = jnp.take(x, np.argsort(order_of_gathered(ring)), axis=axis, unique_indices=True)
    return psum_scatter(x, ring.axis, scatter_dimension=axis, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(ring: Ring, options: Options, q: Array, k: Array, v: Array, extras: Extras) -> tuple[Array, Array]:
    out, lse = forward(ring, options, q, gather(ring, k), gather(ring, v), extras | whole_sides(ring, q))
    return out, lse


def _gathered_forward(ring: Ring, options: Options, q: Array, k: Array, v: Array, extras: Extras) -> Any:
    out, lse = _gathered(ring, options, q, k, v, extras)
    return (out, lse), (q, k, v, extras, out, lse)


def _gathered_backward(ring: Ring, options: Options, saved: Any, cotangents: Any) -> Any:
    """Gathers K and V again instead of keeping them; their gradients are summed in lse's type."""
    q, k, v, extras, out, lse = saved
    dout, dlse = cotangents
    rows = without_sink(extras) | whole_sides(ring, q) | {"dlse": dlse}
    fixed = (dout, q, gather(ring, k), gather(ring, v), out, lse)
    dq, dk, dv = backward(ring, options._replace(wide=True), fixed, rows)
    sums = scatter_sum(ring, dk).astype(k.dtype), scatter_sum(ring, dv).astype(v.dtype)
    return dq.astype(q.dtype), *sums, gradients_of(extras, dout, out, lse, dlse)


_gathered.defvjp(_gathered_forward, _gathered_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _once(ring: Ring, options: Options, q: Array, k: Array, v: Array, extras: Extras) -> tuple[Array, Array]:
    """One call over keys that are on this device, with first derivatives."""
    out, lse = forward(ring, options, q, k, v, extras)
    return out, lse


def _once_forward(ring: Ring, options: Options, q: Array, k: Array, v: Array, extras: Extras) -> Any:
    out, lse = _once(ring, options, q, k, v, extras)
    return (out, lse), (q, k, v, extras, out, lse)


def _once_backward(ring: Ring, options: Options, saved: Any, cotangents: Any) -> Any:
    q, k, v, extras, out, lse = saved
    dout, dlse = cotangents
    rows = without_sink(extras) | {"dlse": dlse}
    dq, dk, dv = backward(ring, options, (dout, q, k, v, out, lse), rows)
    return dq, dk, dv, gradients_of(extras, dout, out, lse, dlse)


_once.defvjp(_once_forward, _once_backward)


def forward(ring: Ring, options: Options, q: Array, k: Array, v: Array, extras: Extras) -> list[Array]:
    def run(options: Options, q: Array, k: Array, v: Array, extras: Extras) -> list[Array]:
        call, rest = call_of(FORWARD, options, extras)
        return bind(call, q, k, v, *rest)

    return ring.heads.call(run, ring.options(options), q, k, v, extras)  # type: ignore[no-any-return]


def backward(ring: Ring, options: Options, fixed: tuple[Array, ...], extras: Extras) -> list[Array]:
    def run(options: Options, fixed: tuple[Array, ...], extras: Extras) -> list[Array]:
        call, rest = call_of(BACKWARD, options, extras)
        return bind(call, *fixed, *rest)

    return ring.heads.call(run, ring.options(options), fixed, extras)  # type: ignore[no-any-return]


def without_sink(extras: Extras) -> Extras:
    """The options without the sink, for calls after the sink has been counted: in the lse of the rows, or in the first step."""
    return {name: x for name, x in extras.items() if name != "learnable_sink"}


# -- the ring


def ring_attention(ring: Ring, options: Options, q: Array, k: Array, v: Array, extras: Extras) -> tuple[Array, Array]:
    """(out, lse), with first derivatives for q, k, v and learnable_sink."""
    return _ring(ring, options._replace(wide=True), *without_forward_mode(ring, options, q, k, v, extras))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(ring: Ring, options: Options, q: Array, k: Array, v: Array, extras: Extras) -> tuple[Array, Array]:
    held, device, wide = ring.local_tokens(), ring.device(), lse_dtype(q.dtype)
    rows = without_sink(extras) | ring.side("q", held, device, q)
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    empty = ((q.shape[:-1] + v.shape[-1:], wide, 0.0), (lse_shape, wide, -jnp.inf))
    total: list[Array] = []
    for step in range(ring.size):
        if not any(ring.sees(step)) and step > 0:
            continue
        keys = (k, v) if step == 0 else ring.send(step, (k, v))
        more = rows | ring.side("k", held, (device - step) % ring.size, q)
        if step == 0:  # the device's own keys; this step also counts the sink
            total = list(forward(ring, options, q, k, v, more | extras))
            continue
        made = ring.where_seen(step, lambda q, k, v, more: list(forward(ring, options, q, k, v, more)), (q, *keys, more), empty)
        total = list(merge([total[0], made[0]], [total[1], made[1]]))
    return total[0].astype(q.dtype), total[1]


def _ring_forward(ring: Ring, options: Options, q: Array, k: Array, v: Array, extras: Extras) -> Any:
    out, lse = _ring(ring, options, q, k, v, extras)
    return (out, lse), (q, k, v, extras, out, lse)


def _ring_backward(ring: Ring, options: Options, saved: Any, cotangents: Any) -> Any:
    q, k, v, extras, out, lse = saved
    dout, dlse = cotangents
    held, device, wide = ring.local_tokens(), ring.device(), lse_dtype(q.dtype)
    rows = without_sink(extras) | ring.side("q", held, device, q)
    rows |= {"dlse": dlse}
    empty = tuple((x.shape, wide, 0.0) for x in (q, k, v))
    dq, dk, dv = (jnp.zeros(x.shape, wide) for x in (q, k, v))
    for step in range(ring.size):
        if not any(ring.sees(step)):
            continue
        keys = (k, v) if step == 0 else ring.send(step, (k, v))
        more = rows | ring.side("k", held, (device - step) % ring.size, q)

        def part(q: Array, k: Array, v: Array, more: Extras) -> list[Array]:
            return list(backward(ring, options, (dout, q, k, v, out, lse), more))

        made = ring.where_seen(step, part, (q, *keys, more), empty)
        dq = dq + made[0]
        back = made[1:] if step == 0 else ring.send(step, tuple(made[1:]), back=True)
        dk, dv = dk + back[0], dv + back[1]
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), gradients_of(extras, dout, out, lse, dlse)


_ring.defvjp(_ring_forward, _ring_backward)


def gradients_of(extras: Extras, dout: Array, out: Array, lse: Array, dlse: Array) -> dict[str, Any]:
    """Gradients of the options. The sink is a key without value: dsink = sum over rows of exp(sink - lse) (dlse - dout . out)."""
    made: dict[str, Any] = dict.fromkeys(extras)
    if "learnable_sink" in extras:
        sink = extras["learnable_sink"]
        delta = (dout.astype(lse.dtype) * out.astype(lse.dtype)).sum(-1)
        sees = lse != -jnp.inf  # NaN comes through
        weight = jnp.where(sees, jnp.exp(of_heads(sink, lse) - jnp.where(sees, lse, 0.0)), 0.0)
        rows = jnp.where(sees, weight * (dlse - jnp.swapaxes(delta, -1, -2)), 0.0)
        heads = rows.ndim - 2
        made["learnable_sink"] = rows.sum(tuple(axis for axis in range(rows.ndim) if axis != heads)).astype(sink.dtype)
    return made
