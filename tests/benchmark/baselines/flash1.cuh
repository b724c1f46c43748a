// The order of FlashAttention-1 (Dao et al., arXiv 2205.14135): the outer loop is over key tiles, the inner one over query tiles;
// one thread block per head.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/tile/product.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "device.cuh"
#include "partial_sums.cuh"

namespace baselines::BASELINE_TYPE {

using namespace libflash::cuda;

template <int kBlockM, int kBlockN>
struct Tiles {
    int seqlen, causal;

    __device__ __forceinline__ int keys() const { return (seqlen + kBlockN - 1) / kBlockN; }
    __device__ __forceinline__ int queries() const { return (seqlen + kBlockM - 1) / kBlockM; }
    // The first query tile that sees a key of the tile.
    __device__ __forceinline__ int first_query(int key) const { return causal ? key * kBlockN / kBlockM : 0; }
    // The last key tile that the query tile sees.
    __device__ __forceinline__ int last_key(int query) const {
        return causal ? min(keys() - 1, (query * kBlockM + kBlockM - 1) / kBlockN) : keys() - 1;
    }
    // Whether some pair of the two tiles is masked or does not exist.
    __device__ __forceinline__ bool is_edge(int query, int key) const {
        return (key + 1) * kBlockN > seqlen || (query + 1) * kBlockM > seqlen ||
               (causal && (key + 1) * kBlockN - 1 > query * kBlockM);
    }
};

__device__ __forceinline__ void store_quad(T* place, const float4& x) {
    *reinterpret_cast<uint2*>(place) = make_uint2(pack_pair(x.x, x.y, T()), pack_pair(x.z, x.w, T()));
}

__device__ __forceinline__ float4 scaled(const float4& x, float factor) {
    return make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
}

}  // namespace baselines::BASELINE_TYPE
