"""The README's Python and C programs run, and its files and links exist."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from harness import run_python
from library_name import soname

import libflash

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
FOLDERS = (".github", "include", "libflash", "python", "tests")
DOCUMENTS = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]


def block(language: str) -> str:
    """All blocks of a language, one after the other: later blocks continue the first."""
    found = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found
    return "\n".join(found)


def test_python_program() -> None:
    printed = run_python(block("python"))
    assert "forward_cpu_" in printed
    assert "backward_cpu_" in printed


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_c_program(tmp_path: pathlib.Path) -> None:
    package = pathlib.Path(next(iter(libflash.__path__)))
    source, program = tmp_path / "readme.c", tmp_path / "readme"
    source.write_text(block("c"))
    folder = package / "lib"
    subprocess.run(
        ["cc", "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror", source, f"-I{package / 'include'}",
         f"-L{folder}", f"-l:{soname(libflash.__version__)}", f"-Wl,-rpath,{folder}", "-o", program],
        check=True,
    )  # fmt: skip
    assert subprocess.run([program], check=True, capture_output=True, text=True, env=os.environ).stdout == "done\n"


def test_names_in_the_text_exist() -> None:
    """The files, folders, kernels and attributes of the package that the README names exist."""
    for path in re.findall(r"`((?:include|libflash|python|tests)/[\w./*]*)`", README):
        assert list(ROOT.glob(path.rstrip("/"))), path
    kernels = {kernel["name"] for kernel in libflash.info()["kernels"]}
    table = re.findall(r"^(\w+) +(sm\d+) +(\w+) +(\w+) ", (ROOT / "libflash/cuda/kernels.table").read_text(), re.MULTILINE)
    kernels |= {f"{operation}_{folder}_{dtype}_d{dims}" for operation, folder, dtype, dims in table}
    for name in re.findall(r'kernel="(\w+)"', README):
        assert name in kernels or name.endswith(("avx2", "avx512", "neon")), name
    for name in re.findall(r"`libflash\.(\w+)\(", README):
        assert hasattr(libflash, name), name


@pytest.mark.parametrize("document", sorted(DOCUMENTS), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: pathlib.Path) -> None:
    text = document.read_text()
    sections = {
        re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in re.findall(r"^#+ (.*)", text, re.MULTILINE)
    }
    for path in re.findall(r"\]\(([^)]+)\)", text):
        if path.startswith("#"):
            assert path[1:] in sections, path
        else:
            assert (document.parent / path.partition("#")[0]).exists(), path


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) < 220
    assert len((ROOT / "libflash/cuda/README.md").read_text().splitlines()) < 120


def test_the_cpu_and_conformance_tables_are_those_of_the_figures() -> None:
    folder = ROOT / "tests" / "benchmark"
    figures = [*sorted(folder.glob("cpu*.json")), *sorted((folder / "conformance").glob("*.json"))]
    subprocess.run([sys.executable, folder / "table.py", *figures, "--into", folder / "RESULTS.md", "--check"], check=True)


def test_the_section_on_the_papers_is_that_of_the_figures() -> None:
    folder = ROOT / "tests" / "benchmark"
    command = [
        sys.executable,
        folder / "paper.py",
        "--from",
        folder / "paper-h200.json",
        "--into",
        folder / "RESULTS.md",
        "--check",
    ]
    subprocess.run(command, check=True)
