"""The JAX twin of train_long.py: a decoder of Llama's shape on long sequences, the context split over the devices of a mesh.

    python tests/examples/train_long_jax.py --small                  1 and 4 devices of the CPU, within a minute
    python tests/examples/train_long_jax.py --devices 1 2 --context 65536

Attention is libflash.jax.context_parallel_attention inside shard_map; the weights are on every device. The text is that of
Python's standard library, a token is a byte.

Exit code 1 if a loss does not fall or a curve is further away from the first one than --limit.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import sysconfig
import time
from typing import Any

from gpt import files

VOCABULARY = 256
DEVICES_OF_SMALL = 4


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="2 blocks, 4 heads of 16, 256 tokens, 20 steps, on the CPU")
    parser.add_argument("--devices", type=int, nargs="+", help="numbers of devices to train with, one after the other")
    parser.add_argument("--context", type=int, help="tokens of a sequence, over all devices")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--scheme", default="auto", help="of context_parallel_attention")
    parser.add_argument("--limit", type=float, help="of the distance between curves, nats per token")
    parser.add_argument("--json", type=pathlib.Path, help="write the curves to this file")
    options = parser.parse_args(arguments)
    files.check(parser, options)
    options.blocks, options.heads, options.key_heads, options.head_dim = (2, 4, 2, 16) if options.small else (16, 32, 8, 64)
    options.context = options.context or (256 if options.small else 32768)
    options.steps = options.steps or (20 if options.small else 50)
    options.limit = options.limit or (1e-4 if options.small else 2e-2)
    return options


options = parsed(None) if __name__ == "__main__" else parsed(["--small"])
if options.small:  # before JAX is imported
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES_OF_SMALL}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import libflash.jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, PartitionSpec  # noqa: E402

Weights = dict[str, Any]
TOKENS = PartitionSpec(None, "context")


def text(most_bytes: int = 1 << 22) -> np.ndarray:
    sources = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(path.read_bytes() for path in sources)[:most_bytes], np.uint8)


def first_weights(key: Any) -> Weights:
    channels, hidden = options.heads * options.head_dim, 4 * options.heads * options.head_dim
    qkv = (options.heads + 2 * options.key_heads) * options.head_dim
    deep = 0.02 / (2 * options.blocks) ** 0.5
    shapes = {"qkv": (channels, qkv, 0.02), "out": (channels, channels, deep), "up": (channels, 2 * hidden, 0.02),
              "down": (hidden, channels, deep)}  # fmt: skip
    keys = iter(jax.random.split(key, 2 + options.blocks * len(shapes)))
    weights: Weights = {name: 0.02 * jax.random.normal(next(keys), (VOCABULARY, channels)) for name in ("tokens", "logits")}
    for block in range(options.blocks):
        for name, (rows, columns, size) in shapes.items():
            weights[f"{name}{block}"] = size * jax.random.normal(next(keys), (rows, columns))
    return weights


def normalised(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary embedding, channels paired (0, d/2), (1, d/2 + 1), ..."""
    frequencies = 10000.0 ** -(jnp.arange(0, options.head_dim, 2) / options.head_dim)
    angles = positions[:, None, None] * frequencies
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((a * jnp.cos(angles) - b * jnp.sin(angles), a * jnp.sin(angles) + b * jnp.cos(angles)), -1)


def loss_of_device(weights: Weights, tokens: jax.Array, labels: jax.Array, positions: jax.Array) -> jax.Array:
    """Of this device's tokens; the mean over the devices is the loss."""
    kind = jnp.float32 if options.small else jnp.bfloat16
    x = weights["tokens"][tokens].astype(kind)
    w = jax.tree.map(lambda weight: weight.astype(kind), weights)
    groups = np.cumsum([options.heads, options.key_heads])
    for block in range(options.blocks):
        qkv = (normalised(x) @ w[f"qkv{block}"]).reshape(*x.shape[:2], -1, options.head_dim)
        q, k, v = jnp.split(qkv, groups, axis=2)
        out = libflash.jax.context_parallel_attention(
            rotated(q, positions).astype(kind), rotated(k, positions).astype(kind), v, axis_name="context", scheme=options.scheme,
            causal=True,
        )  # fmt: skip
        x = x + out.reshape(x.shape) @ w[f"out{block}"]
        gate, up = jnp.split(normalised(x) @ w[f"up{block}"], 2, axis=-1)
        x = x + (jax.nn.silu(gate) * up) @ w[f"down{block}"]
    logits = (normalised(x) @ w["logits"].T).astype(jnp.float32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return jax.lax.pmean(-chosen.mean(), "context")


def train(devices: int) -> list[float]:
    """The loss of each step, in nats per token."""
    mesh = jax.make_mesh((devices,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    places = jnp.asarray(libflash.jax.positions(options.context, devices))
    specs = (PartitionSpec(), TOKENS, TOKENS, PartitionSpec("context"))
    loss = jax.shard_map(loss_of_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())

    @jax.jit
    def step(weights: Weights, moments: tuple[Weights, Weights], tokens: jax.Array, number: jax.Array) -> Any:
        """Adam with a linear warm-up of 10 steps."""
        inputs, labels = (libflash.jax.shard(x, devices) for x in (tokens[:, :-1], tokens[:, 1:]))
        value, gradient = jax.value_and_grad(loss)(weights, inputs, labels, places)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradient)
        second = jax.tree.map(lambda m, g: 0.95 * m + 0.05 * g * g, moments[1], gradient)
        rate = 0.25 / (options.heads * options.head_dim) * jnp.minimum(1.0, number / 10)
        scale1, scale2 = 1 - 0.9**number, 1 - 0.95**number
        moved = jax.tree.map(lambda w, m, s: w - rate * (m / scale1) / (jnp.sqrt(s / scale2) + 1e-8), weights, first, second)
        return value, moved, (first, second)

    weights = first_weights(jax.random.key(0))
    moments = (jax.tree.map(jnp.zeros_like, weights), jax.tree.map(jnp.zeros_like, weights))
    source, random, losses = text(), np.random.default_rng(0), []
    for number in range(1, options.steps + 1):
        start = random.integers(len(source) - options.context - 1)
        tokens = jnp.asarray(source[None, start : start + options.context + 1], jnp.int32)
        began = time.perf_counter()
        value, weights, moments = step(weights, moments, tokens, jnp.float32(number))
        losses.append(float(value))
        rate = options.context / (time.perf_counter() - began)
        print(f"\rstep {number:4} of {options.steps}  loss {losses[-1]:.4f}  {rate:9.0f} tokens/s", end="", file=sys.stderr)
    print(file=sys.stderr)
    return losses


def main() -> int:
    wanted = options.devices or [1, DEVICES_OF_SMALL if options.small else jax.device_count()]
    curves = {devices: train(devices) for devices in wanted}
    first = curves[wanted[0]]
    print("devices  loss            difference")
    wrong = False
    for devices, curve in curves.items():
        difference = float(np.sqrt(np.mean((np.subtract(curve, first)) ** 2)))
        print(f"{devices:7}  {curve[0]:.3f} -> {curve[-1]:.3f}  {difference:10.1e}")
        wrong |= not difference <= options.limit or not np.mean(curve[-5:]) < np.mean(curve[:5])
    if options.json:
        options.json.write_text(json.dumps({str(devices): curve for devices, curve in curves.items()}) + "\n")
    print("WRONG" if wrong else "good")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
