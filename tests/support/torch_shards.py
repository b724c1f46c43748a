"""Run by test_torch_sharding.py in each of two processes: attention on DTensors, on the CPU."""

from __future__ import annotations

import sys

import libflash.torch
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from two_processes import leave

import libflash
from libflash import flash_attn


def check(placements: list, layout: str, **options: object) -> None:
    """Results and gradients are those of the full tensors, and are sharded like q, k and v."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(5)
    axes = ["bshd".index(axis) for axis in layout]
    whole = [torch.randn(shape).permute(axes).contiguous() for shape in ((4, 6, 8, 16), (4, 9, 4, 16), (4, 9, 4, 12))]
    bias, sink = torch.randn(8, 6, 9), torch.randn(8)
    leaves = [x.requires_grad_() for x in (*whole, bias, sink)]
    shards = [distribute_tensor(x.detach(), mesh, placements).requires_grad_() for x in whole]
    shards += [distribute_tensor(x.detach(), mesh, [Replicate()]).requires_grad_() for x in (bias, sink)]

    def run(q, k, v, bias, sink):
        return libflash.torch.attention(q, k, v, bias=bias, learnable_sink=sink, layout=layout, return_lse=True, **options)

    out, lse = run(*leaves)
    out_shards, lse_shards = run(*shards)
    assert out_shards.placements == tuple(placements), out_shards.placements
    torch.testing.assert_close(out_shards.full_tensor(), out)
    torch.testing.assert_close(lse_shards.full_tensor(), lse)
    wanted = torch.autograd.grad(out.square().sum() + lse.sum(), leaves)
    got = torch.autograd.grad(out_shards.square().sum() + lse_shards.sum(), shards)
    for name, x, y in zip("qkvbs", got, wanted, strict=True):
        torch.testing.assert_close(x.full_tensor(), y, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    assert got[0].placements == tuple(placements), got[0].placements


def check_heads_of_a_group_stay_together() -> None:
    """Three key heads on two processes are gathered, not sharded."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(6)
    whole = [torch.randn(2, 5, 12, 8), torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 8)]
    shards = [distribute_tensor(x, mesh, [Shard(2)]) for x in whole]
    torch.testing.assert_close(libflash.torch.attention(*shards).full_tensor(), libflash.torch.attention(*whole))


def check_dropout_masks_are_those_of_the_whole() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(7)
    whole = [torch.randn(4, 5, 2, 8) for _ in range(3)]
    shards = [distribute_tensor(x, mesh, [Shard(0)]) for x in whole]
    for dropout_p in (0.0, 0.5):
        got = libflash.torch.attention(*shards, dropout_p=dropout_p, seed=0).full_tensor()
        torch.testing.assert_close(got, libflash.torch.attention(*whole, dropout_p=dropout_p, seed=0))
    numbers = torch.tensor([3, 4])
    got = libflash.torch.attention(*shards, dropout_p=0.5, seed=distribute_tensor(numbers, mesh, [Replicate()])).full_tensor()
    torch.testing.assert_close(got, libflash.torch.attention(*whole, dropout_p=0.5, seed=numbers))


def check_merge_and_decode() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(8)
    q, k, v = (torch.randn(4, 5, 2, 8) for _ in range(3))
    parts = [libflash.torch.attention(q, k[:, i : i + 3], v[:, i : i + 3], return_lse=True) for i in (0, 3)]
    wanted = libflash.torch.merge(*zip(*parts, strict=True))
    for out_place, lse_place in ((Shard(0), Shard(0)), (Shard(2), Shard(1)), (Replicate(), Replicate())):
        outs = [distribute_tensor(out, mesh, [out_place]) for out, _ in parts]
        lses = [distribute_tensor(lse, mesh, [lse_place]) for _, lse in parts]
        got = libflash.torch.merge(outs, lses)
        torch.testing.assert_close(tuple(x.full_tensor() for x in got), wanted)
        assert got[0].placements == (out_place,)
    lengths = torch.tensor([5, 2, 3, 4], dtype=torch.int32)
    shards = [distribute_tensor(x, mesh, [Shard(0)]) for x in (q, k, v, lengths)]
    got = libflash.torch.decode(*shards[:3], cache_seqlens=shards[3])
    assert got.placements == (Shard(0),)
    torch.testing.assert_close(got.full_tensor(), libflash.torch.decode(q, k, v, cache_seqlens=lengths))


def check_functions_of_flash_attn() -> None:
    """Numbers become DTensors where the others are; dropout, whose mask each rank would draw, is refused by the caller's name."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(9)
    q, k, v = (torch.randn(4, 5, 2, 8) for _ in range(3))
    shards = [distribute_tensor(x, mesh, [Shard(0)]) for x in (q, k, v)]
    got = flash_attn.flash_attn_with_kvcache(*shards, cache_seqlens=3, causal=True)
    assert got.placements == (Shard(0),)
    torch.testing.assert_close(got.full_tensor(), flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=3, causal=True))
    compiled = torch.compile(flash_attn.flash_attn_with_kvcache, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*shards, cache_seqlens=3, causal=True).full_tensor(), got.full_tensor())
    got = libflash.torch.decode(*shards, k_scale=0.5, v_scale=2.0)
    torch.testing.assert_close(got.full_tensor(), libflash.torch.decode(q, k, v, k_scale=0.5, v_scale=2.0))

    whole = [q[0], k, v, *(torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 5], [0, 6, 14], [[1, 3], [2, 0]]))]
    places = [Shard(1), Shard(2), Shard(2), *[Replicate()] * 3]
    given = [distribute_tensor(x, mesh, [place]) for x, place in zip(whole, places, strict=True)]

    def paged(q, k, v, cu_q, cu_k, table):
        return flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 3, 8, causal=True, block_table=table)

    torch.testing.assert_close(paged(*given).full_tensor(), paged(*whole))
    for x in (given, whole):
        x[0].requires_grad_()
    got, wanted = (torch.autograd.grad(paged(*x).sin().sum(), x[0])[0] for x in (given, whole))
    torch.testing.assert_close(got.full_tensor(), wanted)

    refused = refusal(lambda: flash_attn.flash_attn_func(*shards, 0.5))
    assert "dropout_p is 0.5; with DTensors it must be 0 here" in refused
    assert "libflash.torch.attention" in refused


def refusal(call) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("was not refused")


def check_refusals_name_the_dtensor() -> None:
    mesh = init_device_mesh("cpu", (2,))
    q = torch.randn(2, 4, 2, 8)
    shard = distribute_tensor(q, mesh, [Replicate()])
    assert "DTensor" in refusal(lambda: libflash.torch.attention(shard, q, q))
    assert "DTensor" in refusal(lambda: libflash.torch.attention(q, shard, q))
    assert "DTensor" in refusal(lambda: libflash.attention(q, q, shard))
    refused = refusal(lambda: libflash.attention_backward(q, q, shard, q, q, q))
    assert "k is a torch.distributed.tensor.DTensor" in refused
    assert "k.to_local() is this rank's part, k.full_tensor() the whole" in refused
    libflash.attention(q, shard.full_tensor(), shard.to_local())
    for seed, given in ((None, "None"), (torch.tensor([3, 4]), "a plain tensor")):  # each rank would draw numbers of its own
        refused = refusal(lambda seed=seed: libflash.torch.attention(shard, shard, shard, dropout_p=0.5, seed=seed))
        assert f"seed is {given}; for DTensors" in refused
    plain = refusal(lambda: libflash.torch.decode(shard, shard, shard, cache_seqlens=torch.tensor([3, 3], dtype=torch.int32)))
    assert "cache_seqlens is a plain tensor, and q is a DTensor; make" in plain
    assert "outs[1] is a plain tensor, and outs[0] is" in refusal(lambda: libflash.torch.merge([shard, q], [shard, q]))
    slots = torch.arange(4)
    assert "slots is a plain tensor" in refusal(lambda: libflash.torch.cache_write(shard, shard, shard, shard, slots))
    assert "out is a DTensor, and attention_out" in refusal(lambda: libflash.torch.attention(shard, shard, shard, out=shard))
    appended = refusal(lambda: libflash.torch.decode(shard, shard, shard, k=shard, v=shard))
    assert "decode_append" in appended
    assert "shard" in appended
    assert isinstance(libflash.attention(shard, shard, shard), DTensor)


def main() -> None:
    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for layout in ("bshd", "bhsd", "sbhd"):
        for by in "bh":
            check([Shard(layout.index(by))], layout, causal=True)
        check([Replicate()], layout)
    check_heads_of_a_group_stay_together()
    check_dropout_masks_are_those_of_the_whole()
    check_merge_and_decode()
    check_functions_of_flash_attn()
    check_refusals_name_the_dtensor()
    dist.destroy_process_group()
    leave()


main()
