"""The GPT examples in their small configuration: their output, their comparisons, and that wrong results are found."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator

import pytest
from forked_programs import run_together

import libflash

torch = pytest.importorskip("torch")

import curvature_gpt  # noqa: E402
import decode_gpt  # noqa: E402
import mean_flow  # noqa: E402
import train_gpt  # noqa: E402
from gpt import attention, rotary, text  # noqa: E402
from gpt.cache import LibflashCache  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def default_torch_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(program: str, *arguments: object) -> str:
    words = ["--small", "--device", "cpu", *map(str, arguments)]
    (done,) = run_together(HERE / program, [words], seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("good\n")
    return done.stdout


def measured(path: pathlib.Path) -> dict:
    return json.loads(path.read_text())


def test_training(tmp_path: pathlib.Path) -> None:
    said = run("train_gpt.py", "--json", tmp_path / "train.json")
    lines = re.findall(r"^ +(\d+) +\d+  (pytorch \w+|libflash) .* (\d+\.\d+) -> (\d+\.\d+) ", said, re.MULTILINE)
    contenders = ["pytorch default", "pytorch math", "pytorch nudged", "libflash"]
    assert [line[:2] for line in lines] == [(context, name) for context in ("64", "256") for name in contenders]
    assert all(float(first) - float(last) > 1 for *_, first, last in lines)
    rows = measured(tmp_path / "train.json")["rows"]
    assert [row["context"] * row["batch"] for row in rows] == [512] * 8
    for row in rows:
        assert row["losses"][0] == pytest.approx(rows[0 if row["context"] == 64 else 4]["losses"][0], rel=1e-2)
        assert row["difference"] < 1e-5
    ran = [row["ran"] for row in rows if row["contender"] == "libflash"]
    assert all(re.fullmatch(r"forward_cpu_\w+, backward_cpu_\w+", kernels) for kernels in ran)


def test_curvature(tmp_path: pathlib.Path) -> None:
    """QK-clip keeps the scores near its limit, where they grow far beyond it without."""
    pytest.importorskip("matplotlib")
    said = run("curvature_gpt.py", "--json", tmp_path / "curves.json", "--chart", tmp_path / "curves.png")
    assert len(re.findall(r"^(?:no clip|QK-clip) +step +\d+   loss ", said, re.MULTILINE)) == 10
    curves = measured(tmp_path / "curves.json")
    assert max(curves["no clip"]["largest"]) > 100
    assert max(curves["QK-clip"]["largest"]) < 40
    assert curves["QK-clip"]["clipped"] > 0
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_mean_flow(tmp_path: pathlib.Path) -> None:
    """A loss with a tangent of attention trains; PyTorch's attention cannot take the step."""
    pytest.importorskip("matplotlib")
    said = run("mean_flow.py", "--json", tmp_path / "curves.json", "--chart", tmp_path / "curves.png")
    assert "refuses the step: Trying to use forward AD with _scaled_dot_product" in said
    assert len(re.findall(r"^step +\d+   error \d\.\d+   drawings ", said, re.MULTILINE)) == 5
    curves = measured(tmp_path / "curves.json")
    assert curves["roundness"][0][1] > 2 * curves["roundness"][-1][1]
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_training_with_bfloat16_weights_and_rotary_embedding(tmp_path: pathlib.Path) -> None:
    options = ["--dtype", "bfloat16", "--positions", "rotary", "--context", 64, "--tokens", 128, "--steps", 12]
    said = run("train_gpt.py", *options, "--head-dim", 64, "--json", tmp_path / "train.json")
    assert "2 heads of 64" in said
    curves = [row["losses"] for row in measured(tmp_path / "train.json")["rows"]]
    assert len(curves) == 4
    for curve in curves:
        assert curve[-1] < curve[0] - 0.3
        assert curve == pytest.approx(curves[0], abs=0.05)
        assert curve != curves[0] or curve is curves[0]


@pytest.mark.parametrize(("dtype", "steps"), [("float32", 40), ("bfloat16", 10)])
def test_generation_with_rotary_embedding(tmp_path: pathlib.Path, dtype: str, steps: int) -> None:
    said = run("decode_gpt.py", "--dtype", dtype, "--train-steps", steps, "--json", tmp_path / "decode.json")
    assert re.findall(r"^(pytorch \w+|libflash)  +\d+ +\d+ +\d+\.\d+$", said, re.MULTILINE) == list(decode_gpt.CACHES)
    found = measured(tmp_path / "decode.json")
    assert found["positions"] == "rotary"
    assert f"tokens: the same in {found['agreement']['same']} of 3 sequences" in said
    if dtype == "float32":
        assert found["agreement"]["same"] == 3
        assert found["agreement"]["difference"] < 1e-4


def test_generation_from_a_checkpoint(tmp_path: pathlib.Path) -> None:
    run("train_gpt.py", "--context", 72, "--steps", 20, "--save", tmp_path / "gpt.pt")
    said = run("decode_gpt.py", "--checkpoint", tmp_path / "gpt.pt")
    assert "learned positions; 3 sequences of 48 + 24 tokens" in said
    assert "tokens: the same in 3 of 3 sequences" in said
    with pytest.raises(SystemExit, match="are 73 tokens; the model's context is 72"):
        decode_gpt.main(["--small", "--device", "cpu", "--checkpoint", str(tmp_path / "gpt.pt"), "--new", "25"])


def test_another_attention_is_seen_in_the_curve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    wrong = {"causal": True, "window_size": (7, 0)}
    monkeypatch.setattr(attention, "by_libflash", lambda q, k, v: libflash.torch.attention(q, k, v, **wrong))
    assert train_gpt.main(["--small", "--device", "cpu", "--context", "64", "--steps", "20"]) == 1
    said = capsys.readouterr()
    assert "context 64: the curves differ by" in said.err
    assert said.out.endswith("WRONG\n")


def test_a_forgotten_key_is_seen_in_the_logits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def forgetful(cache: LibflashCache, number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cos, sin = cache.angles
        return libflash.decode(
            q, cache.keys[number], cache.values[number], k=k, v=v, cache_seqlens=cache.lengths, rotary_cos=cos, rotary_sin=sin,
            rotary_interleaved=False, window_size=(46, 0),
        )  # fmt: skip

    monkeypatch.setattr(LibflashCache, "step", forgetful)
    assert decode_gpt.main(["--small", "--device", "cpu", "--train-steps", "10", "--rounds", "1"]) == 1
    said = capsys.readouterr()
    assert "logits differ by" in said.err
    assert said.out.endswith("WRONG\n")


def test_verdicts() -> None:
    def rows(*curves: list[float]) -> list[train_gpt.Row]:
        first = curves[0]
        names = ["pytorch default", "pytorch math", "libflash"]
        return [
            train_gpt.Row(64, 8, name, "", 1.0, None, curve, train_gpt.root_mean_square(first, curve))
            for name, curve in zip(names, curves, strict=True)
        ]

    falling = [5.0, 4.0, 3.0, 2.0]
    assert train_gpt.verdicts(rows(falling, falling, falling), "float32") == []
    assert "does not fall" in train_gpt.verdicts(rows(falling, falling, [5.0, 5.0, 5.0, 5.0]), "float32")[0]
    off = [x + 0.1 for x in falling]
    assert "differ by 0.1" in train_gpt.verdicts(rows(falling, falling, off), "float32")[0]
    assert train_gpt.verdicts(rows(falling, [x - 0.06 for x in falling], off), "float32") == []  # PyTorch differs as much
    assert len(train_gpt.verdicts(rows(falling, falling, [5.0, 4.0, 3.0, float("nan")]), "float32")) == 2


def test_first_differences() -> None:
    a = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    b = torch.tensor([[1, 2, 3], [1, 0, 0], [0, 2, 3]])
    assert decode_gpt.first_differences(a, b) == [(1, 1), (2, 0)]
    assert decode_gpt.Agreement(0.1, 0.0, 0.2, 1, 3, 0.5).complaints()[0].startswith("another token")
    assert decode_gpt.Agreement(float("nan"), 0.0, 0.2, 3, 3, 0.0).complaints()[0].startswith("logits differ")


def test_rotary_embedding_turns_by_the_position() -> None:
    """Products of rotated rows depend on the distance alone."""
    cos, sin = (table[None, :, None] for table in rotary.tables(9, 8, torch.device("cpu")))
    q, k = torch.randn(8).expand(1, 9, 1, 8), torch.randn(8).expand(1, 9, 1, 8)
    products = rotary.rotated(q, cos, sin)[0, :, 0] @ rotary.rotated(k, cos, sin)[0, :, 0].T
    assert products[0, 0].item() == pytest.approx(float(q[0, 0, 0] @ k[0, 0, 0]), abs=1e-5)
    torch.testing.assert_close(products[1:, 1:], products[:-1, :-1], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(products[0, 1:], products[0, :-1])


def test_pieces_are_text_and_the_seed_decides() -> None:
    source = text.load(100_000)
    assert source.shape == (100_000,)
    assert "import" in text.shown(source)
    assert torch.equal(text.pieces(source, 3, 50, 1), text.pieces(source, 3, 50, 1))
    assert not torch.equal(text.pieces(source, 3, 50, 1), text.pieces(source, 3, 50, 2))
    assert text.shown(text.pieces(source, 1, 50, 1)[0]) in text.shown(source)


@pytest.mark.parametrize(
    ("main", "arguments", "said"),
    [
        (train_gpt.main, ["--steps", "5"], "--steps is 5; it must be more than 5"),
        (train_gpt.main, ["--context", "8", "16", "--save", "x.pt"], "--save takes the model of one --context, not of 2"),
        (decode_gpt.main, ["--prompt", "2"], "--prompt is 2; it must be 3 or more"),
    ],
)
def test_bad_options(main, arguments: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--small", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "work", "name"),
    [
        (train_gpt, "compared", "json"), (train_gpt, "compared", "save"), (curvature_gpt, "train", "json"),
        (curvature_gpt, "train", "chart"), (mean_flow, "train", "json"), (mean_flow, "train", "chart"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)  # fmt: skip
def test_files_are_checked_before_work_begins(
    program, work: str, name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(program, work, lambda *_: pytest.fail("work began"))
    path = tmp_path / "missing" / "x"
    with pytest.raises(SystemExit) as ended:
        program.main(["--small", "--device", "cpu", f"--{name}", str(path)])
    assert ended.value.code == 2
    assert f"--{name} is {path}; the folder {path.parent} must exist\n" in capsys.readouterr().err
