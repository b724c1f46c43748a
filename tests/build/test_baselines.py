"""The benchmarks' baselines, compiled without a GPU. They are fair peers only if no registers are spilled to local memory."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "benchmark"
KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for 'sm_\w+'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads",
    re.S,
)
ARCHITECTURE = "sm_90"  # the GPU of the README's figures


def module():
    spec = importlib.util.spec_from_file_location("_baselines", FOLDER / "_baselines.py")
    made = importlib.util.module_from_spec(spec)
    sys.modules["_baselines"] = made
    spec.loader.exec_module(made)
    return made


BASELINES = module()


@pytest.mark.parametrize("dtype", BASELINES.TYPES.values())
@pytest.mark.parametrize("source", BASELINES.SOURCES)
def test_no_spills_no_local_memory(source: str, dtype: str, tmp_path: pathlib.Path) -> None:
    nvcc = BASELINES.find_nvcc()
    if not nvcc:
        pytest.skip("no nvcc")
    command = BASELINES.compile_command(nvcc, ARCHITECTURE, source, dtype)
    done = subprocess.run(
        [*command, "-cubin", "-Xptxas=-v", "-o", tmp_path / "code"], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    kernels = {match["name"]: match for match in KERNEL.finditer(done.stderr)}
    assert kernels
    for name, match in kernels.items():
        assert match.group("stack", "stores", "loads") == ("0", "0", "0"), name


def test_a_library_is_built_again_when_a_source_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    before = BASELINES.fingerprint(ARCHITECTURE)
    assert before == BASELINES.fingerprint(ARCHITECTURE)
    assert before != BASELINES.fingerprint("sm_100")
    for path in BASELINES.FOLDER.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(BASELINES, "FOLDER", tmp_path)
    same = BASELINES.fingerprint(ARCHITECTURE)
    (tmp_path / "rows.cuh").write_text((tmp_path / "rows.cuh").read_text() + "\n")
    assert BASELINES.fingerprint(ARCHITECTURE) != same


def test_without_a_compiler_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(BASELINES, "CACHE", tmp_path)
    monkeypatch.setattr(BASELINES, "find_nvcc", lambda: None)
    with pytest.raises(BASELINES.NoCompiler, match="nvcc"):
        BASELINES.build(ARCHITECTURE)
