"""CUDA graphs, streams and threads: a replay, another stream or another thread gives the bits of a plain call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from gpu_kernels import kernels, parameters, supporting

import libflash

torch = pytest.importorskip("torch")
from gpu_case import DTYPES, same_bits, wide_type  # noqa: E402  (needs torch)
from gpu_graphs import captured  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = "cuda"
REPLAYS = 100
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-21, torch.float64: 2.0**-50}

Tensors = dict[str, torch.Tensor]


def randoms(dtype: torch.dtype, seed: int, **shapes: tuple[int, ...]) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for name, shape in shapes.items()}


def dense(dtype: torch.dtype, seed: int, dim: int, sq: int = 150, sk: int = 333) -> Tensors:
    q, k = (2, sq, 4, dim), (2, sk, 2, dim)
    return randoms(dtype, seed, q=q, k=k, v=k, dout=q)


def packed(dtype: torch.dtype, seed: int, dim: int, total: int = 500) -> Tensors:
    q, k = (total, 4, dim), (total, 2, dim)
    return randoms(dtype, seed, q=q, k=k, v=k, dout=q)


def results_of(x: Tensors) -> Tensors:
    """Outputs for a problem, all NaN."""
    rows, heads = x["q"].shape[-3], x["q"].shape[-2]
    lse = torch.full((*x["q"].shape[:-3], heads, rows), torch.nan, device=DEVICE, dtype=wide_type(x["q"]))
    made = {"out": torch.full_like(x["dout"], torch.nan), "lse": lse}
    return made | {f"d{name}": torch.full_like(x[name], torch.nan) for name in "qkv"}


def forward_and_backward(
    x: Tensors, made: Tensors, forward: str | None = None, backward: str | None = None, deterministic: bool = True, **options
) -> None:
    """All results into `made`."""
    q, k, v, out, lse = x["q"], x["k"], x["v"], made["out"], made["lse"]
    libflash.attention(q, k, v, out=out, lse=lse, kernel=forward, **options)
    gradients = {name: made[name] for name in ("dq", "dk", "dv")}
    libflash.attention_backward(
        x["dout"], q, k, v, out, lse, deterministic=deterministic, kernel=backward, **gradients, **options
    )


def copy_into(x: Tensors, others: Tensors) -> None:
    for name, other in others.items():
        x[name].copy_(other)


def assert_same(got: Tensors, wanted: Tensors, unordered: tuple[str, ...] = (), what: str = "") -> None:
    """The same bits; sums without a fixed order may differ by rounding errors, rarely by one unit in the last place. Elements
    that were not written are NaN in both.
    """
    for name, x in wanted.items():
        if name in unordered:
            assert torch.equal(got[name].isnan(), x.isnan()), f"{what} {name}"
            a, b = got[name].double().nan_to_num(), x.double().nan_to_num()
            difference, size = (y.square().mean().sqrt() for y in (a - b, b))
            assert difference <= ROUNDING[x.dtype] * size, f"{what} {name}"
        else:
            assert same_bits(got[name], x), f"{what} {name}"


def partner(kernel: dict, **fields: object) -> str:
    """The forward kernel of the smallest head_dim that serves the problems of a backward kernel with these fields of a case."""
    able = supporting(kernels("forward"), **fields)
    wide = [k for k in able if k["dtype"] == kernel["dtype"] and min(k["head_dim"], k["head_dim_v"]) >= kernel["head_dim"]]
    return min(wide, key=lambda k: k["head_dim"])["name"]


def ordered(kernel: dict) -> bool:
    """Whether the kernel can be deterministic; otherwise dq may differ by rounding errors."""
    return bool(supporting([kernel], deterministic=True))


def unordered(kernel: dict) -> tuple[str, ...]:
    return () if ordered(kernel) else ("dq",)


WITH_LENGTHS = parameters(supporting(kernels("backward"), used_k=(1,)))


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "default"])
@pytest.mark.parametrize("kernel", parameters(kernels("backward")))
def test_replays_with_other_contents(kernel: dict, deterministic: bool) -> None:
    dtype, dim = DTYPES[kernel["dtype"]], kernel["head_dim"]
    deterministic = deterministic and ordered(kernel)
    x = dense(dtype, 0, dim)
    made, wanted = results_of(x), results_of(x)
    options = {"forward": partner(kernel), "backward": kernel["name"], "deterministic": deterministic, "causal": True}
    replay = captured(lambda: forward_and_backward(x, made, **options))
    contents = [dense(dtype, seed, dim) for seed in range(1, 8)]
    for number in range(REPLAYS):
        copy_into(x, contents[number % len(contents)])
        copy_into(made, {name: torch.full_like(y, torch.nan) for name, y in made.items()})
        replay()
        forward_and_backward(x, wanted, **options)
        assert_same(made, wanted, () if deterministic else ("dq",), f"replay {number}")


LENGTHS = [  # of queries and keys of four packed sequences; the first is the one captured
    ((100, 150, 50, 200), (200, 100, 150, 50)),
    ((500, 0, 0, 0), (0, 0, 0, 500)),
    ((0, 0, 0, 0), (500, 0, 0, 0)),
    ((1, 2, 3, 4), (5, 0, 7, 488)),
    ((125, 125, 125, 125), (125, 125, 125, 125)),
    ((17, 300, 0, 100), (300, 0, 17, 100)),
    ((0, 128, 256, 64), (128, 128, 128, 116)),
]


def sums(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(DEVICE)


@pytest.mark.parametrize("maxima", [{}, {"max_seqlen_q": 500, "max_seqlen_k": 500}], ids=["capacity", "maxima"])
@pytest.mark.parametrize("kernel", WITH_LENGTHS)
def test_replays_with_other_sequences(kernel: dict, maxima: dict) -> None:
    """Any lengths up to the captured capacity: lengths are in device memory, and the grid serves all of them."""
    dtype, dim = DTYPES[kernel["dtype"]], kernel["head_dim"]
    x = packed(dtype, 0, dim)
    made = results_of(x)
    cu_q, cu_k = (sums(lengths) for lengths in LENGTHS[0])
    options = {"forward": partner(kernel, used_k=(1,)), "backward": kernel["name"], "causal": True, **maxima}
    options["deterministic"] = ordered(kernel)
    replay = captured(lambda: forward_and_backward(x, made, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options))
    contents = [packed(dtype, seed, dim) for seed in range(1, 6)]
    for number in range(REPLAYS):
        lengths_q, lengths_k = LENGTHS[number % len(LENGTHS)]
        copy_into(x, contents[number % len(contents)])
        cu_q.copy_(sums(lengths_q))
        cu_k.copy_(sums(lengths_k))
        wanted = results_of(x)  # NaN in rows outside every sequence, which are not written
        copy_into(made, wanted)
        replay()
        forward_and_backward(x, wanted, cu_seqlens_q=sums(lengths_q), cu_seqlens_k=sums(lengths_k), **options)
        assert_same(made, wanted, unordered(kernel), f"replay {number}")


@pytest.mark.parametrize("kernel", WITH_LENGTHS)
def test_replays_with_other_used_lengths(kernel: dict) -> None:
    """Dense tensors with other used lengths in each replay, with a sink and a gradient of lse."""
    dtype, dim = DTYPES[kernel["dtype"]], kernel["head_dim"]
    x = dense(dtype, 0, dim)
    made = results_of(x)
    used_q, used_k = (torch.full((2,), n, dtype=torch.int32, device=DEVICE) for n in (150, 333))
    sink = torch.linspace(-1, 1, 4, device=DEVICE)
    names = {"forward": partner(kernel, used_k=(1,)), "backward": kernel["name"], "deterministic": ordered(kernel)}
    options = names | {"seqused_q": used_q, "seqused_k": used_k, "window_size": (100, 30), "learnable_sink": sink}
    replay = captured(lambda: forward_and_backward(x, made, **options))
    for lengths in ((150, 0, 333, 7), (0, 0, 0, 0), (1, 149, 300, 333), (128, 64, 0, 129), (150, 150, 333, 333)):
        used_q.copy_(torch.tensor(lengths[:2]))
        used_k.copy_(torch.tensor(lengths[2:]))
        copy_into(x, dense(dtype, sum(lengths), dim))
        replay()
        wanted = results_of(x)
        forward_and_backward(x, wanted, **options)
        assert_same(made, wanted, unordered(kernel), str(lengths))


@pytest.mark.parametrize("kernel", parameters(kernels("backward")))
def test_graphs_allocate_their_results(kernel: dict) -> None:
    """Without out=: results and workspace are in the graph's memory pool and stay valid for the replays."""
    dtype, dim = DTYPES[kernel["dtype"]], kernel["head_dim"]
    x, kept = dense(dtype, 0, dim), {}

    def call() -> None:
        out, lse = libflash.attention(x["q"], x["k"], x["v"], causal=True, return_lse=True)
        gradients = libflash.attention_backward(
            x["dout"], x["q"], x["k"], x["v"], out, lse, causal=True, deterministic=ordered(kernel), kernel=kernel["name"]
        )
        kept.update(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))

    replay = captured(call)
    of_the_graph = dict(kept)
    for seed in (1, 2):
        copy_into(x, dense(dtype, seed, dim))
        torch.empty(2**22, device=DEVICE).fill_(torch.nan)  # other allocations between the replays
        replay()
        call()
        assert_same(of_the_graph, kept, unordered(kernel))


@pytest.mark.parametrize("kernel", parameters(kernels("backward")))
def test_streams_and_threads(kernel: dict) -> None:
    """Eight threads on four streams, each with its own problems and results: the bits of calls one after the other."""
    dtype, dim = DTYPES[kernel["dtype"]], kernel["head_dim"]
    names = {"forward": partner(kernel, used_k=(1,)), "backward": kernel["name"], "deterministic": ordered(kernel)}
    problems = [dense(dtype, number, dim, 64 + 40 * number, 400 - 30 * number) for number in range(8)]
    options = [{"causal": number % 2 == 0, "softmax_scale": 0.05 * (number + 1)} for number in range(8)]
    wanted = [results_of(x) for x in problems]
    for x, made, rest in zip(problems, wanted, options, strict=True):
        forward_and_backward(x, made, **names, **rest)
    streams = [torch.cuda.Stream() for _ in range(4)]
    together = Barrier(8)
    torch.cuda.synchronize()

    def work(number: int) -> None:
        together.wait()
        for turn in range(12):
            with torch.cuda.stream(streams[(number + turn) % 4]):
                made = results_of(problems[number])
                forward_and_backward(problems[number], made, **names, **options[number])
                assert_same(made, wanted[number], unordered(kernel), f"thread {number}, turn {turn}")

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, number) for number in range(8)]:
            done.result()


either_stream = pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])


def check_neighbours(kernel: dict, side: bool, lengths: list[torch.Tensor] | None = None) -> None:
    """A slow kernel, then kernels that write the inputs and, of each call, used lengths of the keys; the call; kernels that
    overwrite all of them.
    """
    dtype, dim = DTYPES[kernel["dtype"]], kernel["head_dim"]
    names = {"forward": partner(kernel, used_k=(1,)), "backward": kernel["name"], "causal": True}
    names["deterministic"] = ordered(kernel)
    contents = [dense(dtype, seed, dim) for seed in range(4)]
    wanted = [results_of(x) for x in contents]
    given = [{"seqused_k": used} for used in lengths] if lengths else [{}] * len(contents)
    for x, made, options in zip(contents, wanted, given, strict=True):
        forward_and_backward(x, made, **names, **options)
    x, mades = {name: torch.full_like(y, torch.nan) for name, y in contents[0].items()}, [results_of(y) for y in contents]
    nothing = {name: torch.full_like(y, torch.nan) for name, y in x.items()}
    used = {name: torch.zeros_like(y) for name, y in given[0].items()}
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for number, made in enumerate(mades):
            torch.cuda._sleep(5_000_000 * (number % 2 + 1))
            copy_into(x, contents[number])
            copy_into(used, given[number])
            forward_and_backward(x, made, **names, **used)
            copy_into(x, nothing)
            for y in used.values():
                y.zero_()
    torch.cuda.synchronize()
    for number, made in enumerate(mades):
        assert_same(made, wanted[number], unordered(kernel), f"call {number}")


@either_stream
@pytest.mark.parametrize("kernel", parameters(kernels("backward")))
def test_neighbours_on_the_stream(kernel: dict, side: bool) -> None:
    """A kernel writes the inputs right before the call, and another overwrites them right after it."""
    check_neighbours(kernel, side)


@either_stream
@pytest.mark.parametrize("kernel", WITH_LENGTHS)
def test_neighbours_of_a_call_with_lengths(kernel: dict, side: bool) -> None:
    """Likewise with used lengths. A kernel of one thread block reads them first, to order the sequences."""
    lengths = ((333, 150), (7, 333), (0, 128), (300, 299))
    check_neighbours(kernel, side, [torch.tensor(used, dtype=torch.int32, device=DEVICE) for used in lengths])
