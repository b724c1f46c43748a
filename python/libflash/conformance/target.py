"""What is tested: an implementation of attention with the interface of all targets, and what it offers."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from .case import Inputs
from .decode_cases import DecodeInputs
from .needs import inputs_of, needs
from .reference_tangent import Tangents

Results = dict[str, np.ndarray]
JVP, JVP_OF_GRADIENTS = "jvp", "jvp of gradients"


APART = "NaN, infinity and overflow apart from the rest of a tile"


class NotOffered(Exception):
    """The target does not have what a call needs, and says so. Never a failure."""


class Target:
    """An adapter overrides `results`, and `decoded` if there is decoding.

    Arrays come as NumPy's, (batch, seqlen, heads, head_dim), with the options of libflash.attention under their names; results
    go back under the names o, lse, dq, dk, dv, dbias, dsink. What the target does not compute is left out.
    """

    name = ""
    versions: Mapping[str, str] = {}
    offers: frozenset[str] = frozenset()  # words of needs.ALL
    offers_decode: frozenset[str] | None = None  # options of libflash.decode; None: no decoding
    offers_tangents: frozenset[str] = frozenset()  # of JVP and JVP_OF_GRADIENTS
    refusals: tuple[type[Exception], ...] = (NotImplementedError,)  # exceptions by which it says that it does not offer a call
    mixes_tiles = False  # it states that a NaN, an infinity or an overflow may reach what shares a tile with it
    reads_contents = True  # arrays of lengths are on the host, so that bad numbers in them can be refused

    def results(self, x: Inputs) -> Results:
        """Forward, and backward if x.dout is given."""
        raise NotImplementedError

    def repeatable(self, x: Inputs) -> Results:
        """The same results, in the mode in which the target promises equal bits in equal calls."""
        return self.results(x)

    def errors(self, x: Inputs) -> dict[str, float]:
        """What it states about its arithmetic: arguments of error_bounds.Model."""
        return {}

    def decoded(self, x: DecodeInputs) -> Results:
        """o, lse, and k_cache, v_cache as they are after the call."""
        raise NotImplementedError

    def tangents(self, x: Inputs, t: Tangents) -> Results:
        """to and tlse, the tangents of o and lse in the direction `t`; with x.dout also tdq, tdk, tdv, tdbias and tdsink."""
        raise NotImplementedError

    def keep_apart(self) -> None:
        """Called before a check in which NaN, infinity or overflow shares a tile with results that must not change."""
        if self.mixes_tiles:
            raise NotOffered(APART)

    def run(self, x: Inputs, *, repeatable: bool = False) -> Results:
        """The results of a call; without gradients, if the target has none."""
        if "gradients" not in self.offers:
            x = dataclasses.replace(x, dout=None, dlse=None)
        missing = [word for word in needs(x) if word not in self.offers]
        if missing:
            raise NotOffered(", ".join(missing))
        try:
            return self.repeatable(x) if repeatable else self.results(x)
        except self.refusals as refusal:
            raise NotOffered(str(refusal)) from refusal

    def run_tangents(self, x: Inputs, t: Tangents) -> Results:
        """The tangents of a call; without those of gradients, if the target does not have them."""
        if JVP not in self.offers_tangents:
            raise NotOffered(JVP)
        if JVP_OF_GRADIENTS not in self.offers_tangents:
            x, t = dataclasses.replace(x, dout=None, dlse=None), dataclasses.replace(t, dout=None, dlse=None)
        missing = [word for word in needs(x) if word not in self.offers]
        if missing:
            raise NotOffered(", ".join(missing))
        try:
            made = self.tangents(x, t)
        except self.refusals as refusal:
            raise NotOffered(str(refusal)) from refusal
        if "dlse" not in self.offers:  # its lse has no derivatives
            made.pop("tlse", None)
        return made

    def run_decode(self, x: DecodeInputs, dtype: str) -> Results:
        if self.offers_decode is None:
            raise NotOffered("decode")
        missing = [name for name in x.options if name not in self.offers_decode]
        missing += [dtype] * (dtype not in self.offers)
        if missing:
            raise NotOffered(", ".join(missing))
        try:
            return self.decoded(x)
        except self.refusals as refusal:
            raise NotOffered(str(refusal)) from refusal

    def works(self) -> bool:
        """False if every later call would fail: after an illegal access on a GPU the process cannot use it any more."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return True
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def call(self, q: Any, k: Any, v: Any, dout: Any = None, **options: Any) -> Results:
        """`run` with the arguments that checks pass."""
        return self.run(inputs_of(q, k, v, dout, **options))
