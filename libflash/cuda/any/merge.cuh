// Merge: combines the outputs of several key ranges, weighted by their LSE.
//
// A group of lanes of one warp computes one row of the result. The lanes divide the parts among themselves and write the weight
// of each part, exp(lse_n - lse), to shared memory. Then they loop over the channels, kVector at a time per lane. Every element
// is read once and written once, so the kernel is bound by memory. The row of a part with weight 0 is not read and may hold
// anything.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>
#include <variant>

#include "cuda/merge_plan.h"
#include "cuda/params.h"

namespace libflash::cuda::merge {

// The types of the parts that a kernel is compiled for, beside their one type. Kernels for rare calls, which load one channel at
// a time or fewer than eight of many parts, are compiled once for all types.
struct Mixed {};  // the types differ
struct AnyType {};

constexpr int kThreads = 128;
constexpr int kInFlight = 4;  // loads of parts in flight per lane
// Allows 64 registers per thread; with the compiler's own choice of 32 it spills. The kernels for any type are not limited.
template <class T, class Params>
constexpr int kBlocksPerMultiprocessor = std::is_same_v<Params, MergeMany> || std::is_same_v<T, AnyType> ? 1 : 8;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ void narrow(float& to, float x) { to = x; }
__device__ __forceinline__ void narrow(__half& to, float x) { to = __float2half_rn(x); }
__device__ __forceinline__ void narrow(__nv_bfloat16& to, float x) { to = __float2bfloat16_rn(x); }

// kCount neighbouring elements, aligned so that they are loaded and stored in pieces of up to 16 bytes.
template <class T, int kCount>
struct alignas(kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16) Pack {
    T at[kCount];
};

template <class T, int kVector>
__device__ __forceinline__ Pack<T, kVector> load(const void* data, int64_t start) {
    return *reinterpret_cast<const Pack<T, kVector>*>(static_cast<const T*>(data) + start);
}

template <class T, int kVector>
__device__ __forceinline__ void accumulate(float (&sums)[kVector], const Pack<T, kVector>& pack, float weight) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[i] += weight * widen(pack.at[i]);
}

template <class T, int kVector>
__device__ __forceinline__ void store(void* data, int64_t start, const float (&sums)[kVector]) {
    Pack<T, kVector> pack;
#pragma unroll
    for (int i = 0; i < kVector; ++i) narrow(pack.at[i], sums[i]);
    *reinterpret_cast<Pack<T, kVector>*>(static_cast<T*>(data) + start) = pack;
}

// Offset of a row in a tensor.
__device__ __forceinline__ int64_t row_start(const RowTensor& tensor, int64_t batch, int64_t row, int64_t head) {
    return batch * tensor.batch + row * tensor.row + head * tensor.head;
}

// out and lse of part `n`.
__device__ __forceinline__ const RowTensor& part_out(const MergeFew& p, int n) { return p.outs[n]; }
__device__ __forceinline__ const RowTensor& part_lse(const MergeFew& p, int n) { return p.lses[n]; }
__device__ __forceinline__ RowTensor part_out(const MergeMany& p, int n) {
    const MergeLayout& layout = p.layouts[p.layout[n]];
    return {p.outs[n], layout.out_batch, layout.out_row, layout.out_head, layout.type, 0};
}
__device__ __forceinline__ RowTensor part_lse(const MergeMany& p, int n) {
    const MergeLayout& layout = p.layouts[p.layout[n]];
    return {p.lses[n], layout.lse_batch, layout.lse_row, layout.lse_head, ElementType::f32, 0};
}

__host__ __device__ inline ElementType type_of_first(const MergeFew& p) { return p.outs[0].type; }
__host__ __device__ inline ElementType type_of_first(const MergeMany& p) { return p.layouts[p.layout[0]].type; }

__device__ __forceinline__ float group_max(float x, int group) {
    for (int step = group / 2; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, x, step);
        x = other > x || other != other ? other : x;  // NaN wins
    }
    return x;
}

__device__ __forceinline__ float group_sum(float x, int group) {
    for (int step = group / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

template <class Params>
__device__ __forceinline__ float lse_of_part(const Params& p, int n, int64_t b, int64_t i, int64_t h) {
    const RowTensor& part = part_lse(p, n);
    return static_cast<const float*>(part.data)[row_start(part, b, i, h)];
}

// Writes the weights of all parts, which add up to 1 (or are all 0 if no part has a key), and returns the LSE. All lanes of the
// warp call it, because of the shuffles; a group without a row passes `valid` = false.
template <class Params>
__device__ __forceinline__ float weigh(const Params& p, int64_t b, int64_t i, int64_t h, bool valid, int lane, int group,
                                       float* weights) {
    float largest = -INFINITY;
    for (int n = lane; n < p.count; n += group) {
        const float lse = valid ? lse_of_part(p, n, b, i, h) : -INFINITY;
        weights[n] = lse;
        largest = lse > largest || lse != lse ? lse : largest;
    }
    largest = group_max(largest, group);
    float sum = 0.0f;
    for (int n = lane; n < p.count; n += group) {
        const float weight = largest == -INFINITY ? 0.0f : expf(weights[n] - largest);
        weights[n] = weight;
        sum += weight;
    }
    sum = group_sum(sum, group);
    const float scale = largest == -INFINITY ? 0.0f : 1.0f / sum;
    for (int n = lane; n < p.count; n += group) weights[n] *= scale;
    __syncwarp();
    return largest == -INFINITY ? -INFINITY : largest + logf(sum);
}

// Adds the weighted rows of all parts, which have the same type T. kInFlight loads are issued before the first result is used.
template <class T, int kVector, class Params>
__device__ __forceinline__ void add_parts(const Params& p, int64_t b, int64_t i, int64_t h, int channel, const float* weights,
                                          float (&sums)[kVector]) {
    for (int n = 0; n < p.count; n += kInFlight) {
        Pack<T, kVector> packs[kInFlight];
        float weight[kInFlight];
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
            weight[j] = n + j < p.count ? weights[n + j] : 0.0f;
            if (weight[j] != 0.0f) {
                const RowTensor& part = part_out(p, n + j);
                packs[j] = load<T, kVector>(part.data, row_start(part, b, i, h) + channel);
            }
        }
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
            if (weight[j] != 0.0f) accumulate(sums, packs[j], weight[j]);
        }
    }
}

// The same for parts of different types.
template <int kVector, class Params>
__device__ __forceinline__ void add_mixed_parts(const Params& p, int64_t b, int64_t i, int64_t h, int channel,
                                                const float* weights, float (&sums)[kVector]) {
#pragma unroll 1
    for (int n = 0; n < p.count; ++n) {
        const float weight = weights[n];
        if (weight == 0.0f) continue;
        const RowTensor& part = part_out(p, n);
        const int64_t start = row_start(part, b, i, h) + channel;
        switch (part.type) {
            case ElementType::f16: accumulate(sums, load<__half, kVector>(part.data, start), weight); break;
            case ElementType::bf16: accumulate(sums, load<__nv_bfloat16, kVector>(part.data, start), weight); break;
            default: accumulate(sums, load<float, kVector>(part.data, start), weight);
        }
    }
}

template <class T, int kVector, class Params>
__device__ __forceinline__ void add_parts_of(const Params& p, bool mixed, int64_t b, int64_t i, int64_t h, int channel,
                                             const float* weights, float (&sums)[kVector]) {
    if constexpr (std::is_same_v<T, Mixed>) {
        add_mixed_parts(p, b, i, h, channel, weights, sums);
    } else if constexpr (std::is_same_v<T, AnyType>) {
        if (mixed) return add_mixed_parts(p, b, i, h, channel, weights, sums);
        switch (type_of_first(p)) {
            case ElementType::f16: return add_parts<__half>(p, b, i, h, channel, weights, sums);
            case ElementType::bf16: return add_parts<__nv_bfloat16>(p, b, i, h, channel, weights, sums);
            default: return add_parts<float>(p, b, i, h, channel, weights, sums);
        }
    } else {
        add_parts<T>(p, b, i, h, channel, weights, sums);
    }
}

// `mixed` is no bool: how PTX loads one depends on the sign of the host's char, and PTX is to be the same on Arm.
template <class Kernel, int kVector, class T, class Params>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor<T, Params>)
    merge_kernel(const __grid_constant__ Params p, int group, int mixed) {
    extern __shared__ float weights_smem[];
    const int lane = static_cast<int>(threadIdx.x) % group, slot = static_cast<int>(threadIdx.x) / group;
    const int slots = kThreads / group;
    float* weights = weights_smem + slot * p.count;
    const int64_t rows = p.batch * p.rows * p.heads;

    for (int64_t first = static_cast<int64_t>(blockIdx.x) * slots; first < rows;
         first += static_cast<int64_t>(gridDim.x) * slots) {
        const bool valid = first + slot < rows;
        const int64_t index = valid ? first + slot : rows - 1;
        const int64_t h = index % p.heads, i = index / p.heads % p.rows, b = index / p.heads / p.rows;
        const float lse = weigh(p, b, i, h, valid, lane, group, weights);
        if (valid && lane == 0 && p.lse.data) static_cast<float*>(p.lse.data)[row_start(p.lse, b, i, h)] = lse;

        for (int channel = lane * kVector; valid && channel < p.head_dim_v; channel += group * kVector) {
            float sums[kVector] = {};
            add_parts_of<T>(p, mixed, b, i, h, channel, weights, sums);
            const int64_t start = row_start(p.out, b, i, h) + channel;
            switch (p.out.type) {
                case ElementType::f16: store<__half>(p.out.data, start, sums); break;
                case ElementType::bf16: store<__nv_bfloat16>(p.out.data, start, sums); break;
                default: store<float>(p.out.data, start, sums);
            }
        }
        __syncwarp();  // all lanes have read the weights before those of the next row overwrite them
    }
}

template <class Kernel, int kVector, class T, class Params>
int launch(const MergePlan& plan, const Params& p, cudaStream_t stream) {
    const LaunchShape& shape = plan.merge;
    const auto kernel = merge_kernel<Kernel, kVector, T, Params>;
    kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, shape.shared_bytes, stream>>>(p, plan.group, plan.mixed);
    return cudaGetLastError();
}

template <class Kernel, int kVector, class Params>
int launch(const MergePlan& plan, const Params& p, cudaStream_t stream) {
    if constexpr (kVector == 1 || (kVector < 8 && std::is_same_v<Params, MergeMany>)) {
        return launch<Kernel, kVector, AnyType>(plan, p, stream);
    } else {
        if (plan.mixed) return launch<Kernel, kVector, Mixed>(plan, p, stream);
        switch (type_of_first(p)) {
            case ElementType::f16: return launch<Kernel, kVector, __half>(plan, p, stream);
            case ElementType::bf16: return launch<Kernel, kVector, __nv_bfloat16>(plan, p, stream);
            default: return launch<Kernel, kVector, float>(plan, p, stream);
        }
    }
}

}  // namespace libflash::cuda::merge

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_merge(int, int) {
    return {merge::kThreads, 0};
}

// Enqueues the kernel on `stream` and returns the result of cudaGetLastError().
template <class Kernel>
int launch_merge(const MergePlan& plan, const MergeParams& p, void* stream) {
    if (plan.merge.blocks == 0) return cudaSuccess;
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const auto launch = [&](const auto& params) {
        switch (plan.vector) {
            case 8: return merge::launch<Kernel, 8>(plan, params, cuda_stream);
            case 4: return merge::launch<Kernel, 4>(plan, params, cuda_stream);
            default: return merge::launch<Kernel, 1>(plan, params, cuda_stream);
        }
    };
    return std::visit(launch, p.parts);
}

}  // namespace libflash::cuda
