"""python -m libflash conformance: its options, what it prints and writes, its exit code."""

from __future__ import annotations

import importlib.util
import json
import pathlib

import pytest
from harness import python
from libflash.conformance import command, report, summary
from libflash.conformance.case import Inputs
from libflash.conformance.item import Item
from libflash.conformance.items import items
from libflash.conformance.outcome import GROUPS, Outcome
from libflash.conformance.target import Target
from libflash.conformance.targets import ADAPTERS, make

from libflash import conformance

FEW = ["--types", "fp32", "--only", "exact-,square"]


def test_items() -> None:
    found = list(items())
    assert len({(item.group, item.name) for item in found}) == len(found)
    assert {item.group for item in found} | {"rows without a key"} == set(GROUPS)
    assert {item.dtype for item in found} == {"bf16", "fp16", "fp32", "fp64"}


def test_libflash_holds(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "run.json"
    assert conformance.main(["--target", "libflash", *FEW, "--json", str(file)]) == 0
    run = json.loads(file.read_text())
    assert run["chosen"] == run["ran"] == run["held"] == 6
    assert run["groups"]["exact answers"]["holds"] == run["held"]
    assert not run["failures"]
    assert 0 < run["tensors"]["o"]["t1"] <= 1
    printed = capsys.readouterr().out
    assert "exact answers" in printed
    assert f"libflash: all {run['held']} checks that apply hold" in printed


def test_failures_are_printed(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attempt.py").write_text("def zeros(q, k, v, *, causal=False):\n    return q * 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "run.json"
    arguments = ["--target", "attempt:zeros", "--types", "fp32", "--only", "exact answers,exact-", "--json", str(file)]
    assert conformance.main(arguments) == 1
    run = json.loads(file.read_text())
    assert run["failures"]
    assert run["failures"][0]["worst"] > 1
    assert run["not_offered"]["softmax_scale"] > 0
    printed = capsys.readouterr().out
    assert "and " in printed
    assert "more (--all)" in printed
    assert f"{len(run['failures'])} of {len(run['failures']) + run['held']} checks that apply fail" in printed
    assert run["ran"] > len(run["failures"]) + run["held"]
    assert "more (--all)" not in report.text(run, everything=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "none"], "--target must be libflash, "),
        (["--target", "no.such:module"], "No module named"),
        (["--target", "libflash.torch:cpu"], "takes nothing after a colon"),
        (["--target", "libflash", "--device", "cuda"], "NumPy's arrays are on the CPU, not on cuda"),
        (["--target", "libflash", "--only", "nosuchcheck"], "no check has these words"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options(arguments: list[str], words: str, capsys: pytest.CaptureFixture) -> None:
    if "torch" in arguments[1]:
        pytest.importorskip("torch")
    assert conformance.main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--types", "int8"], ["--seconds", "0"]], ids=" ".join)
def test_bad_values(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as left:
        conformance.main(["--target", "libflash", *arguments])
    assert left.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_the_time_ends_a_run(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "run.json"
    assert conformance.main(["--target", "libflash", *FEW, "--seconds", "1e-9", "--json", str(file)]) == 0
    run = json.loads(file.read_text())
    assert run["ran"] == 0
    assert run["groups"]["exact answers"]["not run"] == run["chosen"]
    assert "were not run for lack of time" in capsys.readouterr().out


@pytest.mark.parametrize("holds", [True, False])
def test_a_lost_gpu_ends_a_run(holds: bool, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the check that loses it holds: bad input may raise."""
    ran: list[str] = []

    def run(target: Target, outcome: Outcome) -> None:
        ran.append(outcome.name)
        assert holds or len(ran) < 3, "wrong"

    class Lost(Target):
        name = "a target"

        def works(self) -> bool:
            return len(ran) < 3

    monkeypatch.setattr(command, "chosen", lambda types, words: [Item("accuracy", str(i), "fp32", run) for i in range(8)])
    monkeypatch.setattr(command, "make", lambda *of_target: Lost())
    assert conformance.main(["--target", "libflash"]) == 1
    printed = capsys.readouterr().out
    assert f"1 of 3 checks that apply fail; 5 were not run, because after {ran[2]} every call on the GPU fails" in printed
    assert len(ran) == 3


def test_a_missing_package_is_named() -> None:
    done = python("""
        import sys
        sys.modules["numpy"] = None
        from libflash.__main__ import main
        sys.exit(main(["conformance", "--target", "libflash"]))
    """)
    assert done.returncode == 2
    assert done.stderr == "libflash conformance: needs numpy, which this Python does not have\n"


def test_without_ml_dtypes_bf16_is_left_out() -> None:
    done = python("""
        import sys
        sys.modules["ml_dtypes"] = None
        from libflash.__main__ import main
        sys.exit(main(["conformance", "--target", "libflash", "--only", "heads-"]))
    """)
    assert done.returncode == 0, done.stderr
    assert "fp16, fp32, fp64; without bf16, for which NumPy needs ml_dtypes" in done.stdout


def test_summary_of_nothing() -> None:
    assert summary.groups([]) == summary.tensors([]) == summary.not_offered([]) == {}
    assert summary.failures([]) == []


def test_every_adapter_is_there() -> None:
    """Each can be made, or says what is missing: flash_attn is not installed everywhere."""
    for name in ADAPTERS:
        package = {"flash_attn": "flash_attn", "libflash.jax": "jax", "jax": "jax", "libflash": "libflash"}.get(name, "torch")
        if importlib.util.find_spec(package) is None:
            with pytest.raises(ModuleNotFoundError, match=rf"'(torch|{package})'"):
                make(name, "cpu")
            continue
        target = make(name, "cpu")
        assert target.name == name
        assert target.offers


def test_a_function_is_read_by_its_signature(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "signed.py").write_text(
        "import libflash\n"
        "def some(q, k, v, *, causal=False, softcap=0.0, return_lse=False):\n"
        "    return libflash.attention(q, k, v, causal=causal, softcap=softcap, return_lse=return_lse)\n"
        "def every(q, k, v, **options):\n"
        "    return libflash.attention(q, k, v, **options)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    some, every = make("signed:some", "cpu"), make("signed:every", "cpu")
    assert {"causal", "causal bottom_right", "softcap"} <= some.offers
    assert not {"causal top_left", "bias", "gradients"} & some.offers
    assert {"causal top_left", "bias", "learnable_sink"} <= every.offers
    for target in (some, every):
        assert set(target.run(problem())) == {"o", "lse"}


def problem() -> Inputs:
    from libflash.conformance.checks.check import qkv

    return Inputs(*qkv(), dout=None, dlse=None, options={"causal": True})
