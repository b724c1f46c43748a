// Writes new rows of keys and values to slots of a KV cache. A warp writes one head of a row of keys, of values or of rope parts,
// converted to the type of the cache. Slots are in device memory, so the host cannot check them: a row whose slot is outside of
// the cache is not written.
#pragma once

#include <cuda_runtime.h>

#include "cuda/attention/quantize.cuh"
#include "cuda/config.h"
#include "cuda/params.h"

namespace libflash::cuda::cache_write {

constexpr int kThreads = 128, kWarps = kThreads / 32;

// One part of a row: its new values, its place in the cache, and how it is written. Selected before the code that writes, which
// then is compiled once for all parts.
struct Part {
    RowsParams from, to;
    int channels;
    CacheScaleParams scale;
    CodeType code;
    bool rotated;
};

__device__ __forceinline__ Part part_of(const CacheWriteParams& p, int part) {
    if (part == 0) return {p.k_new, p.k, p.channels, p.k_scale, p.code, !p.rope.data};
    if (part == 1 && p.v.data) return {p.v_new, p.v, p.channels_v, p.v_scale, p.code, false};
    return {p.rope_new, p.rope, p.channels_rope, CacheScaleParams{}, CodeType::none, true};
}

template <class T>
__device__ __forceinline__ void write_part(const CacheWriteParams& p, int64_t row, int head, int part, int lane) {
    const int64_t slot = p.wide_slots ? static_cast<const int64_t*>(p.slots)[row] : static_cast<const int32_t*>(p.slots)[row];
    if (slot < 0 || slot >= p.cache_blocks * p.cache_block_rows) return;
    const int64_t block = slot / p.cache_block_rows, in_block = slot - block * p.cache_block_rows;
    const Part of = part_of(p, part);
    const T* const values = static_cast<const T*>(of.from.data) + row * of.from.row + head * of.from.head;
    const RotaryParams* const rotary = of.rotated && p.rotary.cos ? &p.rotary : nullptr;
    const NewCacheRow<T> made{values, rotary, rotary ? p.positions[row] : 0};
    void* const at = cached_address<T>(of.to.data, block * of.to.batch + in_block * of.to.row + head * of.to.head, of.code);
    write_cached_row(made, of.channels, of.scale, scale_address(of.scale, 0, block, in_block, head), of.code, at, lane);
}

template <class Kernel, class T>
__global__ void __launch_bounds__(kThreads) cache_write_kernel(const __grid_constant__ CacheWriteParams p) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t of_row = static_cast<int64_t>(p.heads) * p.parts, items = p.rows * of_row;
    for (int64_t item = int64_t{blockIdx.x} * kWarps + warp; item < items; item += int64_t{gridDim.x} * kWarps) {
        const int in_row = static_cast<int>(item % of_row);
        write_part<T>(p, item / of_row, in_row / p.parts, in_row % p.parts, lane);
    }
}

template <class Kernel, class T>
int launch(const CacheWritePlan& plan, const CacheWriteParams& p, cudaStream_t stream) {
    const LaunchShape& shape = plan.write;
    const auto kernel = cache_write_kernel<Kernel, T>;
    kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, shape.shared_bytes, stream>>>(p);
    return cudaGetLastError();
}

}  // namespace libflash::cuda::cache_write

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_cache_write(int, int) {
    return {cache_write::kThreads, 0};
}

// Enqueues the kernel on `stream` and returns the result of cudaGetLastError().
template <class Kernel>
int launch_cache_write(const CacheWritePlan& plan, const CacheWriteParams& p, void* stream) {
    if (plan.write.blocks == 0) return cudaSuccess;
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    switch (plan.rows_type) {
        case KernelType::f16_: return cache_write::launch<Kernel, __half>(plan, p, cuda_stream);
        case KernelType::bf16_: return cache_write::launch<Kernel, __nv_bfloat16>(plan, p, cuda_stream);
        default: return cache_write::launch<Kernel, float>(plan, p, cuda_stream);
    }
}

}  // namespace libflash::cuda
