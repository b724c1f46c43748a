"""Several GPUs: the right device is used, and the current device is restored."""

from __future__ import annotations

import cases
import pytest
from gpu_kernels import kernels, serves

import libflash

torch = pytest.importorskip("torch")
import libflash.torch  # noqa: E402  (needs torch)
from gpu_case import problem, run_forward, to_numpy  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

CASES = [cases.by_name(name) for name in ("only-visible-1", "only-bias-1", "only-lengths-4", "only-dropout-1", "only-sink-1")]


@pytest.fixture(params=[(0, 1), (1, 0)], ids=["on the second", "on the first"])
def places(request: pytest.FixtureRequest):
    """The current device, and the device of the tensors."""
    before = torch.cuda.current_device()
    torch.cuda.set_device(request.param[0])
    yield request.param
    torch.cuda.set_device(before)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tensors_on_another_device(case, places: tuple[int, int]) -> None:
    """With every kernel: properties that the library caches are cached per device."""
    current, where = places
    for forward in (k["name"] for k in kernels("forward") if serves(k, case)):
        case.check(**run_forward(case, forward, device=f"cuda:{where}"))
        assert torch.cuda.current_device() == current
    p = problem(case, f"cuda:{where}")
    for backward in (k["name"] for k in kernels("backward") if serves(k, case)):
        made = p.backward(*p.forward(), backward)
        assert torch.cuda.current_device() == current
        assert all(x.device.index == where for x in made.values())
        case.check(**{name: to_numpy(x, p.inputs.q.dtype) for name, x in made.items()})


def test_results_and_gradients_on_another_device(places: tuple[int, int]) -> None:
    """The library allocates on q's device, also in PyTorch's backward threads, which have a current device of their own."""
    current, where = places
    device = f"cuda:{where}"
    q, k, v = (torch.randn(2, 100, 4, 64, device=device, dtype=torch.float16, requires_grad=True) for _ in range(3))
    results, options = [], {"causal": True, "deterministic": True}
    for _ in range(2):
        out, lse = libflash.torch.attention(q, k, v, return_lse=True, **options)
        results.append((out, lse, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        assert torch.cuda.current_device() == current
        torch.cuda.set_device(where)  # the second time everything is on the current device
        current = where
    for one, other in zip(*results, strict=True):
        assert one.device.index == where
        assert torch.equal(one, other)
    merged, lse = libflash.merge([results[0][0].detach()] * 2, [results[0][1].detach()] * 2)
    assert merged.device.index == lse.device.index == where


def test_a_stream_of_another_device() -> None:
    q = torch.randn(1, 200, 2, 64, device="cuda:1", dtype=torch.float16)
    wanted = libflash.attention(q, q, q)
    stream = torch.cuda.Stream(device=1)
    stream.wait_stream(torch.cuda.current_stream(1))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # some 100 ms, longer than any call
        got = libflash.attention(q, q, q)
    assert not stream.query(), "the call waited, or used another stream"
    stream.synchronize()
    assert torch.equal(got, wanted)


def test_one_call_has_one_device() -> None:
    q, k = (torch.zeros(1, 8, 2, 64, device=f"cuda:{i}", dtype=torch.float16) for i in range(2))
    with pytest.raises(libflash.InvalidError, match=r"k.*cuda:1"):
        libflash.attention(q, k, k)
    with pytest.raises(libflash.InvalidError, match=r"out.*cuda:1"):
        libflash.attention(q, q, q, out=torch.empty_like(k))
