"""Forward with so many or so few rows that each kind of static schedule of the sm90 kernels runs: several rounds of tiles, pairs
with and without a tail, and the narrow instance. Row by row against a float64 reference.
"""

from __future__ import annotations

import pytest
from gpu_kernels import device_of, parameters, with_cpu
from static_schedule_problems import PROBLEMS

import libflash

torch = pytest.importorskip("torch")
from gpu_case import DTYPES, full_of_nan  # noqa: E402  (needs torch)

SMALL = (2, 150, 200, 3)  # of the CPU kernel: sequences, rows, keys, heads


def runs() -> list:
    found = []
    for parameter in parameters([k for k in with_cpu("forward") if k["backend"] in ("sm90", "cpu") and k["head_dim"] <= 256]):
        kernel = parameter.values[0]
        for name, problem in PROBLEMS.items():
            if kernel["head_dim"] in problem.head_dims:
                found.append(pytest.param(kernel, name, id=f"{parameter.id}-{name}", marks=parameter.marks))
    return found


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Of one sequence, in float64."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1 + k.shape[1] - q.shape[1]), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize(("kernel", "name"), runs())
def test_every_row_is_right(kernel: dict, name: str) -> None:
    problem = PROBLEMS[name]
    on_gpu, device, dtype = kernel["backend"] == "sm90", device_of(kernel), DTYPES[kernel["dtype"]]
    batch, rows, keys, heads = problem[:4] if on_gpu else SMALL
    generator = torch.Generator(device).manual_seed(1)
    sizes = ((rows, kernel["head_dim"]), (keys, kernel["head_dim"]), (keys, kernel["head_dim_v"]))
    q, k, v = (torch.randn(batch, n, heads, d, generator=generator, device=device).to(dtype) for n, d in sizes)
    causal = problem.causal
    if on_gpu and torch.cuda.get_device_properties(0).multi_processor_count == 132:
        assert problem.line in libflash.explain(q, k, v, causal=causal, kernel=kernel["name"]) + "\n"
    out = full_of_nan((batch, rows, heads, kernel["head_dim_v"]), q)
    libflash.attention(q, k, v, causal=causal, out=out, kernel=kernel["name"])
    for i in range(batch):
        wanted = exact(q[i], k[i], v[i], causal=causal)
        error = (out[i].double() - wanted).square().mean(-1).sqrt() / wanted.square().mean(-1).sqrt()
        assert float(error.max()) <= (2**-6 if dtype == torch.bfloat16 else 2**-9), i
