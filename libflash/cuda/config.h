// What a row of kernels.table says, as a value: kernels read it at compile time, the registry at run time. No CUDA header.
#pragma once

#include <cstdint>

namespace libflash::cuda {

enum class RowType : int32_t { any_, f16_, bf16_, f32_ };

// Bytes of an element that a row is for; a row for any type has none of its own.
constexpr int element_bytes(RowType type) { return type == RowType::f32_ ? 4 : (type == RowType::any_ ? 0 : 2); }

enum class Operation : int32_t { merge, compress, forward, backward, decode };

struct KernelConfig {
    const char* name;
    const char* operation;
    const char* room;  // "any": every GPU the build has code for; "sm80", "sm90"
    RowType dtype;
    int head_dim, head_dim_v;   // the largest; 0: whatever comes
    int tile_q, tile_k;         // 0: none
    int stages;                 // 0: none
    const char* architectures;  // it was compiled for, as in flash_build_info()
};

}  // namespace libflash::cuda
