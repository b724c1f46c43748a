"""What context_parallel_attention refuses, it refuses on all ranks, with the same text."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

import libflash.torch as adapter  # noqa: E402
from context_ranks import run_ranks  # noqa: E402


def refusals_job(rank: int) -> list[tuple[str, str]]:
    """The type and text of each refusal."""
    made = []
    x = torch.randn(1, 8, 4, 8)

    def refused(*arrays: Any, **options: Any) -> None:
        try:
            adapter.context_parallel_attention(*arrays, **options)
            made.append(("none", ""))
        except Exception as error:
            made.append((type(error).__name__, str(error)))

    short = torch.randn(1, 6, 4, 8) if rank == 1 else x
    refused(short, short, short)
    refused(x, x.double() if rank == 1 else x, x)
    refused(x, x, x, causal=rank == 0)
    refused(x, x, x, scheme="rings")
    refused(x, x, x, order="striped")
    refused(*(x[:, :7],) * 3)
    refused(*(x[:, :, :3],) * 3, scheme="heads")
    refused(x, x, x, dropout_p=0.5)
    refused(x, x, x, scheme="heads_ring")
    refused(x, x, x, scheme="halo", window_size=(3, 3))
    refused(x[0], x[0], x[0], cu_seqlens=[0, 3, 15])
    if rank == 1:
        refused("no tensor", x, x)
    else:
        refused(x, x, x)
    refused(x, x, x, window_size=("a", 1) if rank == 1 else (-1, -1))
    refused(x, x, x, alibi_slopes=[1.0] * 4 if rank == 0 else torch.ones(4))
    refused(x[0], x[0], x[0], cu_seqlens=[0, 3.5, 16])
    refused(x[0], x[0], x[0], cu_seqlens=[0, True, 16])
    refused(x, x, x, window_size=(True, 0))
    refused(x, x, x, dropout_p=0.5, seed=True)
    refused(x, x, x, softcap=-1.0)
    refused(x, x, x, softcap=True)
    refused(x, x, x, softmax_scale=np.True_)
    refused(x, x, x, dropout_p=False)
    refused(x, x, x, softcap="1")
    refused(x, x, x, dropout_p=0.5, seed=0.0)
    refused(x, x, x, dropout_p=0.5, seed=1, offset="2")
    refused(x, x, x, learnable_sink=torch.ones(4, dtype=torch.int32))
    refused(x, x, x, learnable_sink=torch.ones(4, requires_grad=rank == 0))
    refused(*(y.transpose(-1, -2).contiguous().transpose(-1, -2) for y in (x, x, x)))
    refused(x.to("meta"), x, x)
    mesh = torch.distributed.init_device_mesh("cpu", (2, 1), mesh_dim_names=("heads", "ring"))
    refused(x, x, x, mesh=mesh, scheme="ring")
    refused(*(x[:, :, :3],) * 3, mesh=mesh)
    refused(*(x[:, :, :3],) * 3, mesh=mesh, scheme="heads_ring")
    refused(x, x, x, mesh=mesh, group=torch.distributed.group.WORLD)
    refused(x, x, x, mesh=torch.distributed.init_device_mesh("cpu", (2, 1, 1)))
    refused(x, x, x, mesh=2)
    made.append(("explain", adapter.explain_context_parallel(x, x, x)))
    made.append(("explain", adapter.explain_context_parallel(*(y.expand(3, -1, -1, -1) for y in (x, x, x)))))
    return made


def others_job(rank: int) -> list[tuple[str, str]]:
    """Options of attention that only rank 1 gives, then both."""
    made = []
    x = torch.randn(1, 8, 4, 8)
    for name, value in OTHERS.items():
        for given in (rank == 1, True):
            try:
                adapter.context_parallel_attention(x, x, x, **({name: value} if given else {}))
            except Exception as error:
                made.append((type(error).__name__, str(error)))
    assert adapter.context_parallel_attention(x, x, x, bias=None).shape == x.shape
    return made


OTHERS = {
    "bias": torch.zeros(1, 4, 8, 16), "mask": torch.ones(8, 16, dtype=torch.bool), "block_mask": torch.ones(1, 1, 1, 1),
    "seqused_k": torch.tensor([3]), "layout": "bhsd", "row_begin": 8, "position_ids": torch.arange(8), "biass": 1,
}  # fmt: skip


TEXTS = [
    "q must be the same on all ranks of the group: it is float32 (1, 8, 4, 8) on rank 0 and float32 (1, 6, 4, 8) on rank 1",
    "k: dtype must be float32 (it is float64)",
    "causal must be the same on all ranks of the group: it is True on rank 0 and False on rank 1",
    "scheme is 'rings'; it must be 'auto', 'ring', 'halo', 'all_gather', 'heads' or 'heads_ring'",
    "order is 'striped'; it must be 'contiguous' or 'zigzag'",
    "the sequence has 14 tokens; order 'zigzag' needs a multiple of 4 for 2 ranks",
    "q has 3 heads; scheme 'heads' needs a multiple of the 2 ranks",
    "seed is None; with dropout_p it must be an integer",
    "scheme is 'heads_ring'; it needs a mesh of two dimensions",
    "scheme is 'halo'; it needs order='contiguous'",
    "cu_seqlens ends at 15; the ranks have 16 tokens together",
    "q must be a tensor, not str",
    "window_size is ('a', 1); it must be a pair",
    "alibi_slopes must be a tensor, not list",
    "cu_seqlens is [0, 3.5, 16]; it must be a list or an array of integers",
    "cu_seqlens is [0, True, 16]; it must be a list or an array of integers",
    "window_size is (True, 0); it must be a pair",
    "seed is of type bool; it must be an integer",
    "softcap: must be 0 (off), or positive and finite",
    "softcap is of type bool; it must be a number",
    "softmax_scale is of type bool",
    "dropout_p is of type bool; it must be a number",
    "softcap is of type str; it must be a number",
    "seed is of type float; it must be an integer",
    "offset is of type str; it must be an integer",
    "learnable_sink: dtype must be float32",
    "requires_grad must be the same on all ranks of the group: it is True on rank 0 and False on rank 1",
    "q: the last dimension must be contiguous",
    "q is on the device meta",
    "scheme is 'ring'; a mesh of two dimensions, (heads, ring), needs 'heads_ring'",
    "q has 3 heads; a mesh of two dimensions, (heads, ring), needs a multiple of the 2 ranks",
    "q has 3 heads; scheme 'heads_ring' needs a multiple of the 2 ranks",
    "group and mesh are given",
    "mesh has 3 dimensions; it must have one, (ring,), or two, (heads, ring)",
    "mesh is of type int; it must be a DeviceMesh",
]


def test_other_options_are_refused_by_name_on_all_ranks(tmp_path: pathlib.Path) -> None:
    zero, one = run_ranks(2, tmp_path, others_job)
    for n, name in enumerate(OTHERS):
        kind = "TypeError" if name == "biass" else "UnsupportedError"
        for said in (one[2 * n], one[2 * n + 1], zero[2 * n + 1]):
            assert (said[0], name in said[1]) == (kind, True), said
        assert (zero[2 * n][0], zero[2 * n][1]) == ("InvalidError", f"rank 1: {one[2 * n][1]}")
    assert "gather k and v and call attention" in one[0][1]


def test_refusals_are_the_same_on_all_ranks(tmp_path: pathlib.Path) -> None:
    zero, one = run_ranks(2, tmp_path, refusals_job)
    of_three, of_one = zero.pop()[1], zero.pop()[1]
    assert of_one.startswith("scheme     heads: a rank has 8 tokens, fewer than the 4096")
    sent = [[int(n) for n in re.findall(r"(\d+) sent by a rank", text)] for text in (of_one, of_three)]
    assert sent[0] == [2048, 2048, 2048]  # half of q, k, v, out; K and V: 8 tokens of 4 heads, twice 8 float32
    assert sent[1] == [3 * n for n in sent[0]]  # each entry of the batch is sent
    assert len(zero) == len(TEXTS)
    for (kind, text), (other_kind, other), wanted in zip(zero, one, TEXTS, strict=False):
        assert wanted in text, text
        assert kind == other_kind == "InvalidError"
        assert text.removeprefix("rank 1: ").removeprefix("rank 0: ") == other.removeprefix("rank 0: ")
