// The registry: the kernels of this build, of every backend, in order of preference within each operation.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"
#include "cuda/kernels.h"
#include "problem/operation.h"

namespace libflash {

struct KernelEntry {
    Operation operation;
    flash_kernel_info_t info;     // without struct_size, usable and why_not
    const cpu::Kernels* cpu;      // set for CPU kernels that depend on the instruction set
    const cuda::Kernel* cuda;     // set for CUDA kernels
    bool supported_by_processor;  // CPU kernels
};

// Kernels of one operation and one kind of device, in order of preference.
struct KernelList {
    const KernelEntry* const* first;
    int count;

    const KernelEntry* const* begin() const { return first; }
    const KernelEntry* const* end() const { return first + count; }
};

KernelList kernels_of(Operation operation, bool on_gpu);
int kernel_count();
const KernelEntry& kernel_entry(int index);

// Whether the build has code of this kernel for a GPU of architecture `arch` (90 for compute capability 9.0).
bool has_code(const KernelEntry& kernel, int arch);

// Whether this machine can run the kernel. If not, `why_not` is set to the reason, which is valid as long as the library is
// loaded; otherwise to "".
bool usable_here(const KernelEntry& kernel, const char** why_not);

}  // namespace libflash
