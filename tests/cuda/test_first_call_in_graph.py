"""The first call of a kernel, and of the process, inside the capture of a CUDA graph.

PyTorch needs three things before a capture, and the program below does nothing else: a context, which its first tensor makes; the
inputs, because a copy from the host is not allowed inside; and a synchronisation, so that no work on other streams is waiting.
Results and workspace may be allocated inside: PyTorch takes them from the memory pool of the graph. The capture is in global
mode, in which every call that could wait for the GPU or allocate by cudaMalloc is an error, also while a kernel is loaded.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from gpu_kernels import device_of, in_place_of, kernels, kernels_of_many_rows, kernels_of_values_in_keys

import libflash

torch = pytest.importorskip("torch")

OPERATIONS = ("forward", "backward", "decode")
PROGRAM = """
import sys
import torch, libflash
device, *names = sys.argv[1:]
dtypes = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
by_name = {k["name"]: k for k in libflash.info()["kernels"]}

def on_host(kernel):
    # Inputs, and out and lse without a call of the library.
    dim, dim_v, generator = kernel["head_dim"] or 64, kernel["head_dim_v"] or 64, torch.Generator().manual_seed(1)
    dtype = dtypes.get(kernel["dtype"], torch.bfloat16)
    x = [torch.randn(1, 64, 2, n, generator=generator).to(dtype) for n in (dim, dim, dim_v, dim_v)]
    if in_keys(kernel):
        x[2] = x[1][..., :dim_v]
    q, k, v = (y.double().transpose(1, 2) for y in x[:3])
    scores = q @ k.transpose(2, 3) * dim ** -0.5
    lse = scores.logsumexp(3)
    out = ((scores - lse[..., None]).exp() @ v).transpose(1, 2)
    return x, (out.to(dtype).contiguous(), lse.to(torch.promote_types(torch.float32, dtype)))

def in_keys(kernel):
    # Whether it requires that values are channels of the keys.
    return (kernel["operation"], kernel["backend"]) == ("decode", "sm90") and kernel["head_dim"] > kernel["head_dim_v"]

def call(kernel, x, of_forward):
    q, k, v, dout = x
    if kernel["operation"] == "backward":
        return libflash.attention_backward(dout, q, k, v, *of_forward, kernel=kernel["name"])
    if kernel["operation"] == "forward":
        return libflash.attention(q, k, v, return_lse=True, kernel=kernel["name"])
    # With a number of splits no prefill kernel takes the rows.
    return libflash.decode(q, k, v, causal=False, num_splits=2, return_lse=True, kernel=kernel["name"])

failures = []
for name in names:
    kernel = by_name[name]
    x, of_forward = on_host(kernel)
    x, of_forward = ([y.to(device) for y in these] for these in (x, of_forward))
    if in_keys(kernel):
        x[2] = x[1][..., : kernel["head_dim_v"]]
    if device == "cpu":
        made = call(kernel, x, of_forward)
    else:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            made = call(kernel, x, of_forward)
        for y in made:
            y.fill_(7)
        graph.replay()
    again = call(kernel, x, of_forward)
    unordered = kernel["operation"] == "backward"  # dq, whose sums have no fixed order
    for number, (a, b) in enumerate(zip(made, again)):
        a, b = a.double(), b.double()
        same = torch.equal(a, b)
        if unordered and number == 0:
            same = bool((a - b).square().mean() <= 2.0 ** -14 * b.square().mean())
        if not same:
            failures.append(f"{name}: result {number} of the replay is another one")
    wanted = of_forward if kernel["operation"] != "backward" else ()
    for number, (a, b) in enumerate(zip(made, wanted)):
        if not bool((a.double() - b.double()).square().mean() <= 2.0 ** -10 * b.double().square().mean()):
            failures.append(f"{name}: result {number} is wrong")
print("\\n".join(failures) or f"{len(names)} kernels are right")
"""


def of_operation(operation: str, backend: str) -> list[str]:
    of_decode = kernels_of_values_in_keys() + kernels_of_many_rows() if operation == "decode" else []
    every = kernels(operation) + of_decode
    return [kernel["name"] for kernel in every if kernel["usable"] and kernel["backend"] == backend]


@pytest.mark.early
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("backend", ["sm80", "sm90", "cpu"])
def test_first_calls(operation: str, backend: str) -> None:
    """With "cpu" without a graph, which shows that the program finds what is wrong."""
    names = of_operation(operation, backend)
    if backend == "cpu":
        names = [in_place_of(operation)["name"]]
    elif not libflash.info()["devices"]:
        pytest.skip("no CUDA device")
    if not names:
        pytest.skip(f"no {operation} kernel of {backend} runs here")
    device = device_of({"backend": backend})
    command = [sys.executable, "-c", PROGRAM, device, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{len(names)} kernels are right\n"
