// Invariant rows in a consumer thread of the sm_90a prefill kernel: the softmax and the accumulators of the segments that have
// ended, in registers. The current segment has accumulators of its own, as in a thread block of sm80/decode_invariant.cuh.
#pragma once

#include "cuda/attention/invariant_softmax.cuh"
#include "cuda/tile/quad.cuh"

namespace libflash::cuda::sm90 {

template <int kSums>
struct InvariantSums {
    using Sums = float[kSums];  // elements i with i / 2 % 2 == r belong to row r

    Sums o;
    float kept_maximum[2], sum[2];      // as in OnlineSoftmax; sums are those of all lanes
    bool unsafe[2];                     // a row has left the rule: its work tile is computed again, the careful way
    InvariantFold::Factors factors[2];  // of the segment that ended last

    __device__ __forceinline__ void clear_rows() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            kept_maximum[r] = kNoScore;
            sum[r] = 0.0f;
            unsafe[r] = false;
        }
    }
    __device__ __forceinline__ void clear() {
        clear_rows();
        factors[0] = factors[1] = {};
#pragma unroll
        for (int i = 0; i < kSums; ++i) o[i] = 0.0f;
    }

    // When all scores of a segment are complete; the next one begins.
    template <class Softmax>
    __device__ __forceinline__ void end_segment(Softmax& softmax) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            unsafe[r] |= softmax.is_unsafe(r);
            InvariantFold fold{kept_maximum[r], sum[r]};
            factors[r] = fold.add(softmax.kept_maximum[r], quad_sum(softmax.sum[r]));
            kept_maximum[r] = fold.maximum;
            sum[r] = fold.sum;
        }
        softmax.clear();
    }

    // After its last P V: adds the accumulators of the segment and clears them. They are not undefined before the first P V of the
    // next one, which adds to them as to those of mma.sync.
    __device__ __forceinline__ void fold(Sums& segment) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            o[i] = factors[i / 2 % 2].of(o[i], segment[i]);
            segment[i] = 0.0f;
        }
    }
    // The same at the end of a work tile, where the sums of all segments are wanted.
    __device__ __forceinline__ void fold_into(Sums& segment) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            segment[i] = factors[i / 2 % 2].of(o[i], segment[i]);
            o[i] = 0.0f;
        }
    }

    // As OnlineSoftmax::finish().
    __device__ __forceinline__ bool finish(int r) const { return unsafe[r]; }
};

}  // namespace libflash::cuda::sm90
