"""Importing libflash is fast and silent: no framework, few milliseconds, no output, no threads that outlive the process."""

from __future__ import annotations

import os

import pytest
from harness import python, run_python

import libflash

FRAMEWORKS = ["torch", "jax", "jaxlib", "cupy", "numpy", "ml_dtypes", "matplotlib", "scipy"]


def test_no_framework_is_imported() -> None:
    code = f"""
        import sys, libflash
        libflash.info(); libflash.get_num_threads()
        print(sorted(set({FRAMEWORKS}) & set(sys.modules)))
    """
    assert run_python(code) == "[]\n"


def test_import_takes_less_than_50_ms() -> None:
    """Processor time, so that other work on the machine does not count; the best of several new processes, with cached files."""
    code = """
        import time
        start = time.process_time()
        import libflash
        print(time.process_time() - start)
    """
    seconds = [float(run_python(code)) for _ in range(5)]
    assert min(seconds) < 0.050, seconds


def test_nothing_is_printed() -> None:
    """Not by the import, not by valid or refused calls, and not at exit with live objects."""
    code = """
        import numpy, libflash
        x = numpy.ones((1, 300, 2, 8), "float32")
        keep = libflash.attention(x, x, x, causal=True, return_lse=True)
        mask = libflash.compress_block_mask(numpy.ones((1, 1, 3, 3), bool))
        libflash.explain(x, x, x)
        try:
            libflash.attention(x, x, x, softcap=-1)
        except ValueError as error:
            kept_error = error
    """
    assert run_python(code) == ""


def test_the_adapter_of_pytorch_does_not_import_its_compiler() -> None:
    """Which would take longer than all other imports."""
    pytest.importorskip("torch")
    code = """
        import sys, libflash.torch
        print(sorted({"torch._dynamo", "torch._inductor", "torch.nn.attention.bias"} & set(sys.modules)))
    """
    assert run_python(code) == "[]\n"


def test_exit_with_frameworks_is_silent() -> None:
    pytest.importorskip("torch")
    code = """
        import torch, libflash
        x = torch.ones(1, 300, 2, 8)
        keep = libflash.attention(x, x, x, return_lse=True)
    """
    assert run_python(code) == ""


def test_public_names() -> None:
    """__all__ lists exactly the public names, and each is documented."""
    for name in libflash.__all__:
        assert name == "__version__" or getattr(libflash, name).__doc__, f"{name} has no documentation"
    public = {name for name in dir(libflash) if not name.startswith("_")}
    modules = {"torch", "jax", "flash_attn", "demo", "conformance"}  # adapters and programs, if they were imported
    assert public - modules == set(libflash.__all__) - {"__version__"}


def test_works_after_fork() -> None:
    """The child has none of the parent's threads and starts its own."""
    code = """
        import os, warnings, numpy, libflash
        warnings.simplefilter("ignore")
        x = numpy.random.default_rng(0).standard_normal((2, 500, 4, 32)).astype("float32")
        before = libflash.attention(x, x, x, causal=True)
        child = os.fork()
        if child == 0:
            same = (libflash.attention(x, x, x, causal=True) == before).all()
            os._exit(0 if same else 3)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status))
    """
    assert run_python(code) == "0\n"


def test_number_of_threads_from_the_environment() -> None:
    code = "import libflash; print(libflash.get_num_threads())"
    assert run_python(code, LIBFLASH_NUM_THREADS="3") == "3\n"
    assert int(run_python(code)) <= (os.cpu_count() or 1)


def test_a_wrong_native_library_is_refused() -> None:
    """Importing fails if the compiled module is missing."""
    done = python("import sys; sys.modules['libflash._core'] = None; import libflash")
    assert done.returncode != 0
    assert "libflash._core" in done.stderr
