// The kernels of this build, of every backend, in order of preference within an operation.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"
#include "cuda/kernels.h"
#include "problem/operation.h"

namespace libflash {

struct KernelEntry {
    char name[48];
    Operation operation;
    const char* backend;  // "any": every CUDA device, whichever CUDA backend is asked for
    const char* dtype;
    int32_t head_dim, head_dim_v;
    int32_t tile_q, tile_k, stages;
    const cpu::Kernels* cpu;      // CPU: forward, backward, decode
    const cuda::Kernel* cuda;     // CUDA
    bool supported_by_processor;  // CPU
};

int kernel_count();
const KernelEntry& kernel_entry(int index);

// Whether a GPU of this architecture can run it.
bool has_code(const KernelEntry& kernel, int arch);

// Can this machine run it? If not, `why_not` says it; valid as long as the library is loaded.
bool usable_here(const KernelEntry& kernel, const char** why_not);

}  // namespace libflash
