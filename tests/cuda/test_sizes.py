"""Sizes on the GPU: 0, more than the 65535 thread blocks that a grid has in y and z, and more than 2^31 elements."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import python

import libflash

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = "cuda"
FAR = 2**31
MANY = 65535 + 700
CHUNK = 2**26  # elements compared at a time


@pytest.fixture(autouse=True)
def give_back_memory() -> Iterator[None]:
    """Other processes test on the same GPU."""
    yield
    torch.cuda.empty_cache()


def randoms(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(7)
    return [torch.randn(shape, generator=generator, dtype=dtype, device=DEVICE) for shape in shapes]


def everything(q, k, v, dout, **options) -> dict[str, torch.Tensor]:
    """Forward and backward, with outputs that contain NaN before."""
    *batch, rows, heads, _ = q.shape
    out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=q.dtype, device=DEVICE)
    lse = torch.full((*batch, heads, rows), torch.nan, device=DEVICE)
    libflash.attention(q, k, v, out=out, lse=lse, **options)
    made = {f"d{name}": torch.full_like(x, torch.nan) for name, x in {"q": q, "k": k, "v": v}.items()}
    libflash.attention_backward(dout, q, k, v, out, lse, deterministic=True, **made, **options)
    return {"out": out, "lse": lse, **made}


# -- none


NONE = {
    "batch": ((0, 5, 4, 16), (0, 7, 2, 16)),
    "heads": ((2, 5, 0, 16), (2, 7, 0, 16)),
    "query heads": ((2, 5, 0, 16), (2, 7, 2, 16)),
    "rows": ((2, 0, 4, 16), (2, 7, 2, 16)),
    "keys": ((2, 5, 4, 16), (2, 0, 2, 16)),
    "rows and keys": ((2, 0, 4, 16), (2, 0, 2, 16)),
}


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("what", NONE)
def test_none(what: str, sink: bool) -> None:
    """Rows without keys give 0, with the sink as lse, or -inf; gradients of unused inputs are written as 0."""
    q_shape, k_shape = NONE[what]
    q, k, v, dout = randoms(q_shape, k_shape, k_shape, q_shape)
    options = {"learnable_sink": torch.zeros(q_shape[2], device=DEVICE)} if sink else {}
    for causal in (False, True):
        made = everything(q, k, v, dout, causal=causal, **options)
        for name, x in made.items():
            wanted = -torch.inf if name == "lse" and not sink else 0
            assert (x == wanted).all(), name


@pytest.mark.parametrize("lengths", [((0, 0), (0, 0)), ((0, 3), (4, 0)), ((3, 0), (0, 0))])
def test_packed_sequences_of_nothing(lengths: tuple) -> None:
    q, k, v, dout = randoms((3, 4, 16), (4, 2, 16), (4, 2, 16), (3, 4, 16))
    cu_q, cu_k = (torch.tensor([0, *part], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(DEVICE) for part in lengths)
    made = everything(q, k, v, dout, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    for name, side in {"out": 0, "dq": 0, "dk": 1, "dv": 1}.items():
        rows = sum(lengths[side])
        assert not made[name][:rows].any(), name
        assert made[name][rows:].isnan().all(), f"{name}: rows outside every sequence were written"


# -- many


def exact(q, k, v, dout, causal: bool = False) -> dict[str, torch.Tensor]:
    """All results in float64 by PyTorch, without its matrix products, whose batch size is limited."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(group, 2) for x in (k, v))
    s = (q[:, :, None] * keys[:, None]).sum(-1) * q.shape[-1] ** -0.5  # (batch, row, key, head)
    if causal:
        visible = torch.ones(s.shape[1:3], dtype=torch.bool, device=DEVICE).tril(s.shape[2] - s.shape[1])
        s = s.masked_fill(~visible[:, :, None], -torch.inf)
    out = (s.softmax(2)[..., None] * values[:, None]).sum(2)
    gradients = torch.autograd.grad(out, (q, k, v), dout.double())
    lse = s.logsumexp(2).transpose(1, 2)
    return {name: x.detach() for name, x in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True)}


def assert_close(got: dict, wanted: dict) -> None:
    """Each row within 2% of its norm, or of 1, the norm of a typical row: some twenty roundings of half precision.
    A row that is missing or of another head differs by its whole norm."""
    for name, x in wanted.items():
        error = got[name].double() - x
        if name == "lse":
            assert (error.abs() <= 1e-4).all(), name
            continue
        assert (error.norm(dim=-1) <= 0.02 * (1 + x.norm(dim=-1))).all(), name  # false for NaN


SHAPES = {
    "batch": ((MANY, 3, 1, 8), (MANY, 5, 1, 8)),
    "heads": ((1, 3, MANY, 8), (1, 5, MANY, 8)),
    "key heads": ((1, 3, 2 * MANY, 8), (1, 5, MANY, 8)),
    "batch * heads": ((300, 3, 300, 8), (300, 5, 300, 8)),
}


@pytest.mark.parametrize("what", SHAPES)
def test_many(what: str) -> None:
    """A grid has 65535 blocks in y and z."""
    q_shape, k_shape = SHAPES[what]
    x = randoms(q_shape, k_shape, k_shape, q_shape)
    assert_close(everything(*x, causal=True), exact(*x, causal=True))


def test_many_sequences() -> None:
    """Packed sequences of 0 to 3 rows and keys."""
    lengths = torch.arange(MANY) % 4
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32).to(DEVICE)
    total = int(lengths.sum())
    x = randoms((total, 2, 16), (total, 1, 16), (total, 1, 16), (total, 2, 16))
    made = everything(*x, cu_seqlens_q=cu, cu_seqlens_k=cu)
    first = cu[:-1].long()
    for length in (1, 2, 3):
        rows = first[length::4, None] + torch.arange(length, device=DEVICE)  # (sequences, rows)
        wanted = exact(*(y[rows] for y in x))
        wanted["lse"] = wanted["lse"].transpose(0, 1)  # heads first
        got = {name: y[:, rows] if name == "lse" else y[rows] for name, y in made.items()}
        assert_close(got, wanted)


@pytest.mark.parametrize("long", ["rows", "keys"])
def test_many_tiles(long: str) -> None:
    """More than 65535 tiles of 128 rows, or of keys."""
    count = 128 * MANY
    shapes = {"rows": ((1, count, 1, 8), (1, 16, 1, 8)), "keys": ((1, 16, 1, 8), (1, count, 1, 8))}[long]
    q, k, v, dout = randoms(
        shapes[0], shapes[1], shapes[1], shapes[0], dtype=torch.bfloat16
    )  # for probabilities of one in millions
    made = everything(q, k, v, dout)
    s = torch.einsum("bihd,bjhd->bij", q.float(), k.float()) * 8**-0.5
    p = (s - s.logsumexp(-1, keepdim=True)).exp()
    dp = torch.einsum("bihd,bjhd->bij", dout.float(), v.float())
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * 8**-0.5
    wanted = {
        "out": torch.einsum("bij,bjhd->bihd", p, v.float()),
        "dq": torch.einsum("bij,bjhd->bihd", ds, k.float()),
        "dk": torch.einsum("bij,bihd->bjhd", ds, q.float()),
        "dv": torch.einsum("bij,bihd->bjhd", p, dout.float()),
    }
    for name, x in wanted.items():
        for part in (slice(None), slice(-200, None)):  # a typical error is a quarter of the limit
            difference = (made[name][:, part].float() - x[:, part]).square().mean().sqrt()
            limit = 0.01 + 2**-28 * count  # the adders of tensor cores truncate
            assert difference <= limit * x[:, part].square().mean().sqrt(), f"{name} {part}"


# -- large


def chunks(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """A few rows of a large tensor at a time, to avoid temporaries of its size."""
    rows = max(1, CHUNK // x[0].numel())
    for start in range(0, len(x), rows):
        yield x[start : start + rows]


def test_large_forward() -> None:
    """More than 2^31 elements in q and out: heads around the limit against separate calls."""
    heads, rows, dim = 1100, 2**15, 64
    q, k, v = randoms((1, rows, heads, dim), (1, 32, heads, dim), (1, 32, heads, dim))
    out = torch.full_like(q, torch.nan)
    lse = torch.full((1, heads, rows), torch.nan, device=DEVICE)
    assert out.numel() > FAR
    libflash.attention(q, k, v, out=out, lse=lse)
    assert not any(part.isnan().any() for part in chunks(out[0]))
    assert not lse.isnan().any()
    for head in (0, 1, 511, heads - 1):
        alone = [x[:, :, head : head + 1].contiguous() for x in (q, k, v)]
        wanted, wanted_lse = libflash.attention(*alone, return_lse=True)
        torch.testing.assert_close(out[:, :, head : head + 1], wanted, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(lse[:, head : head + 1], wanted_lse, rtol=1e-5, atol=1e-5)


def test_large_backward() -> None:
    """More than 2^31 elements in dq, and in its accumulator: inputs repeated along the batch, so every entry is the same."""
    batch, rows, heads, dim = 520, 4096, 16, 64
    q, k, v, dout = randoms((1, rows, heads, dim), (1, 16, heads, dim), (1, 16, heads, dim), (1, rows, heads, dim))
    out, lse = libflash.attention(q, k, v, return_lse=True)
    wanted = dict(zip(("dq", "dk", "dv"), libflash.attention_backward(dout, q, k, v, out, lse), strict=True))
    repeated = [x.expand(batch, *x.shape[1:]) for x in (dout, q, k, v, out, lse)]
    made = {name: torch.full((batch, *x.shape[1:]), torch.nan, dtype=x.dtype, device=DEVICE) for name, x in wanted.items()}
    assert made["dq"].numel() > FAR
    libflash.attention_backward(*repeated, **made)
    for name, x in wanted.items():
        limit = 0.01 * x.float().abs().max()
        for part in chunks(made[name]):
            assert (part.float() - x.float()).abs().max() <= limit, name  # false for NaN


# -- too large for the kernels' 32-bit counts

TOO_LARGE = """
    import abi, libflash, torch
    memory = torch.zeros(2**16, dtype=torch.uint8, device="cuda")
    heads, dim = 1, 8

    def tensor(at, batch, rows, row_stride, batch_stride):
        view = abi.Tensor(data=memory.data_ptr() + at, dtype=abi.FLOAT16, device_type=abi.CUDA_DEVICE, ndim=4)
        view.shape[:], view.stride[:] = (batch, rows, heads, dim), (batch_stride, row_stride, dim, 1)
        return abi.pointer(view)

    batch, rows, keys = {sizes}
    q, k = tensor(0, batch, rows, 0, 0), tensor(0, batch, keys, 0, 0)
    out = tensor(4096, batch, rows, dim, rows * dim)
    status = abi.lib.flash_attention_forward(q, k, k, out, None, None, None, 0, None)
    print(abi.status_name(status))
    torch.cuda.synchronize()
    x = torch.ones(1, 4, 1, 8, dtype=torch.float16, device="cuda")
    print(bool((libflash.attention(x, x, x) == 1).all()))
"""
BEYOND = {
    "a grid": (FAR, 1, 1),
    "the batch": (2 * FAR + 1, 1, 1),
    "the rows": (1, FAR + 5, 1),
    "the keys": (1, 1, FAR + 5),
}


@pytest.mark.parametrize("what", BEYOND)
def test_beyond(what: str) -> None:
    """Refused, or reported as a failed launch: never OK for a part of the work; and the next call succeeds.
    Inputs have strides of 0 and need no memory; the output is described but not allocated, so this runs in a separate process."""
    done = python(TOO_LARGE.format(sizes=BEYOND[what]))
    status, *good = done.stdout.split() or ["nothing"]
    assert status in ("UNSUPPORTED", "INVALID", "CUDA"), done.stderr
    assert good == ["True"], done.stderr
