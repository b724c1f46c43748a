"""C and C++ programs that use the installed library through its CMake package and pkg-config.

LIBFLASH_PREFIX names an installation other than that of this Python, for example by `cmake --install`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def run(*command, **kwargs):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tool(*names):
    """The first of these programs that exists, also in the folder of this Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for name in names:
        if found := shutil.which(name, path=path):
            return found
    pytest.skip(f"no {' or '.join(names)} on this machine")


def asked(flag):
    return Path(run(sys.executable, "-m", "libflash", flag).strip())


@pytest.fixture(scope="module")
def cmake_dir():
    if prefix := os.environ.get("LIBFLASH_PREFIX"):
        return next(Path(prefix).glob("lib*/**/libflash-config.cmake")).parent
    return asked("--cmake-dir")


@pytest.fixture(scope="module")
def pkgconfig_dir(cmake_dir):
    return cmake_dir.parents[1] / "pkgconfig"


def configure(source, build, cmake_dir):
    cmake = tool("cmake")
    tool("cc", "gcc", "clang")
    tool("c++", "g++", "clang++")
    ninja = tool("ninja", "make")
    generator = "Ninja" if Path(ninja).name == "ninja" else "Unix Makefiles"
    command = [cmake, "-S", source, "-B", build, "-G", generator, f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-Dlibflash_DIR={cmake_dir}"]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory, cmake_dir):
    build = tmp_path_factory.mktemp("examples")
    done = configure(HERE, build, cmake_dir)
    assert done.returncode == 0, done.stderr
    run(tool("cmake"), "--build", build)
    return build


@pytest.mark.parametrize("program", ["attention_c", "ring_c", "attention_cpp"])
def test_find_package(built, program):
    output = run(built / program)
    assert output.rstrip().endswith("good")
    assert "largest error" in output


def test_wrong_version_is_not_found(tmp_path, cmake_dir):
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24)\nproject(p LANGUAGES C CXX)\nfind_package(libflash 0.1 CONFIG REQUIRED)\n"
    )
    done = configure(tmp_path, tmp_path / "build", cmake_dir)
    assert done.returncode != 0
    assert "libflash" in done.stderr
    assert "0.2.0" in done.stderr


def test_pkg_config(tmp_path, pkgconfig_dir):
    """One compiler command; also after the installation was moved, because the .pc file contains relative paths."""
    pkg_config, cc = tool("pkg-config", "pkgconf"), tool("cc", "gcc", "clang")
    lib, include = pkgconfig_dir.parent, pkgconfig_dir.parent.parent / "include"
    moved = tmp_path / "moved"
    shutil.copytree(lib, moved / lib.name, symlinks=True)
    shutil.copytree(include, moved / "include")
    env = {**os.environ, "PKG_CONFIG_PATH": str(moved / lib.name / "pkgconfig"), "LD_LIBRARY_PATH": str(moved / lib.name)}
    flags = run(pkg_config, "--cflags", "--libs", "libflash", env=env).split()
    assert not any(str(lib) in flag for flag in flags)
    assert run(pkg_config, "--modversion", "libflash", env=env).strip() == "0.2.0"
    run(cc, "-std=c99", HERE / "attention.c", "-o", tmp_path / "attention", *flags, "-lm", env=env)
    assert run(tmp_path / "attention", env=env).rstrip().endswith("good")


def test_include_dir():
    assert (asked("--include-dir") / "libflash.h").is_file()
