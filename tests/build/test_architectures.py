"""What the kernels of each folder are compiled for, given a list of architectures. Runs the CMake functions alone;
configures and compiles nothing.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "libflash" / "cuda"
DEFAULT = "80-real 90a-real 80-virtual"
LIST = "80-real 90a-real 100-real 120-real 80-virtual"
SCRIPT = """
include({functions})
set(CMAKE_CUDA_ARCHITECTURES {architectures})
libflash_folder_architectures()
foreach(group any sm80 sm80_large sm80_small sm80_tangent sm80_tangent_large sm80_tangent_small sm80_backward sm80_f32 sm80_f64
        sm80_statistics sm80_wide sm90 sm90_statistics)
  libflash_gencode("${{LIBFLASH_ARCHITECTURES_${{group}}}}" "{versions}" options)
  message("${{group}}|${{LIBFLASH_ARCHITECTURES_${{group}}}}|${{options}}")
endforeach()
"""


@pytest.fixture
def cmake(cmake_script):
    def run(architectures, versions="80;90"):
        """group of kernels -> (architectures, {PTX version: targets compiled from it})."""
        text = SCRIPT.format(functions=CUDA / "architectures.cmake", architectures=architectures, versions=versions)
        done = cmake_script(text)
        if done.returncode != 0:
            return " ".join(done.stderr.split())
        lines = [line.split("|") for line in done.stderr.splitlines()]
        return {group: (" ".join(found.split(";")), dict(re.findall(OPTION, options))) for group, found, options in lines}

    return run


OPTION = r"--generate-code=arch=compute_(\w+),code=\[([\w,]+)\]"


def test_default_architectures(cmake):
    text = (CUDA / "toolchain.cmake").read_text()
    assert f"set(LIBFLASH_DEFAULT_ARCHITECTURES {DEFAULT})" in text
    made = cmake(DEFAULT)
    assert made["sm80"] == made["any"]
    assert made["sm80"] == made["sm80_tangent"] == ("80-real 90-real 80-virtual", {"80": "sm_80,compute_80", "90": "sm_90"})
    assert made["sm80_large"] == ("90-real", {"90": "sm_90"})
    assert made["sm80_small"] == ("80-real 80-virtual", {"80": "sm_80,compute_80"})
    assert made["sm90"] == ("90a-real", {"90a": "sm_90a"})


def test_every_architecture_with_its_own_code(cmake):
    made = cmake(LIST)
    assert made["sm80"] == made["any"]
    assert made["sm80"][0] == "80-real 90-real 100-real 120-real 80-virtual"
    assert made["sm80"][1] == {"80": "sm_80,compute_80", "90": "sm_90,sm_100,sm_120"}
    assert made["sm80_large"] == ("90-real 100-real", {"90": "sm_90,sm_100"})
    assert made["sm80_small"] == ("80-real 120-real 80-virtual", {"80": "sm_80,compute_80", "90": "sm_120"})
    assert made["sm90"] == ("90a-real", {"90a": "sm_90a"})


def test_operations_on_tangents(cmake):
    """GPUs newer than sm_90 compile their PTX, from the one version that the build makes."""
    made = cmake(LIST, "80")
    assert made["sm80_tangent"] == ("80-real 90-real 80-virtual", {"80": "sm_80,sm_90,compute_80"})
    assert made["sm80_f64"] == made["sm80_statistics"] == made["sm80_tangent"]
    assert made["sm90_statistics"] == made["sm90"]
    assert made["sm80_tangent_large"] == ("90-real", {"80": "sm_90"})
    assert made["sm80_tangent_small"] == ("80-real 80-virtual", {"80": "sm_80,compute_80"})


@pytest.mark.parametrize("kind", ["backward", "f32", "wide"])
def test_kinds_that_newer_gpus_compile(cmake, kind):
    assert cmake(LIST)[f"sm80_{kind}"] == ("80-real 90-real 80-virtual", {"80": "sm_80,compute_80", "90": "sm_90"})


@pytest.mark.parametrize(
    ("architectures", "tangent"),
    [
        ("80-real 86-real 90a-real 103-real 80-virtual", "80-real 86-real 90-real 80-virtual"),
        ("90 120-real", "90"),
        ("89-virtual 100-real", "89-virtual"),
        ("80-real 120-real", "80-real 120-real"),  # there is no PTX
        ("100-real 120", "100-real 120"),  # nor is there for sm_100
        ("90a 100-real", "90"),
        ("80-virtual 100f 121-real", "80-virtual 100"),  # machine code and PTX were asked for
    ],
)
def test_other_architectures_of_operations_on_tangents(cmake, architectures, tangent):
    assert cmake(architectures)["sm80_tangent"][0] == tangent


def test_kernels_with_more_versions(cmake):
    assert cmake(LIST, "80;90;100")["sm80"][1] == {"80": "sm_80,compute_80", "90": "sm_90", "100": "sm_100,sm_120"}
    assert cmake(LIST, "80;90;120")["sm80"][1] == {"80": "sm_80,compute_80", "90": "sm_90,sm_100", "120": "sm_120"}


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


def test_kernels_that_have_no_architecture(cmake):
    """Without 90a there is no sm90 kernel; if all architectures have the larger shared memory, small kernels take those."""
    made = cmake("90-real 100-real")
    assert made["sm90"] == ("", {})
    assert made["sm80_small"] == made["sm80_large"] == made["sm80"]
    assert cmake("80-real 120-real")["sm80_large"] == ("", {})


@pytest.mark.parametrize(
    ("architectures", "small"),
    [
        ("80-real 90a-real", "80-real 90-real"),  # there is no PTX
        ("90a-real 100-real 120", "90-real 100-real 120"),  # PTX for newer GPUs alone
        ("80-real 90a-real 90-virtual", "80-real 90-real 90-virtual"),
        ("80-real 90a-real 86-virtual", "80-real 86-virtual"),
        ("89 100-real", "89"),
    ],
)
def test_small_kernels_run_on_every_architecture(cmake, architectures, small):
    """Some kernels are only small: those of float32 and float64 with 512 channels."""
    assert cmake(architectures)["sm80_small"][0] == small


@pytest.mark.parametrize("wrong", ["native", "all-major", "75-real", "80-reel", "sm_80"])
def test_other_words_are_refused(cmake, wrong):
    error = cmake(f"80-real {wrong}")
    assert "CMAKE_CUDA_ARCHITECTURES: numbers from 80 on are needed" in error
    assert f"got '{wrong}'" in error


def test_every_version_in_the_sources_has_ptx():
    """A version that the sources test but that has no PTX would never be compiled, without an error."""
    versions = dict(re.findall(r"^set\(versions(\w*) ([\d ]+)\)", (CUDA / "kernels.cmake").read_text(), re.MULTILINE))
    assert versions[""] == "80 90"
    tested = {}
    for path in sorted(CUDA.rglob("*.cuh")):
        for relation, number in re.findall(r"__CUDA_ARCH__ ([<>=!]+) (\d+)", path.read_text()):
            assert relation in ("<", ">="), path
            tested.setdefault(int(number), set()).add(path.relative_to(CUDA).as_posix())
    assert set(tested) == {900, 1000, 1100}
    assert tested[1000] == tested[1100] == {"sm80/forward.cuh"}
    for dtype in ("bf16", "f16"):  # 256 channels: the first version after 1100 is that of sm_120
        assert "120" in versions[f"_forward_sm80_{dtype}_d256"].split()
    kernels = {f"_{operation}_{folder}_{dtype}_d{dims}" for operation, folder, dtype, dims in table()}
    kernels |= {"", *(f"_{operation}" for operation, *_ in table()), *(f"_{dtype}" for _, _, dtype, _ in table())}
    kernels.add("_forward_statistics")
    for kernel, some in versions.items():
        assert kernel.removesuffix("_small") in kernels
        assert "100" not in some.split() or kernel.startswith("_forward_sm80_")


def table():
    lines = [line.split() for line in (CUDA / "kernels.table").read_text().splitlines() if re.match("[a-z]", line)]
    return [line[:4] for line in lines]
