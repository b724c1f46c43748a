"""The adapters of PyTorch, JAX and flash-attn: some checks of every group, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from harness import random
from libflash.conformance.case import Inputs
from libflash.conformance.items import chosen
from libflash.conformance.outcome import FAILS, HOLDS
from libflash.conformance.reference import forward
from libflash.conformance.target import NotOffered
from libflash.conformance.targets import make

OWN = ["libflash.torch", "libflash.jax", "libflash.flash_attn"]
OTHERS = ["torch.sdpa", "torch.sdpa:math", "torch.sdpa:flash", "jax", "jax:xla"]
SOME = ["only-visible", "heads-4-2", "exact-selection-square", "far-sink", "several", "paged-all", "q_nan", "types of q"]


def needed(name: str) -> None:
    pytest.importorskip("jax" if "jax" in name else "torch")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OWN)
def test_own_adapters_hold(name: str) -> None:
    needed(name)
    target = make(name, "cpu")
    found = [item.outcome(target) for words in SOME for item in chosen(["bf16", "fp32"], [words])]
    assert not [(outcome.name, outcome.findings) for outcome in found if outcome.status == FAILS]
    assert sum(outcome.status == HOLDS for outcome in found) > 10


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softmax_scale": 0.3}, {"mask": True}, {"bias": True}], ids=str)
def test_other_adapters_pass_on_what_they_are_given(name: str, options: dict) -> None:
    """Compared with float64. With the causal rule q and k have the same length, because functions align the rule differently."""
    needed(name)
    options = dict(options)
    q, k, v, dout = (
        random(2, 30 if "causal" in options or side else 20, 4 - 2 * (side in (1, 2)), 16, seed=side) for side in (0, 1, 2, 0)
    )
    dout = random(*q.shape, seed=5)
    if "mask" in options:
        options["mask"] = random(2, 1, 20, 30, seed=7) > -1
    if "bias" in options:
        options["bias"] = random(1, 4, 20, 30, seed=7)
    got = make(name, "cpu").run(Inputs(q, k, v, dout, None, options))
    o, lse = forward(q, k, v, **options)
    np.testing.assert_allclose(got["o"], o, atol=1e-5)
    if "lse" in got:
        np.testing.assert_allclose(got["lse"], lse, atol=1e-5)
    assert {"dq", "dk", "dv"} <= set(got)
    assert ("dbias" in got) == ("bias" in options and name != "torch.sdpa:flash")


@pytest.mark.parametrize("name", OTHERS)
def test_other_adapters_do_not_offer_what_the_functions_lack(name: str) -> None:
    needed(name)
    q, k, v = (random(1, n, 2, 16, seed=n) for n in (20, 30, 30))
    lacking = {"softcap": 2.0, "learnable_sink": np.zeros(2, np.float32), "causal": True, "dropout_p": 0.5}
    for option, value in lacking.items():
        with pytest.raises(NotOffered, match=option):
            make(name, "cpu").run(Inputs(q, k, v, None, None, {option: value}))


def test_backend_by_name_is_the_one_that_runs() -> None:
    """Flash attention on the CPU has no dropout and no gradient of a bias; a backend for GPUs runs nowhere here."""
    pytest.importorskip("torch")
    q, k, v = (random(1, 20, 2, 16, seed=seed) for seed in range(3))
    with pytest.raises(NotOffered, match="refuses"):
        make("torch.sdpa:efficient", "cpu").run(Inputs(q, k, v, None, None, {}))
    with pytest.raises(ValueError, match="the backends are math, flash"):
        make("torch.sdpa:fast", "cpu")


def test_two_alignments_are_one_where_lengths_are_equal() -> None:
    pytest.importorskip("torch")
    q, k, v = (random(1, 20, 2, 16, seed=seed) for seed in range(3))
    target = make("torch.sdpa", "cpu")
    for align in ("top_left", "bottom_right"):
        target.run(Inputs(q, k, v, None, None, {"causal": True, "causal_align": align}))
    with pytest.raises(NotOffered, match="causal bottom_right"):
        target.run(Inputs(q[:, 1:], k, v, None, None, {"causal": True}))
