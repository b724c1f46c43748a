"""Host threads that have not used CUDA before: calls of every kernel are right, also the first one of the process."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_kernels import kernels, kernels_of_many_rows, kernels_of_values_in_keys

import libflash

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("fresh_threads.cpp")
OPERATIONS = ("forward", "backward", "decode")

# The main thread makes arrays and outputs; a fresh thread makes no other call.
PYTHON = """
import sys, threading
import torch, libflash
names = sys.argv[1:]
torch.zeros(1, device="cuda")
by_name = {k["name"]: k for k in libflash.info()["kernels"]}
dtypes = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
failures = []
def work(kernel, x, made, together):
    together.wait()
    try:
        q, k, v, dout = x
        if kernel["operation"] == "forward":
            libflash.attention(q, k, v, out=made[0], lse=made[1], stream=1, kernel=kernel["name"])
        elif kernel["operation"] == "decode":
            libflash.decode(q, k, v, out=made[0], lse=made[1], causal=False, stream=1, kernel=kernel["name"])
        else:
            dq, dk, dv = (torch.empty_like(y) for y in x[:3])
            libflash.attention_backward(
                dout, q, k, v, *made, dq=dq, dk=dk, dv=dv, stream=1, kernel=kernel["name"])
    except Exception as error:
        failures.append(f"{kernel['name']}: {error}")
for name in names:
    kernel = by_name[name]
    dim, dim_v = kernel["head_dim"], kernel["head_dim_v"]
    x = [torch.randn(1, 64, 2, n, device="cuda").to(dtypes[kernel["dtype"]]) for n in (dim, dim, dim_v, dim_v)]
    if (kernel["operation"], kernel["backend"]) == ("decode", "sm90"):  # its values are channels of the keys
        x[2] = x[1][..., :dim_v]
    rows = torch.full((1, 2, 64), torch.nan, device="cuda", dtype=torch.promote_types(torch.float32, x[0].dtype))
    mades = [(torch.full_like(x[3], torch.nan), rows.clone()) for _ in range(8)]
    if kernel["operation"] == "backward":
        torch.cuda.synchronize()
        mades = [(torch.zeros_like(x[3]), torch.zeros_like(rows)) for _ in range(8)]
    torch.cuda.synchronize()
    together = threading.Barrier(8)
    threads = [threading.Thread(target=work, args=(kernel, x, made, together)) for made in mades]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for made in mades:
        if not all(torch.equal(a, b) for a, b in zip(made, mades[0], strict=True)):
            failures.append(f"{name}: another result")
print("\\n".join(failures) or f"{len(names)} kernels are right")
"""


def usable(operation: str) -> list[str]:
    of_decode = kernels_of_values_in_keys() + kernels_of_many_rows() if operation == "decode" else []
    every = kernels(operation) + of_decode
    return [kernel["name"] for kernel in every if kernel["usable"]]


@pytest.mark.skipif(not libflash.info()["devices"], reason="no CUDA device")
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("backend", ["sm80", "sm90"])
def test_python_threads(operation: str, backend: str) -> None:
    pytest.importorskip("torch")
    names = [name for name in usable(operation) if f"_{backend}_" in name]
    if not names:
        pytest.skip(f"no {operation} kernel of {backend} runs here")
    done = subprocess.run([sys.executable, "-c", PYTHON, *names], capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{len(names)} kernels are right\n"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    sys.path.insert(0, str(ROOT / "tests" / "capi"))
    from abi import library_path

    made, library = tmp_path_factory.mktemp("threads") / "fresh_threads", library_path()
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}", str(SOURCE), str(library)]
    command += [f"-Wl,-rpath,{library.parent}", "-ldl", "-pthread", "-o", str(made)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return made


def test_the_program_compiles(program: Path) -> None:
    assert program.exists()


@pytest.mark.skipif(not libflash.info()["devices"], reason="no CUDA device")
def test_std_thread(program: Path) -> None:
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    usable = [k for k in libflash.info()["kernels"] if k["usable"] and k["backend"] != "cpu"]
    usable = [k for k in usable if not k["name"].endswith("_statistics")]
    chosen_by_decode = ("prefill", "decode_prefix")
    known = [k["name"] for k in usable if k["operation"] not in chosen_by_decode]
    assert sorted(line.split()[1] for line in done.stdout.splitlines()[:-1]) == sorted(known)
