"""The cells of gpu_derivatives.py: calls that are timed in turn after their results were compared with plain formulas."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
from collections.abc import Callable, Iterable

import torch
from _cells import GPU_TOKENS, GPU_WIDTH, Cell
from _gpu_contenders import FAMILY, HELD, OURS, Call, Problem, backward_libflash, forward_libflash, problem
from _report import mask_name
from _shapes import Contest
from gpu_attention import ROW_TOLERANCE

import libflash

TOKENS, WIDTH = GPU_TOKENS, GPU_WIDTH
HEAD_DIMS, MASKS = (64, 128, 256), (False, True)
JVP_SEQLENS, LONG = (512, 1024, 2048, 8192), 2048  # LONG: from which length on the figure is that of long sequences
DOUBLE_SEQLENS = (1024, 8192)
MATH_TOKENS, MATH_SEQLEN = 8192, 2048  # PyTorch keeps some ten matrices of all scores
DOUBLES_TOKENS, DOUBLES_SEQLEN, SIDE = 8192, 4096, 4096
WIDE, WIDE_SEQLEN = (512, 256), 4096
STATISTICS_SEQLENS = (2048, 8192)
ROUNDED = ROW_TOLERANCE["bfloat16"] * 2  # |difference| / |row| of results that are rounded to bf16, as of gradients elsewhere
EXACT = 1e-11  # the same for float64
SUMMED = 1e-3  # for largest scores and entropies: sums of float32

Tensors = tuple[torch.Tensor, ...]


def cell(head_dim: int, seqlen: int, causal: bool, dtype: str = "bfloat16", tokens: int = 0, direction: str = "forward") -> Cell:
    return Cell(direction, dtype, head_dim, seqlen, causal, max(1, (tokens or TOKENS) // seqlen), WIDTH // head_dim)


def name_of(c: Cell) -> str:
    return f"d={c.head_dim} S={c.seqlen} {mask_name(c.causal)}"


def exact_gflop(c: Cell, products: int) -> float:
    """Operations of the matrix products with visible keys, in GFLOP."""
    pairs = c.seqlen * (c.seqlen + 1) / 2 if c.causal else c.seqlen**2
    return 2 * products * c.batch * c.heads * c.head_dim * pairs / 1e9


def directions(p: Problem) -> Tensors:
    """Random tangents of q, k and v."""
    generator = torch.Generator(p.q.device).manual_seed(1)
    return tuple(torch.randn(p.q.shape, generator=generator, device=p.q.device).to(p.q.dtype) for _ in range(3))


def first_head(*tensors: torch.Tensor) -> Tensors:
    """The first head of the first sequence, (rows, channels), in float32 or float64."""
    return tuple(x[0, :, 0].double() if x.dtype == torch.float64 else x[0, :, 0].float() for x in tensors)


def scores(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if not causal:
        return s
    return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -torch.inf)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention of (..., rows, channels), with all scores in memory."""
    return scores(q, k, causal).softmax(-1) @ v


def plain_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool) -> Tensors:
    p = scores(q, k, causal).softmax(-1)
    dp = dout @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    return ds @ k, ds.mT @ q, p.mT @ dout


def compare(what: str, mine: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor], tolerance: float) -> None:
    """Raise an exception for a wrong row."""
    for i, (a, b) in enumerate(zip(mine, wanted, strict=True)):
        difference = ((a - b).norm(dim=-1) / sizes(b)).max().item()
        if not difference <= tolerance:
            raise AssertionError(f"{what}: a row of result {i} differs by {difference:.3g}; nothing is timed")


def sizes(x: torch.Tensor) -> torch.Tensor:
    """|row|, or that of its neighbours if it is smaller: a gradient can be nearly 0 by chance, with errors of their size."""
    squares = x.square().sum(-1)[None]
    near = torch.nn.functional.avg_pool1d(squares, 33, stride=1, padding=16, count_include_pad=False)
    largest = squares.maximum(near).sqrt()[0]
    return largest.clamp(min=0.1 * largest.median().item())


def tangent_libflash(p: Problem, along: Tensors, **more: object) -> Call:
    """out and its tangent; with out and lse given the tangent alone is computed."""

    def call() -> Tensors:
        made = libflash.attention_tangent(p.q, p.k, p.v, *along, causal=p.cell.causal, **more)
        return made[0], made[2]

    return call


def plain_tangent(p: Problem, along: Tensors) -> Tensors:
    """out and its tangent, of the first head."""
    return torch.func.jvp(lambda *x: plain(*x, p.cell.causal), first_head(p.q, p.k, p.v), first_head(*along))


def jvp(head_dim: int, seqlen: int, causal: bool) -> Contest:
    p = problem(cell(head_dim, seqlen, causal))
    along = directions(p)
    call = tangent_libflash(p, along)
    calls = {"tangent": call, OURS: forward_libflash(p, None), HELD: forward_libflash(p, None, FAMILY)}
    figure = f"jvp d={head_dim}" if seqlen >= LONG else f"jvp S<{LONG}"
    return Contest(
        name_of(p.cell),
        calls,
        {figure: ("tangent", OURS), f"{figure} / sm80": ("tangent", HELD)},
        check=lambda: compare("tangent", first_head(*call()), plain_tangent(p, along), ROUNDED),
    )


def double(head_dim: int, seqlen: int, causal: bool) -> Contest:
    """The tangent of backward; `both` has that of forward too, which a double backward pass also needs."""
    p = problem(cell(head_dim, seqlen, causal))
    along = directions(p)
    out, lse = libflash.attention(p.q, p.k, p.v, return_lse=True, causal=causal)
    _, _, tout, tlse = libflash.attention_tangent(p.q, p.k, p.v, *along, out=out, lse=lse, causal=causal)
    first = (p.dout, p.q, p.k, p.v, out, lse)

    def tangent() -> Tensors:
        return libflash.attention_backward_tangent(*first, tout, tlse, *along, causal=causal)

    def both() -> Tensors:
        _, _, moved, lse_moved = libflash.attention_tangent(p.q, p.k, p.v, *along, out=out, lse=lse, causal=causal)
        return libflash.attention_backward_tangent(*first, moved, lse_moved, *along, causal=causal)

    def check() -> None:
        q, k, v, dout = first_head(p.q, p.k, p.v, p.dout)
        wanted = torch.func.jvp(lambda *x: plain_backward(*x, dout, causal), (q, k, v), first_head(*along))[1]
        compare("tangent of backward", first_head(*tangent()), wanted, ROUNDED)

    calls = {"tangent": tangent, "both": both, OURS: backward_libflash(p, None), HELD: backward_libflash(p, None, FAMILY)}
    ratios = {"double / sm80": ("tangent", HELD), "double": ("tangent", OURS), "double, both": ("both", OURS)}
    return Contest(name_of(p.cell), calls, ratios, check=check)


def math_path(head_dim: int, causal: bool) -> Contest:
    """torch.func.jvp over attention with all scores in memory, in bf16."""
    p = problem(cell(head_dim, MATH_SEQLEN, causal, tokens=MATH_TOKENS))
    along = directions(p)
    call = tangent_libflash(p, along)
    swapped, moved = (tuple(x.transpose(1, 2).contiguous() for x in some) for some in ((p.q, p.k, p.v), along))

    def by_torch() -> Tensors:
        return torch.func.jvp(lambda *x: plain(*x, causal), swapped, moved)

    def check() -> None:
        compare("tangent", first_head(*call()), plain_tangent(p, along), ROUNDED)

    return Contest(name_of(p.cell), {"torch": by_torch, "tangent": call}, {"math": ("torch", "tangent")}, check=check)


def triton_kernel(head_dim: int, causal: bool) -> Contest:
    """The kernel of jvp_flash_attention, with forward-mode differentiation of PyTorch."""
    from jvp_flash_attention.jvp_attention import JVPAttn

    p = problem(cell(head_dim, MATH_SEQLEN, causal))
    along = directions(p)
    call = tangent_libflash(p, along)
    swapped, moved = (tuple(x.transpose(1, 2).contiguous() for x in some) for some in ((p.q, p.k, p.v), along))

    def by_triton() -> Tensors:
        return torch.func.jvp(lambda q, k, v: JVPAttn.fwd_dual(q, k, v, causal=causal), swapped, moved)

    def check() -> None:
        compare("tangent", first_head(*call()), plain_tangent(p, along), ROUNDED)
        compare("Triton's tangent", first_head(*(x.transpose(1, 2) for x in by_triton())), plain_tangent(p, along), ROUNDED)

    return Contest(name_of(p.cell), {"triton": by_triton, "tangent": call}, {"triton": ("triton", "tangent")}, check=check)


def doubles(head_dim: int, causal: bool) -> Contest:
    """Attention in float64, against a matrix product in float64."""
    p = problem(cell(head_dim, DOUBLES_SEQLEN, causal, "float64", DOUBLES_TOKENS))
    forward, backward = forward_libflash(p, None), backward_libflash(p, None)

    def check() -> None:
        q, k, v, dout = first_head(p.q, p.k, p.v, p.dout)
        compare("forward", first_head(*forward()), (plain(q, k, v, causal),), EXACT)
        compare("backward", first_head(*backward()), plain_backward(q, k, v, dout, causal), EXACT)

    return Contest(
        name_of(p.cell),
        {"forward": forward, "backward": backward, "product": square_product(p.q)},
        {"float64": ("product", "forward"), "float64 backward": ("product", "backward")},
        {"forward": exact_gflop(p.cell, 2), "backward": exact_gflop(p.cell, 5), "product": 2 * SIDE**3 / 1e9},
        check,
    )


def square_product(like: torch.Tensor) -> Callable[[], object]:
    a, b = (torch.randn(SIDE, SIDE, device=like.device, dtype=like.dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def wide(causal: bool) -> Contest:
    """head_dim 512 against head_dim 256: as many operations, with half as many heads."""
    large, small = (problem(cell(head_dim, WIDE_SEQLEN, causal)) for head_dim in WIDE)
    forward, backward = forward_libflash(large, None), backward_libflash(large, None)

    def check() -> None:
        q, k, v, dout = first_head(large.q, large.k, large.v, large.dout)
        compare("forward", first_head(*forward()), (plain(q, k, v, causal),), ROUNDED)
        compare("backward", first_head(*backward()), plain_backward(q, k, v, dout, causal), ROUNDED)

    peers = {"forward d=256": forward_libflash(small, None), "backward d=256": backward_libflash(small, None)}
    work = {"forward": exact_gflop(large.cell, 2), "backward": exact_gflop(large.cell, 5)}
    return Contest(
        name_of(large.cell),
        {"forward": forward, "backward": backward, **peers},
        {"wide forward": ("forward d=256", "forward"), "wide backward": ("backward d=256", "backward")},
        work | {f"{pass_} d=256": gflop for pass_, gflop in work.items()},
        check,
    )


def statistics(head_dim: int, seqlen: int, causal: bool) -> Contest:
    """The largest score of each row or of each head, and the entropy of each row."""
    p = problem(cell(head_dim, seqlen, causal))
    rows, entropy = (torch.empty(p.cell.batch, p.cell.heads, seqlen, device=p.q.device) for _ in range(2))
    heads = torch.empty(p.cell.heads, device=p.q.device)
    calls = {
        "rows": forward_libflash(p, None, max_logit=rows),
        "heads": forward_libflash(p, None, max_logit=heads),
        "rows, entropy": forward_libflash(p, None, max_logit=rows, entropy=entropy),
        OURS: forward_libflash(p, None),
    }

    def check() -> None:
        calls["rows, entropy"]()
        s = scores(*first_head(p.q, p.k), causal)
        compare("row maxima", (rows[0, 0, :, None],), (s.amax(-1)[:, None],), SUMMED)
        compare("entropy", (entropy[0, 0, :, None],), (torch.special.entr(s.softmax(-1)).sum(-1)[:, None],), SUMMED)

    ratios = {
        f"row maxima d={head_dim}": ("rows", OURS),
        f"head maxima d={head_dim}": ("heads", OURS),
        "entropy": ("rows, entropy", "rows"),
    }
    return Contest(name_of(p.cell), calls, ratios, check=check)


SECTIONS: dict[str, Callable[..., Contest]] = {
    "jvp": jvp,
    "double": double,
    "math": math_path,
    "float64": doubles,
    "wide": wide,
    "stats": statistics,
}
if importlib.util.find_spec("jvp_flash_attention"):
    SECTIONS["triton"] = triton_kernel


def axes(quick: bool) -> dict[str, tuple[tuple, ...]]:
    """The arguments of a section's function: all combinations."""

    def few(values: tuple) -> tuple:
        return values[-1:] if quick else values

    return {
        "jvp": (HEAD_DIMS, few(JVP_SEQLENS), MASKS),
        "double": (HEAD_DIMS, few(DOUBLE_SEQLENS), MASKS),
        "math": (HEAD_DIMS, few(MASKS)),
        "float64": (HEAD_DIMS, few(MASKS)),
        "wide": (MASKS,),
        "stats": (HEAD_DIMS, few(STATISTICS_SEQLENS), few(MASKS)),
        "triton": (HEAD_DIMS, MASKS),
    }


def makers(section: str, quick: bool) -> list[tuple[str, Callable[[], Contest]]]:
    """For each contest a function that allocates its tensors, and what to call it if that fails."""
    chosen = itertools.product(*axes(quick)[section])
    return [(" ".join(map(str, values)), functools.partial(SECTIONS[section], *values)) for values in chosen]
