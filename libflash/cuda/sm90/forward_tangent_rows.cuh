// The last step of the sm_90a forward_tangent kernel: what a consumer thread does with the sums of its two query rows.
//
//   l = sum + exp(sink - kept)      mu = pivot + (mean + exp(sink - kept) (tsink - pivot)) / l = tlse
//   out = o / l      tout = to / l - (mu - pivot) out
//   delta = dout . out - dlse      tdelta = tdout . out + dout . tout - tdlse
#pragma once

#include "cuda/attention/scores.cuh"
#include "cuda/attention/softmax_statistics.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/prefetch.cuh"
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
    // Gives `softmax` the saved LSE of the rows; +infinity: a row does not take part.
    __device__ __forceinline__ void keep_lse(Softmax& softmax) const {
        float lse[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int r = 0; r < 2; ++r)
            if (row(r) < work_tile.q_rows.length) lse[r] = *address_of(params.lse, r);
#pragma unroll
        for (int r = 0; r < 2; ++r) softmax.keep_lse(r, lse[r] == -INFINITY ? INFINITY : lse_with_margin(lse[r] * kLog2e));
    }

    // Brings the warp's rows of the saved out to L2, two lanes each.
    __device__ __forceinline__ void prefetch_out() const {
        constexpr int kLine = 64;  // elements
        const int in_warp = lane / 2, row_number = work_tile.keys.first_row + (thread >> 5 << 4) + in_warp;
        if (row_number >= work_tile.q_rows.length) return;
        const T* const out = static_cast<const T*>(params.out.data) + offset_of(params.out, row_number);
#pragma unroll 1
        for (int col = lane % 2 * kLine; col < params.head_dim_v; col += 2 * kLine) prefetch_to_l2(out + col);
    }

    __device__ __forceinline__ void finish(const Softmax& softmax, OutSums& o, Sums& to) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Factors f = finish_softmax(softmax, r);
            const bool exists = row(r) < work_tile.q_rows.owned;
            Dots dots = finish_channels(f, o, to, r);
            dots = {quad_sum(dots.delta), quad_sum(dots.tdelta)};
            if (exists && (lane & 3) == 0) write_statistics(f, dots, r);
            if constexpr (kFused) write_channels(params.out, o, exists, r);
            write_channels(params.tout, to, exists, r);
        }
    }

private:
    // Of a row: the factor of its sums, mu - pivot, and what is written.
    struct Factors {
        float inverse, below, lse, mu;
        bool sees_keys;  // the row is used and sees a key or a sink
    };

    // dout . out, and tdout . out + dout . tout: this lane's parts, or those of the row.
    struct Dots {
        float delta, tdelta;
    };

    __device__ __forceinline__ float* address_of(const RowStatisticsParams& numbers, int r) const {
        return numbers.data + work_tile.at.batch * numbers.batch + work_tile.at.head * numbers.head +
               (work_tile.q_rows.start + row(r)) * numbers.row;
    }

    __device__ __forceinline__ Factors finish_softmax(const Softmax& softmax, int r) const {
        float kept = softmax.kept[r], factor = 1.0f, mean = quad_sum(softmax.mean[r]), sum = softmax.sum_of_row(r);
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
        const bool sees_keys = row(r) < work_tile.q_rows.length && (kFused ? sum != 0.0f : kept != INFINITY);
        if (!sees_keys) return {0.0f, 0.0f, -INFINITY, 0.0f, false};
        const float below = __fdividef(mean, sum);
        return {__fdividef(factor, sum), below, (kept + __log2f(sum)) * kLn2, softmax.pivot[r] + below, true};
    }

    // Sums become out and tout in place.
    __device__ __forceinline__ Dots finish_channels(const Factors& f, OutSums& o, Sums& to, int r) const {
        const bool wants_delta = params.tdelta.data;
        Dots dots = {0.0f, 0.0f};
#pragma unroll
        for (int first = 0; first < kPairs; first += kPart) {
            __syncwarp();  // keeps the compiler from loading more at once than it has registers
            Words out, d{}, td{};
            if constexpr (!kFused) load_channels(params.out, f.sees_keys, r, first, out);
            if (wants_delta) load_channels(params.dout, f.sees_keys, r, first, d);
            if (wants_delta) load_channels(params.tdout, f.sees_keys, r, first, td);
#pragma unroll
            for (int n = 0; n < kPart; ++n) {
                const int at = 4 * (first + n) + 2 * r;
                float2 x;
                if constexpr (kFused) {
                    x = f.sees_keys ? make_float2(o[at] * f.inverse, o[at + 1] * f.inverse) : make_float2(0.0f, 0.0f);
                    o[at] = x.x, o[at + 1] = x.y;
                } else {
                    x = pair_of(out[n]);
                }
                to[at] = f.sees_keys ? fmaf(-f.below, x.x, to[at] * f.inverse) : 0.0f;
                to[at + 1] = f.sees_keys ? fmaf(-f.below, x.y, to[at + 1] * f.inverse) : 0.0f;
                if (!wants_delta) continue;
                const float2 y = pair_of(d[n]), ty = pair_of(td[n]);
                dots.delta = fmaf(y.x, x.x, fmaf(y.y, x.y, dots.delta));
                dots.tdelta = fmaf(y.x, to[at], fmaf(y.y, to[at + 1], fmaf(ty.x, x.x, fmaf(ty.y, x.y, dots.tdelta))));
            }
        }
        return dots;
    }

    // Of a part of a row of 16-bit values: word n has columns 8 n + 2 (lane % 4) and the next one.
    static constexpr int kPairs = kSums / 4, kPart = kPairs < 16 ? kPairs : 16;
    using Words = uint32_t[kPart];
    __device__ static __forceinline__ float2 pair_of(uint32_t word) { return make_float2(low_of(word, T()), high_of(word, T())); }
    // The part that begins with column 8 * first_pair; zeros without `sees_keys` or without the tensor. In vectors of 16 bytes,
    // all of which are loaded at once; then lanes exchange words as in write_channels().
    __device__ __forceinline__ void load_channels(const RowsParams& rows, bool sees_keys, int r, int first_pair,
                                                  Words& words) const {
        const uint16_t* const part = static_cast<const uint16_t*>(rows.data) + offset_of(rows, row(r)) + 8 * first_pair;
        const int channels = (sees_keys && rows.data ? params.head_dim_v : 0) - 8 * first_pair;
        if (params.vector_rows) {
#pragma unroll
            for (int n = 0; n < kPart; n += 4) {
                const int col = (n + (lane & 3)) * 8;
                uint4 x = make_uint4(0, 0, 0, 0);
                if (col < channels) x = *reinterpret_cast<const uint4*>(part + col);
                words[n] = x.x, words[n + 1] = x.y, words[n + 2] = x.z, words[n + 3] = x.w;
            }
#pragma unroll
            for (int n = 0; n < kPart; n += 4) transpose_quad(reinterpret_cast<uint32_t (&)[4]>(words[n]), lane);
        } else {
#pragma unroll
            for (int n = 0; n < kPart; ++n) {
                const int col = 8 * n + (lane & 3) * 2;
                words[n] = col < channels ? part[col] : 0;
                if (col + 1 < channels) words[n] |= static_cast<uint32_t>(part[col + 1]) << 16;
            }
        }
    }
    // Of a row in a tensor of channels.
    __device__ __forceinline__ int64_t offset_of(const RowsParams& rows, int row_number) const {
        return work_tile.at.batch * rows.batch + work_tile.at.head * rows.head + (work_tile.q_rows.start + row_number) * rows.row;
    }

    // `dot` minus the number of `less`, if it is given.
    __device__ __forceinline__ float difference(const Factors& f, float dot, const RowStatisticsParams& less, int r) const {
        return !f.sees_keys ? 0.0f : less.data ? dot - *address_of(less, r) : dot;
    }
    __device__ __forceinline__ void write_statistics(const Factors& f, const Dots& dots, int r) const {
        if (kFused && params.lse.data) *address_of(params.lse, r) = f.lse;
        if (params.tlse.data) *address_of(params.tlse, r) = f.mu;
        if (params.delta.data) *address_of(params.delta, r) = difference(f, dots.delta, params.dlse, r);
        if (params.tdelta.data) *address_of(params.tdelta, r) = difference(f, dots.tdelta, params.tdlse, r);
    }

    // Of every 32 channels each of the row's four lanes gets eight neighbouring ones.
    __device__ __forceinline__ void write_channels(const RowsParams& rows, const Sums& sums, bool exists, int r) const {
        if (!rows.data) return;
        T* const out = static_cast<T*>(rows.data) + offset_of(rows, row(r));
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
