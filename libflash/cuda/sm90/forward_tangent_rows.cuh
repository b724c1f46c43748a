// The last step of the sm_90a forward_tangent kernel: what a consumer thread does with the sums of its two query rows.
//
//   l = sum + exp(sink - kept)      mu = pivot + (mean + exp(sink - kept) (tsink - pivot)) / l = tlse
//   out = o / l      tout = to / l - (mu - pivot) out      tdelta = tdout . out + dout . tout - tdlse
#pragma once

#include "cuda/attention/row_pairs.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/softmax_statistics.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm90/forward_tangent_softmax.cuh"
#include "cuda/sm90/forward_tangent_work_tile.cuh"
#include "cuda/tile/quad.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardTangentRows {
    using T = typename Traits::T;
    using Softmax = TangentSoftmax<Traits::kBlockN, Traits::kFused, Traits::kHalf>;
    static constexpr bool kFused = Traits::kFused;
    static constexpr int kSums = Traits::kHeadDimV / 2;
    using Sums = float[kSums];
    using OutSums = float[kFused ? kSums : 1];

    const ForwardTangentParams& params;
    const ForwardTangentWorkTile<Traits>& work_tile;
    int thread, lane;  // thread: among the consumers

    // A row of this thread in its sequence.
    __device__ __forceinline__ int row(int r) const {
        return work_tile.keys.first_row + (thread >> 5 << 4) + r * 8 + (lane >> 2);
    }
    // The saved LSE of a row in base-2 units; +infinity: the row does not take part.
    __device__ __forceinline__ float lse_log2(int r) const {
        if (row(r) >= work_tile.q_rows.length) return INFINITY;
        const float lse = *address_of(params.lse, r);
        return lse == -INFINITY ? INFINITY : lse_with_margin(lse * kLog2e);
    }

    __device__ __forceinline__ void finish(const Softmax& softmax, OutSums& o, Sums& to) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Factors f = finish_softmax(softmax, r);
            const bool exists = row(r) < work_tile.q_rows.owned;
            const float dot = quad_sum(finish_channels(f, o, to, r));
            if (exists && (lane & 3) == 0) write_statistics(f, dot, r);
            if constexpr (kFused) write_channels(params.out, o, exists, r);
            write_channels(params.tout, to, exists, r);
        }
    }

private:
    // Of a row: the factor of its sums, mu - pivot, and what is written.
    struct Factors {
        float inverse, below, lse, mu;
        bool counts;  // the row is used and sees a key or a sink
    };

    __device__ __forceinline__ float* address_of(const RowStatisticsParams& numbers, int r) const {
        return numbers.data + work_tile.at.batch * numbers.batch + work_tile.at.head * numbers.head +
               (work_tile.q_rows.start + row(r)) * numbers.row;
    }

    __device__ __forceinline__ Factors finish_softmax(const Softmax& softmax, int r) const {
        float kept = softmax.kept[r], factor = 1.0f, mean = quad_sum(softmax.mean[r]), sum = quad_sum(softmax.sum[r]);
        // From saved LSE: the sum of all probabilities, the sink included.
        if constexpr (!kFused) sum = exp2_approx(lse_log2(r) - kept);
        if (params.sink.data) {
            const float sink = head_number<T>(params.sink, work_tile.at.batch, work_tile.at.head) * kLog2e;
            const float tsink = params.tsink.data ? head_number<T>(params.tsink, work_tile.at.batch, work_tile.at.head) : 0.0f;
            const float largest = kFused ? fmaxf(kept, sink) : kept;
            factor = kFused ? exp2_approx(kept - largest) : 1.0f;
            const float of_sink = exp2_approx(sink - largest);
            if constexpr (kFused) sum = sum * factor + of_sink;
            mean = mean * factor + (of_sink > 0.0f ? of_sink * (tsink - softmax.pivot[r]) : 0.0f);
            kept = largest;
        }
        const bool counts = row(r) < work_tile.q_rows.length && (kFused ? sum != 0.0f : kept != INFINITY);
        if (!counts) return {0.0f, 0.0f, -INFINITY, 0.0f, false};
        const float below = __fdividef(mean, sum);
        return {__fdividef(factor, sum), below, (kept + __log2f(sum)) * kLn2, softmax.pivot[r] + below, true};
    }

    // Sums become out and tout in place. Returns this lane's part of tdout . out + dout . tout.
    __device__ __forceinline__ float finish_channels(const Factors& f, OutSums& o, Sums& to, int r) const {
        const int channels = f.counts ? params.head_dim_v : 0;
        const auto pairs = [&](const RowsParams& rows) {
            return RowPairs<T>::of(rows, work_tile.at, work_tile.q_rows.start + row(r), channels, params.vector_rows, lane);
        };
        const RowPairs<T> out = kFused ? RowPairs<T>{} : pairs(params.out);
        const bool wants_delta = params.tdelta.data;
        float dot = 0.0f;
#pragma unroll
        for (int n = 0; n < kSums / 4; ++n) {
            if (n % 4 == 0 && n > 0) __syncwarp();  // keeps the compiler from loading more at once than it has registers
            const int at = 4 * n + 2 * r;
            float2 x;
            if constexpr (kFused) {
                x = f.counts ? make_float2(o[at] * f.inverse, o[at + 1] * f.inverse) : make_float2(0.0f, 0.0f);
                o[at] = x.x, o[at + 1] = x.y;
            } else {
                x = out.at(n);
            }
            to[at] = f.counts ? fmaf(-f.below, x.x, to[at] * f.inverse) : 0.0f;
            to[at + 1] = f.counts ? fmaf(-f.below, x.y, to[at + 1] * f.inverse) : 0.0f;
            if (!wants_delta) continue;
            const float2 d = pairs(params.dout).at(n), td = pairs(params.tdout).at(n);
            dot = fmaf(d.x, to[at], fmaf(d.y, to[at + 1], fmaf(td.x, x.x, fmaf(td.y, x.y, dot))));
        }
        return dot;
    }

    __device__ __forceinline__ void write_statistics(const Factors& f, float dot, int r) const {
        if (kFused && params.lse.data) *address_of(params.lse, r) = f.lse;
        if (params.tlse.data) *address_of(params.tlse, r) = f.mu;
        if (params.tdelta.data)
            *address_of(params.tdelta, r) = !f.counts ? 0.0f : params.tdlse.data ? dot - *address_of(params.tdlse, r) : dot;
    }

    // Of every 32 channels each of the row's four lanes gets eight neighbouring ones.
    __device__ __forceinline__ void write_channels(const RowsParams& rows, const Sums& sums, bool exists, int r) const {
        if (!rows.data) return;
        T* out = static_cast<T*>(rows.data) + work_tile.at.batch * rows.batch + work_tile.at.head * rows.head +
                 (work_tile.q_rows.start + row(r)) * rows.row;
#pragma unroll
        for (int first = 0; first < kSums / 4; first += 4) {
            uint32_t words[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int at = 4 * (first + k) + 2 * r;
                words[k] = pack_pair(sums[at], sums[at + 1], T());
            }
            transpose_quad(words, lane);
            const int col = (first + (lane & 3)) * 8;
            if (exists && col < params.head_dim_v)
                *reinterpret_cast<uint4*>(out + col) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
};

}  // namespace libflash::cuda::sm90
