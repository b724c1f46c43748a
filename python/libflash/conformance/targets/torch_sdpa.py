"""torch.nn.functional.scaled_dot_product_attention, by default as PyTorch chooses, or one of its backends by name."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..case import Inputs
from ..convert import numpy_of, torch_of, torch_tangents
from ..reference_tangent import Tangents
from ..target import JVP, JVP_OF_GRADIENTS, NotOffered, Results, Target

# Its causal rule begins at the top left. It does not return lse. Its dropout draws masks of its own.
OFFERS = frozenset(
    ("fp64", "fp32", "fp16", "bf16", "causal", "causal top_left", "softmax_scale", "bias", "mask", "grouped heads",
     "two head_dims", "empty tensors", "gradients")
)  # fmt: skip
BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
BIAS_GRADIENT = (None, "math", "efficient")
REFUSALS = ("No available kernel", "No viable backend")  # of a backend that does not take a call


class TorchSdpa(Target):
    def __init__(self, backend: str | None, device: str) -> None:
        if backend not in (None, *BACKENDS):
            raise ValueError(f"--target torch.sdpa:{backend}: the backends are {', '.join(BACKENDS)}")
        self.name = "torch.sdpa" + (f":{backend}" if backend else "")
        self.backend, self.device = backend, device
        self.versions = {"torch": torch.__version__}
        self.offers = OFFERS
        if backend == "math":  # the others have no forward mode
            self.offers_tangents = frozenset((JVP, JVP_OF_GRADIENTS))

    def results(self, x: Inputs) -> Results:
        return self.offered(lambda: self.forward_and_backward(x))

    def tangents(self, x: Inputs, t: Tangents) -> Results:
        def attention(q: Any, k: Any, v: Any, *, return_lse: bool, **options: Any) -> Any:
            options.pop("seed")
            return self.attention(q, k, v, **options), None

        return self.offered(lambda: torch_tangents(x, t, attention, self.device))

    def offered(self, run: Callable[[], Results]) -> Results:
        try:
            with self.chosen_backend():
                return run()
        except RuntimeError as error:
            if any(text in str(error) for text in REFUSALS):
                raise NotOffered("a call that this backend refuses") from error
            raise

    @contextlib.contextmanager
    def chosen_backend(self) -> Any:
        with warnings.catch_warnings(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")  # PyTorch warns why a backend does not take a call
            if self.backend is not None:
                stack.enter_context(sdpa_kernel([BACKENDS[self.backend]]))
            yield

    def forward_and_backward(self, x: Inputs) -> Results:
        q, k, v = leaves = [torch_of(array, self.device) for array in (x.q, x.k, x.v)]
        options = {name: torch_of(value, self.device) for name, value in x.options.items()}
        names = ["dq", "dk", "dv"]
        if "bias" in options and self.backend in BIAS_GRADIENT:
            leaves, names = [*leaves, options["bias"]], [*names, "dbias"]
        if x.dout is not None:
            for leaf in leaves:
                leaf.requires_grad_()
        o = self.attention(q, k, v, **options)
        results = {"o": numpy_of(o)}
        if x.dout is not None:
            gradients = torch.autograd.grad(o, leaves, torch_of(x.dout, self.device))
            results |= dict(zip(names, map(numpy_of, gradients), strict=True))
        return results

    def attention(self, q: Any, k: Any, v: Any, **given: Any) -> Any:
        """With the arguments and the layout of libflash.torch.attention."""
        options: dict[str, Any] = {"is_causal": given.pop("causal", False), "scale": given.pop("softmax_scale", None)}
        given.pop("causal_align", None)  # see needs.same_lengths
        masks = [given.pop(name) for name in ("bias", "mask") if name in given]
        if len(masks) + options["is_causal"] > 1:
            raise NotOffered("two of causal, bias and mask")
        if given:
            raise NotOffered(", ".join(given))
        options |= {"attn_mask": masks[0] if masks else None, "enable_gqa": q.shape[2] != k.shape[2]}
        transposed = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*transposed, **options)
        return out.transpose(1, 2)
