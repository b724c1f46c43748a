"""The example of long contexts in its small configuration, and that a wrong result is found."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

import train_long  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in arguments]
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=alone)


def trained(path: pathlib.Path, *options: object) -> dict:
    done = run(sys.executable, HERE / "train_long.py", "--small", "--device", "cpu", "--json", path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("good\n")
    return json.loads(path.read_text())


def test_the_loss_of_two_ranks_is_that_of_one(tmp_path: pathlib.Path) -> None:
    results = trained(tmp_path / "long.json", "--scheme", "ring", "--recompute")
    assert list(results) == ["1", "2"]
    one, two = (results[ranks]["losses"] for ranks in results)
    assert len(one) == 20
    assert one[0] - one[-1] > 1
    assert two == pytest.approx(one, abs=1e-4)
    assert two != one  # other sums: two processes did take part
    assert "ring" in results["2"]["scheme"]


def test_torchrun_and_bfloat16(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "long.json"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    options = ("--small", "--device", "cpu", "--dtype", "bfloat16", "--steps", 12, "--json", path)
    done = run(*launcher, HERE / "train_long.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^    2 +\d+ +-  \d\.\d+ -> \d\.\d+ ", done.stdout, re.MULTILINE)
    losses = json.loads(path.read_text())["2"]["losses"]
    assert losses[0] - losses[-1] > 0.5


def test_files_are_checked_before_work_begins(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """By the process that writes them: the others of torchrun may be on machines that lack the folder."""
    monkeypatch.setattr(train_long, "started_here", lambda *_: pytest.fail("work began"))
    arguments = ["--small", "--device", "cpu", "--json", str(tmp_path / "missing" / "x.json")]
    for rank in (None, "0"):
        if rank is not None:
            monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            train_long.main(arguments)
        assert ended.value.code == 2
        assert f"the folder {tmp_path / 'missing'} must exist" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert train_long.parsed(arguments).json.name == "x.json"


def test_wrong_curves_are_found() -> None:
    good = [5.0, 4.0, 3.0, 2.0]
    assert train_long.verdicts({1: good, 2: [x + 1e-5 for x in good]}, 1e-4) == []
    assert train_long.verdicts({1: good, 2: [x + 1e-2 for x in good]}, 1e-4) == [
        "2 ranks: the curve differs from the first by 0.01, more than 0.0001"
    ]
    assert len(train_long.verdicts({1: good, 2: [float("nan")] * 4}, 1e-4)) == 2
    assert train_long.verdicts({1: good[::-1]}, 1e-4) == ["1 ranks: the loss does not fall"]
