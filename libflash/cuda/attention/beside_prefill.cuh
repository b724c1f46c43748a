// How the attention kernel of decode waits for the kernel before it. If that is the prefill kernel, which computes other rows,
// both run at the same time: the prefill kernel leaves multiprocessors free for this one (sm90/prefill_share.cuh), and lets it
// begin as soon as the prefill kernel itself has waited for the kernels before it. So this kernel need not wait for those.
//
// The next kernel waits for this kernel only. Therefore a last thread block, which has no rows, waits for the prefill kernel:
// this kernel then ends after the prefill kernel.
#pragma once

#include "cuda/attention/decode_params.h"
#include "cuda/ptx/dependent_launch.cuh"

namespace libflash::cuda {

// Thread blocks that a launch has in addition.
inline int64_t waiting_blocks(const DecodeParams& params) { return params.beside_prefill ? 1 : 0; }

// Returns false in a thread block that has no rows.
__device__ __forceinline__ bool wait_unless_beside_prefill(const DecodeParams& params) {
    if (params.beside_prefill && blockIdx.x + 1 < gridDim.x) return true;
    wait_for_previous_kernel();
    return !params.beside_prefill;
}

}  // namespace libflash::cuda
