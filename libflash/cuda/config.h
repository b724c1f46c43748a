// A line of kernels.table as a value: kernels read it at compile time, plans at run time. No CUDA header.
#pragma once

#include <cstdint>

#include "problem/operation.h"

namespace libflash::cuda {

enum class KernelType : int32_t { any_, f16_, bf16_, f32_ };

// Bytes of an element of the kernel's type; 0: the type is decided at run time.
constexpr int element_bytes(KernelType type) { return type == KernelType::f32_ ? 4 : (type == KernelType::any_ ? 0 : 2); }

struct KernelConfig {
    const char* name;
    Operation operation;
    const char* backend;  // the folder of its code: "sm80", "sm90"; "any": every GPU, whichever backend is asked for
    KernelType dtype;
    int head_dim, head_dim_v;  // the largest; 0: any
    int tile_q, tile_k;        // of the plain instance; 0: none
    int stages;                // 0: none
    const char* compiled_for;  // architectures, as in flash_build_info()
    const char* versions;      // "80 90": the values of __CUDA_ARCH__ / 10 that its code was compiled with
};

// What a thread block of one template instance takes.
struct KernelResources {
    int threads;
    int shared_bytes;  // dynamic shared memory
};

}  // namespace libflash::cuda
