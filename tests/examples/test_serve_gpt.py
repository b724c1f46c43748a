"""The serving example in its small configuration: what it prints, that batches change no token, and that defects are found."""

from __future__ import annotations

import io
import json
import os
import pathlib
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from forked_programs import run_together

import libflash

torch = pytest.importorskip("torch")

import decode_gpt  # noqa: E402
import serve_gpt  # noqa: E402
from gpt import checkpoint, files  # noqa: E402
from gpt.draft import Tree, draft  # noqa: E402
from gpt.engine import Engine, Settings  # noqa: E402
from gpt.groups import groups_of  # noqa: E402
from gpt.model import GPT, Shape  # noqa: E402
from gpt.paged import PagedCache  # noqa: E402
from gpt.pages import Pages  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def default_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    libflash.set_num_threads(0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A checkpoint after a training that makes texts of some variety."""
    serve_gpt.use_one_thread()
    path = tmp_path_factory.mktemp("model") / "gpt.pt"
    checkpoint.save(serve_gpt.trained(serve_gpt.parsed(["--small", "--train-steps", "100"])), path)
    return path


def served(model: pathlib.Path, *arguments: str) -> dict[str, Any]:
    path = model.with_suffix(".json")
    path.unlink(missing_ok=True)
    assert serve_gpt.main(["--small", "--check", "--checkpoint", str(model), "--json", str(path), *arguments]) == 0
    return json.loads(path.read_text())


def test_the_program(tmp_path: pathlib.Path) -> None:
    (done,) = run_together(HERE / "serve_gpt.py", [["--small", "--check", "--requests", "6"]], seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^192 tokens of 6 requests in \d+\.\d\d s: \d+ tokens/s$", done.stdout, re.MULTILINE)
    assert re.search(r"^\d+ steps of \d+\.\d rows; \d+ of \d+ tokens of prompts shared$", done.stdout, re.MULTILINE)
    assert "the same tokens in 6 of 6 texts" in done.stdout
    assert done.stdout.endswith("good\n")
    assert done.stderr == ""  # no terminal, no progress line


OPTIONS = {
    "all": [],
    "int8": ["--cache", "int8"],
    "e4m3": ["--cache", "e4m3"],
    "e5m2": ["--cache", "e5m2"],
    "odd pages": ["--page-size", "7", "--nodes", "31", "--depth", "9"],
    "few rows": ["--budget", "5", "--batch", "3"],
    "few pages": ["--pages", "20"],
    "bfloat16": ["--dtype", "bfloat16"],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_batches_change_no_token(model: pathlib.Path, name: str) -> None:
    found = served(model, *OPTIONS[name])
    counts, check = found["counts"], found["check"]
    assert counts["generated"] == 12 * 32
    assert counts["shared"] > 0
    assert counts["accepted"] > 0
    assert counts["accepted"] < counts["drafted"]
    if name in ("all", "odd pages", "few rows", "few pages"):
        assert check["same"] == check["texts"] == 12


CHAINS = ["--nodes", "2"]  # drafts of one token: no branch


@pytest.mark.parametrize("name", OPTIONS)
def test_batches_change_no_bit(model: pathlib.Path, name: str) -> None:
    """Every logit of every text, with each type and each cache: rows beside others, in chunks, drafted, over shared pages."""
    found = served(model, *OPTIONS[name], *CHAINS)
    assert found["check"]["equal"] == found["check"]["same"] == found["check"]["texts"] == 12
    assert found["check"]["difference"] == 0
    assert found["counts"]["shared"] > 0
    assert found["counts"]["accepted"] > 0


@pytest.mark.parametrize("name", ["all", "e4m3"])
def test_rows_that_are_not_invariant_change_bits(model: pathlib.Path, name: str) -> None:
    """Not with bfloat16: rounding to bfloat16 may hide every difference between two orders of a float32 sum."""
    found = served(model, *OPTIONS[name], *CHAINS, "--free")
    assert found["check"]["equal"] < found["check"]["texts"]
    assert found["check"]["difference"] > 0


def test_without_drafts_and_shared_pages(model: pathlib.Path) -> None:
    every, plain = served(model), served(model, "--nodes", "1", "--no-share", "--batch", "4")
    assert plain["counts"]["shared"] == plain["counts"]["drafted"] == 0
    assert plain["texts"] == every["texts"]
    assert plain["counts"]["steps"] > every["counts"]["steps"]


def test_progress(model: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal a line says how far the engine is, and is written over. Steps take 0.11 seconds of this clock."""
    screen, calls = io.StringIO(), iter(range(10000))
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(serve_gpt.sys, "stderr", screen)
    monkeypatch.setattr(serve_gpt, "time", SimpleNamespace(perf_counter=lambda: 0.11 * next(calls)))
    engine = Engine(checkpoint.load_or_exit(model, torch.device("cpu"), torch.float32), Settings(nodes=1), torch.float32)
    with torch.no_grad():
        serve_gpt.serve(engine, [[1, 2, 3]] * 3, 9, arrivals=1)
    first, *lines = screen.getvalue().split("\r")
    assert first == ""
    assert lines[-1].endswith(" \n")
    wanted = r"step (\d+): (\d) running, (\d) waiting, (\d+) pages available, (\d+) tokens, (\d+) tokens/s \n?"
    numbers = [[int(number) for number in re.fullmatch(wanted, line).groups()] for line in lines]  # type: ignore[union-attr]
    assert [step for step, *_ in numbers] == [2, 4, 6, 8, 10]
    assert numbers[0] == [2, 2, 0, 254, 3, 14]  # 3 tokens in 0.22 s
    assert numbers[-1][:5] == [10, 1, 0, 255, 26]


# -- defects


def forgotten_move(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagedCache, "move", lambda *given: None)


def one_position(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tree, "depths", property(lambda tree: [0] * len(tree.tokens)))


def chain_for_a_tree(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tree, "words", lambda tree: [(2 << node) - 1 for node in range(len(tree.tokens))])


def another_prefix(patch: pytest.MonkeyPatch) -> None:
    beginning = Pages.beginning
    patch.setattr(Pages, "beginning", lambda pages, text: beginning(pages, text)[:1] * len(beginning(pages, text)))


@pytest.mark.parametrize("defect", [forgotten_move, one_position, chain_for_a_tree, another_prefix])
def test_defects_are_found(
    model: pathlib.Path, defect: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    defect(monkeypatch)
    assert serve_gpt.main(["--small", "--check", "--checkpoint", str(model), "--pages", "24"]) == 1
    said = capsys.readouterr()
    assert "logits differ from those alone by" in said.err
    assert said.out.endswith("WRONG\n")


# -- parts


def test_pages() -> None:
    pages = Pages(4, 2, share=True)
    mine = [pages.new(), pages.new()]
    pages.name(mine[0], [1, 2])
    pages.name(mine[1], [1, 2, 3, 4])
    assert pages.beginning([1, 2, 3, 4]) == mine[:1]  # one token is left
    assert pages.beginning([1, 2, 3, 4, 5]) == mine
    assert pages.beginning([2, 2, 3, 4, 5]) == []
    assert pages.available == 2
    pages.use(mine[0])
    for page in mine:
        pages.leave(page)
    assert pages.available == 3
    assert pages.beginning([1, 2, 3, 4, 5]) == mine
    assert {pages.new(), pages.new(), pages.new()} == {0, 1, 2, 3} - {mine[0]}
    assert pages.available == 0
    assert pages.beginning([1, 2, 3, 4, 5]) == mine[:1]  # the other one has a new owner
    assert Pages(4, 2, share=False).beginning([1, 2, 3]) == []


def test_groups() -> None:
    """Neighbours with the same first page, as far as all of them go together, and have keys."""
    assert groups_of([[3], [1, 2, 5], [1, 2, 6], [1, 2], [4, 9], [4, 8]], [4, 9, 8, 8, 6, 3], 4) == ([0, 1, 4, 6], [0, 8, 3])
    assert groups_of([[7, 8]], [5], 4) == ([0, 1], [0])


def test_shared_pages_are_given_as_a_hint(model: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hints, decode = [], libflash.decode

    def recorded(*arrays: Any, **options: Any) -> Any:
        hints.append((options["shared_groups"].diff() > 1) & (options["shared_lens"] > 0))
        return decode(*arrays, **options)

    monkeypatch.setattr(libflash, "decode", recorded)
    served(model)
    assert torch.cat(hints).any()
    hints.clear()
    assert serve_gpt.main(["--small", "--checkpoint", str(model), "--no-share"]) == 0
    assert not torch.cat(hints).any()


def test_trees() -> None:
    tree = Tree([5], [-1])
    tree.add([7, 8], 9)
    tree.add([7, 9], 9)
    tree.add([6], 9)
    assert tree.tokens == [5, 7, 8, 9, 6]
    assert tree.parents == [-1, 0, 1, 1, 0]
    assert tree.depths == [0, 1, 2, 2, 1]
    assert [bin(word) for word in tree.words()] == ["0b1", "0b11", "0b111", "0b1011", "0b10001"]
    assert tree.child(1, 9) == 3
    assert tree.child(0, 9) is None


def test_drafts() -> None:
    text = [1, 2, 3, 4, 9, 1, 2, 3, 7, 8, 1, 2, 3]
    tree = draft(text, 8, 2)
    assert tree.tokens == [3, 7, 8, 4, 9]
    assert tree.parents == [-1, 0, 1, 0, 3]
    assert draft(text, 3, 2).tokens == [3, 7, 8]
    assert draft(text, 1, 2).tokens == [3]
    assert draft([4], 8, 2).tokens == [4]


def test_a_request_that_has_no_room() -> None:
    engine = Engine(GPT(Shape(256, 64, 1, 1, 8, "rotary")), Settings(pages=4, page_size=4), torch.float32)
    with pytest.raises(ValueError, match=r"10 \+ 7 tokens; there is room for 16"):
        engine.add([1] * 10, 7)
    engine.add([1] * 10, 6)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nodes", "32"], "--nodes is 32; it must be 1 to 31"),
        (["--page-size", "0"], "--page-size is 0; it must be 1 or more"),
        (["--requests", "0"], "--requests is 0; it must be 1 or more"),
        (["--new", "-1"], "--new is -1; it must be 1 or more"),
        (["--depth", "0"], "--depth is 0; it must be 1 or more"),
        (["--pages", "5"], "--pages is 5, room for 80 tokens; a request has up to 96"),
    ],
)
def test_bad_options(arguments: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        serve_gpt.main(["--small", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


FILES = {
    "json in no folder": (["--json", "missing/x.json"], r"--json is missing/x\.json; the folder /.*/missing must exist$"),
    "json is a folder": (["--json", "folder"], r"--json is folder; it must be a file, not a folder$"),
    "no checkpoint": (
        ["--checkpoint", "missing.pt"],
        r"--checkpoint is missing\.pt; .* can be read \(No such file or directory\)$",
    ),
    "checkpoint is a folder": (["--checkpoint", "folder"], r"--checkpoint is folder; it must be a file .* \(Is a directory\)$"),
    "checkpoint is text": (
        ["--checkpoint", "text"],
        r"--checkpoint is text; it must be what train_gpt\.py --save wrote \(UnpicklingError\)$",
    ),
    "checkpoint is empty": (
        ["--checkpoint", "empty"],
        r"--checkpoint is empty; it must be what train_gpt\.py --save wrote \(EOFError\)$",
    ),
    "checkpoint is cut": (
        ["--checkpoint", "cut"],
        r"--checkpoint is cut; it must be what train_gpt\.py --save wrote \(RuntimeError\)$",
    ),
    "checkpoint of another": (["--checkpoint", "other"], r"--checkpoint is other; it must be .* wrote \(KeyError\)$"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_are_checked_before_work_begins(
    name: str, model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    arguments, said = FILES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve_gpt, "trained_briefly", lambda *_: pytest.fail("a training began"))
    monkeypatch.setattr(serve_gpt, "serve", lambda *_: pytest.fail("a request was served"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("no checkpoint\n")
    (tmp_path / "empty").touch()
    (tmp_path / "cut").write_bytes(model.read_bytes()[:-1000])
    torch.save({"weights": {}}, tmp_path / "other")
    for program in (serve_gpt, decode_gpt):
        with pytest.raises(SystemExit) as ended:
            program.main(["--small", *arguments])
        assert ended.value.code == 2
        assert re.search(said, capsys.readouterr().err, re.MULTILINE)


def test_a_file_that_cannot_be_written(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so what the system says is replaced."""
    path = tmp_path / "x.json"
    assert files.unwritable(path) is None
    assert not path.exists()
    monkeypatch.setattr(os, "access", lambda given, mode: given != tmp_path or mode != os.W_OK)
    assert files.unwritable(path) == "it must be a file that can be written"
    path.touch()
    assert files.unwritable(path) is None
    monkeypatch.setattr(os, "access", lambda given, mode: given != path or mode != os.W_OK)
    assert files.unwritable(path) == "it must be a file that can be written"


def test_a_checkpoint_that_is_too_short(model: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    assert serve_gpt.main(["--small", "--checkpoint", str(model), "--prompt", "500"]) == 2
    assert "context is 96; requests have up to 572 tokens" in capsys.readouterr().err
