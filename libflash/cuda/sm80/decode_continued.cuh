// The attention kernel of decode after the kernel for shared keys (decode_prefix.cuh): a warp continues from the sums of its rows
// over the shared keys of its class, which are in the workspace. `Body`: Decode in decode_range.cuh.
#pragma once

#include "cuda/attention/shared_prefix.cuh"
#include "cuda/sm80/decode_prefix.cuh"

namespace libflash::cuda::sm80 {

template <class Body>
struct DecodeContinued {
    static constexpr int kHeadDim = Body::kValueChannels, kClasses = Body::kTileK / kDecodeSlab;

    Body& body;

    // Removes the keys that are in the sums from the range of the split. Returns whether there are sums.
    __device__ __forceinline__ bool skip_shared_keys(VisibleKeys& range) const {
        const DecodeParams& params = body.params;
        const int keys = shared_keys_of(params.shared, params.batch, body.work_tile.batch);
        const int end = end_of_prefix(params, range, keys, Body::kTileK);
        if (range.first >= end) return false;
        range.first = end;
        return true;
    }

    __device__ __forceinline__ void load_sums() const {
        const int of_class = body.own_keys() / kDecodeSlab;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float* const from = prefix_sums_of<kHeadDim>(
                body.params, body.workspace_row(body.own_head(), body.packed_row(r)), body.work_tile.split, kClasses, of_class);
#pragma unroll
            for (int n = 0; n < Body::kBlocks; ++n) {
                const float2 x = *reinterpret_cast<const float2*>(from + n * 8 + body.lane % 4 * 2);
                body.o[n][2 * r] = x.x, body.o[n][2 * r + 1] = x.y;
            }
            body.kept_maximum[r] = from[kHeadDim];
            body.row_sum[r] = from[kHeadDim + 1 + body.lane % 4];
        }
    }
};

}  // namespace libflash::cuda::sm80
