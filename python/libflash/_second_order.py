"""Second derivatives in 16 bits: when their row statistics are computed from unrounded sums.

The tangent of backward needs delta = dout . out - dlse and its tangent, tdelta = tdout . out + dout . tout - tdlse, of each row.
The errors of these statistics are the same for all keys of a row: they are multiplied by the sums P K and P tK, which are large
if keys or their tangents have a nonzero mean. If the statistics are computed from 16-bit out and tout, these errors dominate the
result.

The tangent of forward can write both in float32, computed from unrounded tout and, if it recomputes out in the same pass over
the keys, from unrounded out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

CPU = 0  # in place of the number of a CUDA architecture

# Options that the sm_90a kernel that computes out and its tangent in one pass does not support.
_NOT_IN_ONE_PASS = frozenset(
    ("softcap", "dropout_p", "alibi_slopes", "bias", "mask", "block_mask", "row_counts")  # row_counts: of a compressed block mask
)


def computes_out_anew(arch: int, head_dims: Sequence[int], options: Iterable[str], backend: str | None = None) -> bool:
    """Whether second derivatives in 16 bits recompute out, to compute delta and tdelta from unrounded sums.

    `arch`: of the GPU (90 for compute capability 9.0), or CPU. `options`: the names of the options that are not at their
    defaults. True only if one pass computes out and its tangent: a separate forward call would cost time and round out again.
    """
    if arch == CPU:
        return True
    return arch == 90 and backend in (None, "", "sm90") and max(head_dims) <= 128 and _NOT_IN_ONE_PASS.isdisjoint(options)
