// Forward in float32 with more than 256 channels: two warps have the same 16 query rows, because the registers of one warp do not
// suffice for all channels of O. Each warp multiplies half of the channels of Q and K; the warps add their parts of the scores
// through shared memory, so that both have the same scores, bit for bit. Both compute the same probabilities, and each multiplies
// them by its half of the channels of V. (In 16 bits each warp has half of the keys instead: row_pair.cuh. Float32 tiles have few
// keys, and the probabilities that warps would exchange have twice the size.)
//
// Q takes most of the shared memory of a thread block, so K and V are loaded one after the other into the same tile. The parts of
// the scores are exchanged through this tile, too.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm80/forward_products.cuh"

namespace libflash::cuda::sm80 {

// `Body`: Forward in forward.cuh.
template <class Body>
struct ChannelPair {
    static constexpr int kKeyBlocks = Body::kKeyBlocks, kRows = Body::kTileRows;
    static constexpr int kStaticBytes = kRows * 4;

    Body& body;
    __device__ __forceinline__ explicit ChannelPair(Body& b) : body(b) {}

    // Space for one number per row, for use after the last tile.
    using RowNumbers = float[kRows];
    __device__ static __forceinline__ RowNumbers& row_numbers() {
        __shared__ RowNumbers numbers;
        return numbers;
    }

    // Adds the part of the scores that the other warp computed. The parts overwrite the tile of K: the first barrier ensures that
    // no warp reads K any more, and the last one that no warp reads the parts any more.
    __device__ __forceinline__ void add_other_part() {
        static_assert(Body::kSlabs == 1 && Body::kThreads * kKeyBlocks * 16 <= Body::KvTile::kBytes, "");
        const int me = hide_from_compiler(body.thread);
        const auto address_of = [&](int thread, int n) { return body.k_smem() + (n * Body::kThreads + thread) * 16; };
        auto& s = body.s[0];
        __syncthreads();
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n) store_shared_16(address_of(me, n), s[n][0], s[n][1], s[n][2], s[n][3]);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n) {
            const float4 other = load_shared_16(address_of(me ^ 32, n));
            s[n][0] += other.x, s[n][1] += other.y, s[n][2] += other.z, s[n][3] += other.w;
        }
        __syncthreads();
    }

    // As Forward::loop_over_keys(), always with the code for rare options.
    __device__ __forceinline__ void loop_over_keys(bool exact_maximum) {
        ForwardProducts<Body> products{body};
        body.clear();
        body.begin_long_sums();
        body.scale = 1.0f;
        int cursor = body.common().tiles.list_count;
        int tile = body.common().tiles.previous(body.common().tiles.end, cursor);
        bool first = true;
#pragma unroll 1
        while (tile >= 0) {
            const int next = body.common().tiles.previous(tile, cursor);
            cp_async_wait<0>();
            __syncthreads();  // K has arrived
            products.multiply_qk_split();
            add_other_part();
            body.load_v(body.common(), tile);
            const bool edge = body.common().tiles.is_edge(tile);
            body.apply_rules(tile);
            if (edge) body.mask_edge(tile);
            if (exact_maximum || first || edge) body.update_max();
            cp_async_wait<0>();
            __syncthreads();  // V has arrived
            products.multiply_pv_split(tile);
            __syncthreads();  // no warp reads V
            body.load_k(body.common(), next);
            if (body.sums_past_limit()) body.rescale_large_sums();
            body.take_long_sums(tile, next);
            first = false;
            tile = next;
        }
        cp_async_wait<0>();
        body.add_long_sums();
    }
};

}  // namespace libflash::cuda::sm80
