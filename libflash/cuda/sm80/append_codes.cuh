// The append kernel of decode for caches of 8-bit codes, with scales, or with k_rope_cache: a warp writes one head of a new key,
// of a new value, or of the last channels of a new key (k_rope_cache), which are the rotated ones then. The rotary embedding and
// rounding to the type of the queries come first; then keys and values are written as codes or divided by their scale. Scales of
// rows are computed and written. The kernel of append.cuh rotates the queries.
#pragma once

#include "cuda/attention/appended_key.cuh"
#include "cuda/attention/launch_dependent.cuh"
#include "cuda/attention/quantize.cuh"
#include "cuda/plans.h"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/sm80/decode_instance.h"

namespace libflash::cuda::sm80 {

// `part`: 0 the key, 1 the value, 2 the last channels of the key. Values that are a view of the keys have no data of their own
// here: they are written with the keys.
template <class T>
__device__ __forceinline__ void append_part(const DecodeParams& params, const AppendedKey& row, int head, int part, int lane) {
    const CacheParams& cache = params.cache;
    const AppendParams& append = params.append;
    const RowsParams &from = part == 0   ? append.k_new
                             : part == 1 ? append.v_new
                                         : params.rope.news,
                     &to = part == 0   ? cache.k
                           : part == 1 ? cache.v
                                       : params.rope.cache;
    if (!from.data) return;
    const KeyLocation location = row.location(params);
    if (static_cast<uint32_t>(location.page) >= static_cast<uint32_t>(cache.pages)) return;
    const T* const values =
        static_cast<const T*>(from.data) + row.batch * from.batch + row.in_tensor * from.row + head * from.head;
    const int rotated = params.rope.channels > 0 ? 2 : 0;  // part
    const NewCacheRow<T, AppendParams> made{values, part == rotated && append.cos ? &append : nullptr, row.position};
    const int64_t offset = location.page * to.batch + location.row * to.row + head * to.head;
    if (part == 2) {
        T* const at = static_cast<T*>(to.data) + offset;
        for (int c = lane; c < params.rope.channels; c += 32) at[c] = made.at(c);
        return;
    }
    const int channels = part == 0 ? params.k_channels : params.head_dim_v;
    const CacheScaleParams& scale = part == 0 ? params.k_scale : params.v_scale;
    write_cached_row(made, channels, scale, scale_address(scale, row.batch, location.page, location.row, head), params.code,
                     cached_address<T>(to.data, offset, params.code), lane);
}

// `items`: new rows times key heads. `parts`: parts of an item.
template <class Kernel, class T>
__global__ void __launch_bounds__(kAppendThreads)
    append_codes_kernel(const __grid_constant__ DecodeParams params, uint32_t items, uint32_t parts) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const uint32_t warp = blockIdx.x * (kAppendThreads / 32) + threadIdx.x / 32, item = warp / parts;
    if (item >= items) return;
    const uint32_t heads = params.heads_k;
    const AppendedKey row = AppendedKey::of(params, static_cast<int>(item / heads));
    if (row.batch < 0) return;
    append_part<T>(params, row, static_cast<int>(item % heads), static_cast<int>(warp % parts),
                   static_cast<int>(threadIdx.x % 32));
}

template <class Kernel, class T>
int launch_append_codes(const DecodePlan& plan, const DecodeParams& params, cudaStream_t stream) {
    if (plan.append_codes.blocks == 0) return cudaSuccess;
    return launch_dependent(append_codes_kernel<Kernel, T>, plan.append_codes.blocks, plan.append_codes.threads,
                            plan.append_codes.shared_bytes, stream, plan.dependent_launch, params, plan.appended_codes,
                            uint32_t{kAppendedParts} + (params.rope.channels > 0));
}

}  // namespace libflash::cuda::sm80
