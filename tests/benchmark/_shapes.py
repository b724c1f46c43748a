"""The cells of gpu_shapes.py: calls that are timed in turn after their results were compared."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from _block_masks import block_mask, compare
from _cells import GPU_TOKENS, GPU_WIDTH, PASSES, Cell
from _gpu_contenders import (
    FA3,
    FAMILY,
    HELD,
    OURS,
    OWN_CALLS,
    PEER_CALLS,
    SDPA,
    Problem,
    backward_fa3,
    backward_libflash,
    flash_attention_3,
    forward_libflash,
    problem,
)
from _report import mask_name
from gpu_attention import agree
from gpu_attention import compare as compare_calls

import libflash

TOKENS, WIDTH = GPU_TOKENS, GPU_WIDTH
HEAD_DIMS, MASKS = (64, 128), (False, True)
SEQUENCES, LONGEST, DENSE_SEQLEN, SEEDS = 16, 8192, 4096, (0, 1)
GROUP, HEADS_SEQLENS = 8, (1024, 8192)
SIDE, PRODUCT_HEAD_DIMS, PRODUCT_SEQLENS = 8192, (128, 256), (4096, 8192, 16384)
FP16_SEQLEN = 8192
DENSITY, BLOCKS_HEAD_DIMS, BLOCKS_SEQLEN = 0.5, (64, 96, 128, 192, 256), 4096
OPTIONS = ("softcap", "alibi", "bias", "mask", "dropout")
OPTIONS_HEAD_DIMS, OPTIONS_SEQLEN = (64, 128, 256), 2048
SHARED_HEAD_DIMS, SHARED_SHAPES = (64, 128, 256), ((1, 1024), (1, 4096), (8, 2048))  # sequences, rows of each
FEW_HEAD_DIMS, FEW_SHAPES = (64, 128, 256), ((4, 512), (1, 512), (1, 1024))

Call = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Contest:
    """Calls that are timed in turn, and the ratios computed from their times."""

    name: str
    calls: dict[str, Call]
    ratios: dict[str, tuple[str, str]]  # figure: time of the first call over that of the second
    gflop: dict[str, float] = dataclasses.field(default_factory=dict)  # if given, ratios are those of times per operation
    check: Callable[[], None] = lambda: None  # raises an exception for a wrong result


def cell(head_dim: int, seqlen: int, causal: bool, dtype: str = "bfloat16", batch: int | None = None) -> Cell:
    return Cell("forward", dtype, head_dim, seqlen, causal, batch or TOKENS // seqlen, WIDTH // head_dim)


def name_of(c: Cell) -> str:
    return f"d={c.head_dim} S={c.seqlen} {mask_name(c.causal)}"


def exact_gflop(lengths: list[int], c: Cell) -> float:
    """Operations of the matrix products; if causal, of the visible pairs only."""
    pairs = sum(n * (n + 1) // 2 if c.causal else n * n for n in lengths)
    return 4 * c.heads * c.head_dim * pairs / 1e9


def packed(head_dim: int, causal: bool, seed: int) -> Contest:
    lengths = torch.randint(1, LONGEST + 1, (SEQUENCES,), generator=torch.Generator().manual_seed(seed)).tolist()
    p, cu_seqlens = packed_problem(lengths, head_dim, causal)
    longest = max(lengths)
    limits = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_k": longest}
    call = forward_libflash(p, None, **limits)
    batch = nearest_batch(lengths)
    dense = problem(cell(head_dim, DENSE_SEQLEN, causal, batch=batch))
    name = f"d={head_dim} {mask_name(causal)} seed={seed}"
    return Contest(
        name,
        {"packed": call, "dense": forward_libflash(dense, None)},
        {"packed": ("dense", "packed")},
        {"packed": exact_gflop(lengths, p.cell), "dense": exact_gflop([DENSE_SEQLEN] * batch, p.cell)},
        lambda: compare_sequences(f"packed {name}", p, lengths, call()[0]),
    )


def packed_problem(lengths: list[int], head_dim: int, causal: bool) -> tuple[Problem, torch.Tensor]:
    """Tensors of (rows, heads, head_dim), and where in them each sequence begins."""
    p = problem(cell(head_dim, sum(lengths), causal, batch=1))
    begins = [0, *itertools.accumulate(lengths)]
    cu_seqlens = torch.tensor(begins, dtype=torch.int32, device=p.q.device)
    return dataclasses.replace(p, q=p.q[0], k=p.k[0], v=p.v[0], dout=p.dout[0]), cu_seqlens


def nearest_batch(lengths: list[int]) -> int:
    """The batch of the dense call with about as many operations."""
    return max(1, round(sum(n * n for n in lengths) / DENSE_SEQLEN**2))


def compare_sequences(what: str, p: Problem, lengths: list[int], out: torch.Tensor) -> None:
    """Compare the shortest and the longest sequence with calls of their own."""
    for which in (lengths.index(min(lengths)), lengths.index(max(lengths))):
        begin = sum(lengths[:which])
        rows = slice(begin, begin + lengths[which])
        alone = libflash.attention(*(x[None, rows] for x in (p.q, p.k, p.v)), causal=p.cell.causal)
        agree(f"{what}, sequence {which}", "forward", "bfloat16", out[None, rows], alone)


def grouped(p: Problem) -> Problem:
    """The same problem with a key head for every GROUP query heads."""
    return dataclasses.replace(p, k=p.k[:, :, ::GROUP].contiguous(), v=p.v[:, :, ::GROUP].contiguous())


def heads(head_dim: int, seqlen: int, causal: bool) -> Contest:
    p = problem(cell(head_dim, seqlen, causal))
    few = grouped(p)
    calls = {"gqa": forward_libflash(few, None), "mha": forward_libflash(p, None)}
    name = name_of(p.cell)

    def check() -> None:
        """Compare the first sequence with a call whose key heads are repeated."""
        k, v = (x[:1].repeat_interleave(GROUP, dim=2) for x in (few.k, few.v))
        alone = libflash.attention(p.q[:1], k, v, causal=causal)
        agree(f"heads {name}", "forward", "bfloat16", calls["gqa"]()[0][:1], alone)

    return Contest(name, calls, {"heads": ("gqa", "mha")}, check=check)


def product(head_dim: int, seqlen: int, causal: bool) -> Contest:
    p = problem(cell(head_dim, seqlen, causal))
    return Contest(
        name_of(p.cell),
        {"attention": forward_libflash(p, None), "product": matrix_product(p.q)},
        {f"product d={head_dim}": ("product", "attention")},
        {"attention": exact_gflop([seqlen] * p.cell.batch, p.cell), "product": 2 * SIDE**3 / 1e9},
    )


def matrix_product(like: torch.Tensor) -> Call:
    """A product of matrices of that tensor's type, on its device."""
    a, b = (torch.randn(SIDE, SIDE, device=like.device).to(like.dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def fp16(head_dim: int, causal: bool) -> Contest:
    dtypes = {"bf16": "bfloat16", "fp16": "float16"}
    problems = {kind: problem(cell(head_dim, FP16_SEQLEN, causal, dtype)) for kind, dtype in dtypes.items()}
    calls: dict[str, Call] = {kind: forward_libflash(p, None) for kind, p in problems.items()}
    calls |= {f"product {kind}": matrix_product(p.q) for kind, p in problems.items()}
    ratios = {"fp16": ("bf16", "fp16"), "fp16 product": ("product bf16", "product fp16")}
    return Contest(name_of(problems["bf16"].cell), calls, ratios)


def blocks(head_dim: int) -> Contest:
    p = problem(cell(head_dim, BLOCKS_SEQLEN, causal=False))
    mask = block_mask(DENSITY, BLOCKS_SEQLEN).to(p.q.device)
    call = forward_libflash(p, None, block_mask=libflash.compress_block_mask(mask))
    calls = {"blocks": call, "dense": forward_libflash(p, None)}
    return Contest(name_of(p.cell), calls, {"blocks": ("blocks", "dense")}, check=lambda: compare(p, mask, call()))


def options(direction: str, option: str, head_dim: int) -> Contest:
    p = problem(dataclasses.replace(cell(head_dim, OPTIONS_SEQLEN, causal=option == "alibi"), direction=direction))
    given = arguments(option, p)
    calls = {HELD: with_options(p, given, FAMILY), OURS: with_options(p, given)}
    peers, figure = peers_with_options(option, p, given), f"{direction} {option}"
    ratios = {figure: (HELD, OURS)} | {f"{figure} {peer}": (peer, OURS) for peer in peers}
    # Dropout masks of peers are others.
    check = functools.partial(compare_calls, p.cell, calls if option == "dropout" else calls | peers)
    return Contest(f"{direction} {name_of(p.cell)} {option}", calls | peers, ratios, check=check)


def peers_with_options(option: str, p: Problem, given: dict[str, object]) -> dict[str, Call]:
    """The peers that support the option, of those that are always installed."""
    sdpa, _ = PEER_CALLS[p.cell.direction]
    if option in ("bias", "mask"):
        return {"cudnn": sdpa(p, SDPA["cudnn"], attn_mask=given[option])}
    if option == "dropout":
        return {peer: sdpa(p, SDPA[peer], dropout_p=given["dropout_p"]) for peer in ("fa2", "cudnn")}
    return {}


def with_options(p: Problem, given: dict[str, object], backend: str | None = None) -> Call:
    if p.cell.direction == "forward":
        return forward_libflash(p, None, backend, **given)
    return backward_libflash(p, None, backend, given=given)


def arguments(option: str, p: Problem) -> dict[str, object]:
    """A bias for each head; one mask for all of them, half of it at random."""
    seqlen, heads, device = p.cell.seqlen, p.cell.heads, p.q.device
    if option == "softcap":
        return {"softcap": 30.0}
    if option == "alibi":
        return {"alibi_slopes": 2.0 ** torch.linspace(-8 / heads, -8, heads, device=device)}
    if option == "bias":
        return {"bias": torch.randn(1, heads, seqlen, seqlen, device=device).to(p.q.dtype)}
    if option == "mask":
        return {"mask": torch.rand(1, 1, seqlen, seqlen, device=device) < 0.5}
    return {"dropout_p": 0.1, "seed": 1}


def shared(head_dim: int, shape: tuple[int, int], causal: bool) -> Contest:
    batch, seqlen = shape
    p = grouped(problem(dataclasses.replace(cell(head_dim, seqlen, causal, batch=batch), direction="backward")))
    many = problem(dataclasses.replace(cell(head_dim, DENSE_SEQLEN, causal), direction="backward"))
    calls = {"shared": backward_libflash(p, None), "many": backward_libflash(many, None)}
    gflop = {name: backward_gflop(of.cell) for name, of in (("shared", p), ("many", many))}
    ratios = {"shared": ("many", "shared")}
    if flash_attention_3():
        calls[FA3], ratios["shared fa3"], gflop[FA3] = backward_fa3(p), (FA3, "shared"), gflop["shared"]
    name = f"{batch} x {name_of(p.cell)} heads {p.q.shape[2]}/{p.k.shape[2]}"
    check = functools.partial(compare_calls, p.cell, {OURS: calls["shared"], HELD: backward_libflash(p, None, FAMILY)})
    return Contest(name, calls, ratios, gflop, check)


def few(direction: str, head_dim: int, shape: tuple[int, int], causal: bool) -> Contest:
    batch, seqlen = shape
    p = problem(dataclasses.replace(cell(head_dim, seqlen, causal, batch=batch), direction=direction))
    (sdpa, fa3), ours = PEER_CALLS[direction], OWN_CALLS[direction]
    figure = f"few {direction}"
    calls, ratios = {OURS: ours(p, None), "cudnn": sdpa(p, SDPA["cudnn"])}, {figure: ("cudnn", OURS)}
    if flash_attention_3():
        calls[FA3], ratios[f"{figure} fa3"] = fa3(p), (FA3, OURS)
    check = functools.partial(compare_calls, p.cell, {OURS: calls[OURS], HELD: ours(p, None, FAMILY)})
    return Contest(f"{direction} {batch} x {name_of(p.cell)} heads {p.cell.heads}", calls, ratios, check=check)


def backward_gflop(c: Cell) -> float:
    """Five products, where forward has two."""
    return 2.5 * exact_gflop([c.seqlen] * c.batch, c)


SECTIONS = {
    "packed": packed,
    "heads": heads,
    "product": product,
    "fp16": fp16,
    "blocks": blocks,
    "options": options,
    "shared": shared,
    "few": few,
}


def axes(quick: bool) -> dict[str, tuple[tuple, ...]]:
    """The arguments of a section's function: all combinations."""

    def some(values: tuple) -> tuple:
        return values[-1:] if quick else values

    return {
        "packed": (some(HEAD_DIMS), MASKS, some(SEEDS)),
        "heads": (some(HEAD_DIMS), some(HEADS_SEQLENS), MASKS),
        "product": (PRODUCT_HEAD_DIMS, some(PRODUCT_SEQLENS), MASKS),
        "fp16": (some(HEAD_DIMS), MASKS),
        "blocks": (some(BLOCKS_HEAD_DIMS),),
        "options": (PASSES, OPTIONS, some(OPTIONS_HEAD_DIMS)),
        "shared": (some(SHARED_HEAD_DIMS), some(SHARED_SHAPES), MASKS),
        "few": (PASSES, some(FEW_HEAD_DIMS), some(FEW_SHAPES), MASKS),
    }


def contests(section: str, quick: bool) -> Iterator[Contest]:
    """One contest at a time, because each allocates its own tensors."""
    return itertools.starmap(SECTIONS[section], itertools.product(*axes(quick)[section]))
