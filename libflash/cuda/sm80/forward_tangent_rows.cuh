// The last step of forward_tangent: what a thread does with the sums of its query rows.
//
//   mu = sum p ts + p0 tsink = tlse      tout = sum R p (ts - pivot) v + sum R p tv - (mu - pivot) out
//   delta = dout . out - dlse      tdelta = tdout . out + dout . tout - tdlse
//
// p0: the probability of the sink; R: dropout.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/row_pairs.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/quad.cuh"
#include "cuda/tile/store_floats.cuh"

#include <type_traits>

namespace libflash::cuda::sm80 {

// Body: ForwardTangent.
template <class Body>
struct ForwardTangentRows {
    using T = typename Body::Element;
    using QTile = typename Body::QTile;
    static constexpr int kSlabs = Body::kSlabs, kChannelBlocks = Body::kChannelBlocks, kParts = Body::kParts;

    Body& body;

    __device__ __forceinline__ float* address_of(const RowStatisticsParams& numbers, int row) const {
        const TileCoordinates work = body.common().work;
        return numbers.data + work.batch * numbers.batch + work.head * numbers.head +
               (body.common().q_rows.start + row) * numbers.row;
    }

    // mu - pivot: sum p (ts - pivot) over all lanes of the row, plus the term of the sink.
    __device__ __forceinline__ float mu_minus_pivot(int a, int r, float lse_log2) const {
        const TileCoordinates work = body.common().work;
        const float sum = quad_sum(body.sum[a][r]);
        if (!body.params.sink.data) return sum;
        const float sink = head_number<T>(body.params.sink, work.batch, work.head) * kLog2e;
        if (sink == -INFINITY) return sum;
        const float p = exp2_approx(min_or_nan(sink - lse_log2, 0.0f));
        const float tsink = body.params.tsink.data ? head_number<T>(body.params.tsink, work.batch, work.head) : 0.0f;
        return p > 0.0f ? fmaf(p, tsink - body.pivot[a][r], sum) : sum;
    }

    // This lane's part of dout . out, and of tdout . out + dout . tout.
    struct Dots {
        float delta, tdelta;
    };
    // Converts the sums of a row to tout in place. `sees_keys`: the row exists and sees a key. `below`: mu - pivot.
    __device__ __forceinline__ Dots finish_channels(int a, int r, int row, bool sees_keys, float factor, float below) {
        const ForwardTangentParams& params = body.params;
        const int at = body.common().q_rows.start + row, channels = sees_keys ? params.head_dim_v : 0;
        const auto pairs = [&](const RowsParams& rows) {
            return RowPairs<T>::of(rows, body.common().work, at, channels, params.vector_rows, body.lane,
                                   body.part() * Body::kPartDim);
        };
        const RowPairs<T> out = pairs(params.out), dout = pairs(params.dout), tdout = pairs(params.tdout);
        Dots dots = {0.0f, 0.0f};
#pragma unroll
        for (int n = 0; n < kChannelBlocks; ++n) {
            if (n % 4 == 0 && n > 0) __syncwarp();  // keeps the compiler from loading more at once than registers allow
            const float2 o = out.at(n);
            float &x = body.tout[a][n][2 * r], &y = body.tout[a][n][2 * r + 1];
            x = sees_keys ? fmaf(-below, o.x, x * factor) : 0.0f;
            y = sees_keys ? fmaf(-below, o.y, y * factor) : 0.0f;
            if (!params.tdelta.data) continue;
            const float2 d = dout.at(n), td = tdout.at(n);
            dots.delta = fmaf(d.x, o.x, fmaf(d.y, o.y, dots.delta));
            dots.tdelta = fmaf(d.x, x, fmaf(d.y, y, fmaf(td.x, o.x, fmaf(td.y, o.y, dots.tdelta))));
        }
        return dots;
    }
    // The sums over all channels of a row, from the parts of its lanes. If several warps have the row, they exchange their sums
    // through the memory of the keys, which no warp reads any more; contains a barrier then. in_tile: the row in the tile.
    __device__ __forceinline__ Dots sum_over_channels(const Dots& parts, int in_tile) const {
        Dots sum = {quad_sum(parts.delta), quad_sum(parts.tdelta)};
        if constexpr (kParts > 1) {
            Dots* const of_row = reinterpret_cast<Dots*>(body.shared + Body::kKeysAt) + in_tile * kParts;
            if (body.lane % 4 == 0) of_row[body.part()] = sum;
            __syncthreads();
            sum = of_row[0];
#pragma unroll
            for (int i = 1; i < kParts; ++i) sum.delta += of_row[i].delta, sum.tdelta += of_row[i].tdelta;
        }
        return sum;
    }
    // Writes `dot`, minus the row's number in `less` if that tensor is given; 0 if not `sees_keys`.
    __device__ __forceinline__ void write_dot(const RowStatisticsParams& to, const RowStatisticsParams& less, float dot, int row,
                                              bool sees_keys, bool writes) const {
        if (to.data && writes) *address_of(to, row) = !sees_keys ? 0.0f : less.data ? dot - *address_of(less, row) : dot;
    }

    __device__ __forceinline__ void finish() {
        const ForwardTangentParams& params = body.params;
        const SequenceRows q_rows = body.common().q_rows;
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = body.row_of(a, 2 * r);
                const float lse_log2 = body.lse_of(a, r), below = mu_minus_pivot(a, r, lse_log2);
                const bool sees_keys = lse_log2 != INFINITY;
                const bool writes = body.part() == 0 && body.lane % 4 == 0 && row < q_rows.owned;
                const Dots parts = finish_channels(a, r, row, sees_keys, body.factor_of(a, r), below);
                const Dots dots = sum_over_channels(parts, row - body.common().tiles.first_row);
                if (writes && params.tlse.data) *address_of(params.tlse, row) = sees_keys ? body.pivot[a][r] + below : 0.0f;
                write_dot(params.delta, params.dlse, dots.delta, row, sees_keys, writes);
                write_dot(params.tdelta, params.tdlse, dots.tdelta, row, sees_keys, writes);
            }
    }

    __device__ __forceinline__ void store() {
        if (!body.params.tout.data) return;
        if constexpr (std::is_same<T, float>::value) {
            store_floats_of_rows();
        } else {
            store_staged();
        }
    }

    __device__ __forceinline__ T* first_row_of(const RowsParams& rows) const {
        const TileCoordinates work = body.common().work;
        return static_cast<T*>(rows.data) + work.batch * rows.batch + work.head * rows.head +
               body.common().q_rows.start * rows.row;
    }

    __device__ __forceinline__ void store_floats_of_rows() {
        const RowsParams& rows = body.params.tout;
        const int col = body.part() * Body::kPartDim + body.lane % 4 * 2;
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = body.row_of(a, 2 * r);
                if (row >= body.common().q_rows.owned) continue;
                store_floats<kChannelBlocks>(first_row_of(rows) + row * rows.row + col, body.params.head_dim_v - col,
                                             body.params.vector_out, [&](int n, int e) { return body.tout[a][n][2 * r + e]; });
            }
    }

    // Stages tout in the Q tile, so that the global stores are contiguous.
    __device__ __forceinline__ void store_staged() {
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int n = 0; n < kChannelBlocks; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int row = body.warp_row() + a * 16 + r * 8 + body.lane / 4;
                    store_shared(body.smem() + QTile::offset(row, body.part() * kChannelBlocks + n) + body.lane % 4 * 4,
                                 pack_pair(body.tout[a][n][2 * r], body.tout[a][n][2 * r + 1], T()));
                }
        __syncthreads();
        const RowsParams& rows = body.params.tout;
        QTile::template store<Body::kThreads>(body.shared, first_row_of(rows), rows.row, body.common().tiles.first_row,
                                              body.common().q_rows.owned, body.params.head_dim_v, body.params.vector_out,
                                              body.thread);
    }
};

}  // namespace libflash::cuda::sm80
