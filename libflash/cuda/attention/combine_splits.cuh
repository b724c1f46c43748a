// Combine, the last kernel of decode: one result from the partial results of the splits (each divided by its own row sum) and
// their LSE. A thread block (combine_few_splits.cuh: a warp) computes one output row or, with long chunks, all rows of a head of
// a sequence. Splits without keys do not contribute. If only one split has keys, the result has the same bits as without splits.
#pragma once

#include "cuda/attention/combine_warps.h"
#include "cuda/attention/decode_params.h"
#include "cuda/attention/launch_dependent.cuh"
#include "cuda/attention/ragged_keys.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/config.h"
#include "cuda/plans.h"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/math.cuh"

#include <type_traits>

namespace libflash::cuda {

// Row of the workspace. With packed rows, batch 0 has the rows of all sequences. `row`: query row * group_size + query head
// within the key head's group.
__device__ __forceinline__ int64_t partial_row(const DecodeParams& p, int batch, int head_k, int row) {
    return (int64_t{batch} * p.heads_k + head_k) * (int64_t{p.seqlen_q} * p.group_size) + row;
}

// Row of the workspace if the prefill kernel takes long chunks: each sequence has as many rows as its tiles can have.
__device__ __forceinline__ int64_t short_partial_row(const DecodeParams& p, int tile_rows, int batch, int head_k, int row) {
    return (int64_t{batch} * p.heads_k + head_k) * (static_cast<int>(p.ragged.short_tiles.divisor) * tile_rows) + row;
}

// The sink in base-2 units, or -infinity.
template <class T>
__device__ __forceinline__ float sink_of(const DecodeParams& p, int batch, int head) {
    return p.sink.data ? head_number<T>(p.sink, batch, head) * kLog2e : -INFINITY;
}

// The factor by which the sink reduces the result of a row. splits_lse: the LSE of all splits of the row together (base 2). The
// thread with `writes` stores lse.
__device__ __forceinline__ float finish_row(const DecodeParams& p, int batch, int row, int head, float splits_lse, float sink,
                                            bool writes) {
    const float largest = fmaxf(splits_lse, sink);
    float weight = 0.0f, lse = -INFINITY;
    if (largest != -INFINITY || splits_lse != splits_lse) {
        weight = exp2_approx(splits_lse - largest);
        const float total = weight + exp2_approx(sink - largest);
        weight /= total;
        lse = (largest + __log2f(total)) * kLn2;
    }
    if (writes && p.lse.data) p.lse.data[batch * p.lse.batch + row * p.lse.row + head * p.lse.head] = lse;
    return weight;
}

template <class T>
__device__ __forceinline__ void store_pair(const DecodeParams& p, int batch, int row, int head, int channel, float2 x) {
    T* to = static_cast<T*>(p.out.data) + batch * p.out.batch + row * p.out.row + head * p.out.head + channel;
    struct alignas(2 * sizeof(T)) Pair {
        T low, high;
    };
    if (p.vector_out) {
        if (channel < p.head_dim_v) *reinterpret_cast<Pair*>(to) = {from_float(x.x, T()), from_float(x.y, T())};
    } else {
        if (channel < p.head_dim_v) to[0] = from_float(x.x, T());
        if (channel + 1 < p.head_dim_v) to[1] = from_float(x.y, T());
    }
}

// Splits are processed in groups of 32: lane n of every warp computes the weight of split n of the group, and each warp adds up a
// quarter of the group (an eighth with wide heads). kHeadDim: channels of the values.
// Out: the type of the results, T or float.
template <class T, int kHeadDim, class Out = T>
struct CombineSplits {
    // To keep the code small, wide heads decide the type of the results at run time and do not load groups ahead.
    static constexpr bool kWide = kHeadDim > 256;
    static constexpr int kWarps = combine_warps(kHeadDim), kThreads = kWarps * 32;
    static constexpr int kPairs = kHeadDim / 64;             // channel pairs per lane
    static constexpr int kShare = splits_of_warp(kHeadDim);  // splits of a group per warp

    const DecodeParams& params;
    const float *lse, *out;  // of the first split of the row
    const int lane, warp;
    using Loaded = float2[kShare][kPairs];
    Loaded even, odd;  // of groups with even and odd numbers
    float2 sums[kPairs];

    __device__ __forceinline__ CombineSplits(const DecodeParams& p, int64_t row)
        : params(p), lse(p.partial_lse + row * p.splits), out(p.partial_out + row * p.splits * kHeadDim), lane(threadIdx.x % 32),
          warp(threadIdx.x / 32), sums{} {}

    __device__ __forceinline__ float lse_of(int split) const { return split < params.splits ? lse[split] : -INFINITY; }

    // Also loads splits without keys, whose values are undefined and not used: first waiting for the LSE would take longer.
    __device__ __forceinline__ void load(Loaded& loaded, int group) const {
        if (group >= params.splits) return;
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            const int split = min(group + i * kWarps + warp, params.splits - 1);
#pragma unroll
            for (int c = 0; c < kPairs; ++c)
                loaded[i][c] = *reinterpret_cast<const float2*>(out + int64_t{split} * kHeadDim + c * 64 + lane * 2);
        }
    }

    // `factor`: weight of split number `lane` of the group.
    __device__ __forceinline__ void add(const Loaded& loaded, float factor) {
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            add(sums, loaded[i], __shfl_sync(0xffffffffu, factor, i * kWarps + warp));
        }
    }
    __device__ __forceinline__ static void add(float2 (&sums)[kPairs], const float2 (&loaded)[kPairs], float weight) {
        if (weight == 0.0f) return;
#pragma unroll
        for (int c = 0; c < kPairs; ++c) {
            sums[c].x = fmaf(weight, loaded[c].x, sums[c].x);
            sums[c].y = fmaf(weight, loaded[c].y, sums[c].y);
        }
    }

    // The weight of a split. `all`: LSE of all splits; `weight`: the factor of the sink.
    __device__ __forceinline__ static float factor_of(float split_lse, float all, float weight) {
        return split_lse == -INFINITY ? 0.0f : exp2_approx(split_lse - all) * weight;
    }

    __device__ __forceinline__ void store(int batch, int row, int head, int channel, float2 sum) const {
        if (kWide && params.out_is_float) {
            store_pair<float>(params, batch, row, head, channel, sum);
        } else {
            store_pair<Out>(params, batch, row, head, channel, sum);
        }
    }

    // LSE of all splits in base-2 units. `own`: LSE of split number `lane`.
    __device__ __forceinline__ float lse_of_all(float own) const {
        float largest = own;
        bool bad = own != own;
#pragma unroll 1
        for (int split = lane + 32; split < params.splits; split += 32) {
            const float x = lse[split];
            bad |= x != x;
            largest = fmaxf(largest, x);
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
        if (__any_sync(0xffffffffu, bad)) return NAN;
        if (largest == -INFINITY) return largest;
        float sum = exp2_approx(own - largest);
#pragma unroll 1
        for (int split = lane + 32; split < params.splits; split += 32) sum += exp2_approx(lse[split] - largest);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        return largest + __log2f(sum);
    }

    __device__ __forceinline__ void run(int batch, int row, int head, float2 (*parts)[kPairs][32]) {
        const float own = lse_of(lane);
        load(even, 0);
        if constexpr (!kWide) load(odd, 32);
        const float all = lse_of_all(own);
        const float weight = finish_row(params, batch, row, head, all, sink_of<T>(params, batch, head), threadIdx.x == 0);
        if constexpr (kWide) {
            float split_lse = own;
#pragma unroll 1
            for (int group = 0; group < params.splits; group += 32) {
                if (group > 0) load(even, group), split_lse = lse_of(group + lane);
                add(even, factor_of(split_lse, all, weight));
            }
        } else {
            add(even, factor_of(own, all, weight));
#pragma unroll 1
            for (int group = 32; group < params.splits; group += 64) {
                load(even, group + 32);
                add(odd, factor_of(lse_of(group + lane), all, weight));
                if (group + 32 >= params.splits) break;
                load(odd, group + 64);
                add(even, factor_of(lse_of(group + 32 + lane), all, weight));
            }
        }
#pragma unroll
        for (int c = 0; c < kPairs; ++c) parts[warp][c][lane] = sums[c];
        __syncthreads();
        for (int i = threadIdx.x; i < kPairs * 32; i += kThreads) {
            float2 sum = parts[0][i / 32][i % 32];
#pragma unroll
            for (int w = 1; w < kWarps; ++w) sum.x += parts[w][i / 32][i % 32].x, sum.y += parts[w][i / 32][i % 32].y;
            store(batch, row, head, i * 2, sum);
        }
    }
};

// The rows of a query head that a thread block or a warp computes.
struct CombinedRows {
    int batch, head, count;
    int first;                    // row of out
    int64_t partial_row, stride;  // in the workspace: of the first row, and from one to the next

    // One row, the `index`-th. Order of rows: [batch][key head][query row][query head of the group].
    __device__ __forceinline__ static CombinedRows one(const DecodeParams& p, int index) {
        const int rows_of_head = p.seqlen_q * p.group_size, head_index = index / rows_of_head;
        const int packed = index - head_index * rows_of_head, row = divide(packed, p.by_group);
        const int batch = divide(head_index, p.by_heads), head_k = head_index - batch * p.heads_k;
        const int count = batch < (p.ragged.queries.cu ? 1 : p.batch);
        return {batch, head_k * p.group_size + packed - row * p.group_size, count, row, index, 0};
    }

    // If the prefill kernel takes long chunks: all rows of a sequence, if the decode kernels compute it. kTileRows: of a tile
    // whose warps share the keys, 16 for each warp, as many as its keys.
    template <int kTileRows>
    __device__ __forceinline__ static CombinedRows sequence(const DecodeParams& p) {
        const int head_index = divide(blockIdx.x, p.by_group), batch = divide(head_index, p.by_heads);
        const int head_k = head_index - batch * p.heads_k, in_group = static_cast<int>(blockIdx.x) - head_index * p.group_size;
        const SequenceRows rows = SequenceRows::of(p.ragged.queries, batch);
        const int count = rows.owned > p.ragged.most_rows ? 0 : rows.owned;
        const int64_t partial_row = short_partial_row(p, kTileRows, batch, head_k, in_group);
        return {batch, head_k * p.group_size + in_group, count, rows.start, partial_row, p.group_size};
    }

    // All rows of the thread block. Waits for the previous kernel.
    template <int kTileRows>
    __device__ __forceinline__ static CombinedRows of_block(const DecodeParams& p) {
        CombinedRows row = one(p, blockIdx.x);
        allow_next_kernel();
        wait_for_previous_kernel();
        if (p.ragged.most_rows > 0) return sequence<kTileRows>(p);
        if (!row.is_of_sequence(p)) row.count = 0;
        return row;
    }

    // Whether the first row is one of a sequence. Packed rows of no sequence are not written. The lanes of a warp have one row.
    __device__ __forceinline__ bool is_of_sequence(const DecodeParams& p) const {
        return !p.ragged.queries.cu || RaggedRow::exists(p.ragged.queries, p.batch, first);
    }
};

// Minimum number of thread blocks of combine per multiprocessor (for __launch_bounds__); 0: any number. Without it ptxas makes
// room for a sixth thread block at head_dim 64, and spills.
constexpr int fewest_combine_blocks(int head_dim) { return head_dim == 64 ? 5 : 0; }

template <class Kernel, class T, class Out>
__global__ void __launch_bounds__(CombineSplits<T, Kernel::config.head_dim_v, Out>::kThreads,
                                  fewest_combine_blocks(Kernel::config.head_dim))
    combine_kernel(const __grid_constant__ DecodeParams params) {
    using Body = CombineSplits<T, Kernel::config.head_dim_v, Out>;
    __shared__ float2 parts[Body::kWarps][Body::kPairs][32];
    const CombinedRows rows = CombinedRows::of_block<Kernel::config.tile_k>(params);
#pragma unroll 1
    for (int i = 0; i < rows.count; ++i) {
        if (i > 0) __syncthreads();  // `parts` are no longer read
        Body(params, rows.partial_row + i * rows.stride).run(rows.batch, rows.first + i, rows.head, parts);
    }
}

template <class Combine>
int launch_combine_kernel(Combine kernel, const DecodePlan& plan, const DecodeParams& params, cudaStream_t stream) {
    if (plan.combine.blocks == 0) return cudaSuccess;
    return launch_dependent(kernel, plan.combine.blocks, plan.combine.threads, plan.combine.shared_bytes, stream,
                            plan.dependent_launch, params);
}

template <class Kernel, class T>
int launch_combine(const DecodePlan& plan, const DecodeParams& params, cudaStream_t stream) {
    using Float = std::conditional_t<CombineSplits<T, Kernel::config.head_dim_v>::kWide, T, float>;
    return launch_combine_kernel(params.out_is_float ? combine_kernel<Kernel, T, Float> : combine_kernel<Kernel, T, T>, plan,
                                 params, stream);
}

}  // namespace libflash::cuda
