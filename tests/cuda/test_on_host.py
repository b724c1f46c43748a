"""CUDA kernels run on the host: their sources, with fibers as threads and emulations of single instructions.

This is slow and shows neither races nor the behaviour of the hardware's instructions. It needs no GPU and finds wrong indices.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kernels_on_host import CUDA_HEADERS, CXX, HERE, ROOT, for_the_host

KEYS_PER_SUM = 32768  # of the library

# Type, head_dim, tiles of forward, tiles and stages of backward: kernels with one, two and four warps for each 32 keys, and with
# two warps for each 16 rows. Then, if they are others, keys per sum, and the architecture whose code runs.
ATTENTION_KERNELS = {
    "bf16-64": ("bf16_", 64, "128, 128", "128, 128, 1"),
    "f16-128": ("f16_", 128, "128, 64", "64, 128, 3"),
    "bf16-192": ("bf16_", 192, "64, 64", "64, 64, 2"),
    "bf16-256-small": ("bf16_", 256, "64, 64", "32, 32, 1"),
    "f32-64": ("f32_", 64, "128, 32", "32, 128, 1"),
    "f32-128": ("f32_", 128, "128, 32", "32, 64, 1"),
    "f32-256-small": ("f32_", 256, "64, 16", "16, 32, 1"),
    "bf16-512": ("bf16_", 512, "64, 32", "64, 64, 1"),
    "f16-512-small": ("f16_", 512, "32, 32", "32, 32, 1", KEYS_PER_SUM, 80),
}

# Kernels again that take their sums out after so few keys that it happens several times (attention/long_sums.h): after
# every tile or every second one, and with two warps for the same rows. Backward has several launches of dK/dV then.
ATTENTION_KERNELS_WITH_LONG_SUMS = {
    "f16-32-sums": ("f16_", 32, "128, 128", "128, 128, 1", 64),
    "bf16-64-sums": ("bf16_", 64, "128, 128", "128, 128, 1", 64),
    "f16-128-sums": ("f16_", 128, "128, 64", "64, 128, 3", 128),
    "f32-128-sums": ("f32_", 128, "128, 32", "32, 64, 1", 64),
    "bf16-256-sums-small": ("bf16_", 256, "64, 64", "32, 32, 1", 32),
    "f16-512-sums-small": ("f16_", 512, "64, 32", "64, 64, 1", 64),
}

# Kernels and cases of parts.cpp: float32 and 16 bits, with one, two and four warps for each 32 keys, long sums.
PART_KERNELS = {
    "bf16-64": ATTENTION_KERNELS["bf16-64"],
    "f16-128": ATTENTION_KERNELS["f16-128"],
    "bf16-256": ("bf16_", 256, "64, 64", "32, 32, 1"),
    "f32-64": ATTENTION_KERNELS["f32-64"],
    "f32-128": ATTENTION_KERNELS["f32-128"],
    "bf16-64-sums": ATTENTION_KERNELS_WITH_LONG_SUMS["bf16-64-sums"],
    "bf16-512": ATTENTION_KERNELS["bf16-512"],
    "f16-512-small": ATTENTION_KERNELS["f16-512-small"],
}
PART_CASES = ((1, 0, 0), (1, 1, 1))

# Magnitude of the inputs, rare options, deterministic. The slowest cases take half a minute each.
CASES = ((1, 0, 0), (1, 1, 0), (4, 0, 1), (4, 1, 1))

# Forward's tangent: type, head_dim, tile; 32 and 16 rows of a warp, and a thread block of one warp.
TANGENT_KERNELS = {
    "bf16-64": ("bf16_", 64, "128, 32"),
    "bf16-96": ("bf16_", 96, "128, 32"),
    "f16-128": ("f16_", 128, "128, 32"),
    "bf16-192": ("bf16_", 192, "64, 32"),
    "f16-256": ("f16_", 256, "64, 16"),
    "f32-64": ("f32_", 64, "64, 32"),
    "f32-128": ("f32_", 128, "64, 16"),
    "f32-256-small": ("f32_", 256, "16, 16"),
}
# The same for sm_90a, with the stages.
TANGENT_KERNELS_SM90 = {
    "bf16-64": ("bf16_", 64, "192, 64", 4),
    "f16-64": ("f16_", 64, "192, 64", 4),
    "bf16-128": ("bf16_", 128, "128, 64", 2),
    "f16-128": ("f16_", 128, "128, 64", 2),
    "bf16-256": ("bf16_", 256, "128, 64", 1),
    "f16-256": ("f16_", 256, "128, 64", 1),
}
# Backward's tangent: type, head_dim, tile; four, two and one warps.
BACKWARD_TANGENT_KERNELS = {
    "bf16-64": ("bf16_", 64, "64, 32"),
    "bf16-96": ("bf16_", 96, "64, 32"),
    "f16-128": ("f16_", 128, "64, 32"),
    "bf16-192": ("bf16_", 192, "32, 32"),
    "f16-256": ("f16_", 256, "32, 16"),
    "f32-64": ("f32_", 64, "64, 16"),
    "f32-128": ("f32_", 128, "32, 16"),
    "f32-256": ("f32_", 256, "16, 16"),
}
# The same for sm_90a, with the stages.
BACKWARD_TANGENT_KERNELS_SM90 = {
    "bf16-64": ("bf16_", 64, "128, 64", 4),
    "f16-64": ("f16_", 64, "128, 64", 4),
    "bf16-128": ("bf16_", 128, "128, 32", 3),
    "f16-128": ("f16_", 128, "128, 32", 3),
    "bf16-256": ("bf16_", 256, "64, 32", 2),
    "f16-256": ("f16_", 256, "64, 32", 2),
}
# As TANGENT_CASES, with 8 for dout.
BACKWARD_TANGENT_CASES = ((1, 1, 0, 15), (1, 1, 1, 15), (1, 1, 1, 1), (1, 1, 0, 2), (1, 1, 1, 4), (1, 1, 0, 8))
# Magnitude of the inputs and of their tangents, rare options and packed rows, tangents that are given (1: q, 2: k, 4: v). With
# the largest, P ts is larger than fp16 can hold. Then whether no key is in use.
TANGENT_CASES = (
    *((1, 1, 0, 7, 0), (1, 1, 1, 7, 0), (2, 1, 1, 1, 0), (2, 1, 0, 2, 0), (1, 1, 0, 4, 0), (1, 4000, 0, 7, 0)),
    *((1, 1, 0, 7, 1), (1, 1, 1, 7, 1)),
)

# float64: head_dim, tiles of forward, of backward and of the tangents; options and magnitude of the inputs (attention_f64.cpp),
# options, tangents and tdelta (tangent_f64.cpp). Then channels that the kernel has and the tensors lack, and the architecture
# whose code runs. The table has no tangents of 64 channels.
DOUBLE_KERNELS = {"128": (128, "128, 32", "16, 16", "16, 16", 3), "256": (256, "64, 16", "8, 16", "8, 8", 4)}
DOUBLE_SMALL_KERNELS = {
    "64": (64, "64, 32", "32, 32", "", 4),
    "128-small": (128, "32, 16", "16, 16", "", 4, 80),
    "256-small": (256, "16, 8", "8, 16", "", 3),
}
DOUBLE_CASES = ((0, 1), (0, 4), (1, 1), (3, 4), (4, 1), (7, 1), (9, 1), (15, 1), (16, 1), (18, 1), (19, 1))
DOUBLE_TANGENT_CASES = ((0, 15, 0), (3, 15, 0), (15, 15, 1), (4, 1, 0), (7, 2, 1), (0, 4, 0), (1, 8, 1))

# Type, head_dim, tile and stages: with and without fragments of Q in registers, with and without matrix instructions, few warps.
DECODE_KERNELS = {
    "bf16-64": ("bf16_", 64, "16, 64, 4"),
    "f16-256-small": ("f16_", 256, "16, 32, 2"),
    "f32-128-small": ("f32_", 128, "16, 32, 2"),
}
# Channels of keys: 512 of values.
WIDE_DECODE_KERNELS = {"bf16-512": ("bf16_", 512, "16, 16, 2"), "f16-576": ("f16_", 576, "16, 16, 2")}
# Decode for sm_90a, where values are channels of the keys.
DECODE_KERNELS_SM90 = {"bf16-576": ("bf16_", 576, 512, "64, 64", 2), "f16-576": ("f16_", 576, 512, "64, 64", 2)}
# Decode for sm_90a, many rows.
DECODE_ROWS_KERNELS_SM90 = {"bf16-64": ("bf16_", 64, "64, 64", 6), "f16-128": ("f16_", 128, "64, 64", 3)}
DECODE_KERNELS_OF_TWO_HEADS = {"bf16-64": DECODE_KERNELS["bf16-64"], "f16-128": ("f16_", 128, "16, 64, 3")}
# Query rows, splits (negative: the keys of each), paged, append (0: nothing, 1: two rows by a kernel before decode, 2: one row by
# decode), stages left empty, key heads of a thread block, and whether copies arrive as late as they may.
DECODE_CASES = (
    *((1, 1, 0, 0, 1, 1, 1), (5, 3, 1, 0, 0, 1, 0), (6, 1, 0, 1, 0, 1, 1), (9, -128, 1, 1, 0, 1, 0), (25, 2, 0, 1, 0, 1, 1)),
    *((1, 1, 0, 2, 1, 1, 0), (1, 3, 0, 2, 0, 1, 1), (1, -128, 1, 2, 0, 1, 1), (1, 40, 1, 2, 0, 1, 0), (4, 2, 1, 0, 1, 1, 1)),
)
TWO_HEADS = (
    *((1, 1, 0, 0, 1, 2, 1), (5, 3, 1, 0, 0, 2, 0), (2, 1, 1, 1, 0, 2, 1), (3, -96, 0, 1, 1, 2, 1), (1, 1, 0, 2, 0, 2, 1)),
    *((1, 3, 1, 2, 1, 2, 1), (1, 40, 1, 2, 0, 2, 0)),
)
# Rows of any lengths: the arguments of decode_ragged.cpp.
RAGGED_CASES = (
    *((1, 0, 0, 0, 0, -1, 0, 0, 0, 1, 0, 0), (0, 1, 2, 0, 0, -1, 1, 0, 130, 1, 1, 3), (1, 0, 1, 0, 0, 25, 0, 0, 0, 0, 1, 1)),
    *((2, 0, 1, 1, 0, 20, 0, 0, 0, 1, 1, 2), (3, 1, 1, 1, 0, -1, 1, 0, 0, 0, 1, 0), (3, 0, 0, 0, 1, -1, 1, 5, 0, 1, 1, 0)),
    *((1, 1, 1, 1, 1, -1, 0, 0, 0, 0, 1, 4), (-128, 1, 2, 1, 2, 15, 1, 0, 3, 0, 0, 5), (2, 1, 2, 1, 0, 3, 1, 4, 0, 1, 1, 0)),
    *((1, 0, 1, 0, 2, -1, 0, 0, 0, 0, 1, 0), (2, 0, 0, 1, 2, 6, 0, 0, 0, 1, 0, 1), (1, 0, 0, 1, 0, 56, 0, 0, 0, 1, 1, 0)),
)

# Of the kernel of sm90 for many rows, which knows neither positions with a window nor positions with ALiBi.
RAGGED_CASES_OF_MANY_ROWS = (
    *((1, 0, 0, 0, 0, -1, 0, 0, 0, 1, 0, 0), (0, 1, 2, 0, 0, -1, 1, 0, 130, 1, 1, 3), (1, 0, 1, 0, 0, 25, 0, 0, 0, 0, 1, 1)),
    *((3, 1, 1, 1, 0, -1, 0, 0, 0, 0, 1, 0), (3, 0, 0, 0, 1, -1, 1, 5, 0, 1, 1, 0), (1, 1, 1, 1, 1, -1, 0, 0, 0, 0, 1, 4)),
    *((-128, 1, 2, 1, 2, -1, 0, 0, 3, 0, 0, 5), (2, 1, 2, 0, 0, 3, 1, 4, 0, 1, 1, 0), (1, 0, 1, 0, 2, -1, 1, 0, 0, 0, 1, 0)),
    *((1, 1, 0, 1, 1, -1, 0, 50, 0, 0, 0, 2), (2, 0, 0, 0, 0, -1, 1, 45, 0, 0, 1, 1), (0, 0, 0, 0, 0, 9, 0, 22, 0, 1, 1, 3)),
)

# The same beside a prefill kernel. The sequences have up to 40 query rows, or all 100.
RAGGED_CASES_WITH_PREFILL = (
    *((1, 0, 0, 0, 0, -1, 0, 0, 0, 1, 0, 0, 9), (3, 1, 1, 0, 0, -1, 0, 0, 0, 1, 1, 1, 9)),
    *((2, 0, 2, 1, 0, -1, 0, 0, 3, 1, 1, 2, 30), (0, 1, 1, 0, 0, 25, 0, 0, 2, 1, 0, 3, 4)),
    *((0, 1, 0, 0, 0, -1, 0, 100, 0, 1, 0, 0, 96), (40, 1, 0, 0, 0, 20, 0, 0, 0, 1, 1, 0, 2)),
)

# Decode over codes of 8 bits: query rows, splits, paged, appended rows, type of the codes (1: e4m3, 2: e5m2, 3: int8), what
# scales belong to (0: none, 1: all, 2: heads, 3: sequences and heads, 4: rows), key heads of a thread block, late copies,
# append by the attention kernel, numbers of the queries.
CODE_CASES = (
    *((1, 1, 0, 0, 1, 0, 1, 1, 0, 0), (2, 3, 1, 0, 2, 2, 1, 0, 0, 0), (5, -128, 0, 0, 3, 4, 1, 1, 0, 0)),
    *((7, 2, 1, 0, 1, 4, 1, 0, 0, 0), (1, 1, 1, 1, 1, 4, 1, 1, 0, 1), (1, 3, 0, 1, 2, 3, 1, 0, 0, 0)),
    *((2, 1, 1, 2, 3, 4, 1, 0, 0, 0), (9, 2, 0, 2, 1, 1, 1, 1, 0, 0), (3, 1, 0, 0, 1, 2, 1, 1, 0, 1)),
)
# Both ways to multiply bfloat16 with codes.
CODE_CASES_OF_NUMBERS = (
    *((2, 1, 0, 0, 1, 2, 1, 1, 0, 1), (1, 1, 0, 0, 2, 0, 1, 1, 0, 1), (2, 2, 1, 0, 3, 4, 1, 0, 0, 1)),
    *((2, 1, 0, 0, 1, 2, 1, 1, 0, 2), (1, 1, 0, 0, 2, 0, 1, 1, 0, 2), (2, 2, 1, 0, 3, 4, 1, 0, 0, 2)),
)
CODE_CASES_INSIDE = (
    *((1, 1, 1, 1, 1, 4, 1, 1, 1, 0), (1, 3, 0, 1, 2, 3, 1, 0, 1, 0), (1, 2, 1, 1, 3, 4, 1, 1, 1, 0)),
    *((1, 1, 0, 1, 1, 2, 1, 1, 1, 2), (1, -128, 0, 1, 3, 2, 1, 0, 1, 0), (1, 40, 1, 1, 2, 4, 1, 1, 1, 1)),
    *((1, 1, 1, 1, 2, 0, 1, 1, 1, 0), (1, 1, 1, 1, 3, 4, 1, 1, 1, 2)),
)
CODE_CASES_OF_TWO_HEADS = (
    *((1, 1, 0, 0, 3, 4, 2, 1, 0, 0), (3, 2, 1, 1, 1, 4, 2, 0, 0, 0), (2, -128, 0, 0, 2, 3, 2, 1, 0, 0)),
    *((1, 1, 0, 1, 3, 4, 2, 1, 1, 0), (1, 2, 1, 1, 1, 3, 2, 1, 1, 0), (1, -128, 1, 1, 2, 4, 2, 0, 1, 0)),
)

# The options of caches that need instances of their own: the arguments of decode_options.cpp.
OPTION_CASES = (
    *((1, 4, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0), (2, 3, 0, 0, 1, 0, 3, 1, 1, 0, 1, 1), (3, 4, 0, 0, 1, 5, -128, 1, 0, 0, 0, 1)),
    *((0, 2, 0, 0, 1, 2, 0, 1, 0, 0, 0, 0), (0, 3, 0, 0, 1, 9, 3, 0, 0, 0, 1, 1), (0, 1, 0, 0, 1, 0, 2, 1, 1, 0, 0, 0)),
    *((1, 5, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0), (3, 5, 0, 0, 1, 0, 2, 1, 0, 0, 0, 1), (0, 5, 0, 0, 1, 0, 2, 0, 0, 0, 1, 0)),
    *((0, 0, 16, 0, 1, 0, 0, 1, 0, 0, 0, 0), (1, 4, 16, 0, 1, 1, 2, 1, 0, 0, 0, 1), (2, 0, 16, 0, 1, 9, 0, 1, 0, 0, 1, 0)),
    *((3, 4, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0), (0, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0), (0, 2, 16, 1, 1, 3, 2, 1, 0, 0, 0, 0)),
    *((1, 5, 16, 1, 1, 0, 0, 1, 0, 0, 0, 0), (0, 0, 0, 0, 3, 0, 0, 1, 0, 0, 1, 0), (1, 4, 0, 0, 2, 2, 3, 1, 1, 0, 1, 1)),
    *((0, 0, 0, 0, 4, 9, 0, 0, 1, 0, 0, 0), (0, 0, 0, 0, 1, 0, -128, 0, 0, 1, 1, 0), (1, 3, 0, 0, 1, 9, -128, 0, 0, 1, 0, 1)),
    *((0, 0, 0, 0, 1, 0, 0, 1, 1, 1, 0, 0), (3, 5, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0)),
)
OPTION_CASES_OF_NUMBERS = tuple(case for case in OPTION_CASES if case[0] == 0)
# Of wide heads, which have no scales. Also rope parts beside values that are channels of the keys, as in MLA.
OPTION_CASES_OF_WIDE_HEADS = (
    *(case for case in OPTION_CASES if case[:2] == (0, 0)),
    *((0, 0, 0, 0, 1, 9, 3, 1, 0, 0, 1, 1), (0, 0, 64, 1, 1, 3, 2, 1, 0, 0, 0, 1), (0, 0, 0, 1, 1, 0, -128, 0, 0, 0, 1, 0)),
)

# Keys that sequences share: the arguments of decode_prefix.cpp. First the calls that take the hint.
PREFIX_CASES = (
    *((1, 4, 1, 16, 0, 0, 0, 0, 20, 1, 0), (1, 3, 0, 16, 0, 0, 0, 1, 4, 0, 1), (1, 4, 3, 16, 1, 0, 0, 0, 20, 1, 1)),
    *((3, 3, -256, 64, 1, 0, 0, 8, 20, 0, 0), (1, 4, 0, 16, 2, 1, 0, 9, 20, 0, 2)),
    *((1, 4, 1, 0, 0, 0, 0, 0, 20, 1, 2), (1, 16, 2, 3, 1, 0, 0, 1, 20, 1, 0), (5, 3, 4, 16, 3, 5, 0, 8, 20, 0, 1)),
    *((1, 1, 5, 100, 1, 0, 0, 0, 20, 0, 0), (2, 1, 0, 64, 1, 2, 0, 0, 4, 1, 1)),
    *((1, 4, 1, 16, 4, 0, 0, 0, 20, 0, 0), (1, 4, 2, 16, 5, 1, 0, 0, 20, 0, 1)),
)
# The same for the kernel of sm90, with more than 64 rows, and with more than 128.
PREFIX_CASES_OF_SM90 = (
    *((1, 16, 1, 16, 1, 0, 0, 0, 20, 1, 1), (3, 5, 0, 32, 0, 0, 0, 9, 20, 0, 2), (2, 8, 3, 0, 0, 0, 0, 8, 4, 1, 0)),
    *((1, 4, 1, 16, 0, 0, 0, 16, 20, 1, 1), (2, 8, 0, 32, 0, 0, 0, 24, 4, 0, 2), (1, 4, 0, 16, 1, 0, 0, 16, 4, 1, 1)),
    *(case for case in PREFIX_CASES if case[3] % 16 == 0),
)
# ALiBi, a window, more rows than a slab, a call that leaves most of the GPU idle without splits, and invariant rows.
PREFIX_CASES_WITHOUT = (
    *((2, 2, -128, 16, 0, 1, 1, 8, 20, 1, 1), (4, 4, -384, 16, 2, 0, 1, 9, 20, 1, 2)),
    *((1, 4, 1, 16, 0, 0, 0, 2, 20, 0, 0), (1, 4, 1, 16, 0, 0, 0, 4, 20, 0, 0)),
    *((5, 4, 1, 16, 0, 0, 0, 8, 20, 0, 0), (1, 4, 0, 16, 0, 0, 0, 0, 64, 0, 0)),
)

# Forward for sm_90a: type, head_dim, head_dim_v, tile, stages; three, two and two warpgroups.
FORWARD_KERNELS_SM90 = {
    "bf16-64": ("bf16_", 64, 64, "192, 128", 4),
    "bf16-96": ("bf16_", 96, 96, "192, 96", 2),
    "f16-128": ("f16_", 128, 128, "128, 128", 2),
    "bf16-192x128": ("bf16_", 192, 128, "128, 128", 2),
    "bf16-256": ("bf16_", 256, 256, "128, 64", 2),
}
FORWARD_KERNELS_SM90_WITH_LONG_SUMS = {
    "f16-64-sums": ("f16_", 64, 64, "192, 128", 4, 256),
    "bf16-128-sums": ("bf16_", 128, 128, "128, 128", 2, 32),
    "bf16-192x128-sums": ("bf16_", 192, 128, "128, 128", 2, 32),
    "f16-256-sums": ("f16_", 256, 256, "128, 64", 2, 128),
}
# The same with more than 256 channels.
WIDE_FORWARD_KERNELS_SM90 = {
    "bf16-512": ("bf16_", 512, 512, "64, 64", 1),
    "f16-512": ("f16_", 512, 512, "64, 64", 1),
    "f16-512-sums": ("f16_", 512, 512, "64, 64", 1, 128),
}
# The same for prefill, of which only the tiles of head_dim 64 differ.
PREFILL_KERNELS = FORWARD_KERNELS_SM90 | {
    "bf16-64": ("bf16_", 64, 64, "128, 128", 4),
    "f16-64-sums": ("f16_", 64, 64, "128, 128", 4, 256),
    "bf16-128-sums": FORWARD_KERNELS_SM90_WITH_LONG_SUMS["bf16-128-sums"],
}
# Invariant rows: type; channels of keys, of values, of the decode kernel; tiles and stages of decode and of prefill; cases, of
# which the first kernel runs each in every order of the warps, the others every second one in order.
INVARIANT_KERNELS = {
    "bf16-64": ("bf16_", (64, 64, 64), "16, 64, 4", "128, 128, 4", range(9)),
    "f16-64": ("f16_", (64, 64, 64), "16, 64, 4", "128, 128, 4", (0, 4)),
    "bf16-96": ("bf16_", (96, 96, 128), "16, 64, 3", "192, 96, 2", (0, 2)),
    "bf16-128": ("bf16_", (128, 128, 128), "16, 64, 3", "128, 128, 2", (1, 5)),
    "f16-128": ("f16_", (128, 128, 128), "16, 64, 3", "128, 128, 2", (2, 3, 6, 5)),
    "f16-192x128": ("f16_", (192, 128, 256), "16, 64, 3", "128, 128, 2", (0, 3)),
}
SHORT_CASES = (6, 7)  # without prefill, not causal
# Backward for sm_90a: type, head_dim, tile, stages.
BACKWARD_KERNELS_SM90 = {
    "bf16-64": ("bf16_", 64, "64, 128", 4),
    "f16-64": ("f16_", 64, "64, 128", 4),
    "bf16-96": ("bf16_", 96, "64, 128", 3),
    "f16-128": ("f16_", 128, "64, 128", 3),
    "bf16-192": ("bf16_", 192, "64, 64", 3),
    "f16-192": ("f16_", 192, "64, 64", 3),
    "bf16-256": ("bf16_", 256, "64, 64", 2),
    "f16-256": ("f16_", 256, "64, 64", 2),
}
# The last number: keys per sum, from which follow the query rows per launch (bf16: four times as many).
BACKWARD_KERNELS_SM90_WITH_LONG_SUMS = {
    "f16-64-sums": ("f16_", 64, "64, 128", 4, 128),
    "bf16-96-sums": ("bf16_", 96, "64, 128", 3, 64),
    "bf16-256-sums": ("bf16_", 256, "64, 64", 2, 32),
    "f16-192-sums": ("f16_", 192, "64, 64", 3, 128),
}
# The same with more than 256 channels.
WIDE_BACKWARD_KERNELS_SM90 = {
    "bf16-512": ("bf16_", 512, "64, 64", 1),
    "f16-512": ("f16_", 512, "64, 64", 1),
    "bf16-512-sums": ("bf16_", 512, "64, 64", 1, 32),
}
# Forward with statistics of rows: type, head_dim, tile, keys per sum. One warp and two for the same rows, long sums.
STATISTICS_KERNELS = {
    "bf16-64": ("bf16_", 64, "128, 64", KEYS_PER_SUM),
    "f16-128": ("f16_", 128, "128, 64", KEYS_PER_SUM),
    "f16-256": ("f16_", 256, "64, 32", KEYS_PER_SUM),
    "f32-128": ("f32_", 128, "128, 32", KEYS_PER_SUM),
    "f32-256": ("f32_", 256, "64, 16", KEYS_PER_SUM),
    "f16-64-sums": ("f16_", 64, "128, 64", 64),
    "bf16-256-sums": ("bf16_", 256, "64, 32", 64),
}
# Magnitude of the inputs, options (forward_statistics.cpp), maxima of heads.
STATISTICS_CASES = ((1, 0, 0), (1, 31, 1), (3, 2, 0), (1, 32, 1), (2, 59, 0))
# The same for sm_90a, with the stages and what is asked for (forward_sm90.cpp).
STATISTICS_KERNELS_SM90 = {
    "bf16-64": ("bf16_", 64, "128, 128", 4, KEYS_PER_SUM, 1),
    "f16-128": ("f16_", 128, "128, 128", 2, KEYS_PER_SUM, 2),
    "bf16-256": ("bf16_", 256, "128, 64", 2, KEYS_PER_SUM, 3),
    "f16-64-sums": ("f16_", 64, "128, 128", 4, 256, 1),
}
pytestmark = pytest.mark.early
DISORDERS = (0, 1)  # orders in which forward_sm90.cpp and backward_sm90.cpp run the warps
# Backward with additions to dq in a fixed order: kernel -> disorders and numbers of thread blocks that run at the same time.
FIXED_ORDER = {
    "bf16-64": ((1, 3), (3, 2)),
    "f16-128": ((3, 4),),
    "bf16-192": ((2, 3),),
    "bf16-256": ((4, 4),),
    "f16-256": ((2, 2),),
    "f16-64-sums": ((1, 2), (3, 2)),
}
ONE_BY_ONE = (0, 1)


class Program(NamedTuple):
    """A program of on_host, the headers of the backend that for_the_host() changes for it, its macros, and sources with the code
    of its kernels (<kernel>_instances.cpp). Compiling that takes longest, so programs with the same kernel share it.
    """

    source: str
    headers: tuple[str, ...]
    defines: tuple[tuple[str, object], ...]
    instances: tuple[Program, ...] = ()


class Run(NamedTuple):
    program: Program
    arguments: tuple[int, ...]


def attention(
    dtype: str, head_dim: int, forward: str, backward: str, keys_per_sum: int = KEYS_PER_SUM, arch: int = 90
) -> Program:
    defines = {"DTYPE": dtype, "HEAD_DIM": head_dim, "FORWARD_TILE": forward, "BACKWARD_TILE": backward}
    defines |= {"LIBFLASH_KEYS_PER_SUM": keys_per_sum, "__CUDA_ARCH__": arch * 10}
    headers = ("attention/backward_steps.cuh", "sm80/backward.cuh", "sm80/backward_wide.cuh", "sm80/forward.cuh")
    instances = Program("attention_instances.cpp", headers, tuple(defines.items()))
    return instances._replace(source="attention.cpp", instances=(instances,))


def parts(*sizes: Any) -> Program:
    return attention(*sizes)._replace(source="parts.cpp")


def forward_tangent(dtype: str, head_dim: int, tile: str) -> Program:
    defines = {"DTYPE": dtype, "HEAD_DIM": head_dim, "TANGENT_TILE": tile}
    return Program("forward_tangent.cpp", ("sm80/forward_tangent.cuh",), tuple(defines.items()))


def forward_tangent_sm90(dtype: str, head_dim: int, tile: str, stages: int) -> Program:
    defines = {"DTYPE": dtype, "HEAD_DIM": head_dim, "TANGENT_TILE": tile, "STAGES": stages}
    return Program("forward_tangent_sm90.cpp", ("sm90/forward_tangent.cuh",), tuple(defines.items()))


def backward_tangent_sm90(*sizes: Any) -> Program:
    return forward_tangent_sm90(*sizes)._replace(source="backward_tangent_sm90.cpp", headers=("sm90/backward_tangent.cuh",))


def backward_tangent(dtype: str, head_dim: int, tile: str) -> Program:
    program = forward_tangent(dtype, head_dim, tile)
    return program._replace(source="backward_tangent.cpp", headers=("sm80/backward_tangent.cuh",))


def doubles(head_dim: int, forward: str, backward: str, tangent: str, left_out: int, arch: int = 90) -> Program:
    defines = {"HEAD_DIM": head_dim, "FORWARD_TILE": forward, "BACKWARD_TILE": backward, "TANGENT_TILE": tangent}
    defines |= {"CHANNELS_LEFT_OUT": left_out, "__CUDA_ARCH__": arch * 10}
    defines |= {"STATISTICS_TILE": "16, 16" if head_dim > 128 else "32, 16"}
    headers = (
        "attention/start_head_maxima.cuh",
        "sm80/backward_f64.cuh",
        "sm80/forward_f64.cuh",
        "sm80/forward_statistics_f64.cuh",
    )
    return Program("attention_f64.cpp", headers, tuple(defines.items()))


def double_tangents(*sizes: Any) -> Program:
    headers = ("sm80/backward_tangent_f64.cuh", "sm80/forward_tangent_f64.cuh")
    return doubles(*sizes)._replace(source="tangent_f64.cpp", headers=headers)


def decode_instances(dtype: str, dims: str, tile: str) -> Program:
    headers = ("sm80/decode.cuh", "sm80/decode_prefix.cuh", "sm80/decode_invariant.cuh")
    return Program("decode_instances.cpp", headers, (("DTYPE", dtype), ("KERNEL_DIMS", dims), ("DECODE_TILE", tile)))


def decode(dtype: str, head_dim: int, tile: str) -> Program:
    # Wide heads: one kernel for keys of 576 channels and values of 512.
    instances = decode_instances(dtype, "576, 512" if head_dim > 256 else f"{head_dim}, {head_dim}", tile)
    defines = (*instances.defines, ("HEAD_DIM", head_dim))
    return instances._replace(source="decode.cpp", defines=defines, instances=(instances,))


def decode_codes(dtype: str, head_dim: int, tile: str) -> Program:
    return decode(dtype, head_dim, tile)._replace(source="decode_codes.cpp")


def decode_options(dtype: str, head_dim: int, tile: str) -> Program:
    return decode(dtype, head_dim, tile)._replace(source="decode_options.cpp")


def decode_prefix(dtype: str, head_dim: int, tile: str) -> Program:
    return decode(dtype, head_dim, tile)._replace(source="decode_prefix.cpp")


def decode_prefix_sm90(dtype: str, head_dim: int, tile: str, stages: int) -> Program:
    """The shared keys by the kernel of sm90."""
    defines = {"DTYPE": dtype, "HEAD_DIM": head_dim, "PREFIX_TILE": f"128, 64, {stages}"}
    of_prefix = Program("prefix_instances.cpp", ("sm90/decode_prefix.cuh",), tuple(defines.items()))
    of_decode = decode_instances(dtype, f"{head_dim}, {head_dim}", tile)
    return with_kernels("decode_prefix.cpp", of_decode, of_prefix)


def prefill_instances(dtype: str, head_dim: int, head_dim_v: int, tile: str, keys_per_sum: int = KEYS_PER_SUM) -> Program:
    defines = {"DTYPE": dtype, "HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim_v, "PREFILL_TILE": tile}
    defines["LIBFLASH_KEYS_PER_SUM"] = keys_per_sum
    return Program("prefill_instances.cpp", ("sm90/forward.cuh", "sm90/prefill.cuh"), tuple(defines.items()))


def with_kernels(source: str, *kernels: Program) -> Program:
    """The program of that source, with the headers and the macros of its kernels."""
    defines = {name: value for kernel in kernels for name, value in kernel.defines}
    headers = tuple(name for kernel in kernels for name in kernel.headers)
    return Program(source, headers, tuple(defines.items()), kernels)


def invariant_rows(dtype: str, head_dims: tuple[int, int, int], decode_tile: str, prefill_tile: str) -> Program:
    head_dim, head_dim_v, of_decode = head_dims
    kernels = (
        decode_instances(dtype, f"{of_decode}, {of_decode}", decode_tile),
        prefill_instances(dtype, head_dim, head_dim_v, prefill_tile),
    )
    return with_kernels("invariant_rows.cpp", *kernels)


def cache_write(dtype: str) -> Program:
    return Program("cache_write.cpp", ("any/cache_write.cuh",), (("DTYPE", dtype),))


def decode_ragged(dtype: str, head_dim: int, tile: str) -> Program:
    return decode(dtype, head_dim, tile)._replace(source="decode_ragged.cpp")


def decode_with_prefill(dtype: str, head_dim: int, tile: str) -> Program:
    prefill_tile = "128, 128, 4" if head_dim == 64 else "128, 128, 2"
    of_decode = decode_instances(dtype, f"{head_dim}, {head_dim}", tile)
    return with_kernels("decode_ragged.cpp", of_decode, prefill_instances(dtype, head_dim, head_dim, prefill_tile))


def decode_sm90(dtype: str, head_dim: int, head_dim_v: int, tile: str, stages: int) -> Program:
    defines = {"DTYPE": dtype, "KERNEL_DIMS": f"{head_dim}, {head_dim_v}", "DECODE_TILE": f"{tile}, {stages}"}
    return Program("decode_sm90.cpp", ("sm90/decode.cuh", "sm90/decode_rows.cuh"), tuple(defines.items()))


def ragged_rows_sm90(dtype: str, head_dim: int, tile: str, stages: int, group: int, head_dim_of_call: int) -> Program:
    """decode_ragged.cpp with the kernel of sm90. `group`: query heads of a key head."""
    of_decode = decode_sm90(dtype, head_dim, head_dim, tile, stages)
    of_decode = of_decode._replace(source="decode_instances.cpp", defines=(*of_decode.defines, ("DECODE_SM90", 1)))
    program = with_kernels("decode_ragged.cpp", of_decode, prefill_instances(dtype, head_dim, head_dim, "128, 128, 2"))
    own = {"HEAD_DIM": head_dim_of_call, "GROUP": group, "PREFILL_DIMS": f"{head_dim}, {head_dim}"}
    return program._replace(defines=tuple((dict(program.defines) | own).items()))


def forward_sm90(dtype: str, head_dim: int, head_dim_v: int, tile: str, stages: int, keys_per_sum: int = KEYS_PER_SUM) -> Program:
    defines = {"DTYPE": dtype, "HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim_v, "FORWARD_TILE": tile, "STAGES": stages}
    defines["LIBFLASH_KEYS_PER_SUM"] = keys_per_sum
    headers = ("attention/start_head_maxima.cuh", "sm90/forward.cuh", "sm90/forward_statistics.cuh")
    return Program("forward_sm90.cpp", headers, tuple(defines.items()))


def wide_forward_sm90(*sizes: Any) -> Program:
    program = forward_sm90(*sizes)
    return program._replace(headers=("sm90/forward_wide.cuh",), defines=(*program.defines, ("WIDE_HEADS", 1)))


def forward_statistics(dtype: str, head_dim: int, tile: str, keys_per_sum: int) -> Program:
    defines = {"DTYPE": dtype, "HEAD_DIM": head_dim, "FORWARD_TILE": tile, "LIBFLASH_KEYS_PER_SUM": keys_per_sum}
    defines["__CUDA_ARCH__"] = 800  # the only PTX version of these kernels
    headers = ("attention/start_head_maxima.cuh", "sm80/forward.cuh", "sm80/forward_statistics.cuh")
    return Program("forward_statistics.cpp", headers, tuple(defines.items()))


def forward_statistics_sm90(dtype: str, head_dim: int, tile: str, stages: int, keys_per_sum: int, wanted: int) -> Program:
    program = forward_sm90(dtype, head_dim, head_dim, tile, stages, keys_per_sum)
    return program._replace(defines=(*program.defines, ("STATISTICS", wanted)))


def prefill(dtype: str, head_dim: int, head_dim_v: int, tile: str, stages: int, keys_per_sum: int = KEYS_PER_SUM) -> Program:
    return with_kernels("prefill.cpp", prefill_instances(dtype, head_dim, head_dim_v, f"{tile}, {stages}", keys_per_sum))


def backward_sm90(dtype: str, head_dim: int, tile: str, stages: int, keys_per_sum: int = KEYS_PER_SUM) -> Program:
    defines = {"DTYPE": dtype, "HEAD_DIM": head_dim, "BACKWARD_TILE": tile, "STAGES": stages}
    defines["LIBFLASH_KEYS_PER_SUM"] = keys_per_sum
    headers = ("attention/backward_steps.cuh", "sm90/backward.cuh")
    return Program("backward_sm90.cpp", headers, tuple(defines.items()))


def wide_backward_sm90(*sizes: Any) -> Program:
    program = backward_sm90(*sizes)
    headers = ("attention/backward_steps.cuh", "sm90/backward_wide.cuh")
    return program._replace(headers=headers, defines=(*program.defines, ("WIDE_HEADS", 1)))


def for_racecheck(program: Program) -> Program:
    return program._replace(defines=(*program.defines, ("LIBFLASH_RACECHECK", 1)))


def runs(programs: dict[str, Program], cases: Callable[[str], tuple[tuple[int, ...], ...]]) -> list[object]:
    return [
        pytest.param(Run(program, case), id="-".join(map(str, (name, *case))))
        for name, program in programs.items()
        for case in cases(name)
    ]


ATTENTION_RUNS = runs(
    {name: attention(*sizes) for name, sizes in (ATTENTION_KERNELS | ATTENTION_KERNELS_WITH_LONG_SUMS).items()},
    lambda name: CASES[1:3] if name.endswith("small") else CASES,
)
PART_RUNS = runs({name: parts(*sizes) for name, sizes in PART_KERNELS.items()}, lambda _: PART_CASES)
TANGENT_RUNS = runs({name: forward_tangent(*sizes) for name, sizes in TANGENT_KERNELS.items()}, lambda _: TANGENT_CASES)
DOUBLE_RUNS = runs(
    {name: doubles(*sizes) for name, sizes in (DOUBLE_KERNELS | DOUBLE_SMALL_KERNELS).items()},
    lambda name: DOUBLE_CASES if name in ("64", "128") else DOUBLE_CASES[:2] + DOUBLE_CASES[2::2],
)
DOUBLE_TANGENT_RUNS = runs(
    {name: double_tangents(*sizes) for name, sizes in DOUBLE_KERNELS.items()},
    lambda name: DOUBLE_TANGENT_CASES if name == "128" else DOUBLE_TANGENT_CASES[2:4],
)
STATISTICS_RUNS = runs(
    {name: forward_statistics(*sizes) for name, sizes in STATISTICS_KERNELS.items()}, lambda _: STATISTICS_CASES
)
STATISTICS_SM90_RUNS = runs(
    {name: forward_statistics_sm90(*sizes) for name, sizes in STATISTICS_KERNELS_SM90.items()},
    lambda _: tuple((disorder,) for disorder in DISORDERS),
)
BACKWARD_TANGENT_RUNS = runs(
    {name: backward_tangent(*sizes) for name, sizes in BACKWARD_TANGENT_KERNELS.items()}, lambda _: BACKWARD_TANGENT_CASES
)


def with_no_prefill(cases: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    return tuple((*case, 0) for case in cases)


DECODE_RUNS = [
    *runs({name: decode(*sizes) for name, sizes in DECODE_KERNELS.items()}, lambda _: DECODE_CASES),
    *runs({name: decode(*sizes) for name, sizes in DECODE_KERNELS_OF_TWO_HEADS.items()}, lambda _: TWO_HEADS),
    *runs(
        {f"ragged-{name}": decode_ragged(*sizes) for name, sizes in DECODE_KERNELS.items()},
        lambda name: with_no_prefill(RAGGED_CASES if name == "ragged-bf16-64" else RAGGED_CASES[1::2]),
    ),
    *runs({"ragged-bf16-512": decode_ragged(*WIDE_DECODE_KERNELS["bf16-512"])}, lambda _: with_no_prefill(RAGGED_CASES[1::2])),
    *runs(
        {f"prefill-{name}": decode_with_prefill(*sizes) for name, sizes in DECODE_KERNELS_OF_TWO_HEADS.items()},
        lambda name: RAGGED_CASES_WITH_PREFILL,
    ),
]
CODE_RUNS = [
    *runs(
        {name: decode_codes(*DECODE_KERNELS[name]) for name in ("bf16-64", "f16-256-small")},
        # too few threads for 256 channels
        lambda name: (*CODE_CASES, *CODE_CASES_OF_NUMBERS, *CODE_CASES_INSIDE) if name == "bf16-64" else CODE_CASES,
    ),
    *runs(
        {name: decode_codes(*DECODE_KERNELS_OF_TWO_HEADS[name]) for name in ("f16-128",)},
        lambda _: (*CODE_CASES_OF_TWO_HEADS, *CODE_CASES_INSIDE[::2]),
    ),
    *runs(
        {"two-heads-bf16-64": decode_codes(*DECODE_KERNELS_OF_TWO_HEADS["bf16-64"])},
        lambda _: (*CODE_CASES_OF_TWO_HEADS[::2], CODE_CASES_OF_TWO_HEADS[-1]),
    ),
]
OPTION_RUNS = [  # there are no codes beside float32
    *runs({"bf16-64": decode_options(*DECODE_KERNELS["bf16-64"])}, lambda _: OPTION_CASES),
    *runs({"f16-256-small": decode_options(*DECODE_KERNELS["f16-256-small"])}, lambda _: OPTION_CASES[::2]),
    *runs({"f32-128-small": decode_options(*DECODE_KERNELS["f32-128-small"])}, lambda _: OPTION_CASES_OF_NUMBERS),
    *runs(
        {name: decode_options(*sizes) for name, sizes in WIDE_DECODE_KERNELS.items()},
        lambda _: OPTION_CASES_OF_WIDE_HEADS,
    ),
]
PREFIX_RUNS = runs(
    {name: decode_prefix(*sizes) for name, sizes in DECODE_KERNELS_OF_TWO_HEADS.items()},
    lambda name: (*PREFIX_CASES, *PREFIX_CASES_WITHOUT) if name == "bf16-64" else PREFIX_CASES[1::3],
)
# Two stages instead of those of kernels.table, so that they are filled again.
PREFIX_SM90_RUNS = runs(
    {f"sm90-{name}": decode_prefix_sm90(*sizes, 2) for name, sizes in DECODE_KERNELS_OF_TWO_HEADS.items()},
    lambda name: PREFIX_CASES_OF_SM90[:: 1 if name == "sm90-bf16-64" else 4],
)
CACHE_WRITE_RUNS = runs({dtype: cache_write(f"{dtype}_") for dtype in ("f16", "bf16", "f32")}, lambda _: ((),))
SM90_RUNS = runs(
    {name: forward_sm90(*sizes) for name, sizes in (FORWARD_KERNELS_SM90 | FORWARD_KERNELS_SM90_WITH_LONG_SUMS).items()},
    lambda _: tuple((x,) for x in DISORDERS),
)
WIDE_SM90_RUNS = runs(
    {name: wide_forward_sm90(*sizes) for name, sizes in WIDE_FORWARD_KERNELS_SM90.items()}
    | {"bf16-512-racecheck": for_racecheck(wide_forward_sm90(*WIDE_FORWARD_KERNELS_SM90["bf16-512"]))},
    lambda name: tuple((x,) for x in DISORDERS["racecheck" in name :]),
)
PREFILL_RUNS = runs({name: prefill(*sizes) for name, sizes in PREFILL_KERNELS.items()}, lambda _: tuple((x,) for x in DISORDERS))
DECODE_SM90_RUNS = runs(
    {name: decode_sm90(*sizes) for name, sizes in DECODE_KERNELS_SM90.items()}
    | {name: decode_sm90(dtype, dim, dim, *tile) for name, (dtype, dim, *tile) in DECODE_ROWS_KERNELS_SM90.items()}
    | {"bf16-576-racecheck": for_racecheck(decode_sm90(*DECODE_KERNELS_SM90["bf16-576"]))},
    lambda name: tuple((x,) for x in (*DISORDERS, 2)["racecheck" in name :]),
)
# Rows of a key head that take tiles of 64 rows and, with larger groups, of 128; and fewer channels than those of the kernel.
RAGGED_SM90_RUNS = [
    *runs(
        {"ragged-bf16-64": ragged_rows_sm90(*DECODE_ROWS_KERNELS_SM90["bf16-64"], 3, 40)},
        lambda _: (*with_no_prefill(RAGGED_CASES_OF_MANY_ROWS), *RAGGED_CASES_WITH_PREFILL[::2]),
    ),
    *runs(
        {"ragged-f16-128": ragged_rows_sm90(*DECODE_ROWS_KERNELS_SM90["f16-128"], 10, 128)},
        lambda _: with_no_prefill(RAGGED_CASES_OF_MANY_ROWS[::2]),
    ),
]
INVARIANT_RUNS = runs(
    {name: invariant_rows(*sizes) for name, (*sizes, _) in INVARIANT_KERNELS.items()},
    lambda name: tuple(
        (case, disorder)
        for i, case in enumerate(INVARIANT_KERNELS[name][-1])
        for disorder in (DISORDERS if name == "bf16-64" else DISORDERS[i % 2 :][:1])
    ),
)
TANGENT_SM90_RUNS = runs(
    {name: forward_tangent_sm90(*sizes) for name, sizes in TANGENT_KERNELS_SM90.items()}
    | {"bf16-256-racecheck": for_racecheck(forward_tangent_sm90(*TANGENT_KERNELS_SM90["bf16-256"]))},
    lambda name: tuple((x,) for x in DISORDERS["racecheck" in name :]),
)
BACKWARD_TANGENT_SM90_RUNS = runs(
    {name: backward_tangent_sm90(*sizes) for name, sizes in BACKWARD_TANGENT_KERNELS_SM90.items()}
    | {"bf16-256-racecheck": for_racecheck(backward_tangent_sm90(*BACKWARD_TANGENT_KERNELS_SM90["bf16-256"]))},
    lambda name: tuple((x,) for x in DISORDERS["racecheck" in name :]),
)

BACKWARD_SM90_RUNS = [
    *runs(
        {name: backward_sm90(*sizes) for name, sizes in (BACKWARD_KERNELS_SM90 | BACKWARD_KERNELS_SM90_WITH_LONG_SUMS).items()},
        lambda name: tuple((x, 0) for x in DISORDERS[name != "bf16-64" :]),
    ),
    *runs({"bf16-64-racecheck": for_racecheck(backward_sm90(*BACKWARD_KERNELS_SM90["bf16-64"]))}, lambda _: ((1, 0),)),
]
WIDE_BACKWARD_SM90_RUNS = runs(
    {name: wide_backward_sm90(*sizes) for name, sizes in WIDE_BACKWARD_KERNELS_SM90.items()}
    | {"bf16-512-racecheck": for_racecheck(wide_backward_sm90(*WIDE_BACKWARD_KERNELS_SM90["bf16-512"]))},
    lambda name: tuple((x, 0) for x in DISORDERS[name != "bf16-512" :]),
)
FIXED_ORDER_RUNS = runs(
    {name: backward_sm90(*(BACKWARD_KERNELS_SM90 | BACKWARD_KERNELS_SM90_WITH_LONG_SUMS)[name]) for name in FIXED_ORDER},
    FIXED_ORDER.__getitem__,
)


def compiled(program: Program, folder: Path) -> Path:
    """The program, or the object file of a program's kernels. The first process that needs it compiles it, to `folder`."""
    own = folder / hashlib.sha256(repr(program).encode()).hexdigest()[:16]
    own.mkdir(parents=True, exist_ok=True)
    with open(own / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (own / "compiled").exists():
            compile_to(own, program, [compiled(instances, folder) for instances in program.instances])
    return own / "compiled"


def compile_to(folder: Path, program: Program, objects: list[Path]) -> None:
    for name in program.headers:
        source = (ROOT / "libflash/cuda" / name).read_text()
        changed = for_the_host(source)
        assert changed != source
        (folder / "cuda" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "cuda" / name).write_text(changed)
    # Most programs run for less time than they are compiled; those of decode, which have most instances, for far less.
    optimize = "-Og" if program.source.startswith("decode") else "-O1"
    defines = {"__CUDA_ARCH__": 900} | dict(program.defines)
    options = [optimize, f"-D__CUDA_ARCH__={defines.pop('__CUDA_ARCH__')}"]
    # The changed headers come first, then the emulated instructions, then the library's headers.
    includes = [f"-I{path}" for path in (folder, HERE, ROOT / "libflash", ROOT / "include", CUDA_HEADERS)]
    arguments = [*options, *(f"-D{name}={value}" for name, value in defines.items()), *includes]
    arguments += ["-include", precompiled(options, folder.parent), HERE / program.source]
    run_compiler(*arguments, *(["-c"] if program.source.endswith("_instances.cpp") else objects), "-o", folder / "compiled")


def precompiled(options: list[str], folder: Path) -> Path:
    """A header that includes emulation.h, compiled for these options: half of the time of a small program goes to that."""
    own = folder / "_".join(["headers", *options])
    own.mkdir(parents=True, exist_ok=True)
    header, made = own / "headers.h", own / "headers.h.gch"
    with open(own / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            header.write_text('#include "emulation.h"\n')
            run_compiler(*options, f"-I{HERE}", f"-I{CUDA_HEADERS}", "-x", "c++-header", header, "-o", own / "incomplete")
            (own / "incomplete").rename(made)
    return header


def run_compiler(*arguments: str | Path) -> None:
    command = [CXX, "-std=c++17", "-fno-strict-aliasing", "-fno-pie", "-no-pie", "-w", "-fpermissive", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]


def finished(program: Future[Path], arguments: tuple[int, ...]) -> str:
    """The output of a run, which must succeed."""
    command = [program.result(), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def output(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Run], str]]:
    """The output of a run. The first test starts the runs of all selected tests, as many at a time as there are processors.
    Where pytest distributes the tests over processes, each run starts with its test, and the processes share the programs.
    """
    if CXX is None or CUDA_HEADERS is None:
        pytest.skip("no g++ or no CUDA headers")
    distributed = hasattr(request.config, "workerinput")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if distributed else base) / "on_host"  # of all processes
    items = [] if distributed else request.session.items
    requested = [item.callspec.params["run"] for item in items if item.path == request.path and hasattr(item, "callspec")]
    programs: dict[Program, Future[Path]] = {}
    begun: dict[Run, Future[str]] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:

        def begin_program(program: Program) -> Future[Path]:
            if program not in programs:
                for instances in program.instances:  # first, so that few programs wait for them
                    begin_program(instances)
                programs[program] = pool.submit(compiled, program, folder)
            return programs[program]

        def begin(run: Run) -> Future[str]:
            if run not in begun:
                begun[run] = pool.submit(finished, begin_program(run.program), run.arguments)
            return begun[run]

        for run in requested:  # programs before runs, so that a run only waits for a program that is being compiled
            begin_program(run.program)
        for run in requested:
            begin(run)
        yield lambda run: begin(run).result()
        pool.shutdown(cancel_futures=True)
    for made in folder.glob("headers_*/*.gch"):  # large
        made.unlink(missing_ok=True)


@pytest.mark.parametrize("run", ATTENTION_RUNS)
def test_attention_against_double(output: Callable[[Run], str], run: Run) -> None:
    output(run)


@pytest.mark.parametrize("run", PART_RUNS)
def test_parts_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == (6 if run.arguments[1] else 5)


@pytest.mark.parametrize("run", TANGENT_RUNS)
def test_forward_tangent_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 3


@pytest.mark.parametrize("run", TANGENT_SM90_RUNS)
def test_forward_tangent_sm90_against_double(output: Callable[[Run], str], run: Run) -> None:
    """With more than 128 channels from saved LSE alone."""
    assert output(run).count("ok ") == (14 if dict(run.program.defines)["HEAD_DIM"] > 128 else 28)


@pytest.mark.parametrize("run", BACKWARD_TANGENT_RUNS)
def test_backward_tangent_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == (4 if run.arguments[2] else 3)


@pytest.mark.parametrize("run", BACKWARD_TANGENT_SM90_RUNS)
def test_backward_tangent_sm90_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 28


@pytest.mark.parametrize("run", DOUBLE_RUNS)
def test_float64_against_long_double(output: Callable[[Run], str], run: Run) -> None:
    rare, parts = run.arguments[0] & 1, run.arguments[0] & 16
    statistics = 0 if parts else 5
    assert output(run).count("ok ") == (5 if not rare else 6 if parts else 7) + statistics


@pytest.mark.parametrize("run", DOUBLE_TANGENT_RUNS)
def test_tangents_in_float64_against_long_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == (7 if run.arguments[0] & 1 else 6)


@pytest.mark.parametrize("run", DECODE_RUNS)
def test_decode_against_double(output: Callable[[Run], str], run: Run) -> None:
    output(run)


@pytest.mark.parametrize("run", CODE_RUNS)
def test_decode_over_codes(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == (2 if run.arguments[3] else 4)


@pytest.mark.parametrize("run", OPTION_RUNS)
def test_decode_with_options_of_caches(output: Callable[[Run], str], run: Run) -> None:
    _, _, _, _, shards, _, _, append, tree, invariant, _, _ = run.arguments
    assert output(run).count("ok ") == shards + (invariant and not append and not tree)


@pytest.mark.parametrize("run", PREFIX_RUNS)
def test_the_hint_of_shared_keys_changes_no_bit(output: Callable[[Run], str], run: Run) -> None:
    used = "unused" if run.arguments in PREFIX_CASES_WITHOUT else "used"
    assert f"ok 0 bits differ, 0 absent, hint {used}" in output(run)


@pytest.mark.parametrize("run", PREFIX_SM90_RUNS)
def test_the_kernel_of_sm90_for_shared_keys_has_the_same_bits(output: Callable[[Run], str], run: Run) -> None:
    assert "ok 0 bits differ, 0 absent, hint used by sm90, " in output(run)


@pytest.mark.parametrize("run", CACHE_WRITE_RUNS)
def test_cache_write_stores_the_bits_of_the_cpu(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 1 + 2 * 3 + 3 * 4 * 3


@pytest.mark.parametrize("run", SM90_RUNS)
def test_sm90_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 32


@pytest.mark.parametrize("run", WIDE_SM90_RUNS)
def test_wide_forward_sm90_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 26  # those without block masks, and two of narrower heads


@pytest.mark.parametrize("run", STATISTICS_RUNS)
def test_statistics_against_double(output: Callable[[Run], str], run: Run) -> None:
    dropout = run.arguments[1] & 4  # without a comparison of out
    assert output(run).count("ok ") == (4 if dropout else 5)


@pytest.mark.parametrize("run", STATISTICS_SM90_RUNS)
def test_statistics_sm90_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 29  # all cases but those with rare options


@pytest.mark.parametrize("run", PREFILL_RUNS)
def test_prefill_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 12


@pytest.mark.parametrize("run", DECODE_SM90_RUNS)
def test_decode_sm90_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 13


@pytest.mark.parametrize("run", RAGGED_SM90_RUNS)
def test_decode_sm90_of_ragged_rows_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert " rows, " in output(run).splitlines()[0]


@pytest.mark.parametrize("run", INVARIANT_RUNS)
def test_invariant_rows_of_decode_and_prefill(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == (2 if run.arguments[0] in SHORT_CASES else 6)


@pytest.mark.parametrize("run", BACKWARD_SM90_RUNS)
def test_backward_sm90_against_double(output: Callable[[Run], str], run: Run) -> None:
    wide = dict(run.program.defines)["HEAD_DIM"] > 128  # without rare options
    assert output(run).count("ok ") == (19 if wide else 23)


@pytest.mark.parametrize("run", WIDE_BACKWARD_SM90_RUNS)
def test_wide_backward_sm90_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 19  # those without other rare options than a softcap


@pytest.mark.parametrize("run", FIXED_ORDER_RUNS)
def test_backward_sm90_has_the_same_bits_in_a_fixed_order(output: Callable[[Run], str], run: Run) -> None:
    """Whenever thread blocks, copies and additions begin and end."""
    defines = dict(run.program.defines)
    wide = defines["HEAD_DIM"] > 128  # without rare options
    unordered = (defines["DTYPE"], defines["HEAD_DIM"]) == ("f16_", 128)  # with block masks, unless there are rare options
    got = output(run)
    assert got.count("ok ") == 23 - 4 * wide - 3 * unordered
    assert got == output(Run(run.program, ONE_BY_ONE))


def test_tiles_are_those_of_kernels_table() -> None:
    """The tiles and stages of sm90 and of tangents above are those of the library."""
    table = (ROOT / "libflash/cuda/kernels.table").read_text()
    forward = [*FORWARD_KERNELS_SM90.values(), *FORWARD_KERNELS_SM90_WITH_LONG_SUMS.values(), *WIDE_FORWARD_KERNELS_SM90.values()]
    of_rows = [(dtype, dim, dim, *tile) for dtype, dim, *tile in DECODE_ROWS_KERNELS_SM90.values()]
    decode = [*DECODE_KERNELS_SM90.values(), *of_rows]
    for operation, kernels in (("forward", forward), ("prefill", PREFILL_KERNELS.values()), ("decode", decode)):
        for dtype, head_dim, head_dim_v, tile, stages, *_ in kernels:
            dims = head_dim if head_dim == head_dim_v else f"{head_dim}x{head_dim_v}"
            line = rf"{operation} +sm90 +{dtype.rstrip('_')} +{dims} +{tile.replace(', ', 'x')} +{stages} "
            assert re.search(line, table), line
    tangents = [("forward", sizes) for sizes in TANGENT_KERNELS.values()]
    tangents += [("backward", sizes) for sizes in BACKWARD_TANGENT_KERNELS.values()]
    for direction, (dtype, head_dim, tile) in tangents:
        line = rf"{direction}_tangent +sm80 +{dtype.rstrip('_')} +{head_dim} +{tile.replace(', ', 'x')} +1 "
        assert re.search(line, table), line
    of_sm90 = [("forward", sizes) for sizes in TANGENT_KERNELS_SM90.values()]
    of_sm90 += [("backward", sizes) for sizes in BACKWARD_TANGENT_KERNELS_SM90.values()]
    for direction, (dtype, head_dim, tile, stages) in of_sm90:
        line = rf"{direction}_tangent +sm90 +{dtype.rstrip('_')} +{head_dim} +{tile.replace(', ', 'x')} +{stages} "
        assert re.search(line, table), line
    for folder, kernels in (("sm80", STATISTICS_KERNELS), ("sm90", STATISTICS_KERNELS_SM90)):
        for dtype, head_dim, tile, *_ in kernels.values():
            line = rf"forward +{folder} +{dtype.rstrip('_')} +{head_dim} +{tile.replace(', ', 'x')} +\d .*statistics"
            assert re.search(line, table), line
    for sizes in ("bf16-512", "f16-512-small"):
        dtype, _, forward_tile, backward_tile, *_ = ATTENTION_KERNELS[sizes]
        for operation, tile in (("forward", forward_tile), ("backward", backward_tile.removesuffix(", 1"))):
            line = rf"{operation} +sm80 +{dtype.rstrip('_')} +512 +{tile.replace(', ', 'x')} +1 "
            assert re.search(line, table), line
    for dtype, _, tile in WIDE_DECODE_KERNELS.values():
        tile_q, tile_k, stages = tile.split(", ")
        line = rf"decode +sm80 +{dtype.rstrip('_')} +576x512 +{tile_q}x{tile_k} +{stages} "
        assert re.search(line, table), line
    doubles = [sizes[:4] for sizes in DOUBLE_KERNELS.values()] + [sizes[:3] for sizes in DOUBLE_SMALL_KERNELS.values()]
    for head_dim, *tiles in doubles:
        for operation, tile in zip(("forward", "backward", "backward_tangent"), tiles, strict=False):
            line = rf"{operation} +sm80 +f64 +{head_dim} +{tile.replace(', ', 'x')} +1 "
            assert re.search(line, table), line
    sums = [sizes[:4] for sizes in BACKWARD_KERNELS_SM90_WITH_LONG_SUMS.values()]
    for dtype, head_dim, tile, stages in [*BACKWARD_KERNELS_SM90.values(), *sums]:
        line = rf"backward +sm90 +{dtype.rstrip('_')} +{head_dim} +{tile.replace(', ', 'x')} +{stages} "
        assert re.search(line, table), line
