// The query tiles that the producer, the consumers and the dQ warpgroup of the sm_90a backward kernel visit: each finds them for
// itself, in the same order. With a block mask they are those that it keeps.
#pragma once

#include "cuda/sm90/backward_context.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardQueryTiles {
    using Position = typename BackwardSharedStorage<Traits>::Position;

    const BackwardContext<Traits>& context;

    __device__ __forceinline__ Position first() const {
        const auto& storage = context.storage;
        if constexpr (Traits::kBlockMask) {
            Position at{{storage.first_head(context.params), storage.tiles.begin - 1, 1}, 0};
            advance(at);
            return at;
        } else {
            return storage.first_position(context.params);
        }
    }
    __device__ __forceinline__ void advance(Position& at) const {
        const auto& storage = context.storage;
        if constexpr (Traits::kBlockMask) {
            const BlockMaskParams& blocks = context.params.block_cols;
            const int end_head = storage.first_head(context.params) + context.params.part.heads;
#pragma unroll 1
            while (true) {
                at.tile = storage.tiles.next(blocks, at.head, at.tile, at.cursor);
                at.left = at.tile >= 0;
                if (at.left || ++at.head == end_head) return;
                at.tile = storage.tiles.begin - 1;
                at.cursor = 0;
            }
        } else {
            storage.range.advance(at);
        }
    }
    __device__ __forceinline__ bool is_edge(int tile) const {
        if constexpr (Traits::kBlockMask) {
            return context.storage.tiles.is_edge(tile);
        } else {
            return context.storage.range.is_edge(tile);
        }
    }
};

}  // namespace libflash::cuda::sm90
