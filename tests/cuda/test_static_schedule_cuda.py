"""Forward with so many or so few rows that each kind of static schedule of the sm90 kernels runs: several rounds of tiles, pairs
with and without a tail, and the narrow instance. Row by row against a float64 reference.
"""

from __future__ import annotations

import pytest
from gpu_kernels import device_of, parameters, with_cpu

import libflash

torch = pytest.importorskip("torch")
from gpu_case import DTYPES, full_of_nan  # noqa: E402  (needs torch)

# Sequences, rows, heads, causal; a part of the line "schedule" or "instance" of explain, and the head dims that have it.
PROBLEMS = {
    "rounds": (4, 1000, 40, False, "plain\n", (64, 96, 128, 192, 256)),
    "pairs": (4, 1000, 40, True, "long tiles paired with short ones", (64, 96, 128, 192, 256)),
    "tail": (4, 1000, 40, True, "but not in the last", (128,)),
    "long-tail": (1, 4000, 32, True, "but not in the last", (64, 128)),
    "longest-first": (1, 1000, 16, True, "longest tiles first", (96, 128, 192, 256)),
    "narrow": (1, 1000, 16, False, "plain, narrow", (64,)),
    "narrow-causal": (2, 500, 16, True, "plain, narrow", (64,)),
}
SMALL = (2, 150, 3)  # of the CPU kernel


def runs() -> list:
    found = []
    for parameter in parameters([k for k in with_cpu("forward") if k["backend"] in ("sm90", "cpu") and k["head_dim"] <= 256]):
        kernel = parameter.values[0]
        for name, problem in PROBLEMS.items():
            if kernel["head_dim"] in problem[-1]:
                found.append(pytest.param(kernel, name, id=f"{parameter.id}-{name}", marks=parameter.marks))
    return found


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Of one sequence, in float64."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize(("kernel", "name"), runs())
def test_every_row_is_right(kernel: dict, name: str) -> None:
    *shape, causal, text, _ = PROBLEMS[name]
    on_gpu, device, dtype = kernel["backend"] == "sm90", device_of(kernel), DTYPES[kernel["dtype"]]
    batch, rows, heads = shape if on_gpu else SMALL
    generator = torch.Generator(device).manual_seed(1)
    made = [torch.randn(batch, rows, heads, d, generator=generator, device=device) for d in (kernel["head_dim"],) * 2]
    q, k, v = (x.to(dtype) for x in (*made, torch.randn(batch, rows, heads, kernel["head_dim_v"], device=device)))
    if on_gpu and torch.cuda.get_device_properties(0).multi_processor_count == 132:
        assert text in libflash.explain(q, k, v, causal=causal, kernel=kernel["name"]) + "\n"
    out = full_of_nan(v.shape, q)
    libflash.attention(q, k, v, causal=causal, out=out, kernel=kernel["name"])
    for i in range(batch):
        wanted = exact(q[i], k[i], v[i], causal=causal)
        error = (out[i].double() - wanted).square().mean(-1).sqrt() / wanted.square().mean(-1).sqrt()
        assert float(error.max()) <= (2**-6 if dtype == torch.bfloat16 else 2**-9), i
