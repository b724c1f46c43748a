"""Calls of scaled_dot_product_attention, run with PyTorch alone and with libflash switched on, and compared.

A case describes its arguments; `check` runs it with and without libflash. PyTorch's kernels are the reference for errors, shapes,
types and strides; its math path in float64 is the reference for values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import libflash.torch
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from libflash import _torch_sdpa_operators as operators

sdpa = torch.nn.functional.scaled_dot_product_attention
FLOAT32 = torch.float32
# Operators that libflash takes over, as autograd names them.
TAKEN = ("ScaledDotProductFlashAttention", "ScaledDotProductCudnnAttention", "ScaledDotProductEfficientAttention")
EPSILON = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def plain(shape: tuple[int, ...], **kind: Any) -> torch.Tensor:
    return torch.randn(shape, **kind)


def transposed(shape: tuple[int, ...], **kind: Any) -> torch.Tensor:
    """Memory order (batch, seqlen, heads, head_dim)."""
    return torch.randn((*shape[:-3], shape[-2], shape[-3], shape[-1]), **kind).transpose(-2, -3)


def packed(shape: tuple[int, ...], **kind: Any) -> torch.Tensor:
    """The middle one of three tensors in one, as in the result of a fused projection to q, k and v."""
    rows = torch.randn((*shape[:-3], shape[-2], 3, shape[-3], shape[-1]), **kind)
    return rows[..., 1, :, :].transpose(-2, -3)


def columns(shape: tuple[int, ...], **kind: Any) -> torch.Tensor:
    """The last dimension is not contiguous."""
    return torch.randn((*shape[:-2], shape[-1], shape[-2]), **kind).transpose(-1, -2)


def expanded(shape: tuple[int, ...], **kind: Any) -> torch.Tensor:
    return torch.randn((1, 1, *shape[2:]), **kind).expand(shape)


def shifted(shape: tuple[int, ...], **kind: Any) -> torch.Tensor:
    """Rows with a gap between them, on the CPU at an odd address; PyTorch's CUDA kernels need an alignment of 16 bytes."""
    first = 1 if kind["device"] == "cpu" else 8
    return torch.randn((*shape[:-1], shape[-1] + 2 * first), **kind)[..., first:-first]


def seqlen_first(shape: tuple[int, ...], **kind: Any) -> torch.Tensor:
    """Memory order (seqlen, batch, heads, head_dim)."""
    batch, heads, seqlen, head_dim = shape
    return torch.randn((seqlen, batch, heads, head_dim), **kind).permute(1, 2, 0, 3)


STRIDES = [plain, transposed, packed, columns, expanded, shifted, seqlen_first]

Options = Callable[[tuple[int, ...], int, dict[str, Any]], dict[str, Any]]


def boolean(shape: tuple[int, ...], kind: dict[str, Any]) -> torch.Tensor:
    return torch.rand(shape, device=kind["device"]) < 0.7


def empty_row(q: tuple[int, ...], keys: int, kind: dict[str, Any]) -> dict[str, Any]:
    mask = boolean((q[-2], keys), kind)
    mask[q[-2] // 2] = False
    return {"attn_mask": mask}


def minus_infinity(q: tuple[int, ...], keys: int, kind: dict[str, Any]) -> dict[str, Any]:
    mask = torch.randn((q[-2], keys), **kind)
    return {"attn_mask": mask.masked_fill(~boolean(mask.shape, kind), -torch.inf)}


MASKS: dict[str, Options] = {  # (shape of q, number of keys, type and device) -> keywords
    "none": lambda q, s, kind: {},
    "causal": lambda q, s, kind: {"is_causal": True},
    "scale": lambda q, s, kind: {"scale": 0.3},
    "negative scale": lambda q, s, kind: {"scale": -0.2},
    "bool": lambda q, s, kind: {"attn_mask": boolean((q[-2], s), kind)},
    "bool of all axes": lambda q, s, kind: {"attn_mask": boolean((*q[:-1], s), kind)},
    "bool of keys": lambda q, s, kind: {"attn_mask": boolean((q[0], *[1] * (len(q) - 2), s), kind)},
    "a row sees nothing": empty_row,
    "bias": lambda q, s, kind: {"attn_mask": torch.randn((q[-2], s), **kind)},
    "bias of all axes": lambda q, s, kind: {"attn_mask": torch.randn((*q[:-1], s), **kind)},
    "bias, expanded": lambda q, s, kind: {"attn_mask": torch.randn((1, s), **kind).expand(*q[:-1], s)},
    "bias, transposed": lambda q, s, kind: {"attn_mask": torch.randn((s, q[-2]), **kind).t()},
    "bias, -inf": minus_infinity,
    "bias, float32": lambda q, s, kind: {"attn_mask": torch.randn((q[-2], s), **kind | {"dtype": FLOAT32})},
    "bias with a gradient": lambda q, s, kind: {"attn_mask": torch.randn((1, q[-3], q[-2], s), **kind).requires_grad_()},
    "mask and causal": lambda q, s, kind: {"attn_mask": boolean((q[-2], s), kind), "is_causal": True},
    "wrong mask": lambda q, s, kind: {"attn_mask": boolean((q[-2], s + 1), kind)},
}


@dataclass(frozen=True)
class Case:
    name: str
    q: tuple[int, ...] = (2, 4, 33, 16)
    k: tuple[int, ...] = (2, 4, 33, 16)
    v: tuple[int, ...] = (2, 4, 33, 16)
    mask: str = "none"
    strides: Callable[..., torch.Tensor] = plain
    dout: Callable[..., torch.Tensor] = plain
    dtype: torch.dtype = FLOAT32
    wants: tuple[bool, bool, bool] = (True, True, True)
    more: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}, {self.mask}, {self.strides.__name__}, {dtype}"

    def arguments(self, device: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
        torch.manual_seed(0)
        kind = {"dtype": self.dtype, "device": device}
        leaves = [self.strides(shape, **kind).detach() for shape in (self.q, self.k, self.v)]
        for x, wanted in zip(leaves, self.wants, strict=True):
            x.requires_grad_(wanted)
        return leaves, MASKS[self.mask](self.q, self.k[-2], kind) | self.more


def sized(name: str, q: tuple[int, int, int, int], keys: int, heads_k: int, head_dim_v: int, **more: Any) -> Case:
    batch, _, _, head_dim = q
    return Case(name, q, (batch, heads_k, keys, head_dim), (batch, heads_k, keys, head_dim_v), **more)


GQA = {"enable_gqa": True}
SIZES = [
    sized("square", (2, 4, 33, 16), 33, 4, 16),
    sized("more keys", (2, 4, 20, 16), 33, 4, 16),
    sized("fewer keys", (2, 4, 33, 16), 20, 4, 16),
    sized("tiles", (1, 2, 128, 64), 256, 2, 64),
    sized("odd", (3, 1, 65, 17), 129, 1, 17),
    sized("head_dim 8", (2, 4, 16, 8), 16, 4, 8),
    sized("head_dim 80", (1, 2, 70, 80), 70, 2, 80),
    sized("head_dim 128", (1, 2, 70, 128), 70, 2, 128),
    sized("head_dim 256", (1, 2, 70, 256), 70, 2, 256),
    sized("wide values", (2, 4, 33, 16), 33, 4, 32),
    sized("narrow values", (2, 4, 33, 64), 33, 4, 32),
    sized("one query", (2, 4, 1, 16), 33, 4, 16),
    sized("one key", (2, 4, 33, 16), 1, 4, 16),
    sized("groups", (2, 8, 33, 16), 33, 2, 16, more=GQA),
    sized("one head of keys", (2, 4, 33, 16), 40, 1, 16, more=GQA),
    sized("groups that do not divide", (2, 4, 33, 16), 33, 3, 16, more=GQA),
    sized("no batch", (0, 4, 33, 16), 33, 4, 16),
    sized("no queries", (2, 4, 0, 16), 33, 4, 16),
    sized("no keys", (2, 4, 33, 16), 0, 4, 16),
    Case("heads broadcast", (2, 4, 33, 16), (2, 1, 33, 16), (2, 1, 33, 16)),
    Case("batch broadcast", (2, 4, 33, 16), (1, 4, 33, 16), (1, 4, 33, 16)),
    Case("three axes", (4, 33, 16), (4, 33, 16), (4, 33, 16)),
    Case("five axes", (2, 1, 4, 33, 16), (2, 1, 4, 33, 16), (2, 1, 4, 33, 16)),
    Case("key heads unlike value heads", (2, 4, 33, 16), (2, 2, 33, 16), (2, 4, 33, 16), more=GQA),
]
SQUARE = SIZES[0]


def cases(dtypes: list[torch.dtype]) -> Iterator[Case]:
    """Sizes with masks, strides with masks, types with both, and special cases."""
    dtype = dtypes[0]
    for size in SIZES:
        for mask in ("none", "causal", "bool of all axes", "bias", "bias with a gradient"):
            yield replace(size, mask=mask, dtype=dtype)
    for strides in STRIDES:
        for mask in MASKS:
            yield replace(SQUARE, mask=mask, strides=strides, dtype=dtype)
        yield replace(SQUARE, name="gradient of out", dout=strides, dtype=dtype)
    for other in dtypes[1:]:
        for mask in MASKS:
            yield replace(SQUARE, mask=mask, dtype=other)
        for strides in STRIDES:
            yield replace(SQUARE, mask="causal", strides=strides, dtype=other)
        yield replace(SIZES[3], dtype=other)
        yield replace(SIZES[13], dtype=other)
    for wants in ((True, False, False), (False, True, False), (False, False, True), (False, False, False)):
        yield replace(SQUARE, name=f"gradients {wants}", wants=wants, dtype=dtype)
        yield replace(SQUARE, name=f"gradients {wants}", mask="bias", wants=wants, dtype=dtype)


@dataclass
class Outcome:
    error: Exception | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)  # out and the gradients
    node: str = ""


def run(case: Case, device: str, exact: bool = False) -> Outcome:
    """Out and all gradients of one call."""
    leaves, options = case.arguments(device)
    mask = options.get("attn_mask")
    if exact:
        leaves = [x.detach().double().requires_grad_(x.requires_grad) for x in leaves]
        if mask is not None and mask.dtype != torch.bool:
            options["attn_mask"] = mask = mask.detach().double().requires_grad_(mask.requires_grad)
        if mask is not None and options.get("is_causal"):  # the math path takes one of them
            options = options | {"attn_mask": mask & torch.ones_like(mask).tril(), "is_causal": False}
    wanted = [x for x in (*leaves, mask) if x is not None and x.requires_grad]
    try:
        out = sdpa(*leaves, **options)
        torch.manual_seed(1)
        dout = case.dout(tuple(out.shape), dtype=case.dtype, device=device).to(out.dtype)
        gradients = torch.autograd.grad(out, wanted, dout) if wanted else ()
    except (
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
    ) as error:  # cuDNN in PyTorch 2.11 returns None for an empty batch
        return Outcome(error)
    return Outcome(None, [out.detach(), *gradients], type(out.grad_fn).__name__)


def strides(x: torch.Tensor) -> list[int]:
    """The strides of dimensions with more than one element."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1] if x.numel() else []


def spy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the names of the library's functions that run."""
    seen: list[str] = []

    def watched(name: str, original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            seen.append(name)
            return result

        return call

    for name in ("attention", "attention_backward"):
        monkeypatch.setattr(operators._core, name, watched(name, getattr(operators._core, name)))
    return seen


EVERYTHING = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def check(case: Case, device: str, calls: list[str], backends: Sequence[SDPBackend] = EVERYTHING) -> None:
    """`calls` is the list of spy()."""
    with sdpa_kernel(SDPBackend.MATH):
        exact = run(case, device, exact=True)
    with sdpa_kernel(list(backends)):
        wanted = run(case, device)
        assert not calls
        with libflash.torch.enable() as switch:
            got = run(case, device)
            left = {name: reasons for name, reasons in switch.left().items() if any(reasons.values())}
    if got.error is not None:
        assert (type(got.error), str(got.error)) == (type(wanted.error), str(wanted.error))
        return
    if wanted.node.startswith(TAKEN) and case.k[-3] != case.v[-3]:
        assert left, "libflash needs as many heads of v as of k"
    elif wanted.node.startswith(TAKEN):
        assert (got.node, left, calls) == (wanted.node, {}, ["attention", "attention_backward"])
    assert_as_exact(case, got, wanted if wanted.error is None else got, exact)


def assert_as_exact(case: Case, got: Outcome, wanted: Outcome, exact: Outcome) -> None:
    """The strides of PyTorch's result, and at most twice its error, or an error within the type's precision."""
    for x, y, z in zip(got.tensors, wanted.tensors, exact.tensors, strict=True):
        assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
        if (
            case.strides is not expanded
        ):  # PyTorch's flash kernel then differs from its meta kernel; another test checks the layout
            assert strides(x) == strides(y)
        ours, theirs = ((tensor.double() - z).abs() for tensor in (x, y))
        assert not (ours.isnan() & ~theirs.isnan()).any()
        known = ~theirs.isnan()  # PyTorch's kernels return NaN for some rows without keys
        if known.any():
            scale = max(1.0, z[known].abs().max().item())
            assert ours[known].max().item() <= max(2 * theirs[known].max().item(), EPSILON[case.dtype] * scale)
