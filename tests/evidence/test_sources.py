"""The hash changes with what a compiler reads, and with nothing else."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import pytest
import sources


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    """A small copy of the layout, not a git checkout."""
    for path in ("libflash/cuda/a.cuh", "libflash/plan/b.cpp", "libflash/cpu/c.cpp", "include/d.h", "tests/e.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    return tmp_path


def test_the_hash_notices_what_matters(tree: pathlib.Path) -> None:
    seen = {sources.digest(tree)}
    (tree / "libflash/cuda/a.cuh").write_text("libflash/cuda/a.cuH")  # a byte
    seen.add(sources.digest(tree))
    (tree / "libflash/cuda/new.cuh").touch()
    seen.add(sources.digest(tree))
    (tree / "libflash/cuda/new.cuh").rename(tree / "libflash/plan/new.cuh")
    seen.add(sources.digest(tree))
    (tree / "include/d.h").unlink()
    seen.add(sources.digest(tree))
    assert len(seen) == 5
    assert sources.files(tree) == ["libflash/cuda/a.cuh", "libflash/plan/b.cpp", "libflash/plan/new.cuh"]


def test_the_hash_ignores_the_rest(tree: pathlib.Path) -> None:
    before = sources.digest(tree)
    (tree / "libflash/cpu/c.cpp").write_text("changed")
    (tree / "libflash/cpu/more.h").touch()
    (tree / "tests/e.py").write_text("changed")
    for path in ("include/.clang-format", "libflash/__pycache__/x.py", "libflash/x.so", "libflash/x.md"):
        (tree / path).parent.mkdir(exist_ok=True)
        (tree / path).touch()
    assert sources.digest(tree) == before


def test_comments_and_documents_do_not_count(tree: pathlib.Path) -> None:
    kernel, table = tree / "libflash/cuda/a.cuh", tree / "libflash/cuda/kernels.table"
    kernel.write_text('int x = 1;  // one\nauto path = "a // b /* c */";\n')
    table.write_text("forward sm80  # a kernel\n")
    before = sources.digest(tree)
    kernel.write_text('/* a word:\n   "two" */\n\nint x  =  1;\nauto path = "a // b /* c */";\n')
    table.write_text("# another\nforward   sm80\n")
    (tree / "libflash/cuda/README.md").write_text("how a kernel is made")
    assert sources.digest(tree) == before
    seen = {before}
    kernel.write_text('int x = 1;\nauto path = "a // b";\n')  # text in a literal is no comment
    seen.add(sources.digest(tree))
    kernel.write_text('intx = 1;\nauto path = "a // b /* c */";\n')
    seen.add(sources.digest(tree))
    kernel.write_text("#define A 1 // one\n")
    seen.add(sources.digest(tree))
    kernel.write_text("#define A\n1 // one\n")  # a line end is part of a directive
    seen.add(sources.digest(tree))
    assert len(seen) == 5


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_git_and_no_git_give_the_same_hash(tree: pathlib.Path) -> None:
    walked = sources.digest(tree)
    (tree / ".gitignore").write_text("*.log\n")
    subprocess.run(["git", "init", "-q", tree], check=True)
    subprocess.run(["git", "-C", tree, "add", "libflash/cuda", "include"], check=True)
    assert sources.listed_by_git(tree) is not None
    assert sources.digest(tree) == walked  # plan/b.cpp is not tracked yet: it counts too
    (tree / "libflash/build.log").touch()
    assert sources.digest(tree) == walked
    (tree / "include/d.h").unlink()
    assert sources.files(tree) == ["libflash/cuda/a.cuh", "libflash/plan/b.cpp"]  # tracked, but deleted
    inner = tree / "libflash"  # an archive unpacked inside a checkout
    assert sources.listed_by_git(inner) is None


def test_the_hash_of_this_repository() -> None:
    found = sources.files()
    assert {"include/libflash.h", "libflash/cuda/kernels.table"} <= set(found)
    assert not [path for path in found if path.startswith("libflash/cpu/")]
    done = subprocess.run([sys.executable, sources.__file__], capture_output=True, text=True, check=True)
    assert done.stdout == sources.digest() + "\n"
