"""The choice of the CUDA compiler: every mode of LIBFLASH_CUDA on every kind of machine. Nothing is built."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

BACKEND = Path(__file__).resolve().parents[2] / "python" / "build_backend"
NVCC = "/somewhere/bin/nvcc"


@pytest.fixture(scope="module")
def choice():
    spec = importlib.util.spec_from_file_location("cuda_choice", BACKEND / "cuda_choice.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["cuda_choice"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["cuda_choice"]


@pytest.fixture
def nvcc_folder(tmp_path):
    """A folder with an executable file `bin/nvcc`."""
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    return tmp_path


# mode, nvcc, driver, wheels for this kind of machine -> wheels are required, words of the line; or the words of the refusal
DECISIONS = [
    ("auto", NVCC, None, True, False, NVCC),
    ("auto", NVCC, 13000, True, False, NVCC),
    ("auto", None, None, True, False, "no nvcc and no NVIDIA driver"),
    ("auto", None, 13000, True, True, "package index"),
    ("auto", None, 13020, True, True, "package index"),
    ("auto", None, 12080, True, False, "supports CUDA 12.8, 13.0 is needed"),
    ("auto", None, 13000, False, False, "none in the package index"),
    ("on", NVCC, None, True, False, NVCC),
    ("on", None, None, True, True, "package index"),
    ("system", NVCC, None, True, False, NVCC),
    ("pypi", NVCC, None, True, True, "package index"),
    ("pypi", None, None, True, True, "package index"),
    ("off", NVCC, 13000, True, False, "as requested"),
    ("off", None, None, False, False, "as requested"),
]
REFUSALS = [
    ("system", None, 13000, True, "no nvcc"),
    ("on", None, 13000, False, "no CUDA compiler for"),
    ("pypi", NVCC, 13000, False, "no CUDA compiler for"),
]


@pytest.mark.parametrize(("mode", "nvcc", "driver", "wheels", "required", "words"), DECISIONS)
def test_decision(choice, mode, nvcc, driver, wheels, required, words):
    made = choice.choose(mode, nvcc, driver, wheels)
    assert made.mode == mode
    assert bool(made.requires) == required
    assert made.cuda == ("CPU library" not in made.line)
    assert words in made.line
    assert "\n" not in made.line


@pytest.mark.parametrize(("mode", "nvcc", "driver", "wheels", "words"), REFUSALS)
def test_refusal(choice, mode, nvcc, driver, wheels, words):
    with pytest.raises(choice.ChoiceError, match=words):
        choice.choose(mode, nvcc, driver, wheels)


def test_compiler_wheels_are_five_pins_of_one_minor(choice):
    pins = choice.compiler_wheels()
    assert len(pins) == 5
    assert {pin.partition("==")[2] for pin in pins} == {"13.0.*"}


def test_mode_setting_beats_environment_beats_default(choice):
    assert choice.requested_mode(None, {}) == "auto"
    assert choice.requested_mode(None, {"LIBFLASH_CUDA": "pypi"}) == "pypi"
    assert choice.requested_mode({"cmake.define.LIBFLASH_CUDA": "OFF"}, {"LIBFLASH_CUDA": "pypi"}) == "off"


@pytest.mark.parametrize("value", ["1", "0", "true", "False", "YES", "no", "ON", "OFF", "Auto", ""])
def test_spellings(choice, value):
    """CMake's words for true and false; empty is as if not set."""
    on = value.lower() in ("1", "true", "yes", "on")
    wanted = "auto" if value.lower() in ("auto", "") else "on" if on else "off"
    assert choice.requested_mode(None, {"LIBFLASH_CUDA": value}) == wanted
    assert choice.requested_mode({"cmake.define.LIBFLASH_CUDA": value}, {}) == wanted


def test_unknown_mode_is_refused(choice):
    with pytest.raises(choice.ChoiceError, match="one of auto, on, off, pypi, system is needed, got 'perhaps'"):
        choice.requested_mode(None, {"LIBFLASH_CUDA": "perhaps"})


def test_nvcc_is_found_in_order(choice, nvcc_folder, tmp_path):
    nothing = tmp_path / "nothing"
    nvcc = str(nvcc_folder / "bin" / "nvcc")
    path = {"PATH": str(nvcc_folder / "bin")}
    assert choice.find_nvcc({"CUDACXX": "/named/nvcc", **path}, nothing) == "/named/nvcc"
    assert choice.find_nvcc(path, nothing) == nvcc
    assert choice.find_nvcc({"PATH": str(nothing), "CUDA_HOME": str(nvcc_folder)}, nothing) == nvcc
    assert choice.find_nvcc({"PATH": str(nothing), "CUDA_PATH": str(nvcc_folder)}, nothing) == nvcc
    assert choice.find_nvcc({"PATH": str(nothing)}, nvcc_folder) == nvcc
    assert choice.find_nvcc({"PATH": str(nothing)}, nothing) is None
    assert choice.find_nvcc({}, nothing) is None


def test_a_file_that_cannot_be_executed_is_no_compiler(choice, nvcc_folder, tmp_path):
    os.chmod(nvcc_folder / "bin" / "nvcc", 0o644)
    if os.access(nvcc_folder / "bin" / "nvcc", os.X_OK):
        pytest.skip("this user may execute anything")
    assert choice.find_nvcc({"PATH": str(nvcc_folder / "bin"), "CUDA_HOME": str(nvcc_folder)}, tmp_path / "nothing") is None


@pytest.fixture
def backend(choice, monkeypatch):
    """libflash_build with a scikit-build-core that only records its calls."""
    calls = []

    class Below:
        def __getattr__(self, name):
            def hook(*args, **kwargs):
                calls.append((name, args))
                return ["below"]

            return hook

    announcements = type(sys)("announce")
    announcements.processors, announcements.line, announcements.announce = lambda: 2, lambda *_: "a line", calls.append
    monkeypatch.setitem(sys.modules, "announce", announcements)
    package, below = type(sys)("scikit_build_core"), Below()
    package.build = below
    monkeypatch.setitem(sys.modules, "scikit_build_core", package)
    monkeypatch.setitem(sys.modules, "scikit_build_core.build", below)
    spec = importlib.util.spec_from_file_location("libflash_build", BACKEND / "libflash_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.calls = calls
    return module


@pytest.mark.parametrize("hook", ["get_requires_for_build_wheel", "get_requires_for_build_editable"])
def test_backend_adds_the_compiler_where_it_is_needed(backend, choice, monkeypatch, capsys, hook):
    monkeypatch.setattr(choice, "find_nvcc", lambda: None)
    monkeypatch.setattr(choice, "has_compiler_wheels", lambda: True)
    monkeypatch.delenv("LIBFLASH_CUDA", raising=False)
    monkeypatch.setattr(choice, "driver_version", lambda: 13000)
    assert getattr(backend, hook)() == ["below", *choice.compiler_wheels()]
    monkeypatch.setattr(choice, "driver_version", lambda: None)
    assert getattr(backend, hook)() == ["below"]
    assert "no nvcc and no NVIDIA driver: the CPU library" in capsys.readouterr().err


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_backend_hands_the_mode_to_cmake(backend, monkeypatch, hook):
    monkeypatch.setenv("LIBFLASH_CUDA", "off")
    getattr(backend, hook)("out", {"build-dir": "b"})
    built = (hook, ("out", {"build-dir": "b", "cmake.define.LIBFLASH_CUDA": "off"}, None))
    assert backend.calls == ["a line", built]  # announced first


def test_backend_stops_in_words(backend, choice, monkeypatch):
    monkeypatch.setenv("LIBFLASH_CUDA", "system")
    monkeypatch.setattr(choice, "find_nvcc", lambda: None)
    with pytest.raises(SystemExit, match="libflash: LIBFLASH_CUDA=system: no nvcc"):
        backend.get_requires_for_build_wheel()
