"""Calls without sequences, heads, queries or keys, by every kernel: gradients that have elements become zero, and keys are
appended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import abi
import pytest
from case import Case
from empty_problems import NONE
from gpu_kernels import TYPES, device_of, kernels_of_many_rows, parameters, supports, widths, with_cpu

import libflash

torch = pytest.importorskip("torch")
from gpu_tangent import run  # noqa: E402  (needs torch)

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
C_TYPES = dict(zip(DTYPES.values(), (abi.FLOAT16, abi.BFLOAT16, abi.FLOAT32, abi.FLOAT64), strict=True)) | {torch.bool: abi.BOOL}
Tensors = dict[str, "torch.Tensor"]


def nan_like(x: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.full_like(x, torch.nan, **options)


def arrays_of(kernel: dict, what: str, *, packed: bool) -> tuple[Tensors, dict[str, Any]]:
    """The arrays without which there is no call, and the options that say which sequence a row belongs to."""
    batch, queries, heads, keys, heads_k = NONE[what]
    dtype, device = DTYPES[kernel["dtype"]], device_of(kernel)

    def rows(count: int, of: int, channels: int, fill: float) -> torch.Tensor:
        shape = (batch * count,) if packed else (batch, count)
        return torch.full((*shape, of, channels), fill, dtype=dtype, device=device)

    dim, dim_v = kernel["head_dim"], kernel["head_dim_v"]
    x = {"dout": rows(queries, heads, dim_v, 1), "q": rows(queries, heads, dim, 1)}
    x |= {"k": rows(keys, heads_k, dim, 1), "v": rows(keys, heads_k, dim_v, 1), "out": rows(queries, heads, dim_v, 0)}
    shape = (heads, batch * queries) if packed else (batch, heads, queries)
    x["lse"] = torch.zeros(shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return x, {"cu_seqlens_q": starts * queries, "cu_seqlens_k": starts * keys} if packed else {}


def options_of(kernel: dict, what: str) -> Iterator[dict[str, Any]]:
    """Of a dense problem: each with a sink, and what the kernel has of the others."""
    batch, queries, heads, keys, _ = NONE[what]
    device, dtype = device_of(kernel), DTYPES[kernel["dtype"]]

    def has(**options: Any) -> bool:
        return supports(kernel, Case("", dtype=TYPES[kernel["dtype"]], **widths(kernel), **options))

    sink = {"learnable_sink": torch.zeros(heads, dtype=dtype, device=device)}
    yield sink
    slopes = torch.full((heads,), 0.1, device=device)
    if has(alibi="h"):
        yield sink | {"alibi_slopes": slopes, "softcap": 5.0}
    for of in (1, heads) if has(block_mask="h") else ():
        mask = torch.ones(1, of, -(-queries // 128), -(-keys // 128), dtype=torch.bool, device=device)
        yield sink | {"block_mask": mask}
    for axes in ("hqk", "qk", "hk", "bq", "") if has(bias="hqk") else ():
        sizes = {"b": batch, "h": heads, "q": queries, "k": keys}
        bias = torch.zeros([size if name in axes else 1 for name, size in sizes.items()], dtype=dtype, device=device)
        yield sink | {"bias": bias, "alibi_slopes": slopes}


def assert_zero(made: Tensors, note: Any) -> None:
    for name, x in made.items():
        assert (x == 0).all(), (name, note)  # false for NaN


def requested(options: dict[str, Any]) -> Tensors:
    """The gradients of sink and bias that the options have."""
    names = {"sink": "learnable_sink", "bias": "bias"}
    return {f"d{name}": nan_like(options[of]) for name, of in names.items() if of in options}


@pytest.mark.parametrize("what", NONE)
@pytest.mark.parametrize("kernel", parameters(with_cpu("backward")))
def test_backward(kernel: dict, what: str) -> None:
    x, _ = arrays_of(kernel, what, packed=False)
    for options in options_of(kernel, what):
        for deterministic in (False, True)[: 1 if "block_mask" in options else 2]:
            made = {f"d{name}": nan_like(x[name]) for name in "qkv"} | requested(options)
            libflash.attention_backward(**x, **made, **options, kernel=kernel["name"], deterministic=deterministic)
            assert_zero(made, options.keys())


@pytest.mark.parametrize("what", NONE)
@pytest.mark.parametrize("kernel", parameters(with_cpu("backward")))
def test_backward_of_packed_sequences(kernel: dict, what: str) -> None:
    x, packing = arrays_of(kernel, what, packed=True)
    options = {"learnable_sink": torch.zeros(x["q"].shape[1], device=device_of(kernel)), "kernel": kernel["name"]}
    made = {f"d{name}": nan_like(x[name]) for name in "qkv"} | requested(options)
    libflash.attention_backward(**x, **made, **options, **packing)
    assert_zero(made, what)


@pytest.mark.parametrize("what", NONE)
@pytest.mark.parametrize("kernel", parameters([k for k in with_cpu("backward") if k["backend"] != "sm90"]))
def test_backward_that_adds(kernel: dict, what: str) -> None:
    """Only the gradients of sink and bias are replaced."""
    x, _ = arrays_of(kernel, what, packed=False)
    number = torch.float64 if kernel["dtype"] == "f64" else torch.float32
    for options in options_of(kernel, what):
        sums, made = {f"d{name}": torch.full_like(x[name], 3, dtype=number) for name in "qkv"}, requested(options)
        libflash.attention_backward(**x, **sums, **made, **options, kernel=kernel["name"], add=True)
        assert_zero(made, options.keys())
        assert all((total == 3).all() for total in sums.values())


def c_tensor(x: torch.Tensor) -> abi.Tensor:
    view = abi.Tensor(data=x.data_ptr(), dtype=C_TYPES[x.dtype], ndim=x.ndim)
    view.shape[: x.ndim], view.stride[: x.ndim] = x.shape, x.stride()
    if x.device.type == "cuda":
        view.device_type, view.device_id = abi.CUDA_DEVICE, x.device.index
    return view


def c_tensors(named: Tensors) -> dict[str, abi.Tensor]:
    return {name: c_tensor(x) for name, x in named.items()}


@pytest.mark.parametrize("gradients", [False, True], ids=["", "gradients"])
@pytest.mark.parametrize("what", NONE)
@pytest.mark.parametrize("kernel", parameters(with_cpu("backward_tangent")))
def test_backward_tangent(kernel: dict, what: str, gradients: bool) -> None:
    """Through the C interface, where all outputs are the caller's."""
    x, _ = arrays_of(kernel, what, packed=False)
    of_rows = {"out": x["out"], "lse": x["lse"], "dout": x["dout"]} | {name: x[name] for name in "qkv"}
    for options in options_of(kernel, what):
        softcap = {"softcap": options.pop("softcap", 0.0), "kernel": kernel["name"].encode()}
        made, primal = ({f"d{name}": nan_like(x[name]) for name in "qkv"} | requested(options) for _ in range(2))
        arrays = [*x.values(), *(primal[f"d{name}"] if gradients else None for name in "qkv")]
        fields = options | {name: primal[name] for name in requested(options) if gradients}
        views = tuple(None if array is None else c_tensor(array) for array in arrays)
        run("backward_tangent", views, c_tensors(of_rows | made), c_tensors(fields) | softcap, device_of(kernel))
        assert_zero(made | (primal if gradients else {}), options.keys())


@pytest.mark.parametrize(("rows", "heads"), [(0, 4), (1, 0), (3, 0), (0, 0)])
@pytest.mark.parametrize("kernel", parameters(with_cpu("decode") + kernels_of_many_rows()))
def test_append_without_queries(kernel: dict, rows: int, heads: int) -> None:
    dtype, device, dim = DTYPES[kernel["dtype"]], device_of(kernel), kernel["head_dim"]
    q = torch.ones(2, rows, heads, dim, dtype=dtype, device=device)
    caches = [torch.full((2, 7, 2, of), torch.nan, dtype=dtype, device=device) for of in (dim, kernel["head_dim_v"])]
    news = [torch.full_like(cache[:, :3], 3) for cache in caches]
    lengths = torch.tensor([1, 4], dtype=torch.int32, device=device)
    table = torch.ones(9, dim // 2, dtype=dtype, device=device)
    rotary = {"rotary_cos": table, "rotary_sin": torch.zeros_like(table)}
    libflash.decode(q, *caches, k=news[0], v=news[1], cache_seqlens=lengths, kernel=kernel["name"], **rotary)
    for cache in caches:
        for sequence, first in zip(cache, (1, 4), strict=True):
            assert (sequence[first : first + 3] == 3).all()
            assert sequence[:first].isnan().all()
            assert sequence[first + 3 :].isnan().all()
