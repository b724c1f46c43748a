"""Counts from pytest's report."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import junit

JUNIT = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest" errors="1" failures="1" skipped="2" tests="6">
<testcase classname="tests.cuda.test_merge" name="test_a[1]" time="0.1" />
<testcase classname="tests.cuda.test_merge" name="test_a[2]" time="0.1"><failure message="AssertionError: o: T1 worst">long</failure></testcase>
<testcase classname="tests.cuda.test_merge.TestB" name="test_b" time="0.1"><skipped type="pytest.skip" message="no CuPy">x</skipped></testcase>
<testcase classname="tests.cuda.test_forward" name="test_c" time="0.1"><skipped message="no CuPy">x</skipped></testcase>
<testcase classname="tests.cuda.test_forward" name="test_d" time="0.1"><error message="boom">x</error></testcase>
<testcase classname="tests.cuda.test_forward" name="test_e" time="0.1"><system-out>text</system-out></testcase>
</testsuite></testsuites>"""  # noqa: E501


def test_counts_of_a_junit_report() -> None:
    found = junit.counts(JUNIT)
    assert {kind: found[kind] for kind in ("passed", "failed", "skipped")} == {"passed": 2, "failed": 2, "skipped": 2}
    assert found["files"]["tests/cuda/test_merge.py"] == {"failed": 1, "passed": 1, "skipped": 1}
    assert found["skipped_because"] == {"no CuPy": 2}
    assert found["failures"]["tests/cuda/test_merge.py::test_a[2]"] == "AssertionError: o: T1 worst"
    assert found["failures"]["tests/cuda/test_forward.py::test_d"] == "boom"
    assert junit.counts(JUNIT, JUNIT)["passed"] == 4


def test_counts_of_pytest_itself(tmp_path: pathlib.Path) -> None:
    """A report by pytest itself: a test that fails in its body and in its teardown counts once."""
    (tmp_path / "test_x.py").write_text(
        "import pytest\n@pytest.fixture\ndef late():\n    yield\n    raise ValueError('late')\n"
        "def test_both(late): assert 0\ndef test_fine(): pass\ndef test_skipped(): pytest.skip('why')\n"
        "@pytest.mark.xfail\ndef test_known(): assert 0\n"
    )
    report = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", f"--rootdir={tmp_path}"]
    subprocess.run([*command, "-c", "/dev/null", tmp_path], capture_output=True, check=False)
    found = junit.counts(report.read_text())
    assert (found["passed"], found["skipped"]) == (1, 2)
    assert list(found["failures"]) == ["test_x.py::test_both"]
    assert found["skipped_because"]["why"] == 1


def test_messages_name_files_within_the_repository() -> None:
    message = f"{junit.ROOT}/tests/a.cu(3): error"
    case = f'<testcase classname="tests.test_a" name="test_b"><failure message="{message}"/></testcase>'
    found = junit.counts(f"<testsuite>{case}</testsuite>")
    assert found["failures"] == {"tests/test_a.py::test_b": "tests/a.cu(3): error"}
