"""Every kernel of kernels.table has a plan."""

from __future__ import annotations

import ctypes as c

import abi
from described import CUDA, DEVICES, explain, lines_of, tensor

KERNELS = [line for line in (CUDA / "kernels.table").read_text().splitlines() if line and not line.startswith("#")]


def test_every_kernel_of_the_table_can_be_planned(lib: c.CDLL) -> None:
    """On the first described device that runs the kernel."""
    types = {"bf16": abi.BFLOAT16, "f16": abi.FLOAT16, "f32": abi.FLOAT32, "f64": abi.FLOAT64}
    planned = 0
    for line in KERNELS:
        operation, backend, dtype, dims, tile, _, marks = line.split()
        if dtype == "any":
            continue
        dim, dim_v = (int(d) for d in (dims if "x" in dims else f"{dims}x{dims}").split("x"))
        name = f"{operation}_{backend}_{dtype}_d{dims}" + ("_small" if "small" in marks else "")
        statistics = "statistics" in marks
        name += "_statistics" * statistics
        lib.describe(*DEVICES["A100" if "small" in marks else "H200"])
        rows = {"prefill": 4096, "forward": 6144}.get(operation, 100)  # forward: tiles of 192 rows, where there are some
        q, v = tensor(2, rows, 4, dim, dtype=types[dtype]), tensor(2, rows, 4, dim_v, dtype=types[dtype])
        planned += 1
        if (operation, backend) == ("decode", "sm90"):  # values are channels of the keys
            v = tensor(2, rows, 4, dim, dtype=types[dtype])
            v.shape[3] = dim_v
        if operation == "decode_prefix":  # decode chooses it, too
            cache, lens = tensor(64, 512, 4, dim, dtype=types[dtype]), tensor(1, dtype=abi.INT32)
            one = tensor(64, 1, 4, dim, dtype=types[dtype])
            hint = {"shared_groups": tensor(2, dtype=abi.INT32), "shared_lens": lens}
            assert lines_of(explain(lib, "decode", (one, cache, cache), **hint))["launch"][0].endswith(f", by {name}")
            continue
        if operation == "prefill":  # decode chooses it
            chunks = lines_of(explain(lib, "decode", (q, q, v)))["long chunks"][0]
            assert chunks.endswith("rows: {}, tile {} queries x {} keys, instance cache".format(name, *tile.split("x")))
            continue
        wanted = {"max_logit": tensor(2, 4, rows, dtype=types["f64" if dtype == "f64" else "f32"])} if statistics else {}
        lines = lines_of(explain(lib, operation, (q, q, v), kernel=name.encode(), **wanted))
        assert lines["kernel"] == [f"{name}, backend {backend}"]
        if operation != "decode":  # 400 rows of a key head: larger tiles
            sides = "{} rows x {} of the other side" if operation == "backward_tangent" else "{} queries x {} keys"
            assert lines["tile"][0] == sides.format(*tile.split("x"))
    assert planned == len(KERNELS) - 3
