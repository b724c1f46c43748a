"""libflash inside another CMake project, by add_subdirectory and FetchContent; and as a static library, also installed.

The builds are Debug builds with the portable engine only, since these tests are about linking. The library is compiled twice,
shared and static, for all processes of pytest.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from made_once import made_once

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "examples" / "attention.c"
INCLUDED = {
    "add_subdirectory": f'add_subdirectory("{ROOT}" libflash)',
    "FetchContent": "include(FetchContent)\n"
    f'FetchContent_Declare(libflash SOURCE_DIR "{ROOT}")\nFetchContent_MakeAvailable(libflash)',
    "find_package": "find_package(libflash 0.2 CONFIG REQUIRED)",
}
OTHER_SETS = ("AVX2", "AVX512", "AVX512BF16", "NEON", "NEONBF16")
NO_DEBUG_SYMBOLS = ["-DCMAKE_CXX_FLAGS_DEBUG=-O0", "-DCMAKE_C_FLAGS_DEBUG=-O0"]
QUICK = ["-DCMAKE_BUILD_TYPE=Debug", *NO_DEBUG_SYMBOLS, *(f"-DLIBFLASH_COMPILER_KNOWS_{isa}=OFF" for isa in OTHER_SETS)]
PARENT = """cmake_minimum_required(VERSION 3.24)
project(parent VERSION 9.9 LANGUAGES C CXX)
{settings}
{included}
add_executable(program "{program}")
set_target_properties(program PROPERTIES C_STANDARD 99 C_EXTENSIONS OFF)
target_link_libraries(program PRIVATE libflash::libflash m)
install(TARGETS program)
"""


def tool(*names):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for name in names:
        if found := shutil.which(name, path=path):
            return found
    pytest.skip(f"no {' or '.join(names)} on this machine")


def run(*command, **kwargs):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Parent:
    """A CMake project that uses libflash, its build and its installation."""

    def __init__(self, folder, how, settings=""):
        self.source, self.build, self.prefix = folder, folder / "build", folder / "prefix"
        self.source.mkdir(parents=True, exist_ok=True)
        text = PARENT.format(settings=settings, included=INCLUDED[how], program=PROGRAM)
        (self.source / "CMakeLists.txt").write_text(text)

    def configure(self, *options):
        tool("c++", "g++", "clang++")
        environment = {key: value for key, value in os.environ.items() if key != "LIBFLASH_CUDA"}
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
        command = [tool("cmake"), "-S", self.source, "-B", self.build, "-DLIBFLASH_CUDA=0", *options]
        return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, env=environment)

    def configured(self, *options):
        done = self.configure(*options)
        assert done.returncode == 0, done.stderr
        return self

    def built(self):
        run(tool("cmake"), "--build", self.build, "--parallel", "2")
        return self

    def cache(self):
        entries = (line.split("=", 1) for line in (self.build / "CMakeCache.txt").read_text().splitlines() if "=" in line)
        return {name.partition(":")[0]: value for name, value in entries}

    def installed(self):
        run(tool("cmake"), "--install", self.build, "--prefix", self.prefix)

    def program(self):
        return run(self.build / "program").rstrip()


def files_of(prefix):
    return sorted(p.relative_to(prefix).as_posix() for p in prefix.rglob("*") if not p.is_dir())


@pytest.mark.parametrize("how", ["add_subdirectory", "FetchContent"])
def test_the_build_type_stays_the_parents(tmp_path, how):
    parent = Parent(tmp_path / "parent", how).configured()
    assert parent.cache().get("CMAKE_BUILD_TYPE", "") == ""


def test_alone_the_build_type_is_release(tmp_path):
    parent = Parent(tmp_path / "parent", "add_subdirectory")
    parent.source = ROOT
    assert parent.configured().cache()["CMAKE_BUILD_TYPE"] == "Release"


@pytest.fixture(scope="module")
def shared(request, tmp_path_factory):
    """A folder with a parent project in `parent` that has the library as it is by default, and its installation. `output` is what
    its program prints, `needed` what it is linked with. Then the install rules are switched on: `installed` has the library too.
    """

    def make(folder):
        parent = Parent(folder / "parent", "add_subdirectory").configured(*QUICK).built()
        parent.installed()
        (folder / "output").write_text(parent.program())
        (folder / "needed").write_text(run(tool("readelf"), "-d", parent.build / "program"))
        parent.configured("-DLIBFLASH_INSTALL=ON").built()  # compiles nothing again
        run(tool("cmake"), "--install", parent.build, "--prefix", folder / "installed")

    return made_once(request, tmp_path_factory, "shared_parent", make)


@pytest.fixture(scope="module")
def static(request, tmp_path_factory):
    """A parent project with static libraries and libflash's install rules, installed."""
    settings = "set(BUILD_SHARED_LIBS OFF)"

    def make(folder):
        Parent(folder / "parent", "FetchContent", settings).configured(*QUICK, "-DLIBFLASH_INSTALL=ON").built().installed()

    return Parent(made_once(request, tmp_path_factory, "static_parent", make) / "parent", "FetchContent", settings)


def test_shared_by_default_and_not_installed(shared):
    assert (shared / "output").read_text().endswith("good")
    assert "libflash.so.0.2" in (shared / "needed").read_text()
    assert files_of(shared / "parent/prefix") == ["bin/program"]


def test_static_if_asked_for(static):
    assert static.program().endswith("good")
    assert "libflash" not in run(tool("readelf"), "-d", static.build / "program")


def test_what_a_static_installation_has(static):
    names = {Path(file).name for file in files_of(static.prefix)}
    package = {"libflash-config.cmake", "libflash-config-version.cmake", "libflash-static-needs.cmake"}
    package |= {"libflash-static-targets.cmake", "libflash-static-targets-debug.cmake"}
    assert names == package | {"libflash.a", "libflash.h", "libflash-static.pc", "program"}


def package_folder(prefix):
    return next(prefix.rglob("libflash-config.cmake")).parent


def test_a_static_installation_is_found(static, tmp_path):
    user = Parent(tmp_path / "user", "find_package").configured(f"-Dlibflash_DIR={package_folder(static.prefix)}").built()
    assert user.program().endswith("good")
    assert "libflash" not in run(tool("readelf"), "-d", user.build / "program")


@pytest.fixture(scope="module")
def both(static, shared, tmp_path_factory):
    """A folder with the static installation and a shared one."""
    prefix = tmp_path_factory.mktemp("both") / "prefix"
    for installed in (shared / "installed", static.prefix):
        shutil.copytree(installed, prefix, dirs_exist_ok=True, symlinks=True)
    return prefix


COMPONENTS = [("", "", "shared"), ("COMPONENTS static", "", "static"), ("COMPONENTS shared", "", "shared")]


@pytest.mark.parametrize(("component", "option", "kind"), [*COMPONENTS, ("", "-DBUILD_SHARED_LIBS=OFF", "static")])
def test_the_kind_that_is_asked_for(both, tmp_path, component, option, kind):
    user = Parent(tmp_path / "user", "find_package")
    file = user.source / "CMakeLists.txt"
    file.write_text(file.read_text().replace("CONFIG REQUIRED", f"CONFIG REQUIRED {component}"))
    user.configured(f"-Dlibflash_DIR={package_folder(both)}", *([option] if option else [])).built()
    assert user.program().endswith("good")
    assert ("libflash.so.0.2" in run(tool("readelf"), "-d", user.build / "program")) == (kind == "shared")


@pytest.mark.parametrize(
    ("component", "text"),
    [
        ("COMPONENTS shared", "the shared library is not installed here"),
        ("COMPONENTS shared static", "one component, shared or static, can be asked for (got: shared;static)"),
        ("COMPONENTS cuda", "one component, shared or static, can be asked for (got: cuda)"),
    ],
)
def test_a_kind_that_is_not_there(static, tmp_path, component, text):
    user = Parent(tmp_path / "user", "find_package")
    file = user.source / "CMakeLists.txt"
    file.write_text(file.read_text().replace("CONFIG REQUIRED", f"CONFIG REQUIRED {component}"))
    done = user.configure(f"-Dlibflash_DIR={package_folder(static.prefix)}")
    assert done.returncode != 0
    assert text in " ".join(done.stderr.split())


def test_one_kind_in_one_project(both, tmp_path):
    user = Parent(tmp_path / "user", "find_package")
    file = user.source / "CMakeLists.txt"
    once = INCLUDED["find_package"]
    file.write_text(file.read_text().replace(once, f"{once}\n{once.replace(')', ' COMPONENTS static)')}"))
    done = user.configure(f"-Dlibflash_DIR={package_folder(both)}")
    assert done.returncode != 0
    assert "libflash::libflash is already a shared_library, a static one is asked for" in " ".join(done.stderr.split())


def test_a_static_installation_needs_cxx(static, tmp_path):
    user = Parent(tmp_path / "user", "find_package")
    file = user.source / "CMakeLists.txt"
    file.write_text(file.read_text().replace("LANGUAGES C CXX", "LANGUAGES C"))
    done = user.configure(f"-Dlibflash_DIR={package_folder(static.prefix)}")
    assert done.returncode != 0
    assert "the static library needs a project with the language CXX" in " ".join(done.stderr.split())


def test_a_static_installation_by_pkg_config(static, tmp_path):
    folder = package_folder(static.prefix).parents[1] / "pkgconfig"
    environment = {**os.environ, "PKG_CONFIG_PATH": str(folder)}
    flags = run(tool("pkg-config", "pkgconf"), "--cflags", "--libs", "libflash-static", env=environment).split()
    run(tool("cc", "gcc", "clang"), "-std=c99", PROGRAM, "-o", tmp_path / "program", *flags)
    assert run(tmp_path / "program").rstrip().endswith("good")


def test_the_python_module_needs_the_shared_library(tmp_path):
    parent = Parent(tmp_path / "parent", "add_subdirectory", "set(BUILD_SHARED_LIBS OFF)\nset(LIBFLASH_PYTHON ON)")
    done = parent.configure()
    assert done.returncode != 0
    assert "BUILD_SHARED_LIBS: the Python module needs the shared library, got 'OFF'" in " ".join(done.stderr.split())
