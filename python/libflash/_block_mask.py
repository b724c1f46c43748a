"""Block masks in compressed form."""

from __future__ import annotations

from ._arguments import described

TYPE_CHECKING = False  # known to type checkers; importing typing would take half of the time of `import libflash`
if TYPE_CHECKING:
    from typing import Any

__all__ = ["BlockMask"]


class BlockMask:
    """Lists of the 128 x 128 blocks of the scores that are kept. `compress_block_mask` makes it, `block_mask=` accepts it.

    A call with the dense bool array gives the same result: the kernels read it as it is.

    With nq = ceil(seqlen_q / 128) and nk = ceil(seqlen_k / 128), all int32 arrays of one library and device:

    row_counts : (batch or 1, heads_q or 1, nq)       how many blocks each row of blocks keeps
    row_indices: (batch or 1, heads_q or 1, nq, nk)   the numbers of these blocks, ascending; entries past the count are not read
    col_counts : (batch or 1, heads_q or 1, nk)       the same by columns, which the backward reads
    col_indices: (batch or 1, heads_q or 1, nk, nq)
    """

    __slots__ = ("col_counts", "col_indices", "row_counts", "row_indices")

    block_size = 128

    def __init__(self, row_counts: Any, row_indices: Any, col_counts: Any, col_indices: Any) -> None:
        lists = {"row_counts": row_counts, "row_indices": row_indices, "col_counts": col_counts, "col_indices": col_indices}
        for name, x in lists.items():
            if not hasattr(x, "shape"):
                raise TypeError(f"{name} must be an array, not {described(x)}; compress_block_mask makes all four")
        self.row_counts = row_counts
        self.row_indices = row_indices
        self.col_counts = col_counts
        self.col_indices = col_indices

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch or 1, heads_q or 1, nq, nk), the shape of the dense mask."""
        return tuple(self.row_indices.shape)

    def __repr__(self) -> str:
        return f"BlockMask(shape={self.shape}, block_size={self.block_size})"
