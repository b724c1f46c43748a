"""On the CPU, every call of scaled_dot_product_attention gives the same with libflash as without it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402
import sdpa_cases  # noqa: E402
import sdpa_programs  # noqa: E402
from sdpa_cases import Case  # noqa: E402


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls that reach the library."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the problems are tiny
    yield sdpa_cases.spy(monkeypatch)
    torch.set_num_threads(threads)
    libflash.torch.disable()


@pytest.mark.parametrize("case", list(sdpa_cases.cases([torch.float32, torch.float64, torch.bfloat16, torch.float16])), ids=str)
def test_as_without_libflash(case: Case, calls: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sdpa_cases.check(case, "cpu", calls)


KIND = {"dtype": torch.float32, "device": "cpu"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sdpa_programs.PROGRAMS)
def test_programs(name: str, calls: list[str]) -> None:
    program = sdpa_programs.PROGRAMS[name]
    wanted = program(KIND)
    with libflash.torch.enable():
        got = program(KIND)
    assert calls or "nested" in name, "PyTorch's kernel ran"
    limit = 2e-2 if name == "autocast" else 2e-5
    torch.testing.assert_close(got, wanted, rtol=limit, atol=limit)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training(backend: str, calls: list[str]) -> None:
    wanted = sdpa_programs.compiled(KIND, sdpa_programs.several_calls)
    torch._dynamo.reset()
    with libflash.torch.enable():
        got = sdpa_programs.compiled(KIND, torch.compile(sdpa_programs.several_calls, backend=backend, fullgraph=True))
    assert calls == ["attention"] * 4 + ["attention_backward"] * 4
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)
