"""A device of JAX by the name that the command line has."""

from __future__ import annotations

import jax


def on_device(name: str) -> jax.Device:
    """`name`: "cpu", "cuda" or "cuda:1"."""
    platform, _, number = name.partition(":")
    try:
        return jax.devices(platform)[int(number or 0)]
    except (RuntimeError, IndexError, ValueError) as error:
        raise ValueError(f"JAX has no device {name!r}: {error}") from error
