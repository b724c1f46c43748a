"""The types of calls with the arrays of each library, by a type checker."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys

import pytest

ARRAYS = {"jax": "jax.Array", "torch": "torch.Tensor", "numpy": "numpy.ndarray", "cupy": "cupy.ndarray"}
CALLS = """
import {library}

def calls_of_{library}(x: {array}) -> None:
    out: {array} = libflash.attention(x, x, x, bias=x, cu_seqlens_q=x)
    both: tuple[{array}, {array}] = libflash.attention(x, x, x, return_lse=True)
    step: {array} = libflash.decode(x, x, x, cache_seqlens=x)
    merged: tuple[{array}, {array}] = libflash.merge([x], [x])
    gradients: tuple[{array}, {array}, {array}] = libflash.attention_backward(x, x, x, x, x, x)
    libflash.attention([1.0], x, x)  # type: ignore[call-overload]
    libflash.attention(x, x, x, causal="no")  # type: ignore[call-overload]
"""


def test_arrays_match_an_overload(tmp_path: pathlib.Path) -> None:
    """One run for all installed libraries, because reading their types takes most of the time."""
    pytest.importorskip("mypy")
    found = [library for library in ARRAYS if importlib.util.find_spec(library) is not None]
    program = tmp_path / "program.py"
    program.write_text("import libflash\n" + "".join(CALLS.format(library=name, array=ARRAYS[name]) for name in found))
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent", "--ignore-missing-imports"]
    done = subprocess.run([*command, str(program)], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
