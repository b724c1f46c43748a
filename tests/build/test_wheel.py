"""The installed package: exactly the expected files, small, self-contained, for every Python from 3.11 on, no other symbols
exported.

LIBFLASH_WHEEL names a wheel file whose size is then also checked.
"""

import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from library_name import soname, symbol_version

import libflash

ROOT = Path(__file__).resolve().parents[2]
MEGABYTE = 10**6
SONAME = soname(libflash.__version__)
# The only libraries needed at run time: the C library and its parts.
C_LIBRARY = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}


@pytest.fixture(scope="module")
def distribution():
    found = importlib.metadata.distribution("libflash")
    if not any(str(f) == "libflash/__init__.py" for f in found.files):
        pytest.skip("an editable installation")
    return found


@pytest.fixture(scope="module")
def installed(distribution):
    """Name in the wheel -> file, without what pip adds."""
    added = re.compile(r"__pycache__|dist-info/(INSTALLER|REQUESTED|direct_url\.json|RECORD)$")
    return {str(f): Path(distribution.locate_file(f)) for f in distribution.files if not added.search(str(f))}


@pytest.fixture(scope="module")
def readelf():
    found = shutil.which("readelf")
    if not found:
        pytest.skip("no readelf on this machine")

    def run(*arguments):
        return subprocess.run([found, "-W", *map(str, arguments)], capture_output=True, text=True, check=True).stdout

    return run


def dynamic(readelf, path, tag):
    return set(re.findall(rf"\({tag}\)[^\[]*\[(.*?)\]", readelf("-d", path)))


def test_exactly_these_files(installed):
    source = ROOT / "python" / "libflash"
    python = {f"libflash/{p.relative_to(source).as_posix()}" for p in source.rglob("*") if p.suffix in (".py", ".pyi", ".typed")}
    package = "libflash/lib/cmake/libflash"
    native = {
        "libflash/_core.abi3.so",
        "libflash/_jax_ffi.abi3.so",
        "libflash/include/libflash.h",
        f"libflash/lib/{SONAME}",
        "libflash/lib/pkgconfig/libflash.pc",
        f"{package}/libflash-config.cmake",
        f"{package}/libflash-config-version.cmake",
        f"{package}/libflash-shared-targets.cmake",
        f"{package}/libflash-shared-targets-release.cmake",
    }
    info = {
        f"libflash-{libflash.__version__}.dist-info/{n}" for n in ("METADATA", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }
    assert set(installed) == python | native | info


def test_no_links(installed):
    assert not [name for name, path in installed.items() if path.is_symlink()]


def test_one_wheel_for_every_python(distribution):
    tags = re.findall(r"^Tag: (.*)$", distribution.read_text("WHEEL"), re.M)
    assert tags
    assert all(tag.startswith("cp311-abi3-linux_") or tag.startswith("cp311-abi3-manylinux") for tag in tags)


def test_version_is_stated_once(distribution):
    header = (ROOT / "include" / "libflash.h").read_text()
    version = ".".join(re.search(rf"define FLASH_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH"))
    assert distribution.version == libflash.__version__ == libflash.info()["version"] == version


def test_no_dependency(distribution):
    required = [r for r in distribution.requires or [] if "extra ==" not in r]
    assert required == []


def test_size(installed):
    """As a wheel, packed: less than 3 MB without the CUDA part, 25 MB with it."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in installed.items():
            archive.write(path, name)
    size = packed.getbuffer().nbytes
    if wheel := os.environ.get("LIBFLASH_WHEEL"):
        size = max(size, Path(wheel).stat().st_size)
    has_cuda = libflash.info()["build"]["cuda architectures"] != ""
    assert size < (25 if has_cuda else 3) * MEGABYTE


def test_needs_the_c_library_only(readelf, installed):
    library = installed[f"libflash/lib/{SONAME}"]
    extra = {n for n in dynamic(readelf, library, "NEEDED") - C_LIBRARY if not n.startswith("ld-linux")}
    assert extra == set()
    assert dynamic(readelf, library, "SONAME") == {SONAME}
    assert not dynamic(readelf, library, "RUNPATH") | dynamic(readelf, library, "RPATH")


@pytest.mark.parametrize("module", ["_core", "_jax_ffi"])
def test_modules_find_the_library_beside_them(readelf, installed, module):
    path = installed[f"libflash/{module}.abi3.so"]
    assert {n for n in dynamic(readelf, path, "NEEDED") - C_LIBRARY if not n.startswith("ld-linux")} == {SONAME}
    assert dynamic(readelf, path, "RUNPATH") | dynamic(readelf, path, "RPATH") == {"$ORIGIN/lib"}


def exported(readelf, path):
    """Symbols that others can link against, with their version."""
    rows = [line.split() for line in readelf("--dyn-syms", path).splitlines() if re.match(r"\s*\d+: ", line)]
    return {
        r[7]
        for r in rows
        if len(r) > 7 and r[6] != "UND" and r[4] in ("GLOBAL", "WEAK") and r[5] == "DEFAULT" and r[3] != "OBJECT"
    }


def test_exports_are_the_header(readelf, installed):
    header = re.sub(r"/\*.*?\*/", "", installed["libflash/include/libflash.h"].read_text(), flags=re.S)
    declared = set(re.findall(r"FLASH_API[^;]*?\b(flash_\w+)\(", header))
    assert len(declared) >= 20
    symbols = exported(readelf, installed[f"libflash/lib/{SONAME}"])
    assert symbols == {f"{function}@@{symbol_version(libflash.__version__)}" for function in declared}


@pytest.mark.parametrize("module", ["_core", "_jax_ffi"])
def test_modules_export_their_entry_only(readelf, installed, module):
    assert exported(readelf, installed[f"libflash/{module}.abi3.so"]) == {f"PyInit_{module}"}


def test_no_path_of_the_building_machine(installed):
    root = str(ROOT).encode()
    native = [n for n in installed if n.endswith((".so", SONAME))]
    assert native
    for name in native:
        assert root not in installed[name].read_bytes(), f"{name} names {root.decode()}"


@pytest.mark.parametrize(("flag", "file"), [("--cmake-dir", "libflash-config.cmake"), ("--include-dir", "libflash.h")])
def test_command_line_names_folders(tmp_path, flag, file):
    done = subprocess.run([sys.executable, "-m", "libflash", flag], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (Path(done.stdout.strip()) / file).is_file()
    assert done.stderr == ""


def test_cmake_entry_point(distribution):
    assert [(e.group, e.name, e.value) for e in distribution.entry_points] == [("cmake.root", "libflash", "libflash")]
