"""Ctrl-C ends a call on the CPU long before it is complete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

CALLS = {
    "forward": "libflash.attention(x, x, x, out=out)",
    "forward, scalar": "libflash.attention(x, x, x, out=out, kernel='forward_cpu_scalar')",
    "backward": "libflash.attention_backward(x, x, x, x, x, lse, dq=out, dk=other, dv=third)",
    "decode": "libflash.decode(x, x, x, out=out)",
    "decode, few rows": "[libflash.decode(x[:, :1], x, x, out=out[:, :1]) for _ in range(2000)]",
    "merge": "[libflash.merge([x] * 200, [lse] * 200, out=out) for _ in range(200)]",
}


def run(code: str) -> object:
    prelude = """
        import json, os, signal, threading, time, numpy, libflash
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process starts with it ignored
        def kill_after(seconds):
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    """
    script = textwrap.dedent(prelude) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # an editable install may print what it builds


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", CALLS)
def test_interrupt_ends_the_call(name: str, threads: int) -> None:
    code = f"""
        x = numpy.ones((1, 20000, 4, 64), "float32")
        lse = numpy.zeros((1, 4, 20000), "float32")
        out, other, third = (numpy.full_like(x, numpy.nan) for _ in range(3))
        libflash.set_num_threads({threads})
        kill_after(0.3)
        try:
            {CALLS[name]}
            caught = "the call came to its end"
            time.sleep(30)
        except KeyboardInterrupt:
            caught = locals().get("caught", "during the call")
        small = x[:, :50]
        print(json.dumps([caught, bool(numpy.isfinite(out).all()), bool((libflash.attention(small, small, small) == 1).all())]))
    """
    caught, complete, works = run(code)
    assert caught == "during the call"
    assert not complete or name in {"decode, few rows", "merge"}
    assert works


def test_what_a_signal_handler_raises_comes_out() -> None:
    code = """
        x = numpy.ones((1, 20000, 4, 64), "float32")
        calls = []
        def handler(number, frame):
            calls.append(float(libflash.attention(x[:, :9], x[:, :9], x[:, :9]).sum()))  # a call from within
            if len(calls) == 2:
                raise RuntimeError("from the handler")
        signal.signal(signal.SIGINT, handler)
        kill_after(0.2)
        kill_after(0.5)
        try:
            libflash.attention(x, x, x)
            text = "nothing"
        except RuntimeError as error:
            text = str(error)
        print(json.dumps([calls, text]))
    """
    assert run(code) == [[9 * 4 * 64.0] * 2, "from the handler"]


def test_a_fork_in_a_signal_handler() -> None:
    """A child process does not wait for threads of its parent."""
    code = """
        import warnings
        warnings.simplefilter("ignore")
        x = numpy.ones((1, 16000, 4, 64), "float32")
        children = []
        def handler(number, frame):
            children.append(os.fork())
        signal.signal(signal.SIGINT, handler)
        libflash.set_num_threads(3)
        kill_after(0.2)
        try:
            done = bool((libflash.attention(x, x, x) == 1).all())
            text = ""
        except libflash.CancelledError as error:
            done, text = False, str(error)
        if children == [0]:
            os._exit(0 if "forked" in text and (libflash.attention(x[:, :9], x[:, :9], x[:, :9]) == 1).all() else 4)
        print(json.dumps([done, os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1])]))
    """
    assert run(code) == [True, 0]
