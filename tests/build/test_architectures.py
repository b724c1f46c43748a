"""What a list of architectures makes of each room's rows: CMake's functions run by themselves, nothing configured or compiled."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "libflash" / "cuda"
DEFAULT = "80-real 90a-real 100-real 120-real 80-virtual"
SCRIPT = """
include({functions})
set(CMAKE_CUDA_ARCHITECTURES {architectures})
libflash_room_architectures()
foreach(room any sm80 sm80_large sm80_small sm90)
  libflash_gencode("${{LIBFLASH_ARCHITECTURES_${{room}}}}" "{versions}" options)
  message("${{room}}|${{LIBFLASH_ARCHITECTURES_${{room}}}}|${{options}}")
endforeach()
"""


@pytest.fixture
def cmake(cmake_script):
    def run(architectures, versions="80;90"):
        """room -> (its architectures, PTX and what is made of it)."""
        text = SCRIPT.format(functions=CUDA / "architectures.cmake", architectures=architectures, versions=versions)
        done = cmake_script(text)
        if done.returncode != 0:
            return " ".join(done.stderr.split())
        lines = [line.split("|") for line in done.stderr.splitlines()]
        return {room: (" ".join(found.split(";")), dict(re.findall(OPTION, options))) for room, found, options in lines}

    return run


OPTION = r"--generate-code=arch=compute_(\w+),code=\[([\w,]+)\]"


def test_default_architectures(cmake):
    text = (CUDA / "toolchain.cmake").read_text()
    assert f"set(LIBFLASH_DEFAULT_ARCHITECTURES {DEFAULT})" in text
    made = cmake(DEFAULT)
    assert made["sm80"] == made["any"]
    assert made["sm80"][0] == "80-real 90-real 100-real 120-real 80-virtual"
    assert made["sm80"][1] == {"80": "sm_80,compute_80", "90": "sm_90,sm_100,sm_120"}
    assert made["sm80_large"] == ("90-real 100-real", {"90": "sm_90,sm_100"})
    assert made["sm80_small"] == ("80-real 120-real 80-virtual", {"80": "sm_80,compute_80", "90": "sm_120"})
    assert made["sm90"] == ("90a-real", {"90a": "sm_90a"})


def test_rows_with_more_versions(cmake):
    assert cmake(DEFAULT, "80;90;100")["sm80"][1] == {"80": "sm_80,compute_80", "90": "sm_90", "100": "sm_100,sm_120"}
    assert cmake(DEFAULT, "80;90;120")["sm80"][1] == {"80": "sm_80,compute_80", "90": "sm_90,sm_100", "120": "sm_120"}


@pytest.mark.parametrize(
    ("architectures", "sm80", "options"),
    [
        ("90-real", "90-real", {"90": "sm_90"}),
        ("86", "86", {"80": "sm_86", "86": "compute_86"}),  # a plain number is machine code and PTX
        ("80", "80", {"80": "sm_80,compute_80"}),
        ("90a 90", "90", {"90": "sm_90,compute_90"}),
        ("86-real 89-real", "86-real 89-real", {"80": "sm_86,sm_89"}),
        ("120-virtual", "120-virtual", {"120": "compute_120"}),
        ("100f-real 121-real", "100-real 121-real", {"90": "sm_100,sm_121"}),
    ],
)
def test_other_architectures(cmake, architectures, sm80, options):
    assert cmake(architectures)["sm80"] == (sm80, options)


def test_rows_that_have_no_architecture(cmake):
    """Without 90a none of sm90; small rows, for what there is, where all have the larger shared memory."""
    made = cmake("90-real 100-real")
    assert made["sm90"] == ("", {})
    assert made["sm80_small"] == made["sm80_large"] == made["sm80"]
    assert cmake("80-real 120-real")["sm80_large"] == ("", {})


@pytest.mark.parametrize("wrong", ["native", "all-major", "75-real", "80-reel", "sm_80"])
def test_other_words_are_refused(cmake, wrong):
    said = cmake(f"80-real {wrong}")
    assert "CMAKE_CUDA_ARCHITECTURES: numbers from 80 on are needed" in said
    assert f"got '{wrong}'" in said


def test_sources_ask_for_versions_that_are_made():
    """A version asked for that no PTX is made for would be left out in silence."""
    versions = dict(re.findall(r"^set\(versions(\w*) ([\d ]+)\)", (CUDA / "kernels.cmake").read_text(), re.MULTILINE))
    assert versions[""] == "80 90"
    asked = {}
    for path in sorted(CUDA.rglob("*.cuh")):
        for relation, number in re.findall(r"__CUDA_ARCH__ (\S+) (\d+)", path.read_text()):
            assert relation in ("<", ">="), path
            asked.setdefault(int(number), set()).add(path.relative_to(CUDA).as_posix())
    assert set(asked) == {900, 1000, 1100}
    assert asked[1000] == asked[1100] == {"sm80/forward.cuh"}
    for dtype in ("bf16", "f16"):  # 256 channels: the first version past 1100 is that of sm_120
        assert "120" in versions[f"_forward_sm80_{dtype}_d256"].split()
    rows = {f"_{operation}_{room}_{dtype}_d{dims}" for operation, room, dtype, dims in table()}
    for row, some in versions.items():
        assert row == "" or row.removesuffix("_small") in rows
        assert "100" not in some.split() or row.startswith("_forward_sm80_")


def table():
    rows = [line.split() for line in (CUDA / "kernels.table").read_text().splitlines() if re.match("[a-z]", line)]
    return [row[:4] for row in rows]
