"""jax.nn.dot_product_attention, by default as JAX chooses it, or one implementation by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..case import Inputs
from ..convert import jax_results, jax_tangents
from ..reference_tangent import Tangents
from ..target import JVP, JVP_OF_GRADIENTS, NotOffered, Results, Target
from .jax_device import on_device

# Its causal rule and window begin at the top left. A window has two sides: "no limit" is a length beyond any of the tests.
OFFERS = frozenset(
    ("fp32", "fp16", "bf16", "causal", "causal top_left", "window_size", "window_size top_left", "softmax_scale", "bias", "mask",
     "seqused_q", "seqused_k", "grouped heads", "empty tensors", "gradients")
)  # fmt: skip
UNLIMITED = 1 << 20
IMPLEMENTATIONS = ("xla", "cudnn")


class JaxSdpa(Target):
    def __init__(self, implementation: str | None, device: str) -> None:
        if implementation not in (None, *IMPLEMENTATIONS):
            raise ValueError(f"--target jax:{implementation}: the implementations are {' and '.join(IMPLEMENTATIONS)}")
        self.name = "jax" + (f":{implementation}" if implementation else "")
        self.implementation, self.device = implementation, on_device(device)
        self.versions = {"jax": jax.__version__}
        self.offers = OFFERS
        if implementation != "cudnn":
            self.offers_tangents = frozenset((JVP, JVP_OF_GRADIENTS))
        self.reads_contents = False  # they are values of a compiled program

    def results(self, x: Inputs) -> Results:
        return self.offered(lambda: jax_results(x, self.attention))

    def tangents(self, x: Inputs, t: Tangents) -> Results:
        return self.offered(lambda: jax_tangents(x, t, self.attention))

    def offered(self, run: Callable[[], Results]) -> Results:
        try:
            with jax.default_device(self.device):
                return run()
        except (ValueError, RuntimeError) as error:
            if "not supported" in str(error):  # products of fp16 on the CPU, for one
                raise NotOffered("a call that JAX does not support on this device") from error
            raise

    def attention(self, q: Any, k: Any, v: Any, *, return_lse: bool, **given: Any) -> Any:
        """With the arguments of libflash.jax.attention. The residual is lse, (batch, seqlen, heads), in the type of q."""
        options: dict[str, Any] = {"is_causal": given.pop("causal", False), "implementation": self.implementation}
        given.pop("causal_align", None)  # see needs.same_lengths
        names = {"softmax_scale": "scale", "seqused_q": "query_seq_lengths", "seqused_k": "key_value_seq_lengths"}
        options |= {theirs: given.pop(ours) for ours, theirs in names.items() if ours in given}
        options |= {name: given.pop(name) for name in ("bias", "mask") if name in given}
        if "window_size" in given:
            options["local_window_size"] = tuple(UNLIMITED if side < 0 else side for side in given.pop("window_size"))
        if given:
            raise NotOffered(", ".join(given))
        out, residual = jax.nn.dot_product_attention(q, k, v, return_residual=True, **options)
        return out, jnp.swapaxes(residual, 1, 2)
