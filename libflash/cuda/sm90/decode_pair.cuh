// Pairs of thread blocks of the sm_90a decode kernel for values in the keys. A pair is a cluster of two thread blocks that
// compute neighbouring tiles of query rows of one sequence, so they need the same keys. Each part of a key tile
// (decode_traits.cuh) is loaded by one of them, into the shared memory of both. The keys are those that a row of either thread
// block sees.
//
// Both thread blocks expect the bytes of every part at full barriers of their own. The thread block that loads a part first waits
// until the consumers of both have released it: the consumers of the other one arrive at its empty barrier, too. The thread block
// that does not load the part waits only for its own consumers before it expects the bytes.
#pragma once

#include "cuda/attention/decode_params.h"
#include "cuda/sm90/cluster_pair.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct DecodePair {
    int in_pairs;  // 1 or 0

    __device__ __forceinline__ explicit DecodePair(const DecodeParams& params) : in_pairs(params.in_pairs) {}
    __device__ __forceinline__ int rank() const { return rank_of_pair(in_pairs); }
    __device__ __forceinline__ int other() const { return rank() ^ 1; }
    // Whether this thread block loads the part. Both load about the same number of bytes.
    __device__ __forceinline__ bool loads(int stage, int part) const {
        return !in_pairs || rank() == ((part == Traits::kValueParts ? stage : part) & 1);
    }
    // Whether the consumers of both thread blocks must release a part before this one expects its next bytes.
    __device__ __forceinline__ bool both_release(int stage, int part) const { return in_pairs && loads(stage, part); }
};

}  // namespace libflash::cuda::sm90
