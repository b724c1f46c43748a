"""The dropout mask of every kernel, found from the results for special inputs, must be that of the definition.

q = 0 makes every probability 1/n, so that zeros come from the mask alone, and the other results of forward and dv are 1/n times
the factor of kept entries. Forward, dv and dbias each use the mask differently.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from dropout_mask import keep_factor, keep_mask
from gpu_kernels import device_of, parameters, supporting, with_cpu

import libflash

torch = pytest.importorskip("torch")

P, SEED, OFFSET = 0.25, 2**40 + 7, 2**35 + 1
PROBABILITIES = (P, 0.99999)  # the second is rounded to 1 - 2^-16
HEADS, ROWS, KEYS = 3, 200, 333
LENGTHS = (
    (70, 200, 130),
    (333, 41, 150),
)  # of packed queries and keys; row and column of the definition count from the start of the sequence
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}


class Sequences:
    """Inputs of zeros, and access to the rows of each sequence."""

    def __init__(self, kernel: dict, packed: bool, p: float = P) -> None:
        self.kernel, self.packed, self.p = kernel, packed, p
        self.lengths = list(zip(*LENGTHS, strict=True)) if packed else [(ROWS, KEYS)] * 2
        self.options = {"dropout_p": p, "seed": SEED, "offset": OFFSET}
        if packed:
            for name, lengths in zip(("cu_seqlens_q", "cu_seqlens_k"), LENGTHS, strict=True):
                self.options[name] = torch.tensor(np.cumsum((0, *lengths)), dtype=torch.int32, device=device_of(kernel))

    def zeros(self, side: int, dim: str) -> torch.Tensor:
        """Rows of queries (0) or keys (1)."""
        lengths = [pair[side] for pair in self.lengths]
        lead = (sum(lengths),) if self.packed else (len(lengths), lengths[0])
        shape = (*lead, HEADS, self.kernel[dim])
        return torch.zeros(shape, dtype=DTYPES[self.kernel["dtype"]], device=device_of(self.kernel))

    def each(self, x: torch.Tensor, side: int) -> Iterator[torch.Tensor]:
        """The parts of each sequence: (rows, heads, channels)."""
        yield from x.split([pair[side] for pair in self.lengths]) if self.packed else x

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.zeros(0, "head_dim"), self.zeros(1, "head_dim"), self.zeros(1, "head_dim_v")

    def unit_rows(self, side: int, start: int) -> torch.Tensor:
        """Row start + c of each sequence is 1 in channel c and all else 0."""
        made = self.zeros(side, "head_dim_v")
        for rows in self.each(made, side):
            count = max(0, min(rows.shape[0] - start, rows.shape[2]))
            rows[start : start + count, :, :count] = torch.eye(count, dtype=made.dtype, device=made.device)[:, None]
        return made

    def gathered(self, parts: list[torch.Tensor], side: int) -> list[np.ndarray]:
        """The elements of each sequence, where channels stand for the rows of the other side: (heads, rows, other rows)."""
        found = []
        for b, one in enumerate(zip(*(self.each(x, side) for x in parts), strict=True)):
            every = torch.cat(one, dim=-1)[..., : self.lengths[b][1 - side]]
            found.append(every.permute(1, 0, 2).double().cpu().numpy())
        return found

    def check(self, found: list[np.ndarray], *, factor: bool = False) -> None:
        """The zeros are those of the mask; with `factor` the other elements have the right size, too."""
        for b, (rows, keys) in enumerate(self.lengths):
            for head in range(HEADS):
                wanted, what = keep_mask(self.p, SEED, OFFSET, b, HEADS, head, rows, keys), f"sequence {b}, head {head}"
                np.testing.assert_array_equal(found[b][head] != 0, wanted, what)
                if factor:
                    np.testing.assert_allclose(found[b][head], wanted * keep_factor(self.p) / keys, rtol=0.01, err_msg=what)


@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kernel", parameters(supporting(with_cpu("forward"), dropout_p=P)))
def test_forward(kernel: dict, packed: bool, p: float) -> None:
    s = Sequences(kernel, packed, p)
    q, k, _ = s.inputs()
    starts = range(0, max(keys for _, keys in s.lengths), kernel["head_dim_v"])
    parts = [libflash.attention(q, k, s.unit_rows(1, start), kernel=kernel["name"], **s.options) for start in starts]
    s.check(s.gathered(parts, 0), factor=True)


@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kernel", parameters(supporting(with_cpu("backward"), dropout_p=P)))
def test_dv(kernel: dict, packed: bool, p: float) -> None:
    s = Sequences(kernel, packed, p)
    q, k, v = s.inputs()
    o, lse = libflash.attention(q, k, v, return_lse=True, **s.options)
    parts = []
    for start in range(0, max(rows for rows, _ in s.lengths), kernel["head_dim_v"]):
        dout = s.unit_rows(0, start)
        parts.append(libflash.attention_backward(dout, q, k, v, o, lse, kernel=kernel["name"], **s.options)[2])
    s.check([x.transpose(0, 2, 1) for x in s.gathered(parts, 1)], factor=True)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kernel", parameters(supporting(with_cpu("backward"), dropout_p=P, bias="hqk")))
def test_dbias(kernel: dict, packed: bool) -> None:
    """With dp = 1 wherever kept, ds = p (kept / (1 - P) - delta) is positive there and negative elsewhere."""
    s = Sequences(kernel, packed)
    q, k, v = s.inputs()
    dout = s.zeros(0, "head_dim_v")
    v[..., 0] = dout[..., 0] = 1
    longest = [max(pair[side] for pair in s.lengths) for side in (0, 1)]
    s.options["bias"] = torch.zeros(len(s.lengths), HEADS, *longest, dtype=q.dtype, device=q.device)
    o, lse = libflash.attention(q, k, v, return_lse=True, **s.options)
    dbias = torch.full_like(s.options["bias"], torch.nan)
    libflash.attention_backward(dout, q, k, v, o, lse, dbias=dbias, kernel=kernel["name"], **s.options)
    found = []
    for b, (rows, keys) in enumerate(s.lengths):
        assert (dbias[b, :, :rows, :keys] != 0).all()
        found.append((dbias[b, :, :rows, :keys] > 0).cpu().numpy())
        assert not dbias[b, :, rows:].any()
        assert not dbias[b, :, :, keys:].any()
    s.check(found)
