"""CMake's result with a CUDA compiler that is missing, broken or switched off: really configured, nothing compiled."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def configure(tmp_path):
    """Run CMake with this shell script as nvcc (None: without nvcc): exit status, output, and the macros of build_info.h."""
    bin_folder = str(Path(sys.executable).parent)
    cmake = shutil.which("cmake", path=os.pathsep.join([bin_folder, os.environ.get("PATH", "")]))
    if not cmake or not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no cmake or no C++ compiler on this machine")

    def run(mode, nvcc_script):
        env = {
            key: value for key, value in os.environ.items() if key not in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "LIBFLASH_CUDA")
        }
        env["PATH"] = os.pathsep.join([bin_folder, env.get("PATH", "")])
        if nvcc_script is None:
            # Remove folders with an nvcc from the search path; these tests need nothing else from them.
            env["PATH"] = os.pathsep.join(p for p in env["PATH"].split(os.pathsep) if not (Path(p) / "nvcc").exists())
        else:
            nvcc = tmp_path / "nvcc"
            nvcc.write_text("#!/bin/sh\n" + nvcc_script)
            nvcc.chmod(0o755)
            env["CUDACXX"] = str(nvcc)
        build = tmp_path / "build"
        command = [cmake, "-S", str(ROOT), "-B", str(build), f"-DLIBFLASH_CUDA={mode}", f"-DPython_EXECUTABLE={sys.executable}"]
        command.append(f"-DLIBFLASH_CUDA_PREFIX={tmp_path}/nothing")
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        header = build / "generated" / "build_info.h"
        build_info = (
            dict(re.findall(r'#define LIBFLASH_BUILD_(\w+) "?(.*?)"?$', header.read_text(), re.M)) if header.exists() else {}
        )
        return done.returncode, " ".join((done.stdout + done.stderr).split()), build_info

    return run


def has_wheel_compiler():
    try:
        import nvidia
    except ImportError:
        return False
    return any((Path(root) / "cu13" / "bin" / "nvcc").exists() for root in nvidia.__path__)


BROKEN = 'echo "nvcc fatal   : Unsupported \\"gcc\\" version" >&2; exit 1\n'


def test_off(configure):
    status, _, build_info = configure("off", BROKEN)
    assert status == 0
    assert build_info["CUDA"] == "0"
    assert build_info["CUDA_VERSION"] == "LIBFLASH_CUDA=off"


@pytest.mark.parametrize("word", ["0", "False", "no"])
def test_off_in_cmakes_words(configure, word):
    status, _, build_info = configure(word, BROKEN)
    assert status == 0
    assert build_info["CUDA"] == "0"
    assert build_info["CUDA_VERSION"] == "LIBFLASH_CUDA=off"


@pytest.mark.parametrize("word", ["1", "TRUE", "yes"])
def test_on_in_cmakes_words(configure, word):
    if has_wheel_compiler():
        pytest.skip("this Python has the compiler wheels")
    status, output, _ = configure(word, None)
    assert status != 0
    assert "LIBFLASH_CUDA=on: no CUDA compiler found" in output


def test_auto_without_compiler_is_the_cpu_library(configure):
    if has_wheel_compiler():
        pytest.skip("this Python has the compiler wheels")
    status, output, build_info = configure("auto", None)
    assert status == 0
    assert "CPU only: no CUDA compiler found" in output
    assert build_info["CUDA"] == "0"
    assert build_info["CUDA_VERSION"] == "no CUDA compiler found"


def test_auto_with_a_broken_compiler_says_so(configure):
    if has_wheel_compiler():
        pytest.skip("this Python has the compiler wheels")
    status, output, build_info = configure("auto", BROKEN)
    assert status == 0
    assert "CMake Warning" in output
    assert "Building the CPU library only" in output
    assert build_info["CUDA"] == "0"
    assert build_info["CUDA_VERSION"].endswith("does not work: nvcc fatal   : Unsupported 'gcc' version")


@pytest.mark.parametrize("mode", ["on", "system"])
def test_asked_for_and_broken_stops(configure, mode):
    if mode == "on" and has_wheel_compiler():
        pytest.skip("this Python has the compiler wheels")
    status, output, _ = configure(mode, BROKEN)
    assert status != 0
    assert f"LIBFLASH_CUDA={mode}" in output
    assert "Unsupported 'gcc' version" in output


@pytest.mark.parametrize("mode", ["on", "system", "pypi"])
def test_asked_for_and_missing_stops(configure, mode):
    if has_wheel_compiler():
        pytest.skip("this Python has the compiler wheels")
    status, output, _ = configure(mode, None)
    assert status != 0
    assert f"LIBFLASH_CUDA={mode}: no CUDA compiler found" in output


def test_a_compiler_that_writes_nothing_is_refused(configure):
    """An nvcc that exits with success and writes nothing."""
    status, output, _ = configure("system", "exit 0\n")
    assert status != 0
    assert "LIBFLASH_CUDA=system" in output
    assert "does not work" in output


def test_unknown_mode(configure):
    status, output, _ = configure("perhaps", None)
    assert status != 0
    assert "one of auto, on, off, system, pypi is needed, got 'perhaps'" in output
