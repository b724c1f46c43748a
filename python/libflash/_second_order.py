"""Second derivatives in 16 bits: where their row statistics come from sums that were not rounded.

The tangent of backward needs delta = dout . out - dlse and its tangent, tdelta = tdout . out + dout . tout - tdlse, of each row.
Their errors are the same for all keys of a row: they multiply sums of P K and P tK, which are large where keys or their tangents
have a mean. From out and tout of 16 bits they dominate the result.

The tangent of forward can write both in float32: before it rounds tout, and before it rounds out too if it computes out anew in
the same pass over the keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

CPU = 0  # in place of the number of a CUDA architecture

# What the kernel of sm_90a that computes out and its tangent in one pass does not have.
_NOT_IN_ONE_PASS = frozenset(
    ("softcap", "dropout_p", "alibi_slopes", "bias", "mask", "block_mask", "row_counts")  # row_counts: of a compressed block mask
)


def computes_out_anew(arch: int, head_dims: Sequence[int], options: Iterable[str], backend: str | None = None) -> bool:
    """Whether second derivatives in 16 bits compute out once more, to have both from sums that were not rounded.

    `arch`: of the GPU (90 for compute capability 9.0), or CPU. `options`: the names of those that are not at their defaults. Only
    where one pass gives out and its tangent: where a call of forward came before, it would cost time and round out again.
    """
    if arch == CPU:
        return True
    return arch == 90 and backend in (None, "", "sm90") and max(head_dims) <= 128 and _NOT_IN_ONE_PASS.isdisjoint(options)
