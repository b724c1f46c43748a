"""The shared object exports the functions of the header only, and needs the C library only."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import abi
import pytest
from library_name import soname, symbol_version

EXPORTED = Path(__file__).with_name("exported_symbols.txt")
# The C library and its loader. Which of these files a build needs depends on the version of the C library.
ALLOWED = re.compile(r"(libc|libm|libpthread|libdl|librt)\.so\.\d+|ld-linux[\w-]*\.so\.\d+")


def output(*command: str) -> str:
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} (binutils) is not installed")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_exported_symbols() -> None:
    lines = output("nm", "-D", "--defined-only", str(abi.library_path())).splitlines()
    names = {line.split()[-1].split("@")[0] for line in lines if line.split()[1] != "A"}
    assert sorted(names) == EXPORTED.read_text().split()


def test_every_symbol_has_a_version() -> None:
    lines = output("nm", "-D", "--defined-only", str(abi.library_path())).splitlines()
    versions = {line.split("@@")[1] for line in lines if line.split()[1] != "A"}
    assert versions == {symbol_version(abi.lib.flash_version_string().decode())}


def test_exports_are_the_header() -> None:
    assert EXPORTED.read_text().split() == sorted(abi.PROTOTYPES)


def test_needed_libraries() -> None:
    dynamic = output("readelf", "-d", str(abi.library_path()))
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    assert needed
    assert all(ALLOWED.fullmatch(name) for name in needed), needed


def test_soname_and_hardening() -> None:
    dynamic = output("readelf", "-d", str(abi.library_path()))
    assert re.findall(r"\(SONAME\).*\[(.+)\]", dynamic) == [soname(abi.lib.flash_version_string().decode())]
    assert "TEXTREL" not in dynamic
    assert not re.search(r"\((RPATH|RUNPATH)\)", dynamic)


def test_stack_is_not_executable() -> None:
    (flags,) = re.findall(r"^ *GNU_STACK(?: +0x[0-9a-f]+){5} ([RWE ]+)", output("readelf", "-lW", str(abi.library_path())), re.M)
    assert flags.strip() == "RW"
