"""The library without launches, with every kernel of kernels.table, for a described GPU, which need not exist.

Compiled without CUDA: `explain` and the workspace queries work, nothing can be launched.
"""

from __future__ import annotations

import ctypes as c
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import abi
import pytest
from host_library import ROOT, compile_host, compile_objects, load_host
from made_once import made_once

CUDA = ROOT / "libflash" / "cuda"
ARCHITECTURES = "80-real 90a-real 100-real 120-real 80-virtual"

# Addresses of tensors: any value works, because no data is read.
ADDRESS = 1 << 20

BUILD_INFO = """
#define LIBFLASH_BUILD_CUDA 1
#define LIBFLASH_BUILD_BACKENDS "cpu sm80 sm90"
"""

CMAKE = """
include({cuda}/architectures.cmake)
include({cuda}/units.cmake)
set(CMAKE_CUDA_ARCHITECTURES {architectures})
libflash_folder_architectures()
set(LIBFLASH_KERNELS {kernels})
{versions}
libflash_units("{cuda}/kernels.table" "{folder}")
"""

# The number of threads shows which step and instance a plan used: 1000 + 100 * step + instance.
WRAPPER = """
#include "cuda/device.h"
#include "plan/plan.h"

namespace libflash {

static cuda::PrefillPlan described_schedule;  // of the last call of launch_schedule()

void launch(const AttentionProblem&, const ForwardPlan&, void*, void*) {}
void launch(const AttentionProblem&, const BackwardPlan&, void*, void*) {}
void launch(const DecodeProblem&, const DecodePlan&, void*, void*) {}
void launch_schedule(const DecodeProblem&, const DecodePlan& plan, void*) { described_schedule = plan.cuda.prefill.plan; }
void launch(const TangentProblem&, const TangentPlan&, void*, void*) {}
void launch(const MergeProblem&, const MergePlan&, void*) {}
void launch(const CompressProblem&, const CompressPlan&, void*) {}
void launch(const CacheWriteProblem&, const CacheWritePlan&, void*) {}

namespace cpu {
const Kernels* const* all_kernels(int* count) { return *count = 0, nullptr; }
}

namespace cuda {
static DeviceProperties device;

int device_count() { return 1; }
const DeviceProperties& device_properties(int) { return device; }
const char* state_text() { return "described"; }
void check_device_exists(const Device&) {}

static KernelResources resources_of(int step, int instance) { return {1000 + 100 * step + instance, 100000}; }
#define LIBFLASH_CUDA_KERNEL(operation, name, ...)                                                                 \\
    int launch_##name(const LaunchPlan<Operation::operation>&, const LaunchParams<Operation::operation>&, void*) { \\
        return 1;                                                                                                  \\
    }                                                                                                              \\
    KernelResources resources_##name(int step, int instance) { return resources_of(step, instance); }
#include "cuda_kernels.inc"
}

}  // namespace libflash

extern "C" void describe(int arch, int multiprocessors, int shared_memory) {
    using libflash::cuda::device;
    device.arch = arch;
    device.multiprocessors = multiprocessors;
    device.shared_memory_bytes = shared_memory;
}

extern "C" int64_t scheduled_order_blocks() { return libflash::described_schedule.order.blocks; }
"""

# arch, multiprocessors, shared memory per thread block
DEVICES = {
    "A100": (80, 108, 166912),
    "L40S": (89, 142, 101376),
    "H200": (90, 132, 232448),
    "B200": (100, 148, 232448),
    "Thor": (110, 20, 232448),  # only the PTX for sm_80 runs there
    "RTX 5090": (120, 170, 101376),
}


def cmake() -> str:
    bin_folder = str(Path(sys.executable).parent)
    program = shutil.which("cmake", path=os.pathsep.join([bin_folder, os.environ.get("PATH", "")]))
    if not program:
        pytest.skip("no cmake on this machine")
    return program


def write_generated(folder: Path, kernels: str = "all") -> None:
    """build_info.h, and the tables that CMake makes from kernels.table. `kernels`: the setting LIBFLASH_KERNELS."""
    (folder / "build_info.h").write_text(BUILD_INFO)
    versions = "\n".join(re.findall(r"^set\(versions.*\)$", (CUDA / "kernels.cmake").read_text(), re.MULTILINE))
    settings = {"architectures": ARCHITECTURES.replace(" ", ";"), "versions": versions, "kernels": kernels}
    script = CMAKE.format(cuda=CUDA, folder=folder, **settings)
    (folder / "script.cmake").write_text(script)
    done = subprocess.run([cmake(), "-P", folder / "script.cmake"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def sources() -> list[str]:
    """All sources between the C functions and the launch; none needs a CUDA header."""
    capi = [f"capi/{name}.cpp" for name in ("forward", "backward", "decode", "tangent", "explain", "last_error")]
    found = [*(ROOT / "libflash/problem").glob("*.cpp"), *(ROOT / "libflash/plan").glob("*.cpp"), *CUDA.rglob("*.cpp")]
    names = [path.relative_to(ROOT / "libflash").as_posix() for path in found]
    launched = ("forward", "backward", "decode", "merge", "compress", "cache_write", "forward_tangent", "backward_tangent")
    launches = {f"cuda/host/{name}.cpp" for name in launched}
    return capi + sorted(set(names) - launches - {"plan/launch.cpp", "cuda/device.cpp"})


def depends_on_table(source: str) -> bool:
    return '#include "cuda_kernels.inc"' in (ROOT / "libflash" / source).read_text()


def compiled_sources(request: pytest.FixtureRequest, factory: pytest.TempPathFactory) -> list[Path]:
    """The object files of sources(), without those that depend on kernels.table, because tests may change what is generated
    from the table.
    """

    def make(folder: Path) -> None:
        write_generated(folder)
        compile_objects(folder, *(name for name in sources() if not depends_on_table(name)))

    return sorted(made_once(request, factory, "host_sources", make).glob("*.o"))


def build(folder: Path, objects: list[Path], kernels: str = "all") -> None:
    """Compile the library to `folder`, with the kernels that match."""
    write_generated(folder, kernels)
    compile_host(folder, WRAPPER, *filter(depends_on_table, sources()), *objects, optimize="-O0")


def load(folder: Path) -> c.CDLL:
    """The library that build() made."""
    library = load_host(folder)
    for name, (result, arguments) in abi.PROTOTYPES.items():
        if re.fullmatch(
            r"flash_attention_(forward|backward|decode|forward_tangent|backward_tangent)(_explain|_workspace_size|_schedule|_schedule_size)?|flash_last_error",
            name,
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    return library


def tensor(*shape: int, dtype: int = abi.BFLOAT16, address: int = ADDRESS) -> abi.Tensor:
    """A contiguous tensor on the described GPU."""
    view = abi.Tensor(data=address, dtype=dtype, device_type=abi.CUDA_DEVICE, ndim=len(shape))
    step = 1
    for i in reversed(range(len(shape))):
        view.shape[i], view.stride[i] = shape[i], step
        step *= shape[i]
    return view


def explain(library: c.CDLL, operation: str, arrays: tuple[abi.Tensor, ...], **fields: Any) -> str:
    kind = abi.DecodeOptions if operation == "decode" else abi.AttentionOptions
    function = getattr(library, f"flash_attention_{operation}_explain")
    tangents = [abi.options(abi.Tangents, **fields.pop("tangents", {}))] if operation.endswith("tangent") else []
    options = abi.options(kind, **fields)
    text, needed = c.create_string_buffer(1 << 16), c.c_size_t()
    status = function(*map(c.pointer, arrays), *tangents, options, text, len(text), c.byref(needed))
    assert status == abi.OK, library.flash_last_error().decode()
    return text.value.decode()


def lines_of(text: str) -> dict[str, list[str]]:
    """The lines of each label of an `explain` text."""
    found: dict[str, list[str]] = {}
    label = ""
    for line in text.splitlines():
        label = line[:12].strip() or label
        found.setdefault(label, []).append(line[12:])
    return found
