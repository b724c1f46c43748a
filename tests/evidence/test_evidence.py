"""The evidence is about the present sources, and the tables agree with it."""

from __future__ import annotations

import subprocess
import sys

import record
import sources


def test_the_evidence_is_about_these_sources() -> None:
    stale = record.FOLDER / "STALE.md"
    wrong = record.problems(record.read_all(), sources.digest(), stale.read_text() if stale.exists() else None)
    assert not wrong, "\n".join(["run tests/evidence/collect.py on a GPU, or say in STALE.md why not:", *wrong])


def test_the_readme_has_the_tables_of_the_evidence() -> None:
    done = subprocess.run([sys.executable, record.FOLDER / "tables.py", "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_files_are_named_after_their_gpu_and_small() -> None:
    for name, data in record.read_all().items():
        assert name == record.file_name(data["gpu"])
        assert (record.FOLDER / name).stat().st_size < 500_000
        assert (record.FOLDER / name).read_text() == record.dumps(record.ordered(data)) + "\n"
