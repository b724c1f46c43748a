"""The kernels that tests/cuda/test_on_host_*.py run on the host: type, head_dim, tiles and stages. test_on_host_table.py compares
them with kernels.table. Kernels for bf16 and f16 come from the same template, so most run for one of the two; every operation
runs for both.
"""

from __future__ import annotations

KEYS_PER_SUM = 32768  # of the library

# Type, head_dim, tiles of forward, tiles and stages of backward: kernels with one, two and four warps for each 32 keys, and with
# two and four warps for each 16 rows. Optional: keys per sum, and the architecture whose code runs.
ATTENTION_KERNELS = {
    "bf16-64": ("bf16_", 64, "128, 128", "128, 128, 1"),
    "f16-128": ("f16_", 128, "128, 64", "64, 128, 3"),
    "bf16-192": ("bf16_", 192, "64, 64", "64, 64, 2"),
    "bf16-256-small": ("bf16_", 256, "64, 64", "32, 32, 1"),
    "f32-64": ("f32_", 64, "128, 32", "32, 128, 1"),
    "f32-128": ("f32_", 128, "128, 32", "32, 64, 1"),
    "f32-256-small": ("f32_", 256, "64, 16", "16, 32, 1"),
    "f32-512": ("f32_", 512, "32, 16", "16, 16, 1"),
    "bf16-512": ("bf16_", 512, "64, 32", "64, 64, 1"),
    "f16-512-small": ("f16_", 512, "32, 32", "32, 32, 1", KEYS_PER_SUM, 80),
}

# Kernels with so few keys per sum that they add their accumulators to the long sums several times (attention/long_sums.h): after
# every tile or every second tile, also with two warps for the same rows. Backward then has several launches for dK/dV.
ATTENTION_KERNELS_WITH_LONG_SUMS = {
    "f16-32-sums": ("f16_", 32, "128, 128", "128, 128, 1", 64),
    "bf16-64-sums": ("bf16_", 64, "128, 128", "128, 128, 1", 64),
    "f16-128-sums": ("f16_", 128, "128, 64", "64, 128, 3", 128),
    "f32-128-sums": ("f32_", 128, "128, 32", "32, 64, 1", 64),
    "bf16-256-sums-small": ("bf16_", 256, "64, 64", "32, 32, 1", 32),
    "f16-512-sums-small": ("f16_", 512, "64, 32", "64, 64, 1", 64),
    "f32-512-sums-small": ("f32_", 512, "32, 16", "16, 16, 1", 64, 80),
}

# Forward with statistics of rows: type, head_dim, tile, keys per sum. One warp and two for the same rows, which share keys or
# channels; long sums.
STATISTICS_KERNELS = {
    "bf16-64": ("bf16_", 64, "128, 64", KEYS_PER_SUM),
    "f16-128": ("f16_", 128, "128, 64", KEYS_PER_SUM),
    "f16-256": ("f16_", 256, "64, 32", KEYS_PER_SUM),
    "f32-128": ("f32_", 128, "128, 32", KEYS_PER_SUM),
    "f32-256": ("f32_", 256, "64, 16", KEYS_PER_SUM),
    "f16-512": ("f16_", 512, "32, 32", KEYS_PER_SUM),
    "f32-512": ("f32_", 512, "32, 16", KEYS_PER_SUM),
    "f16-64-sums": ("f16_", 64, "128, 64", 64),
    "bf16-256-sums": ("bf16_", 256, "64, 32", 64),
    "bf16-512-sums": ("bf16_", 512, "32, 32", 64),
    "f32-512-sums": ("f32_", 512, "32, 16", 64),
}
# The same for sm_90a, with the stages and the value of STATISTICS (forward_sm90.cpp).
STATISTICS_KERNELS_SM90 = {
    "bf16-64": ("bf16_", 64, "192, 128", 4, KEYS_PER_SUM, 2),
    "f16-128": ("f16_", 128, "128, 128", 2, KEYS_PER_SUM, 1),
    "bf16-256": ("bf16_", 256, "128, 64", 2, KEYS_PER_SUM, 3),
    "f16-64-sums": ("f16_", 64, "192, 128", 4, 256, 1),
}

# Forward's tangent: type, head_dim, tile; 32 and 16 rows of a warp, and a thread block of one warp.
TANGENT_KERNELS = {
    "bf16-64": ("bf16_", 64, "128, 32"),
    "bf16-96": ("bf16_", 96, "128, 32"),
    "f16-128": ("f16_", 128, "128, 32"),
    "bf16-192": ("bf16_", 192, "64, 32"),
    "f16-256": ("f16_", 256, "64, 16"),
    "f32-64": ("f32_", 64, "64, 32"),
    "f32-128": ("f32_", 128, "64, 16"),
    "f32-256": ("f32_", 256, "16, 16"),
    "bf16-512": ("bf16_", 512, "32, 32"),
    "f16-512": ("f16_", 512, "32, 32"),
    "f32-512": ("f32_", 512, "16, 16"),
}
# The same for sm_90a, with the stages.
TANGENT_KERNELS_SM90 = {
    "bf16-64": ("bf16_", 64, "192, 64", 4),
    "bf16-128": ("bf16_", 128, "128, 64", 2),
    "f16-128": ("f16_", 128, "128, 64", 2),
    "bf16-256": ("bf16_", 256, "128, 64", 1),
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
    "bf16-512": ("bf16_", 512, "32, 32"),
    "f16-512": ("f16_", 512, "32, 32"),
    "f32-512": ("f32_", 512, "16, 16"),
}
# The same for sm_90a, with the stages.
BACKWARD_TANGENT_KERNELS_SM90 = {
    "bf16-64": ("bf16_", 64, "128, 64", 4),
    "bf16-128": ("bf16_", 128, "128, 32", 3),
    "f16-128": ("f16_", 128, "128, 32", 3),
    "bf16-256": ("bf16_", 256, "64, 32", 2),
}

# float64: head_dim, tiles of forward, of backward and of the tangents; by how many channels the tensors are narrower than the
# kernel; optional: the architecture whose code runs. kernels.table has no tangents of 64 channels; those of 128 and 256 run once.
DOUBLE_KERNELS = {"128": (128, "128, 32", "16, 16", "16, 16", 3), "256": (256, "64, 16", "8, 16", "8, 8", 4)}
DOUBLE_SMALL_KERNELS = {
    "64": (64, "64, 32", "32, 32", "", 4),
    "128-small": (128, "32, 16", "16, 16", "", 4, 80),
    "256-small": (256, "16, 8", "8, 16", "", 3),
    "512": (512, "16, 8", "8, 8", "8, 8", 3),
    "512-sm80": (512, "16, 8", "8, 8", "8, 8", 190, 80),
}

# Decode: type, head_dim, tile and stages; with and without fragments of Q in registers, with and without matrix instructions,
# few warps.
DECODE_KERNELS = {
    "bf16-64": ("bf16_", 64, "16, 64, 4"),
    "f16-256-small": ("f16_", 256, "16, 32, 2"),
    "f32-128-small": ("f32_", 128, "16, 32, 2"),
}
# Keys of so many channels, values of 512 channels.
WIDE_DECODE_KERNELS = {
    "bf16-512": ("bf16_", 512, "16, 16, 2"),
    "f16-576": ("f16_", 576, "16, 16, 2"),
    "f32-512": ("f32_", 512, "16, 16, 1"),
}
DECODE_KERNELS_OF_TWO_HEADS = {"bf16-64": DECODE_KERNELS["bf16-64"], "f16-128": ("f16_", 128, "16, 64, 3")}
# Decode for sm_90a, where values are channels of the keys.
DECODE_KERNELS_SM90 = {"bf16-576": ("bf16_", 576, 512, "64, 64", 2)}
# Decode for sm_90a, many rows.
DECODE_ROWS_KERNELS_SM90 = {"bf16-64": ("bf16_", 64, "64, 64", 6), "f16-128": ("f16_", 128, "64, 64", 3)}

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
    "f16-512-sums": ("f16_", 512, 512, "64, 64", 1, 128),
}
# The same for prefill, of which only the tiles of head_dim 64 differ.
PREFILL_KERNELS = FORWARD_KERNELS_SM90 | {
    "bf16-64": ("bf16_", 64, 64, "128, 128", 4),
    "f16-64-sums": ("f16_", 64, 64, "128, 128", 4, 256),
    "bf16-128-sums": FORWARD_KERNELS_SM90_WITH_LONG_SUMS["bf16-128-sums"],
}

# Backward for sm_90a: type, head_dim, tile, stages.
BACKWARD_KERNELS_SM90 = {
    "bf16-64": ("bf16_", 64, "64, 128", 4),
    "bf16-96": ("bf16_", 96, "64, 128", 3),
    "f16-128": ("f16_", 128, "64, 128", 3),
    "bf16-192": ("bf16_", 192, "64, 64", 3),
    "bf16-256": ("bf16_", 256, "64, 64", 2),
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
    "bf16-512-sums": ("bf16_", 512, "64, 64", 1, 32),
}
