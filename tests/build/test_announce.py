"""The line that an installation prints before it compiles, also where pip hides its output."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

BACKEND = Path(__file__).resolve().parents[2] / "python" / "build_backend"
SAY = f"import sys; sys.path.insert(0, {str(BACKEND)!r}); import announce; announce.announce('a line')"


@pytest.fixture(scope="module")
def announce():
    space = {"__name__": "announce"}
    exec((BACKEND / "announce.py").read_text(), space)
    return space


@pytest.mark.parametrize(
    ("cuda", "count", "words"),
    [
        (True, 2, "the CPU library and the CUDA kernels: about 24 minutes on 2 processors, more on a busy machine. "),
        (True, 2, " LIBFLASH_CUDA=off compiles the CPU library alone, in about 2 minutes."),
        (True, 64, "about 1 minute on 64 processors"),
        (False, 2, "compiling the CPU library: about 2 minutes on 2 processors, more on a busy machine."),
        (False, 1, "about 4 minutes on 1 processor,"),
    ],
)
def test_line(announce, cuda, count, words):
    text = announce["line"](cuda, count)
    assert words in text
    assert "\n" not in text


def test_processors(announce):
    assert announce["processors"]({}) == len(os.sched_getaffinity(0))
    assert announce["processors"]({"CMAKE_BUILD_PARALLEL_LEVEL": "3"}) == 3
    assert announce["processors"]({"CMAKE_BUILD_PARALLEL_LEVEL": "many"}) == len(os.sched_getaffinity(0))


def test_without_a_terminal_it_is_on_stderr():
    done = subprocess.run([sys.executable, "-c", SAY], capture_output=True, text=True, check=True, start_new_session=True)
    assert (done.stdout, done.stderr) == ("", "a line\n")


@pytest.mark.parametrize("hidden", [True, False])
def test_it_reaches_the_terminal_once(hidden):
    """`hidden`: another process captures the output, as pip does. The child opens the terminal, which makes it the terminal of
    its session: a fork of this process is no way, because libraries of other tests may have started threads.
    """
    terminal, end = pty.openpty()
    output = subprocess.DEVNULL if hidden else end
    child = f"import os; os.open({os.ttyname(end)!r}, os.O_RDWR); {SAY}"
    subprocess.run([sys.executable, "-c", child], stdout=output, stderr=output, start_new_session=True, check=True)
    os.close(end)
    seen = b""
    try:
        while piece := os.read(terminal, 4096):
            seen += piece
    except OSError:  # no process has the terminal open any more
        pass
    os.close(terminal)
    assert re.findall(rb"a line", seen) == [b"a line"]
