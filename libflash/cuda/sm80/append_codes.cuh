// The append kernel of decode over a cache of 8-bit codes: a warp writes one head of a new key or of a new value, after the
// rotary embedding and the rounding to the type of the queries, as codes; scales that belong to rows are computed and
// written. The queries are rotated by the kernel of append.cuh.
#pragma once

#include "cuda/attention/decode_keys.cuh"
#include "cuda/attention/launch_dependent.cuh"
#include "cuda/attention/quantize.cuh"
#include "cuda/plans.h"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/sm80/decode_instance.h"

namespace libflash::cuda::sm80 {

template <class T>
__device__ __forceinline__ void append_codes(const DecodeParams& params, int batch, int row, int head, bool is_key, int lane) {
    const CacheParams& cache = params.cache;
    const AppendParams& append = params.append;
    const int key = cached_keys(cache, batch) + row;
    if (key >= cache.capacity) return;  // the row does not fit and is not stored
    const KeyLocation location = KeyLocations(cache, batch).of(key);
    if (static_cast<uint32_t>(location.page) >= static_cast<uint32_t>(cache.pages)) return;  // no such page
    const RowsParams &from = is_key ? append.k_new : append.v_new, &to = is_key ? cache.k : cache.v;
    const CacheScaleParams& scale = is_key ? params.k_scale : params.v_scale;
    const T* const values = static_cast<const T*>(from.data) + batch * from.batch + row * from.row + head * from.head;
    const NewCacheRow<T, AppendParams> made{values, is_key && append.cos ? &append : nullptr, key};
    void* const at = cached_address<T>(to.data, location.page * to.batch + location.row * to.row + head * to.head, params.code);
    write_cached_row(made, is_key ? params.head_dim : params.head_dim_v, scale,
                     scale_address(scale, batch, location.page, location.row, head), params.code, at, lane);
}

template <class Kernel, class T>
__global__ void __launch_bounds__(kAppendThreads)
    append_codes_kernel(const __grid_constant__ DecodeParams params, uint32_t new_rows) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const uint32_t item = blockIdx.x * (kAppendThreads / 32) + threadIdx.x / 32, index = item / 2;
    if (index >= new_rows) return;
    const uint32_t heads = params.heads_k, rows = params.cache.seqlen_new;
    append_codes<T>(params, static_cast<int>(index / heads / rows), static_cast<int>(index / heads % rows),
                    static_cast<int>(index % heads), item % 2 == 0, static_cast<int>(threadIdx.x % 32));
}

template <class Kernel, class T>
int launch_append_codes(const DecodePlan& plan, const DecodeParams& params, cudaStream_t stream) {
    if constexpr (sizeof(T) == 2) {
        if (plan.append_codes.blocks == 0) return cudaSuccess;
        return launch_dependent(append_codes_kernel<Kernel, T>, plan.append_codes.blocks, plan.append_codes.threads,
                                plan.append_codes.shared_bytes, stream, plan.dependent_launch, params, plan.appended_codes);
    }
    return cudaSuccess;
}

}  // namespace libflash::cuda::sm80
