"""A program is ended at its limit, with all processes that it started."""

from __future__ import annotations

import pathlib
import sys
import time

import limited


def test_a_program_may_end_what_has_a_session_of_its_own(tmp_path: pathlib.Path) -> None:
    """As torchrun does, whose processes a signal to its own group does not reach."""
    note = tmp_path / "note"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(note)!r}).touch()"
    code = "import signal, subprocess, sys, time\n"
    code += f"child = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
    code += "signal.signal(signal.SIGTERM, lambda *of: (child.kill(), sys.exit()))\nprint('begun', flush=True)\ntime.sleep(9)"
    done = limited.run_limited([sys.executable, "-c", code], 1.0, tmp_path / "log")
    assert done.code is None
    assert done.text == "begun\n"
    time.sleep(3)
    assert not note.exists()


def test_what_runs_too_long_is_ended_with_all_it_started(tmp_path: pathlib.Path) -> None:
    note = tmp_path / "note"
    child = f"import time, pathlib; time.sleep(2); pathlib.Path({str(note)!r}).touch()"
    code = "import subprocess, sys, time; print('begun', flush=True)\n"
    code += f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(9)"
    done = limited.run_limited([sys.executable, "-c", code], 1.0, tmp_path / "log")
    assert done.code is None
    assert done.text == "begun\n"
    assert done.seconds < 5
    assert limited.run_limited([sys.executable, "-c", "import time; time.sleep(2.5)"], 9, tmp_path / "log").code == 0
    assert not note.exists()
