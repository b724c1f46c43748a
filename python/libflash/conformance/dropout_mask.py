"""Which probabilities dropout keeps: the definition that every backend follows.

Element (row, column) of query head `head` in sequence `batch` owns 16 bits of Philox4x32-7:

    key     = (seed low 32 bits, seed high 32 bits)
    counter = (column >> 3,
               row,
               (batch * heads_q + head) mod 2^32,
               offset low 32 bits  XOR  (offset high 32 bits * 0x9E3779B9 mod 2^32))

The eight halves of the four output words, the low half of a word first, belong to columns 8*(column >> 3) .. +7,
in order. The element is kept iff its half >= threshold = min(floor(dropout_p * 2^16 + 1/2), 2^16 - 1), computed in
float64. So it is dropped with the probability threshold / 2^16, and a kept element is multiplied by
1 / (1 - threshold / 2^16): its mean stays.

`row` and `column` count inside the sequence, so neither packing nor tiling nor splitting changes the mask. If the
call has positions, `row` and `column` are positions. With sequence_numbers, head_begin and heads_total, these take
the place of batch, head and heads_q: the sequence's number, head_begin + head, heads_total.

To compare implementations, use a `dropout_p` that is a multiple of 2^-16: then threshold and factor agree exactly.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 7
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW = np.uint64(0xFFFFFFFF)
HIGH_SHIFT = np.uint64(32)


def philox4x32(counter: tuple, key: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Philox4x32 over broadcast arrays of counters; four arrays of 32-bit words, as uint64."""
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c, dtype=np.uint64) for c in counter))
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2  # 32 x 32 bits fit in 64
        c0, c1, c2, c3 = (
            (product1 >> HIGH_SHIFT) ^ c1 ^ np.uint64(k0),
            product1 & LOW,
            (product0 >> HIGH_SHIFT) ^ c3 ^ np.uint64(k1),
            product0 & LOW,
        )
        k0, k1 = (k0 + KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + KEY_STEPS[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_numbers(seed: int, offset: int, sequence_head: int, rows: int | np.ndarray, columns: int | np.ndarray) -> np.ndarray:
    """The (rows, columns) 16-bit numbers of one head; `sequence_head` is batch * heads_q + head. `rows`, `columns`: how many, or
    an array of those that are wanted.
    """
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    offset_low, offset_high = offset & 0xFFFFFFFF, (offset >> 32) & 0xFFFFFFFF
    c3 = offset_low ^ (offset_high * 0x9E3779B9 & 0xFFFFFFFF)
    row, column = (np.arange(x) if np.ndim(x) == 0 else np.asarray(x) for x in (rows, columns))
    octets, which = np.unique(column // 8, return_inverse=True)
    words = philox4x32((octets.astype(np.uint64)[None, :], row.astype(np.uint64)[:, None], sequence_head & 0xFFFFFFFF, c3), key)
    halves = [word >> np.uint64(shift) & np.uint64(0xFFFF) for word in words for shift in (0, 16)]
    return np.stack(halves, axis=-1)[:, which, column % 8]


def threshold(dropout_p: float) -> int:
    """Smaller random numbers drop an element."""
    return int(min(np.floor(np.float64(dropout_p) * 2.0**16 + 0.5), 2.0**16 - 1))


def keep_factor(dropout_p: float) -> float:
    """The factor of kept elements."""
    return 1 / (1 - threshold(dropout_p) / 2**16)


def keep_mask(
    dropout_p: float,
    seed: int,
    offset: int,
    batch: int,
    heads_q: int,
    head: int,
    rows: int | np.ndarray,
    columns: int | np.ndarray,
) -> np.ndarray:
    """Bool (rows, columns): true where the probability is kept."""
    return random_numbers(seed, offset, batch * heads_q + head, rows, columns) >= np.uint64(threshold(dropout_p))
