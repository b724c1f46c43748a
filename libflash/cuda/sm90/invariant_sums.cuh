// Invariant rows in a consumer thread of the sm_90a prefill kernel: the softmax and the accumulators of the segments that have
// ended, in registers. The current segment has accumulators of its own, as in a thread block of sm80/decode_invariant.cuh.
#pragma once

#include "cuda/attention/invariant_softmax.cuh"
#include "cuda/tile/quad.cuh"

namespace libflash::cuda::sm90 {

template <int kSums>
struct InvariantSums {
    using Sums = float[kSums];  // elements i with i / 2 % 2 == r belong to row r

    using Factors = InvariantFold::Factors[2];

    Sums o;
    float kept_maximum[2], sum[2];  // as in OnlineSoftmax; sums are those of all lanes

    __device__ __forceinline__ void clear_rows() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            kept_maximum[r] = kNoScore;
            sum[r] = 0.0f;
        }
    }
    __device__ __forceinline__ void clear() {
        clear_rows();
#pragma unroll
        for (int i = 0; i < kSums; ++i) o[i] = 0.0f;
    }

    // When all scores of a segment are complete; the next one begins.
    template <class Softmax>
    __device__ __forceinline__ void end_segment(Softmax& softmax, Factors& factors) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            InvariantFold fold{kept_maximum[r], sum[r]};
            const float maximum = softmax.kept_maximum[r];
            factors[r] = fold.add(maximum, softmax.end_segment(r));
            kept_maximum[r] = fold.maximum;
            sum[r] = fold.sum;
        }
        softmax.begin_segment();
    }

    // What the epilogue needs, as OnlineSoftmax has it.
    struct Rows {
        float kept_maximum[2], sum[2];
        bool unsafe[2];

        __device__ __forceinline__ bool finish(int r) const { return unsafe[r]; }
    };
    template <class Softmax>
    __device__ __forceinline__ Rows rows(const Softmax& softmax) const {
        return {{kept_maximum[0], kept_maximum[1]}, {sum[0], sum[1]}, {softmax.is_unsafe(0), softmax.is_unsafe(1)}};
    }

    // After its last P V: adds the accumulators of the segment and clears them. The next P V adds to zeros, as that of mma.sync.
    __device__ __forceinline__ void fold(Sums& segment, const Factors& factors) {
#pragma unroll
        for (int i = 0; i < kSums; ++i)
            add_scaled_and_clear(o[i], segment[i], factors[i / 2 % 2].folded, factors[i / 2 % 2].added);
    }
    // The same at the end of a work tile, where the sums of all segments are wanted.
    __device__ __forceinline__ void fold_into(Sums& segment, const Factors& factors) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) add_scaled_to_last(o[i], segment[i], factors[i / 2 % 2].folded, factors[i / 2 % 2].added);
    }
};

}  // namespace libflash::cuda::sm90
