// The end of a thread block of decode: combines the partial results of its warps, and stores the result of the split or, without
// splits, of the row. `Body`: Decode in decode_range.cuh.
#pragma once

#include "cuda/attention/combine_splits.cuh"
#include "cuda/attention/online_softmax.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/quad.cuh"

namespace libflash::cuda::sm80 {

template <class Body>
struct DecodeResults {
    using T = typename Body::Element;
    using ExistingRow = typename Body::ExistingRow;
    static constexpr int kValueDim = Body::kValueChannels, kHeads = Body::kHeadsOfBlock;
    static constexpr int kWarps = Body::kThreads / 32 / Body::kParts;
    static constexpr int kThreads = Body::kThreads;
    // In shared memory, in the place of the stages: for each warp and query row a row of O, and four numbers.
    static constexpr int kPartRow = kValueDim + 8;
    static_assert((kWarps * kDecodeSlab * (kPartRow + 4)) * 4 <= Body::kStagesBytes, "they fit");

    Body& body;

    // How many warps have partial results of the same row (not Body::kParts).
    static constexpr int kParts = Body::kSameKeys ? 1 : kWarps / kHeads;
    __device__ __forceinline__ float* part(int slab, int row) const {
        return reinterpret_cast<float*>(body.shared) + (slab * kDecodeSlab + row) * kPartRow;
    }
    // Four numbers per row and slab: kept maximum, row sum, weight of this part, and the factor for the sum of all parts.
    __device__ __forceinline__ float* part_statistics(int slab, int row) const {
        return reinterpret_cast<float*>(body.shared) + kWarps * kDecodeSlab * kPartRow + (slab * kDecodeSlab + row) * 4;
    }
    // Stores the lane's channels of one of its two rows.
    __device__ __forceinline__ void store_row(float* to, int r) const {
        const auto& o = body.o;
        if constexpr (Body::kConvertsInRegisters) {
#pragma unroll
            for (int n = 0; n < Body::kBlocks; n += 2)
                *reinterpret_cast<float4*>(to + Body::Codes::Products::first_channel(n, body.lane)) =
                    make_float4(o[n][2 * r], o[n + 1][2 * r], o[n][2 * r + 1], o[n + 1][2 * r + 1]);
        } else {
#pragma unroll
            for (int n = 0; n < Body::kBlocks; ++n)
                *reinterpret_cast<float2*>(to + n * 8 + body.lane % 4 * 2) = make_float2(o[n][2 * r], o[n][2 * r + 1]);
        }
    }
    // store_row() with few rows: the lane's O is of two query rows, which are not the query row of its scores.
    __device__ __forceinline__ void store_columns() const {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float* const to = part(body.warp, body.lane % 4 * 2 + e);
#pragma unroll
            for (int n = 0; n < Body::kBlocks; ++n)
                *reinterpret_cast<float2*>(to + Body::Products::first_channel(n, body.lane)) =
                    make_float2(body.o[n][e], body.o[n][e + 2]);
        }
    }
    // Stores the results of each warp in shared memory.
    __device__ __forceinline__ void store_partial_results() {
#pragma unroll
        for (int r = 0; r < Body::kLaneRows; ++r) body.row_sum[r] = quad_sum(body.row_sum[r]);
        __syncthreads();  // no warp reads or writes a stage
        if constexpr (Body::kHasFewRows) store_columns();
#pragma unroll
        for (int r = 0; r < Body::kLaneRows; ++r) {
            const int row = r * 8 + body.lane / 4;
            if (body.lane % 4 == 0 && body.part() == 0) {
                part_statistics(body.warp, row)[0] = body.kept_maximum[r];
                part_statistics(body.warp, row)[1] = body.row_sum[r];
            }
            if constexpr (!Body::kHasFewRows) store_row(part(body.warp, row) + body.part() * Body::kBlocks * 8, r);
        }
        __syncthreads();
    }

    // For each row: the LSE of its parts, and the weights by which the parts are added, including the division by the row sum.
    __device__ __forceinline__ void compute_weights() {
        for (int n = threadIdx.x; n < kHeads * body.work_tile.rows; n += kThreads) {
            const ExistingRow row = body.existing_row(n);
            const auto statistics_of = [&](int w) { return part_statistics(row.slab + w * kHeads, row.in_slab); };
            float largest = kNoScore, total = 0.0f;
#pragma unroll
            for (int w = 0; w < kParts; ++w) largest = fmaxf(largest, statistics_of(w)[0]);
#pragma unroll
            for (int w = 0; w < kParts; ++w) {
                const float* statistics = statistics_of(w);
                total += exp2_approx(statistics[0] - largest) * statistics[1];
            }
            const float inverse = total != 0.0f ? 1.0f / total : 0.0f;  // 0: the row sees no key
            const float lse = total != 0.0f ? largest + __log2f(total) : -INFINITY;
#pragma unroll
            for (int w = 0; w < kParts; ++w) {
                float* statistics = statistics_of(w);
                statistics[2] = exp2_approx(statistics[0] - largest) * inverse;
            }
            store_lse(row, lse);
        }
        __syncthreads();
    }

    // Stores the LSE of this split in the workspace. Without splits it stores the LSE of the row in the output instead, and the
    // factor by which the sink reduces the result.
    __device__ __forceinline__ void store_lse(const ExistingRow& row, float lse) {
        const int head = body.query_head(row.head_k, row.packed);
        if (body.params.splits > 1) {
            body.params.partial_lse[body.workspace_row(row.head_k, row.packed) * body.params.splits + body.work_tile.split] = lse;
        } else {
            part_statistics(row.slab, row.in_slab)[3] =
                finish_row(body.params, body.work_tile.batch, body.tensor_row(row.packed), head, lse,
                           sink_of<T>(body.params, body.work_tile.batch, head), true);
        }
    }

    // Weighted sum of the parts of a row, for two channels.
    __device__ __forceinline__ float2 sum_of_parts(const ExistingRow& row, int channel) const {
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < kParts; ++w) {
            const float factor = part_statistics(row.slab + w * kHeads, row.in_slab)[2];
            const float2 x = *reinterpret_cast<const float2*>(part(row.slab + w * kHeads, row.in_slab) + channel);
            if (factor == 0.0f) continue;  // the part may hold NaN
            sum.x = fmaf(factor, x.x, sum.x);
            sum.y = fmaf(factor, x.y, sum.y);
        }
        return sum;
    }

    __device__ __forceinline__ void store_rows() {
        constexpr int kPairs = kValueDim / 2;
        for (int i = threadIdx.x; i < kHeads * body.work_tile.rows * kPairs; i += kThreads) {
            const ExistingRow row = body.existing_row(i / kPairs);
            const int channel = i % kPairs * 2;
            const float2 x = sum_of_parts(row, channel);
            if (body.params.splits > 1) {
                const int64_t range = body.workspace_row(row.head_k, row.packed) * body.params.splits + body.work_tile.split;
                *reinterpret_cast<float2*>(body.params.partial_out + range * kValueDim + channel) = x;
            } else {
                const float weight = part_statistics(row.slab, row.in_slab)[3];
                store_pair_of_row(row, channel, {x.x * weight, x.y * weight});
            }
        }
    }

    __device__ __forceinline__ void store_pair_of_row(const ExistingRow& row, int channel, float2 x) const {
        const int batch = body.work_tile.batch, in_tensor = body.tensor_row(row.packed),
                  head = body.query_head(row.head_k, row.packed);
        if (Body::kHasRareOptions && body.params.out_is_float)
            return store_pair<float>(body.params, batch, in_tensor, head, channel, x);
        store_pair<T>(body.params, batch, in_tensor, head, channel, x);
    }

    // For a split without keys: only the LSE, because combine does not use the partial result.
    __device__ __forceinline__ void store_without_keys() {
        for (int n = threadIdx.x; n < kHeads * body.work_tile.rows; n += kThreads) store_lse(body.existing_row(n), -INFINITY);
    }
    __device__ __forceinline__ void store_result() {
        store_partial_results();
        compute_weights();
        store_rows();
    }
};

}  // namespace libflash::cuda::sm80
