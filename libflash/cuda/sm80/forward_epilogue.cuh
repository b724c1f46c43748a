// The epilogue of the sm80 forward kernel: normalizes O, writes the LSE and stores O. `Body`: Forward in forward.cuh.
#pragma once

#include "cuda/attention/online_softmax.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm80/row_statistics_output.cuh"
#include "cuda/tile/store_floats.cuh"

namespace libflash::cuda::sm80 {

template <class Body>
struct ForwardEpilogue {
    using T = typename Body::Element;
    using QTile = typename Body::QTile;
    static constexpr int kSlabs = Body::kSlabs, kChannelBlocks = Body::kChannelBlocks, kHeadDim = Body::kChannels;
    static constexpr int kBlockM = Body::kTileRows;
    static constexpr bool kGeneral = Body::kRare, kHasFloats = Body::kFloat;

    Body& body;
    float earlier[kSlabs][2];  // continuation: the old LSE in base-2 units; after normalize() the weight of the old result

    // Whether store_shard() must write O: out is float32 and the inputs have 16 bits, or out holds an earlier result
    // (continuation).
    __device__ __forceinline__ bool stores_shard() const { return kGeneral && (body.params.continues || body.params.wide_out); }

    // Reads the old LSE of the rows. The barrier ensures that all threads of a row have read it before one of them writes the new
    // LSE.
    __device__ __forceinline__ void read_earlier(const float* lse) {
        const SequenceRows q_rows = body.common().q_rows;
#pragma unroll
        for (int i = 0; i < kSlabs * 2; ++i) {
            const int row = body.row_of(i / 2, i % 2 * 2);
            earlier[i / 2][i % 2] = row < q_rows.length ? lse[(q_rows.start + row) * body.params.lse.row] * kLog2e : -INFINITY;
        }
        __syncthreads();
    }

    // Writes the LSE, and calls scale_by(a, r, factor) with the factor that normalizes each row of o. The sink counts as a score.
    template <class Scale>
    __device__ __forceinline__ void normalize(const Scale& scale_by) {
        const TileCoordinates work = body.common().work;
        const SequenceRows q_rows = body.common().q_rows;
        const float sink = body.params.sink.data ? head_number<T>(body.params.sink, work.batch, work.head) * kLog2e : -INFINITY;
        float* lse = body.params.lse.data
                         ? body.params.lse.data + work.batch * body.params.lse.batch + work.head * body.params.lse.head
                         : nullptr;
        const bool continues = kGeneral && body.params.continues;
        if (continues) read_earlier(lse);
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = body.row_of(a, 2 * r);
                const bool exists = row < q_rows.length;
                // One more score: that of the sink or of the earlier result.
                const float other = continues ? earlier[a][r] : sink;
                const float largest = fmaxf(body.kept_maximum[a][r], other);
                float total = body.row_sum[a][r], factor = 1.0f;  // no finite score: total is 0, or NaN if a score was NaN
                if (largest != kNoScore || (continues && other != -INFINITY)) {  // second case: `other` is NaN
                    factor = exp2_approx(body.kept_maximum[a][r] - largest);
                    total = body.row_sum[a][r] * factor + exp2_approx(other - largest);
                }
                // NaN in total propagates: the comparison with 0 is true and the quotient is NaN.
                float inverse = exists && total != 0.0f ? factor / total : 0.0f;
                if constexpr (kGeneral) inverse *= body.params.rare.dropout.keep_factor;
                if constexpr (kGeneral)
                    earlier[a][r] = continues && exists && other != -INFINITY ? exp2_approx(other - largest) / total : 0.0f;
                if (lse && body.part() == 0 && body.lane % 4 == 0 && row < q_rows.owned)
                    lse[(q_rows.start + row) * body.params.lse.row] =
                        exists && total != 0.0f ? (largest + __log2f(total)) * kLn2 : -INFINITY;
                if constexpr (Body::kHasStatistics) RowStatisticsOutput<Body>{body}.store(a, r, exists, sink, total);
                scale_by(a, r, inverse);
            }
    }
    // A factor of 0 means that the row sees no key or is past the end. A row past the end may hold NaN, so it is not multiplied
    // but set to 0.
    __device__ __forceinline__ void scale_out(int a, int r, float factor) {
#pragma unroll
        for (int n = 0; n < kChannelBlocks; ++n) {
            body.o[a][n][2 * r] = factor == 0.0f ? 0.0f : body.o[a][n][2 * r] * factor;
            body.o[a][n][2 * r + 1] = factor == 0.0f ? 0.0f : body.o[a][n][2 * r + 1] * factor;
        }
    }

    // Writes O from registers. In a continuation it adds the earlier result, times its weight.
    __device__ __forceinline__ void store_shard() {
        if (kHasFloats || body.params.wide_out) {
            store_shard_as<float>();
        } else {
            store_shard_as<T>();
        }
    }
    template <class Out>
    __device__ __forceinline__ void store_shard_as() {
        const SequenceRows q_rows = body.common().q_rows;
        Out* out = Body::template start<Out>(body.params.out, body.common().work.batch, q_rows.start, body.common().work.head);
        const int first_col = body.part() * kChannelBlocks * 8 + body.lane % 4 * 2;
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = body.row_of(a, 2 * r);
                store_sums<kChannelBlocks>(out + row * body.params.out.row + first_col,
                                           row < q_rows.owned ? body.params.head_dim_v - first_col : 0, body.params.vector_out,
                                           earlier[a][r], [&](int n, int e) { return body.o[a][n][2 * r + e]; });
            }
    }

    // Stages the warp's rows of O in the same rows of the Q tile in shared memory, so that the global stores are contiguous.
    __device__ __forceinline__ void store_out() {
        const TileCoordinates work = body.common().work;
        const SequenceRows q_rows = body.common().q_rows;
        T* out = Body::template start<T>(body.params.out, work.batch, q_rows.start, work.head);
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int n = 0; n < kChannelBlocks; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int row = (body.warp * kSlabs + a) * 16 + r * 8 + body.lane / 4;
                    *reinterpret_cast<uint32_t*>(body.shared + QTile::offset(row, n) + body.lane % 4 * 4) =
                        pack_pair(body.o[a][n][2 * r], body.o[a][n][2 * r + 1], T());
                }
        __syncwarp();
        constexpr int kChunks = kHeadDim / 8;
        for (int i = body.lane; i < kSlabs * 16 * kChunks; i += 32) {
            const int row = body.warp * kSlabs * 16 + i / kChunks, chunk = i % kChunks;
            const int sequence_row = work.tile * kBlockM + row;
            if (sequence_row >= q_rows.owned || chunk * 8 >= body.params.head_dim_v) continue;
            const char* source = body.shared + QTile::offset(row, chunk);
            T* target = out + sequence_row * body.params.out.row + chunk * 8;
            if (body.params.vector_out) {
                *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
            } else {
                for (int c = 0; c < min(8, body.params.head_dim_v - chunk * 8); ++c)
                    target[c] = reinterpret_cast<const T*>(source)[c];
            }
        }
    }

    __device__ __forceinline__ void store_out_floats() {
        const SequenceRows q_rows = body.common().q_rows;
        float* out =
            Body::template start<float>(body.params.out, body.common().work.batch, q_rows.start, body.common().work.head);
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = body.row_of(a, 2 * r);
                const int col = body.lane % 4 * 2;
                if (row >= q_rows.owned) continue;
                store_floats<kChannelBlocks>(out + row * body.params.out.row + col, body.params.head_dim_v - col,
                                             body.params.vector_out, [&](int n, int e) { return body.o[a][n][2 * r + e]; });
            }
    }
};

}  // namespace libflash::cuda::sm80
