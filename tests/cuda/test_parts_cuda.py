"""Parts of a problem on a GPU: one device makes the calls of all ranks of a ring, one after another, and the results are those of
the whole problem. The calls go on from each other and add up their gradients, in float32 or float64.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import tolerance
from case import Case
from libflash._context_layout import tokens_of

import libflash

torch = pytest.importorskip("torch")
from gpu_case import Problem, full_of_nan, problem, to_numpy, wide_type  # noqa: E402  (needs torch)

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = [pytest.param("cuda", marks=CUDA), "cpu"]  # on the CPU: a test of this file
RANKS = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (101, -1), "softcap": 8.0},
    "dropout": {"causal": True, "dropout_p": 0.25, "seed": 5, "sink": True, "dlse": True},
    "full": {"dropout_p": 0.5, "seed": 2**40},
}
# head_dim, type, options, order, deterministic. Tokens: chunks of 41 with zigzag, so that positions have any remainder mod 4.
TYPES = {
    64: ("bf16", "fp16", "fp32", "fp64"),
    128: ("bf16", "fp16", "fp32"),
    256: ("bf16", "fp32", "fp64"),
    512: ("bf16", "fp16", "fp32", "fp64"),
}
CASES = [
    (dim, dtype, name, order, dim == 128)
    for dim, dtypes in TYPES.items()
    for dtype in dtypes
    for name, order in (("causal", "zigzag"), ("window", "contiguous"), ("dropout", "zigzag"), ("full", "contiguous"))
]


def case_of(dim: int, dtype: str, name: str) -> Case:
    tokens = 41 * 2 * RANKS
    return Case(f"parts-cuda-{name}-{dim}-{dtype}", dtype, 1, tokens, tokens, 4, 2, dim, **OPTIONS[name])


@cache
def expected(case: Case) -> tolerance.Expected:
    x = case.inputs()
    return tolerance.expect(x.q, x.k, x.v, dout=x.dout, dlse=x.dlse, **x.options)


@dataclasses.dataclass
class Ring:
    p: Problem
    order: str

    def members(self, rank: int) -> torch.Tensor:
        return torch.from_numpy(tokens_of(self.order, self.p.q.shape[1], rank, RANKS).copy()).to(self.p.q.device)

    def part(self, x: torch.Tensor, rank: int, dim: int = 1) -> torch.Tensor:
        return x.index_select(dim, self.members(rank)).contiguous()

    def side(self, name: str, rank: int) -> dict[str, Any]:
        """Contiguous: alternately one number and one for each sequence."""
        members = self.members(rank)
        if self.order == "zigzag":
            return {f"{name}_positions": members.to(torch.int32).expand(len(self.p.q), -1).contiguous()}
        first = int(members[0])
        return {f"{name}_begin": first if rank % 2 else torch.full((len(self.p.q),), first, dtype=torch.int32).to(members.device)}

    def options(self, rank: int, step: int) -> dict[str, Any]:
        owner = (rank - step) % RANKS
        options = {name: x for name, x in self.p.options.items() if name != "learnable_sink" or step == 0}
        return options | self.side("row", rank) | self.side("column", owner)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        p = self.p
        out = full_of_nan((*p.q.shape[:-1], p.v.shape[-1]), p.q, wide_type(p.q))
        lse = full_of_nan((len(p.q), p.q.shape[2], p.q.shape[1]), p.q, wide_type(p.q))
        for rank in range(RANKS):
            q = self.part(p.q, rank)
            mine, my_lse = self.part(out, rank), self.part(lse, rank, 2)
            for step in range(RANKS):
                owner = (rank - step) % RANKS
                k, v = self.part(p.k, owner), self.part(p.v, owner)
                libflash.attention(q, k, v, out=mine, lse=my_lse, resume=step > 0, **self.options(rank, step))
            out[:, self.members(rank)], lse[:, :, self.members(rank)] = mine, my_lse
        return out, lse

    def backward(self, out: torch.Tensor, lse: torch.Tensor, deterministic: bool) -> dict[str, torch.Tensor]:
        p = self.p
        total = {name: torch.zeros(x.shape, dtype=wide_type(x)).to(x.device) for name, x in (("dk", p.k), ("dv", p.v))}
        total["dq"] = full_of_nan(p.q.shape, p.q, wide_type(p.q))
        sink = p.options.get("learnable_sink")
        if sink is not None:
            total["dsink"] = torch.zeros_like(sink)
        for rank in range(RANKS):
            q, dout = self.part(p.q, rank), self.part(p.dout, rank)
            read, my_lse = self.part(out.to(p.q.dtype), rank), self.part(lse, rank, 2)
            dq = full_of_nan(q.shape, q, wide_type(q))
            delta = full_of_nan(my_lse.shape, q, wide_type(q))
            for step in range(RANKS):
                members = self.members((rank - step) % RANKS)
                k, v = p.k.index_select(1, members), p.v.index_select(1, members)
                options = self.options(rank, step) | {"add": step > 0, "deterministic": deterministic, "dq": dq, "delta": delta}
                if step == 0:
                    made = {f"d{name}": full_of_nan(x.shape, x, wide_type(x)) for name, x in (("k", k), ("v", v))}
                    options["dlse"] = None if p.dlse is None else self.part(p.dlse, rank, 2)
                    if sink is not None:
                        options["dsink"] = torch.empty_like(sink)
                else:  # added to what is there
                    made = {name: total[name].index_select(1, members) for name in ("dk", "dv")}
                    read = torch.full_like(read, torch.nan)  # delta has what is needed of it
                libflash.attention_backward(dout, q, k, v, read, my_lse, **made, **options)
                for name, x in made.items():
                    total[name][:, members] = x if step else total[name][:, members] + x
                if "dsink" in options:
                    total["dsink"] += options["dsink"]
            total["dq"][:, self.members(rank)] = dq
        return total


@pytest.mark.parametrize(("dim", "dtype", "name", "order", "deterministic"), CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_ring(device: str, dim: int, dtype: str, name: str, order: str, deterministic: bool) -> None:
    """`expect` allows for one rounding of the result; between the calls out is float32."""
    if device == "cpu" and (dim != 64 or dtype == "fp16"):
        pytest.skip("the CPU has tests of its own")
    case = case_of(dim, dtype, name)
    ring = Ring(problem(case, device), order)
    kind = ring.p.inputs.q.dtype
    out, lse = ring.forward()
    made = {"o": to_numpy(out.to(ring.p.q.dtype), kind), "lse": lse.cpu().numpy()}
    for gradient, x in ring.backward(out, lse, deterministic).items():
        made[gradient] = to_numpy(x if gradient == "dsink" else x.to(ring.p.q.dtype), kind)
    tolerance.check(made, expected(case), label=str(case))


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("device", DEVICES)
def test_dropout_mask_is_that_of_the_whole(device: str, order: str) -> None:
    """With unit vectors as values, out is the matrix of the probabilities, 0 where one is dropped."""
    case = Case(f"parts-mask-{order}", "bf16", 2, 42, 42, 4, 2, 64, head_dim_v=42, dropout_p=0.5, seed=3)
    p = problem(case, device)
    p.v.copy_(torch.eye(42).reshape(1, 42, 1, 42).expand(p.v.shape))
    numbers = torch.tensor([0, 1], dtype=torch.int32)
    p.options |= {"sequence_numbers": numbers.to(p.q.device), "head_begin": 0, "heads_total": 4}
    out, _ = Ring(p, order).forward()
    whole = libflash.attention(p.q.cpu(), p.k.cpu(), p.v.cpu(), dropout_p=0.5, seed=3)
    assert torch.equal(out.cpu() == 0, whole == 0)
    # Half of the heads, the last ones, of the second sequence.
    part = {"sequence_numbers": numbers[1:].to(p.q.device), "head_begin": 2, "heads_total": 4, "dropout_p": 0.5, "seed": 3}
    some = libflash.attention(p.q[1:, :, 2:], p.k[1:, :, 1:], p.v[1:, :, 1:], **part)
    assert torch.equal(some.cpu() == 0, whole[1:, :, 2:] == 0)


@CUDA
def test_parts_are_left_to_sm80() -> None:
    q = torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16).to("cuda")
    text = libflash.explain(q, q, q, causal=True, row_begin=64, column_begin=0)
    assert "forward_sm80_bf16_d64, backend sm80" in text
    slopes, members = torch.ones(2).to("cuda"), torch.arange(64, dtype=torch.int32).reshape(1, 64).to("cuda")
    libflash.attention(q, q, q, alibi_slopes=slopes, row_begin=64, column_begin=0)
    with pytest.raises(libflash.UnsupportedError, match="alibi_slopes"):
        libflash.attention(q, q, q, alibi_slopes=slopes, row_positions=members, column_begin=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_block_masks_with_positions(dtype: str, dim: int, device: str) -> None:
    """Row 0 is at position 100, so rows see keys that the causal rule without positions would hide."""
    torch.manual_seed(dim)
    q, k, v, dout = (torch.randn(1, n, 2, dim).to(getattr(torch, dtype)) for n in (384, 256, 256, 384))
    blocks = torch.tensor([[True, False], [False, True], [True, True]]).view(1, 1, 3, 2)
    sees = torch.arange(256) <= torch.arange(384)[:, None] + 100
    visible = blocks.repeat_interleave(128, 2).repeat_interleave(128, 3) & sees
    wanted = [*libflash.attention(q, k, v, mask=visible, return_lse=True)]
    wanted += libflash.attention_backward(dout, q, k, v, *wanted, mask=visible)
    q, k, v, dout = (x.to(device) for x in (q, k, v, dout))
    options = {"causal": True, "row_begin": 100, "column_begin": 0, "block_mask": blocks.to(device)}
    got = [*libflash.attention(q, k, v, return_lse=True, **options)]
    got += libflash.attention_backward(dout, q, k, v, *got, **options)
    bound = {"bfloat16": 3e-2, "float32": 1e-4, "float64": 1e-12}[dtype]
    for x, exact in zip(got, wanted, strict=True):
        assert (x.cpu().double() - exact.double()).abs().max() <= bound * exact.double().abs().max()
