"""libflash.jax.context_parallel_attention on some devices of JAX, and the same problem in one call on the CPU.

python jax_context.py 2          the problems of tests/cuda/test_jax_context_gpus.py on two devices, a line of JSON for each
python jax_context.py 2 ring     only those whose names begin with "ring"
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import libflash.jax as lj
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

import libflash

P = PartitionSpec
NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")


def mesh_of(scheme: str, ranks: int) -> tuple[Mesh, Any, Any]:
    """(mesh, axis_name of the call, axes of the tokens in a PartitionSpec)"""
    devices = jax.devices()[:ranks]
    if scheme == "heads_ring":
        mesh = jax.make_mesh((2, ranks // 2), ("heads", "cp"), axis_types=(AxisType.Auto,) * 2, devices=devices)
        return mesh, ("heads", "cp"), ("cp", "heads")
    return jax.make_mesh((ranks,), ("cp",), axis_types=(AxisType.Auto,), devices=devices), "cp", "cp"


def tensors(shape: tuple[int, ...], packed: bool, dtype: str = "float64") -> tuple[np.ndarray, ...]:
    """q, k, v, dout, dlse; `shape` is (batch, tokens, heads_q, heads_k, head_dim, head_dim_v)."""
    batch, tokens, hq, hk, d, dv = shape
    rng, lead = np.random.default_rng(5), (tokens,) if packed else (batch, tokens)
    made = (rng.standard_normal((*lead, h, c)).astype(dtype) for h, c in ((hq, d), (hk, d), (hk, dv), (hq, dv)))
    lse = (hq, tokens) if packed else (batch, hq, tokens)
    return (*made, rng.standard_normal(lse).astype("float64" if dtype == "float64" else "float32"))


def divided(scheme: str, order: str, ranks: int = 4, cu: Any = None, **options: Any) -> Callable[..., tuple[Any, Any]]:
    """A function from (q, k, v, sink, slopes) of the whole problem to (out, lse) of the whole problem, computed on `ranks`
    devices.
    """
    mesh, axis, spec = mesh_of(scheme, ranks)
    dim = 0 if cu is not None else 1
    tokens, rows = P(*(None,) * dim, spec), P(*(None,) * (dim + 1), spec)

    def local(q: Any, k: Any, v: Any, sink: Any, slopes: Any) -> Any:
        return lj.context_parallel_attention(
            q, k, v, axis_name=axis, scheme=scheme, order=order, cu_seqlens=cu, learnable_sink=sink, alibi_slopes=slopes,
            return_lse=True, **options)  # fmt: skip

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(tokens,) * 3 + (P(),) * 2, out_specs=(tokens, rows))

    def whole(q: Any, k: Any, v: Any, sink: Any, slopes: Any) -> tuple[Any, Any]:
        out, lse = mapped(*(lj.shard(x, ranks, dim=dim, order=order) for x in (q, k, v)), sink, slopes)
        return lj.unshard(out, ranks, dim=dim, order=order), lj.unshard(lse, ranks, dim=dim + 1, order=order)

    return whole


def one_call(q: Any, k: Any, v: Any, g: Any, gl: Any, sink: Any, slopes: Any, cu: Any = None, **options: Any) -> tuple[Any, ...]:
    """The results in the order of NAMES, by one call on the CPU."""
    options.pop("deterministic", None)  # the CPU always is
    options |= {} if cu is None else {"cu_seqlens_q": np.int32(cu), "cu_seqlens_k": np.int32(cu)}
    out, lse = libflash.attention(q, k, v, learnable_sink=sink, alibi_slopes=slopes, return_lse=True, **options)
    more = {} if sink is None else {"dsink": np.empty_like(sink)}
    options |= {"learnable_sink": sink, "alibi_slopes": slopes, "dlse": np.where(np.isfinite(lse), gl, 0)}
    grads = libflash.attention_backward(g, q, k, v, out, lse, **options, **more)
    return (out, lse, *grads[:3], *more.values())


def step_of(whole: Callable[..., Any], slopes: Any, sink: bool) -> Callable[..., tuple[Any, ...]]:
    """A compiled function from (q, k, v, dout, dlse, sink) to the results in the order of NAMES."""

    def run(q: Any, k: Any, v: Any, g: Any, gl: Any, s: Any) -> tuple[Any, ...]:
        def loss(q: Any, k: Any, v: Any, s: Any) -> Any:
            out, lse = whole(q, k, v, s, slopes)
            return (out * g).sum() + (jnp.where(jnp.isfinite(lse), lse, 0) * gl).sum(), (out, lse)

        gradients, made = jax.grad(loss, argnums=(0, 1, 2, 3) if sink else (0, 1, 2), has_aux=True)(q, k, v, s)
        return (*made, *gradients)

    return jax.jit(run)


def both(
    scheme: str, order: str, shape: tuple[int, ...] = (2, 48, 4, 2, 8, 6), ranks: int = 4, sink: bool = False,
    slopes: bool = False, cu: Any = None, dtype: str = "float64", **options: Any,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """The results, in the order of NAMES, of the devices together and of one call, which computes in float64 for float64 and in
    float32 for other types.
    """
    q, k, v, g, gl = tensors(shape, cu is not None, dtype)
    wide = "float64" if dtype == "float64" else "float32"
    s = np.linspace(-1, 1, shape[2]).astype(wide) if sink else None
    a = np.linspace(0.1, 0.5, shape[2]).astype(wide) if slopes else None
    got = step_of(divided(scheme, order, ranks, cu, **options), a, sink)(q, k, v, g, gl, s)
    return got, one_call(*(x.astype(wide) for x in (q, k, v, g)), gl, s, a, cu, **options)


def compare(scheme: str, order: str, bound: float = 1e-12, **problem: Any) -> tuple[Any, ...]:
    got, want = both(scheme, order, **problem)
    assert len(got) == len(want), problem
    for n, (x, y) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_allclose(
            np.asarray(x), y, rtol=bound, atol=bound * 10, err_msg=f"{scheme} {order} {problem}: {NAMES[n]}"
        )
    return got


# -- problems for GPUs

SHAPE = (2, 4 * 296, 8, 2, 64, 64)
FIRST = {"causal": True, "sink": True}
OTHERS: dict[str, dict[str, Any]] = {
    "window-dropout": {"window_size": (300, 40), "dropout_p": 0.25, "seed": 2**40 + 3, "offset": 5},
    "documents": {"causal": True, "cu": (0, 1, 422, 422, 441, 1184), "softcap": 3.0},
    "deterministic-128": {"causal": True, "deterministic": True, "shape": (1, 1024, 8, 4, 128, 128)},
}


def problems(ranks: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """On two devices: the schemes ring, all_gather and heads with all types and options. On more devices: these schemes with the
    types alone, and heads_ring, which needs more than two devices, with all types and options.
    """
    cases = {f"{dtype}-causal-sink": {"dtype": dtype} | FIRST for dtype in ("float32", "bfloat16")}
    others = {f"bfloat16-{name}": {"dtype": "bfloat16"} | more for name, more in OTHERS.items()}
    if ranks == 2:
        wanted = itertools.product(("ring", "all_gather", "heads"), (cases | others).items())
    else:
        wanted = itertools.chain(
            itertools.product(("ring", "all_gather", "heads"), cases.items()),
            itertools.product(("heads_ring",), (cases | others).items()),
        )
    return {f"{scheme}-{name}": (scheme, more) for scheme, (name, more) in wanted}


def errors(ranks: int, scheme: str, problem: dict[str, Any]) -> dict[str, float]:
    """Root mean square of the error over that of the values; infinity if different elements are finite."""
    found = {}
    for name, x, y in zip(NAMES, *both(scheme, "zigzag", ranks=ranks, **{"shape": SHAPE, **problem}), strict=False):
        got, finite = np.asarray(x, np.float64), np.isfinite(y)
        got, exact = np.where(finite, got, 0), np.where(finite, np.float64(y), 0)
        same = np.array_equal(np.isfinite(np.asarray(x, np.float64)), finite)
        found[name] = float(np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2))) if same else float("inf")
    return found


def same_bits_again(ranks: int, scheme: str) -> bool:
    """Whether a jitted step gives the same bits for the same values, if it is called with two sets of values in turn. XLA may
    record and replay the step.
    """
    whole = divided(scheme, "zigzag", ranks, causal=True, deterministic=True)
    q, *x = tensors(SHAPE, False, "bfloat16")
    step = step_of(whole, None, False)
    first: dict[int, list[np.ndarray]] = {}
    for turn in range(8):
        sign = 1 - 2 * (turn % 2)
        made = [np.asarray(y, np.float32) for y in step(sign * q, *x, None)]
        if not all(np.array_equal(a, b) for a, b in zip(first.setdefault(sign, made), made, strict=True)):
            return False
    return not np.array_equal(first[1][0], first[-1][0])


def report(ranks: int, beginning: str = "") -> Iterator[dict[str, Any]]:
    """One line for each problem whose name begins with `beginning`."""
    yield {"backend": jax.default_backend(), "devices": jax.device_count()}
    if jax.device_count() < ranks:
        return
    jobs: dict[str, Callable[[], Any]] = {
        name: lambda problem=problem: errors(ranks, *problem) for name, problem in problems(ranks).items()
    }
    jobs |= {f"again-{scheme}": lambda scheme=scheme: same_bits_again(ranks, scheme) for scheme in ("ring", "heads")}
    for name, job in jobs.items():
        if not name.startswith(beginning):
            continue
        try:
            yield {"name": name, "made": job()}
        except Exception as error:  # the others run nevertheless
            yield {"name": name, "raised": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    for line in report(int(sys.argv[1]), *sys.argv[2:]):
        print(json.dumps(line), flush=True)
