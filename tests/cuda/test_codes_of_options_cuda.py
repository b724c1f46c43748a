"""A cache of codes has the bits of a 16-bit cache of their values with the same scales, also with trees, positions, padding on
the left and entries of a larger cache. Nothing is appended: a 16-bit cache would store the new rows unrounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import assert_same_bits
from libflash.conformance.cache_cases import SCALES, CacheCase
from libflash.conformance.decode_cases import DecodeCase, DecodeInputs
from libflash.conformance.reference_cache import CODES

torch = pytest.importorskip("torch")
from gpu_codes import run  # noqa: E402  (needs torch)

SEVERAL: dict[str, Any] = {"lengths": (0, 1, 63, 64, 65, 130), "capacity": 140}
PACKED: dict[str, Any] = {"lengths": (70, 140, 5, 64, 165, 130), "seqlen_q": (1, 40, 0, 3, 64, 9), "capacity": 200}
PACKED["slack_rows"] = 2
PADS = {"leftpad": (0, 1, 5, 64, 12, 100)}
SHAPES: dict[str, dict[str, Any]] = {
    "tree": {"seqlen_q": 6, "tree": True, **SEVERAL},
    "tree-paged": {"seqlen_q": 12, "tree": True, "page_size": 16, "heads_q": 8, "sink": True, **SEVERAL},
    "tree-positions": {"seqlen_q": 7, "tree": True, "positions": True, "window_size": (12, 4), "alibi": "h", **SEVERAL},
    "tree-packed": {"tree": True, "page_size": 7, "softcap": 30.0, **PACKED},
    "tree-leftpad": {"seqlen_q": 4, "tree": True, "batch_idx": True, **PADS, **SEVERAL},
    "positions": {"seqlen_q": 5, "positions": True, "alibi": "bh", "window_size": (20, 0), **SEVERAL},
    "positions-packed": {"positions": True, "window_size": (50, 0), **PACKED},
    "leftpad": {"head_dim": 128, **PADS, **SEVERAL},
    "leftpad-paged": {"seqlen_q": 5, "page_size": 7, "heads_q": 12, **PADS, **SEVERAL},
    "batch-idx": {"batch_idx": True, "heads_q": 8, "heads_k": 8, **SEVERAL},
    "batch-idx-rows": {"batch_idx": True, "seqlen_q": 9, "head_dim": 128, "window_size": (70, 0), **SEVERAL},
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))]


def values_of(x: DecodeInputs, dtype: np.dtype) -> DecodeInputs:
    """The same problem over elements with the values of the codes."""
    k, v = (codes.astype(np.float32).astype(dtype) for codes in (x.k_cache, x.v_cache))
    return DecodeInputs(x.q, k, v, x.options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_have_the_bits_of_their_values(shape: str, code: str, device: str) -> None:
    """Without scales sm90 may have another kernel for values; with invariant rows another instance of sm80."""
    for number, scale in enumerate(SCALES):
        if scale == "none" and code == "int8":
            continue
        dtype = ("bf16", "fp16")[number % 2]
        case = CacheCase(DecodeCase(f"codes-of-{shape}", dtype, **SHAPES[shape]), code, scale)
        x = case.inputs()
        splits: list[dict[str, Any]] = [{}, {"num_splits": 3}, {"split_size": 128}]
        if scale != "none":
            splits.append({"invariant": True})
        for split in splits:
            more = split | ({"backend": "sm80"} if device == "cuda" and scale == "none" else {})
            got, wanted = (run(y, device, **more) for y in (x, values_of(x, x.q.dtype)))
            used = slice(len(got[0]) - case.base.slack_rows)
            assert_same_bits(got[0][used], wanted[0][used], f"{case} {split}")
            assert_same_bits(np.ascontiguousarray(got[1][..., used]), np.ascontiguousarray(wanted[1][..., used]))
            if number == len(shape) % len(SCALES) and not split:  # not always, because exact results take long
                case.check(x, o=got[0], lse=got[1])
