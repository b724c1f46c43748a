"""When second derivatives in 16 bits compute out again."""

from __future__ import annotations

import pytest
from libflash._second_order import CPU, computes_out_anew


def test_the_cpu_always_does() -> None:
    assert computes_out_anew(CPU, (512, 512), ("bias", "dropout_p"))


@pytest.mark.parametrize(
    ("anew", "arch", "head_dims", "options", "backend"),
    [
        (True, 90, (64, 128), (), None),
        (True, 90, (128, 128), ("causal", "cu_seqlens_q", "learnable_sink"), "sm90"),
        (False, 90, (192, 128), (), None),
        (False, 90, (128, 256), (), None),
        (False, 90, (64, 64), (), "sm80"),
        (False, 80, (64, 64), (), None),
        (False, 100, (64, 64), (), None),
        *[
            (False, 90, (64, 64), (name,), None)
            for name in ("softcap", "dropout_p", "alibi_slopes", "bias", "mask", "row_counts")
        ],
    ],
)
def test_on_cuda_where_one_pass_gives_out_and_its_tangent(
    anew: bool, arch: int, head_dims: tuple[int, int], options: tuple[str, ...], backend: str | None
) -> None:
    """Kernels of sm_90a up to 128 channels without rare options (libflash/cuda/sm90/forward_tangent_instance.h)."""
    assert computes_out_anew(arch, head_dims, options, backend) is anew
