"""Shared by the tests of the Python interface: kernels to choose, runs of a case, comparisons."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from functools import cache, lru_cache

import ml_dtypes
import numpy as np
from case import Case
from libflash.conformance.checks.check import Check
from libflash.conformance.target import NotOffered
from libflash.conformance.targets.own import Own, empty_like, run_backward, run_forward  # noqa: F401 (for the tests)

import libflash

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@cache
def cpu_kernels() -> tuple[str, ...]:
    """The instruction sets of this machine with both a forward and a backward kernel, from the ends of their names."""
    usable = {kernel["name"] for kernel in libflash.info()["kernels"] if kernel["usable"] and kernel["backend"] == "cpu"}
    sets = [name.removeprefix("forward_cpu_") for name in usable if name.startswith("forward_cpu_")]
    both = sorted(isa for isa in sets if f"backward_cpu_{isa}" in usable)
    assert "scalar" in both, f"the scalar reference is not among {sorted(usable)}"
    return tuple(both)


def run(case: Case, isa: str | None = None) -> dict[str, np.ndarray]:
    """Forward and backward of a case, by the kernels of one instruction set."""
    return Own(isa).run(case.inputs())


def check_cpu(check: Check, isa: str) -> None:
    """A check of libflash.conformance on the kernels of one instruction set, which offer everything."""
    try:
        check(Own(isa).call)
    except NotOffered as missing:
        raise AssertionError(f"{check}: not offered: {missing}") from missing


def random(*shape: int, seed: int = 0, dtype: np.dtype | str = "float32") -> np.ndarray:
    """Normal random numbers in a new array."""
    return generated(shape, seed, np.dtype(dtype)).copy()


@lru_cache(maxsize=16)  # a test asks for the same arrays with every parameter
def generated(shape: tuple[int, ...], seed: int, dtype: np.dtype) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def qkv(
    batch: int = 1,
    sq: int = 40,
    sk: int = 56,
    hq: int = 4,
    hk: int = 2,
    d: int = 16,
    dv: int | None = None,
    dtype: str = "float32",
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    wanted = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    shapes = (batch, sq, hq, d), (batch, sk, hk, d), (batch, sk, hk, dv or d)
    return tuple(random(*shape, seed=i, dtype=wanted) for i, shape in enumerate(shapes))  # type: ignore[return-value]


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, isa: str | None = None, **options) -> tuple[np.ndarray, np.ndarray]:
    """(o, lse), by the kernel of one instruction set."""
    return libflash.attention(q, k, v, return_lse=True, kernel=isa and f"forward_cpu_{isa}", **options)


def gradients(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, isa: str | None = None, **options
) -> dict[str, np.ndarray]:
    """Forward and backward as one; keys o, lse, dq, dk, dv, and dbias, dsink if there is a bias or a sink."""
    only_backward = {name: options.pop(name) for name in ("dlse", "deterministic") if name in options}
    o, lse = attention(q, k, v, isa, **options)
    made = {
        name: empty_like(options[given])
        for name, given in {"dbias": "bias", "dsink": "learnable_sink"}.items()
        if options.get(given) is not None
    }
    dq, dk, dv = libflash.attention_backward(
        dout, q, k, v, o, lse, kernel=isa and f"backward_cpu_{isa}", **made, **only_backward, **options
    )
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv, **made}


def bits(x: np.ndarray) -> np.ndarray:
    """The elements as integers, to compare bits: 0 and -0 differ, and a NaN equals a NaN with the same bits."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def assert_same_bits(got: object, wanted: object, what: str = "") -> None:
    if isinstance(got, dict):
        assert got.keys() == wanted.keys()  # type: ignore[attr-defined]
        for name in got:
            assert_same_bits(got[name], wanted[name], f"{what} {name}")  # type: ignore[index]
        return
    np.testing.assert_array_equal(bits(np.asarray(got)), bits(np.asarray(wanted)), what)


CLOSE = {np.dtype(np.float64): 1e-13, np.dtype(np.float32): 3e-6, np.dtype(np.float16): 1.5e-3, BFLOAT16: 1.2e-2}


def assert_close(got: np.ndarray, wanted: np.ndarray, what: str = "", factor: float = 1.0) -> None:
    """The relative root mean square difference is at most a few roundings of the storage type."""
    assert got.shape == wanted.shape, what
    dtype = got.dtype
    got, wanted = got.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(got[~finite], wanted[~finite], what)
    assert np.isfinite(got[finite]).all(), what
    error = np.sqrt(((got[finite] - wanted[finite]) ** 2).mean()) if finite.any() else 0.0
    size = np.sqrt((wanted[finite] ** 2).mean()) if finite.any() else 0.0
    assert error <= CLOSE[dtype] * factor * size, f"{what}: relative difference {error / max(size, 1e-300):.3g}"


def problem(dtype: str, **shape: int) -> list[np.ndarray]:
    """q, k, v, dout."""
    q, k, v = qkv(**{"batch": 2, "sq": 90, "sk": 150, "d": 32, **shape}, dtype=dtype)
    return [q, k, v, random(*q.shape[:3], v.shape[3], seed=9, dtype=q.dtype)]


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Run code in a new interpreter with the same search path."""
    search = [path for path in sys.path if path]
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run_python(code: str, **environment: str) -> str:
    """The same; it must succeed without output on stderr. Returns its stdout."""
    done = python(code, **environment)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stderr == "", done.stderr
    return done.stdout
