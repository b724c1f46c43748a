"""Decoding problems over caches of codes with scales, with rope parts of keys, and with values that are channels of keys.

case = cache_cases.quick()[0]
x = case.inputs()
out, lse = libflash.decode(x.q, x.k_cache, x.v_cache, **x.options, return_lse=True)    appends in place
case.check(x, o=out, lse=lse)
"""

from __future__ import annotations

import copy
import dataclasses
import zlib
from functools import cache, lru_cache

import numpy as np

from . import tolerance
from .decode_cases import DecodeCase, DecodeInputs, drawn, make_read_only
from .reference_cache import CODES, LARGEST, GatheredCodes, gather_codes, to_codes

SCALES = ("none", "tensor", "heads", "sequences", "rows", "groups")


@dataclasses.dataclass(frozen=True)
class CacheCase:
    base: DecodeCase
    codes: str | None = "e4m3"  # None: q's type
    scale: str = "heads"
    group: int = 32  # channels that share a scale, if `scale` is "groups"
    rope_dim: int = 0
    head_dim_v: int | None = None  # given: values are the first channels of the keys

    def __str__(self) -> str:
        extra = f"-rope{self.rope_dim}" * bool(self.rope_dim) + f"-view{self.head_dim_v}" * bool(self.head_dim_v)
        return f"{self.base}-{self.codes or 'plain'}-{self.scale}{extra}"

    def inputs(self) -> DecodeInputs:
        """New arrays with the same values in every call."""
        return copy.deepcopy(drawn(self))

    def draw(self) -> DecodeInputs:
        x = self.base.inputs()
        rng = np.random.default_rng(zlib.crc32(str(self).encode()))
        options = dict(x.options)
        k_cache, k = x.k_cache, options.get("k")
        if self.rope_dim:
            k_cache, options["k_rope_cache"] = parts(k_cache, self.rope_dim)
            if k is not None:
                options["k"], options["k_rope"] = parts(k, self.rope_dim)
        unseen = np.isnan(k_cache.astype(np.float32)).all(axis=(2, 3))
        k_codes, options["k_scale"] = self._coded(k_cache, unseen, rng)
        if self.head_dim_v is not None:
            options["head_dim_v"] = self.head_dim_v
            options.pop("v", None)
            return DecodeInputs(x.q, k_codes, None, drop_none(options))
        v_codes, options["v_scale"] = self._coded(x.v_cache, unseen, rng)
        return DecodeInputs(x.q, k_codes, v_codes, drop_none(options))

    def _coded(self, x: np.ndarray, unseen: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None]:
        """Codes and scales. Rows that no sequence sees have NaN as codes (in int8, an arbitrary code) and as scales of rows."""
        dtype = x.dtype if self.codes is None else CODES[self.codes]
        one = np.float32(1 if self.codes is None or self.scale == "none" else 4 / LARGEST[dtype])
        codes = to_codes(x, np.full((1,), one), dtype) if self.codes else x.copy()
        if self.codes == "int8":
            codes[unseen] = 113
        if self.scale == "none":
            return codes, None
        shape = {
            "tensor": (1,), "heads": x.shape[2:3], "sequences": (self.base.sequences, x.shape[2]), "rows": x.shape[:3],
            "groups": (*x.shape[:3], x.shape[3] // self.group),
        }[self.scale]  # fmt: skip
        scale = (one * rng.uniform(0.5, 2.0, shape)).astype(np.float32)
        if scale.ndim > 2:
            scale[unseen] = np.nan
        return codes, scale

    def gathered(self) -> GatheredCodes:
        """Read-only arrays, the same ones in every call."""
        return _gathered(self)

    def check(
        self, after: DecodeInputs, *, errors: dict[str, float] | None = None, **result: object
    ) -> dict[str, tolerance.Report]:
        """Check o and lse, and that the call left in `after`, its inputs, the codes and scales of the reference, bit for bit."""
        self.check_written(after)
        return tolerance.check(result, _expected(self, tuple(sorted((errors or {}).items()))), label=str(self))

    def check_written(self, after: DecodeInputs) -> None:
        wanted = self.gathered()
        for name in ("k_cache", "v_cache", "k_scale", "v_scale", "k_rope_cache"):
            got = getattr(after, name) if name in ("k_cache", "v_cache") else after.options.get(name)
            if got is not None:
                exact, bits = getattr(wanted, name), np.dtype(f"u{got.itemsize}")
                different = np.argwhere((got.view(bits) != exact.view(bits)) & ~(is_nan(got) & is_nan(exact)))
                assert not len(different), f"{self}: {name} is wrong at {tuple(different[0])}"


def parts(x: np.ndarray, rope_dim: int) -> tuple[np.ndarray, np.ndarray]:
    return x[..., :-rope_dim].copy(), x[..., -rope_dim:].copy()


def drop_none(options: dict) -> dict:
    return {name: value for name, value in options.items() if value is not None}


def is_nan(x: np.ndarray) -> np.ndarray:
    return np.isnan(x.astype(np.float64))


@lru_cache(maxsize=32)
def _gathered(case: CacheCase) -> GatheredCodes:
    x = case.inputs()
    gathered = gather_codes(x.q, x.k_cache, x.v_cache, **x.options)
    make_read_only(gathered)
    return gathered


@cache
def _expected(case: CacheCase, errors: tuple) -> tolerance.Expected:
    x = case.gathered()
    ulps = 2.0 if case.base.rotary else 0.0
    return tolerance.expect(x.q, x.k, x.v, score_ulps=ulps, dtype=x.dtype, **dict(errors), **x.options)


SEVERAL = {"lengths": (0, 1, 63, 64, 65, 130), "capacity": 140}
PACKED = {**SEVERAL, "seqlen_q": (1, 40, 0, 3, 64, 9), "capacity": 200, "slack_rows": 2}
SHAPES = {
    "several": SEVERAL,
    "long": {"lengths": (1500, 3, 900), "capacity": 1600},
    "dims": {"head_dim": 40, "head_dim_v": 72, **SEVERAL},
    "rows": {"seqlen_q": 7, **SEVERAL},
    "window": {"seqlen_q": 3, "window_size": (20, 0), **SEVERAL},
    "all": {"page_size": 16, "window_size": (50, 0), "softcap": 30.0, "sink": True, "alibi": "h", "seqlen_q": 2, **SEVERAL},
    "append": {"append": 3, "seqlen_q": 3, **SEVERAL},
    "append-paged": {"page_size": 7, "append": 5, **SEVERAL},
    "leftpad": {"page_size": 16, "leftpad": (0, 1, 5, 64, 16, 100), "append": 3, "seqlen_q": 9, **SEVERAL},
    "batch-idx": {"batch_idx": True, "append": 2, "heads_q": 8, "heads_k": 8, **SEVERAL},
    "paged": {"page_size": 16, "seqlen_q": 6, "heads_q": 6, "heads_k": 1, **SEVERAL},
    "packed": {"window_size": (50, 0), **PACKED},
    "packed-append": {"append": PACKED["seqlen_q"], "page_size": 16, **PACKED},
    "packed-new": {"append": (3, 0, 2, 0, 70, 1), "batch_idx": True, **PACKED},
    "new-alone": {"append": (3, 0, 2, 0, 70, 1), "seqlen_q": 2, **SEVERAL, "capacity": 200},
    "positions": {"seqlen_q": 5, "positions": True, "alibi": "h", "window_size": (20, 0), "append": 5, **SEVERAL},
    "tree": {"seqlen_q": 3, "tree": True, "append": 2, **SEVERAL},
    "tree-leftpad": {"seqlen_q": 9, "tree": True, "append": 9, "leftpad": (0, 1, 5, 64, 16, 100), "page_size": 7, **SEVERAL},
    "tree-packed": {
        "append": PACKED["seqlen_q"], "tree": True, "positions": True, "window_size": (12, 4), "alibi": "bh", "softcap": 30.0,
        "sink": True, "page_size": 7, **PACKED,
    },
}  # fmt: skip
MLA = {"head_dim": 96, "heads_k": 1, "seqlen_q": 2, **SEVERAL}


@cache
def quick() -> list[CacheCase]:
    """Each shape with each kind of scales; the types of codes and of q in turn."""
    dtypes, codes = ("bf16", "fp16", "fp32"), ("e4m3", "int8", "e5m2", None)
    found = []
    for i, (name, shape) in enumerate(SHAPES.items()):
        for j, scale in enumerate(SCALES):
            kind = codes[(i + j) % 4]
            if (kind == "int8" and scale == "none") or (kind is None and scale == "none"):
                kind = "e4m3"
            if kind is None and "append" in shape and scale in ("rows", "groups"):
                kind = "int8"
            base = DecodeCase(f"cache-{name}", dtypes[(i + j) % 3], **shape)
            found.append(CacheCase(base, kind, scale, group=8 if name == "dims" else 32))
    rows = PACKED["seqlen_q"]
    for i, more in enumerate((
        {}, {"append": 2}, {"page_size": 7, "append": 1}, {"seqlen_q": 5, "page_size": 16, "heads_q": 3},
        {**PACKED, "append": rows, "page_size": 16}, {**PACKED, "append": rows, "tree": True, "batch_idx": True},
        {"seqlen_q": 4, "tree": True, "positions": True, "append": 4, "alibi": "h", "window_size": (30, 0)},
    )):  # fmt: skip
        base = DecodeCase("cache-mla", dtypes[i % 3], **(MLA | more))
        found += [
            CacheCase(base, "e4m3", "groups", 32, rope_dim=32, head_dim_v=64),
            CacheCase(base, "int8", "rows", rope_dim=32, head_dim_v=64),
            CacheCase(base, "e5m2", "tensor", rope_dim=24),
            CacheCase(base, None, "none", rope_dim=32, head_dim_v=64),
            CacheCase(base, None, "none", head_dim_v=64),
        ]
    return found + rotating()


@cache
def rotating() -> list[CacheCase]:
    """A rotary embedding of rope parts: of all their channels or some, with either pairing, with and without new keys."""
    rows, found = PACKED["seqlen_q"], []
    for i, more in enumerate((
        {"append": 2, "rotary": 32}, {"append": 1, "seqlen_q": 1, "page_size": 7, "rotary": 16}, {"rotary": 32, "causal": False},
        {"append": 3, "seqlen_q": 2, "causal": False, "batch_idx": True, "rotary": 8, "heads_q": 3},
        {"append": 4, "seqlen_q": 4, "window_size": (30, 0), "leftpad": (0, 1, 5, 64, 16, 100), "rotary": 24},
        {**PACKED, "append": rows, "page_size": 16, "rotary": 2}, {**PACKED, "append": (3, 0, 2, 0, 70, 1), "rotary": 32},
        {**PACKED, "append": rows, "positions": True, "rotary": 16}, {"seqlen_q": 5, "positions": True, "rotary": 30},
        {"seqlen_q": 4, "tree": True, "append": 4, "rotary": 32, "heads_q": 2, "heads_k": 2},
        {**PACKED, "append": rows, "tree": True, "positions": True, "page_size": 7, "rotary": 32},
    )):  # fmt: skip
        for j, rest in enumerate((
            {"codes": "e4m3", "scale": "groups", "head_dim_v": 64}, {"codes": "int8", "scale": "rows", "head_dim_v": 64},
            {"codes": "e5m2", "scale": "sequences"}, {"codes": None, "scale": "none", "head_dim_v": 64},
            {"codes": None, "scale": "heads"},
        )):  # fmt: skip
            name, halves = f"cache-mla-rotary{i}", (i + j) % 2 == 1
            base = DecodeCase(name, ("bf16", "fp16", "fp32")[(i + j) % 3], **(MLA | more), rotary_interleaved=not halves)
            found.append(CacheCase(base, rope_dim=32, **rest))
    return found
