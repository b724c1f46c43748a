"""All test modules can be collected where the packages that they need optionally are missing: they skip themselves."""

from __future__ import annotations

import pathlib
import subprocess
import sys

TESTS = pathlib.Path(__file__).parents[1]
OPTIONAL = ("torch", "jax", "jaxlib", "cupy", "transformers", "matplotlib", "flash_attn", "flash_attn_interface")

# A module that is None in sys.modules cannot be imported, as if it were not installed.
PROGRAM = f"""
import sys
sys.modules.update(dict.fromkeys({OPTIONAL!r}))
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def collect(*paths: pathlib.Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *map(str, paths)]
    return subprocess.run(command, check=False, cwd=TESTS.parent, capture_output=True, text=True)


def test_all_modules_are_collected() -> None:
    done = collect(TESTS)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def test_a_module_that_needs_pytorch_is_found(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_needs.py").write_text("import torch\n\n\ndef test_nothing():\n    assert torch\n")
    done = collect(tmp_path)
    assert done.returncode == 2
    assert "ModuleNotFoundError: import of torch halted" in done.stdout
