// A line of kernels.table as a value, which kernels read at compile time and plans at run time. No CUDA header.
#pragma once

#include <cstdint>

#include "problem/operation.h"

namespace libflash::cuda {

enum class KernelType : int32_t { any_, f16_, bf16_, f32_, f64_ };

// Bytes of an element of the kernel's type; 0 if the type is known at run time only.
constexpr int element_bytes(KernelType type) {
    if (type == KernelType::f64_ || type == KernelType::f32_) return type == KernelType::f64_ ? 8 : 4;
    return type == KernelType::any_ ? 0 : 2;
}

struct KernelConfig {
    const char* name;
    Operation operation;
    const char* backend;  // folder of its code: "sm80", "sm90"; "any": used whichever backend is requested
    KernelType dtype;
    int head_dim, head_dim_v;  // the largest that the kernel supports; 0: any
    int tile_q, tile_k;        // of the plain instance; 0: none
    int stages;                // 0: none
    const char* compiled_for;  // architectures, in the format of flash_build_info()
    const char* versions;      // "80 90": the values of __CUDA_ARCH__ / 10 with which its sources were compiled to PTX
    bool statistics = false;   // forward with statistics of rows: for calls that request them, and no others
};

// The resources of a thread block of one instance.
struct KernelResources {
    int threads;
    int shared_bytes;  // dynamic shared memory
};

}  // namespace libflash::cuda
