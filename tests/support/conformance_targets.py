"""Targets for tests of the conformance kit: the emulator, right or with a defect, and targets that are wrong in other ways."""

from __future__ import annotations

import dataclasses

import numpy as np
from emulator import Emulator
from libflash.conformance import needs
from libflash.conformance.case import Inputs
from libflash.conformance.target import NotOffered, Results, Target
from libflash.conformance.targets.own import Own


class Emulated(Target):
    """The emulator with tiles of 16 rows and 16 keys, so that small problems have several tiles."""

    def __init__(self, kernel: type[Emulator] = Emulator) -> None:
        self.name, self.offers, self.kernel = kernel.__name__, needs.ALL - {"empty tensors"}, kernel

    def results(self, x: Inputs) -> Results:
        dout = np.zeros((*x.q.shape[:-1], x.v.shape[-1]), x.v.dtype) if x.dout is None else x.dout
        made = self.kernel(16, 16).run(x.q, x.k, x.v, dout, x.dlse, **x.options)
        return {name: y for name, y in made.items() if y is not None and (x.dout is not None or name in ("o", "lse"))}


class ChangesBits(Own):
    """The last bit of one element of dq changes from call to call."""

    def results(self, x: Inputs) -> Results:
        made = super().results(x)
        if "dq" in made and made["dq"].size:
            self.calls = getattr(self, "calls", 0) + 1
            made["dq"].view(f"u{made['dq'].itemsize}").flat[0] ^= self.calls & 1
        return made


class AcceptsBadInput(Own):
    """It accepts every input: where libflash refuses a call, the result is zeros."""

    def results(self, x: Inputs) -> Results:
        try:
            return super().results(x)
        except ValueError:
            return {"o": np.zeros_like(x.q)}


class Leaking(Own):
    """NaN anywhere in the values reaches every result."""

    def results(self, x: Inputs) -> Results:
        made = super().results(x)
        leak = x.v.astype(np.float64).sum() * 0
        return {name: (y + np.asarray(leak, y.dtype)).astype(y.dtype) for name, y in made.items()}


class TopLeft(Own):
    """The causal rule is always aligned at the top left."""

    def results(self, x: Inputs) -> Results:
        return super().results(dataclasses.replace(x, options=x.options | {"causal_align": "top_left"}))


class Fragile(Own):
    """An unexpected exception for every packed call."""

    def results(self, x: Inputs) -> Results:
        if "cu_seqlens_q" in x.options:
            raise KeyError("no such kernel")
        return super().results(x)


class LimitedTarget(Own):
    """It offers one type, and refuses what it does not support."""

    def __init__(self) -> None:
        super().__init__()
        self.offers = frozenset({"fp32", "causal", "gradients", "grouped heads"})
        self.offers_decode = None

    def results(self, x: Inputs) -> Results:
        if x.q.shape[-1] % 8:
            raise NotImplementedError("head_dim must be a multiple of 8")
        if x.q.shape[-1] > 128:
            raise NotOffered("head_dim above 128")
        return super().results(x)
