"""Decode on a GPU that rotates the rope part of queries and of the keys that it appends: against the oracle, and bit for bit what
it gives for rows that the CPU has rotated.

A CPU kernel runs the same tests in place of a GPU's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from decode_cases import DecodeCase
from gpu_kernels import TYPES, device_of, in_place_of, kernels, parameters
from libflash.conformance.cache_cases import CacheCase

import libflash

torch = pytest.importorskip("torch")
from gpu_case import same_bits  # noqa: E402  (needs torch)
from gpu_codes import TORCH_CODES, run_cache  # noqa: E402
from gpu_decode import ints, normal  # noqa: E402

Options = dict[str, Any]
every_kernel = pytest.mark.parametrize("kernel", parameters([*kernels("decode"), in_place_of("decode")]))
SEVERAL: Options = {"lengths": (0, 1, 63, 64, 65, 130), "capacity": 140, "heads_k": 1}
ROWS = (1, 40, 0, 3, 64, 9)
PACKED: Options = {**SEVERAL, "seqlen_q": ROWS, "append": ROWS, "capacity": 200, "slack_rows": 2}
SHAPES: dict[str, Options] = {
    "step": {"append": 1, **SEVERAL},
    "queries alone": {"seqlen_q": 2, **SEVERAL},
    "rows": {"append": 3, "seqlen_q": 3, "page_size": 16, **SEVERAL},
    "full": {"append": 2, "seqlen_q": 2, "causal": False, "heads_q": 3, **SEVERAL},
    "packed": {"page_size": 7, **PACKED},
    "trees": {"tree": True, "positions": True, "page_size": 16, **PACKED},
}
CODES = [(None, "none"), ("e4m3", "groups"), ("int8", "rows")]


def channels(kernel: dict) -> tuple[int, int]:
    """Of the latent part and of the rope part."""
    rope = 64 if kernel["head_dim"] == 576 else kernel["head_dim"] // 4
    return kernel["head_dim"] - rope, rope


@every_kernel
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_against_the_oracle(kernel: dict, shape: str, codes: tuple[str | None, str], interleaved: bool) -> None:
    if codes[0] and kernel["dtype"] == "f32":
        pytest.skip("there are no codes beside float32")
    latent, rope = channels(kernel)
    fields = SHAPES[shape] | {"head_dim": latent + rope, "rotary": rope // (2 if interleaved else 1)}
    base = DecodeCase(f"rotated-{shape}", TYPES[kernel["dtype"]], **fields, rotary_interleaved=interleaved)
    case = CacheCase(base, *codes, group=16, rope_dim=rope, head_dim_v=latent)
    for more in ({}, {"num_splits": 3}, {"invariant": True}):
        case.check(**run_cache(case, kernel["name"], device_of(kernel), **more))


def tables(pairs: int, rows: int, more: int = 0) -> Options:
    """`rows` rows and, after them, the last row `more` times."""
    at = torch.arange(rows + more).clamp(max=rows - 1)[:, None] * 0.1 ** torch.linspace(0, 3, pairs)
    return {"rotary_cos": at.cos(), "rotary_sin": at.sin()}


def rotated(x: torch.Tensor, positions: np.ndarray, angles: Options) -> torch.Tensor:
    """Rows of x at these positions as cache_write rotates them on the CPU."""
    rows = x.cpu().flatten(0, -3)
    cache, slots = torch.zeros_like(rows)[None], torch.arange(len(rows))
    libflash.cache_write(rows, None, cache, None, slots, positions=torch.from_numpy(positions.astype(np.int32)), **angles)
    return cache[0].view(x.shape).to(x.device)


@every_kernel
@pytest.mark.parametrize("codes", [None, "e4m3", "int8"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_bits_of_rows_that_the_cpu_has_rotated(kernel: dict, codes: str | None, interleaved: bool) -> None:
    """In the results and in the caches, where some positions are past the end of the tables. The CPU refuses them: there the
    tables have their last row more than once.
    """
    if codes and kernel["dtype"] == "f32":
        pytest.skip("there are no codes beside float32")
    (latent, rope), lengths, rows, end = channels(kernel), (70, 3, 97), 4, 90
    q = normal(kernel, 3, rows, 8, latent + rope, seed=1)
    k, k_rope = normal(kernel, 3, rows, 1, latent, seed=2), normal(kernel, 3, rows, 1, rope, seed=3)
    cache, ropes = normal(kernel, 3, 128, 1, latent, seed=4), normal(kernel, 3, 128, 1, rope, seed=5)
    given: Options = {"cache_seqlens": ints(kernel, *lengths), "kernel": kernel["name"], "head_dim_v": latent, "return_lse": True}
    if codes:
        cache = (8 * cache).to(TORCH_CODES[codes])
        given["k_scale"] = torch.full((3, 128, 1), 0.1, device=cache.device)
    of_keys = np.array(lengths)[:, None] + np.arange(rows)
    ordered = of_keys - np.array([0, 0, 1, 2])
    for pairs, options, of_queries in (
        (rope // 2, {}, of_keys), (rope // 4, {"num_splits": 3}, of_keys), (1, {"invariant": True}, of_keys),
        (3, {"causal": False}, of_keys[:, :1].repeat(rows, 1)), (4, {"q_positions": ordered}, ordered),
    ):  # fmt: skip
        exact = tables(pairs, end, 40) | {"rotary_interleaved": interleaved}
        in_call = exact if device_of(kernel) == "cpu" else tables(pairs, end) | {"rotary_interleaved": interleaved}
        more = {name: ints(kernel, *x.reshape(-1)).view(x.shape) if name == "q_positions" else x for name, x in options.items()}
        of_new = of_queries if "q_positions" in options else of_keys
        results = []
        for rotates in (True, False):
            own = {"k_cache": cache.clone(), "k_rope_cache": ropes.clone()}
            own |= {"k_scale": given["k_scale"].clone()} if codes else {}
            if rotates:
                rotary = {name: x.to(q.device) if isinstance(x, torch.Tensor) else x for name, x in in_call.items()}
                out, lse = libflash.decode(q, k=k, k_rope=k_rope, **given | own | more | rotary)
            else:
                one = torch.cat([q[..., :latent], rotated(q[..., latent:].contiguous(), of_queries.reshape(-1), exact)], -1)
                rope_rows = rotated(k_rope, of_new.reshape(-1), exact)
                out, lse = libflash.decode(one, k=k, k_rope=rope_rows, **given | own | more)
            results.append([out, lse, *own.values()])
        assert [same_bits(a, b) for a, b in zip(*results, strict=True)] == [True] * len(results[0]), options
        assert not same_bits(results[0][3], ropes)


@every_kernel
def test_more_channels_than_the_rope_part_are_refused(kernel: dict) -> None:
    latent, rope = channels(kernel)
    q, cache, ropes = (normal(kernel, 1, 1, 1, n, seed=n) for n in (latent + rope, latent, rope))
    angles = {name: x.to(q.device) for name, x in tables(rope // 2 + 1, 8).items()}
    with pytest.raises(libflash.InvalidError, match=rf"^rotary_cos: .* at most those of k_rope_cache \({rope + 2} of {rope}\)"):
        libflash.decode(q, cache, k_rope_cache=ropes, head_dim_v=latent, kernel=kernel["name"], **angles)
