"""Makes the programs of this folder importable by its tests; a fixture that runs CMake functions without compiling anything."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture
def cmake_script(tmp_path):
    """Runs a CMake script and returns the finished process; messages of the script are in stderr."""
    bin_folder = str(Path(sys.executable).parent)
    program = shutil.which("cmake", path=os.pathsep.join([bin_folder, os.environ.get("PATH", "")]))
    if not program:
        pytest.skip("no cmake on this machine")

    def run(text):
        script = tmp_path / "script.cmake"
        script.write_text(text)
        return subprocess.run([program, "-P", script], capture_output=True, text=True, check=False)

    return run
