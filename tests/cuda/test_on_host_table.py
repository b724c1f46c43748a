"""The kernels that run on the host (the other test_on_host_*.py) are those of the library."""

from __future__ import annotations

import re

import pytest
from emulated_kernels import (
    ATTENTION_KERNELS,
    BACKWARD_KERNELS_SM90,
    BACKWARD_KERNELS_SM90_WITH_LONG_SUMS,
    BACKWARD_TANGENT_KERNELS,
    BACKWARD_TANGENT_KERNELS_SM90,
    DECODE_KERNELS_SM90,
    DECODE_ROWS_KERNELS_SM90,
    DOUBLE_KERNELS,
    DOUBLE_SMALL_KERNELS,
    FORWARD_KERNELS_SM90,
    FORWARD_KERNELS_SM90_WITH_LONG_SUMS,
    PREFILL_KERNELS,
    STATISTICS_KERNELS,
    STATISTICS_KERNELS_SM90,
    TANGENT_KERNELS,
    TANGENT_KERNELS_SM90,
    WIDE_DECODE_KERNELS,
    WIDE_FORWARD_KERNELS_SM90,
)
from kernels_on_host import ROOT

pytestmark = pytest.mark.early


def test_tiles_are_those_of_kernels_table() -> None:
    """The tiles and stages of sm90 and of tangents in emulated_kernels.py are those of the library."""
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
    for sizes in ("f32-512", "bf16-512", "f16-512-small"):
        dtype, _, forward_tile, backward_tile, *_ = ATTENTION_KERNELS[sizes]
        for operation, tile in (("forward", forward_tile), ("backward", backward_tile.removesuffix(", 1"))):
            line = rf"{operation} +sm80 +{dtype.rstrip('_')} +512 +{tile.replace(', ', 'x')} +1 "
            assert re.search(line, table), line
    for dtype, _, tile in WIDE_DECODE_KERNELS.values():
        tile_q, tile_k, stages = tile.split(", ")
        line = rf"decode +sm80 +{dtype.rstrip('_')} +576x512 +{tile_q}x{tile_k} +{stages} "
        assert re.search(line, table), line
    for head_dim, *tiles in [sizes[:4] for sizes in (DOUBLE_KERNELS | DOUBLE_SMALL_KERNELS).values()]:
        tiles_of = dict(zip(("forward", "backward", "backward_tangent"), tiles, strict=True))
        tiles_of["forward_tangent"] = tiles_of["backward_tangent"]
        for operation, tile in tiles_of.items():
            if not tile:
                continue
            line = rf"{operation} +sm80 +f64 +{head_dim} +{tile.replace(', ', 'x')} +1 "
            assert re.search(line, table), line
    sums = [sizes[:4] for sizes in BACKWARD_KERNELS_SM90_WITH_LONG_SUMS.values()]
    for dtype, head_dim, tile, stages in [*BACKWARD_KERNELS_SM90.values(), *sums]:
        line = rf"backward +sm90 +{dtype.rstrip('_')} +{head_dim} +{tile.replace(', ', 'x')} +{stages} "
        assert re.search(line, table), line
