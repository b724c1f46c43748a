"""A failed GPU: failures are reported.

For a GPU too old for the build see tests/plan/test_old_gpu.py, for several GPUs test_two_devices.py.
"""

from __future__ import annotations

import pytest
from harness import python

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

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
