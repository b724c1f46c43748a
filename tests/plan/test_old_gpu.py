"""GPUs that are too old or too small: the choice of a kernel, compiled with made-up devices, refuses with the reason."""

from __future__ import annotations

import ctypes as c
from pathlib import Path

import pytest
from host_library import compile_host

UNSUPPORTED = 2
ENOUGH = 100_000  # bytes of shared memory, for the kernels below

BUILD_INFO = """
#define LIBFLASH_BUILD_CUDA 1
"""

WRAPPER = """
#include <cstdio>
#include "cuda/device.h"
#include "plan/selection.h"
#include "problem/error.h"

namespace libflash {

namespace cpu {
const Kernels* const* all_kernels(int* count) { return *count = 0, nullptr; }
}

namespace cuda {
static int devices;
static DeviceProperties properties;

int device_count() { return devices; }
const DeviceProperties& device_properties(int) { return properties; }
const char* state_text() { return "made up"; }
void check_device_exists(const Device&) {}

int shared_bytes(const KernelConfig& config) { return config.stages * 1000; }
const Kernel* compiled_kernels(int* count) {
    static const Architecture older{"sm80", false, nullptr, nullptr, nullptr, shared_bytes};
    static const Architecture newer{"sm90", true, nullptr, nullptr, nullptr, shared_bytes};
    static Kernel kernels[2];
    kernels[0].config.name = "forward_sm80_f16_d128";
    kernels[1].config.name = "forward_sm90_f16_d128";
    kernels[0].architecture = &older;
    kernels[1].architecture = &newer;
    for (Kernel& kernel : kernels) {
        kernel.config.operation = Operation::forward;
        kernel.config.backend = kernel.architecture->name;
        kernel.config.dtype = KernelType::f16_;
        kernel.config.head_dim = kernel.config.head_dim_v = 128;
        kernel.config.stages = 100;
        kernel.config.compiled_for = "80-real 90a-real 80-virtual";
    }
    *count = 2;
    return kernels;
}
}

}  // namespace libflash

using namespace libflash;
using cuda::devices, cuda::properties;

// The name of the kernel, or the reason why there is none; the status.
extern "C" int choose(int arch, int shared_memory, char* text, size_t capacity) {
    devices = 1;
    properties.arch = arch;
    properties.shared_memory_bytes = shared_memory;
    Request request{};
    KernelQuery query{Operation::forward, Device{FLASH_DEVICE_CUDA, 0}, DType::f16, 64, 64, &request};
    try {
        std::snprintf(text, capacity, "%s", choose_kernel(query).info.name);
        return 0;
    } catch (const Error& error) {
        std::snprintf(text, capacity, "%s", error.what());
        return error.status();
    }
}

extern "C" int usable(int count, int arch, int kernel, char* text, size_t capacity) {
    devices = count;
    properties.arch = arch;
    const char* why_not = nullptr;
    const bool can = usable_here(kernel_entry(kernel), &why_not);
    std::snprintf(text, capacity, "%s", why_not);
    return can;
}
"""


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> c.CDLL:
    folder: Path = tmp_path_factory.mktemp("old_gpu")
    (folder / "build_info.h").write_text(BUILD_INFO)
    return compile_host(folder, WRAPPER, "plan/registry.cpp", "plan/selection.cpp", "cuda/machine_code.cpp", "problem/check.cpp")


def text_of(function: c._CFuncPtr, *arguments: int) -> tuple[int, str]:
    text = c.create_string_buffer(400)
    return function(*arguments, text, c.c_size_t(len(text))), text.value.decode()


@pytest.mark.parametrize("arch", [70, 75])
def test_a_gpu_before_ampere(lib: c.CDLL, arch: int) -> None:
    status, text = text_of(lib.choose, arch, ENOUGH)
    assert status == UNSUPPORTED
    assert f"no code for its architecture in this build (sm_{arch})" in text
    assert "forward_sm80_f16_d128, forward_sm90_f16_d128" in text


@pytest.mark.parametrize(("arch", "kernel"), [(80, 0), (86, 0), (90, 0), (120, 0), (90, 1)])
def test_a_gpu_that_it_has_code_for(lib: c.CDLL, arch: int, kernel: int) -> None:
    assert text_of(lib.choose, arch, ENOUGH) == (0, "forward_sm80_f16_d128")
    assert text_of(lib.usable, 1, arch, kernel) == (1, "")


def test_a_gpu_with_too_little_shared_memory(lib: c.CDLL) -> None:
    status, text = text_of(lib.choose, 86, ENOUGH - 1)
    assert status == UNSUPPORTED
    assert f"device: must have {ENOUGH} bytes of shared memory for a thread block ({ENOUGH - 1})" in text


def test_why_a_kernel_cannot_run_here(lib: c.CDLL) -> None:
    """The result of flash_kernel_info."""
    assert text_of(lib.usable, 1, 75, 0) == (0, "no code for the architecture of this machine's GPUs")
    assert text_of(lib.usable, 1, 100, 1) == (0, "no code for the architecture of this machine's GPUs")
    assert text_of(lib.usable, 0, 0, 0) == (0, "made up")
