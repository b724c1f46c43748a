// Invariant rows in a consumer thread of the sm_90a prefill kernel: the softmax and the accumulators of the segments that have
// ended. They are in registers, except for the last kInShared accumulators, which are in shared memory where registers are
// scarce. The current segment has separate accumulators, as in sm80/decode_invariant.cuh.
#pragma once

#include "cuda/attention/invariant_softmax.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/tile/quad.cuh"

namespace libflash::cuda::sm90 {

template <int kSums, int kInShared>
struct InvariantSums {
    using Sums = float[kSums];  // element i belongs to row i / 2 % 2 (tile/accumulator.cuh)
    static constexpr int kOwn = kSums - kInShared;
    static_assert(kInShared % 4 == 0);

    using Factors = InvariantFold::Factors[2];

    float o[kOwn];
    bool in_shared;                 // whether shared memory holds sums; otherwise these sums are zeros
    float kept_maximum[2], sum[2];  // as in OnlineSoftmax; sum: over all lanes

    __device__ __forceinline__ void clear_rows() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            kept_maximum[r] = kNoScore;
            sum[r] = 0.0f;
        }
    }
    __device__ __forceinline__ void clear() {
        clear_rows();
        in_shared = false;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) o[i] = 0.0f;
    }

    // Called when all scores of a segment are complete. Begins the next segment.
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

    // The interface of OnlineSoftmax that the epilogue needs.
    struct Rows {
        float kept_maximum[2], sum[2];
        bool unsafe[2];

        __device__ __forceinline__ bool finish(int r) const { return unsafe[r]; }
    };
    template <class Softmax>
    __device__ __forceinline__ Rows rows(const Softmax& softmax) const {
        return {{kept_maximum[0], kept_maximum[1]}, {sum[0], sum[1]}, {softmax.is_unsafe(0), softmax.is_unsafe(1)}};
    }

    // Called after the last P V of a segment: adds its accumulators and sets them to `zero`. The next P V adds to zeros, as
    // mma.sync in decode does. `memory`: the warp's shared memory.
    __device__ __forceinline__ void fold(Sums& segment, const Factors& factors, float zero, uint32_t memory) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
            add_scaled_and_clear(o[i], segment[i], factors[i / 2 % 2].folded, factors[i / 2 % 2].added, zero);
#pragma unroll
        for (int i = kOwn; i < kSums; i += 4) {
            float x[4];
            load(x, memory, i);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                add_scaled_and_clear(x[e], segment[i + e], factors[e / 2].folded, factors[e / 2].added, zero);
            store_shared_16(at(memory, i), x[0], x[1], x[2], x[3]);
        }
        in_shared = true;
    }
    // As fold(), at the end of a work tile: leaves the sums of all segments in `segment`.
    __device__ __forceinline__ void fold_into(Sums& segment, const Factors& factors, uint32_t memory) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) add_scaled_to_last(o[i], segment[i], factors[i / 2 % 2].folded, factors[i / 2 % 2].added);
#pragma unroll
        for (int i = kOwn; i < kSums; i += 4) {
            float x[4];
            load(x, memory, i);
#pragma unroll
            for (int e = 0; e < 4; ++e) add_scaled_to_last(x[e], segment[i + e], factors[e / 2].folded, factors[e / 2].added);
        }
        in_shared = false;
    }

private:
    // The shared address of the lane's four sums from i on.
    __device__ __forceinline__ static uint32_t at(uint32_t memory, int i) {
        return memory + (i - kOwn) / 4 * 512 + hide_from_compiler(static_cast<int>(threadIdx.x)) % 32 * 16;
    }
    __device__ __forceinline__ void load(float (&x)[4], uint32_t memory, int i) const {
        const float4 loaded = in_shared ? load_shared_16(at(memory, i)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        x[0] = loaded.x, x[1] = loaded.y, x[2] = loaded.z, x[3] = loaded.w;
    }
};

}  // namespace libflash::cuda::sm90
