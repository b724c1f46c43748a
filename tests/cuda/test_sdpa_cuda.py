"""scaled_dot_product_attention under libflash on CUDA: calls that PyTorch assigns to flash, cuDNN and memory-efficient
attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("PyTorch sees no GPU", allow_module_level=True)

import libflash.torch  # noqa: E402
import sdpa_cases  # noqa: E402
import sdpa_programs  # noqa: E402
from sdpa_cases import Case  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
sdpa = torch.nn.functional.scaled_dot_product_attention
CHOICES: dict[str, tuple[SDPBackend, ...]] = {
    "PyTorch's choice": sdpa_cases.EVERYTHING,
    "cuDNN": (SDPBackend.CUDNN_ATTENTION,),
    "flash": (SDPBackend.FLASH_ATTENTION,),
    "memory-efficient": (SDPBackend.EFFICIENT_ATTENTION,),
}
# For whole programs against the math path in the same type; gradients of parameters are sums over rows.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 16 * 2**-8}
KINDS = [{"dtype": dtype, "device": "cuda"} for dtype in (torch.bfloat16, torch.float32)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls that reach the library."""
    yield sdpa_cases.spy(monkeypatch)
    libflash.torch.disable()


@pytest.mark.parametrize("case", list(sdpa_cases.cases([torch.bfloat16, torch.float16, torch.float32])), ids=str)
@pytest.mark.parametrize("choice", CHOICES)
def test_as_without_libflash(choice: str, case: Case, calls: list[str]) -> None:
    sdpa_cases.check(case, "cuda", calls, CHOICES[choice])


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_libflash_runs_what_pytorch_gives_to_a_fused_kernel(dtype: torch.dtype, choice: str, calls: list[str]) -> None:
    if dtype == torch.float32 and choice in ("cuDNN", "flash"):
        return  # PyTorch has no kernel for it
    x = sdpa_programs.leaves({"dtype": dtype, "device": "cuda"}, *[(2, 4, 200, 64)] * 3)
    with sdpa_kernel(list(CHOICES[choice])), libflash.torch.enable() as switch:
        sdpa_programs.with_gradients(sdpa(*x, is_causal=True), x)
        assert not any(count for reasons in switch.left().values() for count in reasons.values())
    assert calls == ["attention", "attention_backward"]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", sdpa_programs.PROGRAMS)
def test_programs(name: str, kind: dict[str, Any], calls: list[str]) -> None:
    program = sdpa_programs.PROGRAMS[name]
    try:
        fused = program(kind)
    except RuntimeError as refused:  # PyTorch's memory-efficient backward under vmap
        pytest.skip(f"PyTorch's own kernel refuses this: {refused}")
    with sdpa_kernel(SDPBackend.MATH):
        plain = program(kind)
    with libflash.torch.enable():
        got = program(kind)
    # Some fused kernels give wrong gradients, or other ones, under vmap and where no gradient arrives; in bf16 the math path
    # rounds more often.
    fused = fused if len(fused) == len(plain) else plain
    limit = LIMITS[torch.bfloat16 if name == "autocast" else kind["dtype"]]
    for x, y, z in zip(got, plain, fused, strict=True):
        assert is_near(x, y, limit) or is_near(x, z, limit / 16)


def is_near(x: torch.Tensor, y: torch.Tensor, limit: float) -> bool:
    return bool(torch.allclose(x, y, rtol=0, atol=limit * max(1.0, y.abs().max().item())))


def assert_near(got: list[torch.Tensor], wanted: list[torch.Tensor], limit: float) -> None:
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=limit * max(1.0, y.abs().max().item()))


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("how", ["aot_eager", "inductor", "reduce-overhead"])
def test_compiled_training(how: str, kind: dict[str, Any], choice: str, calls: list[str]) -> None:
    """assert_size_stride never fails: results and gradients have the strides that the compiler expects."""
    options = {"mode": how} if how == "reduce-overhead" else {"backend": how}
    function = sdpa_programs.several_calls if choice != "flash" else sdpa_programs.calls_without_a_mask
    if kind["dtype"] == torch.float32 and choice in ("cuDNN", "flash"):
        return
    with sdpa_kernel(list(CHOICES[choice])):
        wanted = sdpa_programs.compiled(kind, function)
        torch._dynamo.reset()
        with libflash.torch.enable():
            compiled = torch.compile(function, **options)
            for _ in range(4):  # the first ones warm up and record
                got = [x.clone() for x in sdpa_programs.compiled(kind, compiled)]
        torch._dynamo.reset()
    assert calls
    assert_near(got, wanted, LIMITS[kind["dtype"]])


# -- dropout


@pytest.mark.parametrize("choice", CHOICES)
def test_dropout_draws_the_same_mask_in_both_passes(choice: str, calls: list[str]) -> None:
    """The result is linear in v, which gives the expected gradient; also if the switch is closed before the backward pass."""
    q, k, v = sdpa_programs.leaves({"dtype": torch.bfloat16, "device": "cuda"}, *[(2, 4, 200, 64)] * 3)
    with sdpa_kernel(list(CHOICES[choice])):
        with libflash.torch.enable():
            torch.manual_seed(1)
            out = sdpa(q, k, v, dropout_p=0.5)
            torch.manual_seed(1)
            assert torch.equal(sdpa(q, k, v, dropout_p=0.5), out)
            assert not torch.equal(sdpa(q, k, v, dropout_p=0.5), out)
            later = sdpa(q, k, v, dropout_p=0.5)
            (dv,) = torch.autograd.grad(out.float().square().sum(), v)
        (dv_later,) = torch.autograd.grad(later.float().square().sum(), v)
    assert calls == ["attention"] * 4 + ["attention_backward"] * 2
    for result, gradient in ((out, dv), (later, dv_later)):
        ratio = (gradient.double() * v.double()).sum() / (2 * result.double().square().sum())
        assert abs(ratio - 1) < 5e-3


@pytest.mark.parametrize("choice", ["flash", "cuDNN", "memory-efficient"])
def test_a_mask_that_pytorch_drew_stays_with_pytorch(choice: str, calls: list[str]) -> None:
    """The forward pass came before the switch was opened."""
    q, k, v = sdpa_programs.leaves({"dtype": torch.bfloat16, "device": "cuda"}, *[(2, 4, 200, 64)] * 3)
    with sdpa_kernel(list(CHOICES[choice])):
        out = sdpa(q, k, v, dropout_p=0.5)
        with libflash.torch.enable() as switch:
            (dv,) = torch.autograd.grad(out.float().square().sum(), v)
            assert "PyTorch's kernel drew the mask" in str(switch.left())
    assert calls == []
    ratio = (dv.double() * v.double()).sum() / (2 * out.double().square().sum())
    assert abs(ratio - 1) < 5e-3


def test_the_mask_as_pytorchs_tests_ask_for_it() -> None:
    q, k, v = sdpa_programs.leaves({"dtype": torch.float32, "device": "cuda"}, *[(2, 4, 100, 64)] * 3)
    with libflash.torch.enable():
        out, _, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.3)
        mask = torch.empty(2, 4, 100, 100, device="cuda")
        torch._fill_mem_eff_dropout_mask_(mask, 0.3, seed.item(), offset.item())
    p = (q @ k.transpose(-1, -2) / 8).softmax(-1)
    torch.testing.assert_close((p * (mask > 0.3) / 0.7) @ v, out, rtol=0, atol=1e-2)


# -- dropout in captured graphs


def linear_in_v(out: torch.Tensor, dv: torch.Tensor, v: torch.Tensor) -> bool:
    return abs((dv.double() * v.double()).sum() / (2 * out.double().square().sum()) - 1) < 5e-3


@pytest.mark.parametrize("choice", CHOICES)
def test_a_graph_draws_a_new_mask_in_each_replay(choice: str, calls: list[str]) -> None:
    q, k, v = sdpa_programs.leaves({"dtype": torch.bfloat16, "device": "cuda"}, *[(2, 4, 200, 64)] * 3)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        out = sdpa(q, k, v, dropout_p=0.5)
        return out, torch.autograd.grad(out.float().square().sum(), v)[0]

    with sdpa_kernel(list(CHOICES[choice])), libflash.torch.enable() as switch:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, dv = step()
        assert not any(count for reasons in switch.left().values() for count in reasons.values())
        results = []
        for _ in range(3):
            graph.replay()
            assert linear_in_v(out, dv, v)
            results.append(out.clone())
    assert len(calls) == 4
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[1], results[2])


@pytest.mark.parametrize("choice", CHOICES)
def test_reduce_overhead_with_dropout(choice: str, calls: list[str]) -> None:
    q, k, v = sdpa_programs.leaves({"dtype": torch.bfloat16, "device": "cuda"}, *[(2, 4, 200, 64)] * 3)
    torch._dynamo.reset()
    with sdpa_kernel(list(CHOICES[choice])), libflash.torch.enable():
        compiled = torch.compile(lambda *x: sdpa(*x, dropout_p=0.5) * 1, mode="reduce-overhead")
        results = []
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(q, k, v)
            kept = out.detach().clone()
            (dv,) = torch.autograd.grad(out.float().square().sum(), v)
            assert linear_in_v(kept, dv, v)
            results.append(kept)
    torch._dynamo.reset()
    assert calls
    assert all(not torch.equal(x, y) for x, y in itertools.pairwise(results))
