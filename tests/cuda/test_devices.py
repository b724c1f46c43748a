"""Several GPUs, and a failed GPU: the right device is used, the current device is restored, and failures are reported.

For a GPU too old for the build see tests/plan/test_old_gpu.py.
"""

from __future__ import annotations

import cases
import pytest
from gpu_kernels import kernels, serves
from harness import python

import libflash

torch = pytest.importorskip("torch")
import libflash.torch  # noqa: E402  (needs torch)
from gpu_case import problem, run_forward, to_numpy  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

CASES = [cases.by_name(name) for name in ("only-visible-1", "only-bias-1", "only-lengths-4", "only-dropout-1", "only-sink-1")]


@pytest.fixture(params=[(0, 1), (1, 0)], ids=["on the second", "on the first"])
def places(request: pytest.FixtureRequest):
    """The current device, and the device of the tensors."""
    before = torch.cuda.current_device()
    torch.cuda.set_device(request.param[0])
    yield request.param
    torch.cuda.set_device(before)


@two_gpus
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


@two_gpus
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


@two_gpus
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


@two_gpus
def test_one_call_has_one_device() -> None:
    q, k = (torch.zeros(1, 8, 2, 64, device=f"cuda:{i}", dtype=torch.float16) for i in range(2))
    with pytest.raises(libflash.InvalidError, match=r"k.*cuda:1"):
        libflash.attention(q, k, k)
    with pytest.raises(libflash.InvalidError, match=r"out.*cuda:1"):
        libflash.attention(q, q, q, out=torch.empty_like(k))


BROKEN = """
    import ctypes
    import abi, libflash, numpy, torch

    def on_gpu(x):
        dtype = {{torch.float16: abi.FLOAT16, torch.float32: abi.FLOAT32}}[x.dtype]
        view = abi.Tensor(data=x.data_ptr(), dtype=dtype, device_type=abi.CUDA_DEVICE, ndim=x.ndim)
        for i in range(x.ndim):
            view.shape[i], view.stride[i] = x.shape[i], x.stride(i)
        return view

    def c_call(name, *tensors):
        views, size = [abi.pointer(on_gpu(x)) for x in tensors], ctypes.c_size_t()
        options = ctypes.byref(abi.options(abi.AttentionOptions))
        abi.check(getattr(abi.lib, name + "_workspace_size")(*views, options, ctypes.byref(size)))
        work = None if size.value == 0 else WORK.data_ptr()
        assert size.value <= WORK.nbytes
        return getattr(abi.lib, name)(*views, options, work, size.value, None)

    WORK = torch.empty(2**24, dtype=torch.uint8, device="cuda")
    x = torch.zeros(1, 64, 1, 64, dtype=torch.float16, device="cuda")
    out, lse = libflash.attention(x, x, x, return_lse=True)
    gradients = libflash.attention_backward(x, x, x, x, out, lse)
    libflash.merge([out], [lse])
    index = torch.tensor([10**6], device="cuda")
    torch.cuda.synchronize()
    try:
        {fault}
        torch.cuda.synchronize()
    except RuntimeError:
        print("broken")
    for name, tensors in {{"forward": (x, x, x, out, lse), "backward": (x, x, x, x, out, lse, *gradients)}}.items():
        for _ in range(2):
            status = c_call("flash_attention_" + name, *tensors)
            text = abi.last_error()
            print(name, abi.status_name(status), "cudaError" in text)
    try:
        libflash.attention(x, x, x, out=out, lse=lse)
    except RuntimeError as error:
        print(type(error).__name__, error.status, error.status_name)
    try:
        libflash.attention_backward(x, x, x, x, out, lse)
    except RuntimeError as error:  # libflash's, or that of PyTorch's allocator
        print("RuntimeError")
    print(libflash.attention(*[numpy.ones((1, 2, 1, 4), "float32")] * 3).shape)
"""
FAULTS = {
    "assertion": "x.flatten()[index]",
    "address": "view = on_gpu(x); view.data = 4096; o, s = on_gpu(out), on_gpu(lse)\n"
    "        abi.check(abi.lib.flash_attention_forward(*map(abi.pointer, (view, view, view, o, s)), None, None, 0, None))",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_failure_on_the_device(fault: str) -> None:
    """After another kernel's failed assertion, or an illegal address, every later call returns the status CUDA with the driver's
    text. CPU calls still work, nothing hangs, and the process exits normally."""
    done = python(BROKEN.format(fault=FAULTS[fault]))
    wanted = [
        "broken",
        *["forward CUDA True"] * 2,
        *["backward CUDA True"] * 2,
        "CudaError 6 CUDA",
        "RuntimeError",
        "(1, 2, 1, 4)",
    ]
    assert done.stdout.splitlines() == wanted, done.stderr
    assert done.returncode == 0, done.stderr
