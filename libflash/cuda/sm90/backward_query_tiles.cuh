// The query tiles that the producer, the consumers and the dQ warpgroup of the sm_90a backward kernel visit. Each role computes
// them independently, in the same order. With a block mask they are the tiles that the mask keeps.
#pragma once

#include "cuda/sm90/backward_context.cuh"

#include <type_traits>

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardQueryTiles {
    using Position = std::conditional_t<Traits::kBlockMask, VisibleTilePosition, QueryTilePosition>;

    const BackwardContext<Traits>& context;

    __device__ __forceinline__ Position first() const {
        const auto& work = context.tile();
        if constexpr (Traits::kBlockMask) {
            Position at{{work.first_position.head, work.first_position.tile, 1}, 0};
            advance(at);
            return at;
        } else {
            return work.first_position;
        }
    }
    __device__ __forceinline__ void advance(Position& at) const {
        const auto& work = context.tile();
        if constexpr (Traits::kBlockMask) {
            const BlockMaskParams& blocks = context.params.block_cols;
            const int end_head = work.first_position.head + work.first_position.left;
#pragma unroll 1
            while (true) {
                at.tile = work.tiles.template next<!Traits::kFixedOrder>(blocks, at.head, at.tile, at.cursor);
                at.left = at.tile >= 0;
                if (at.left || ++at.head == end_head) return;
                at.tile = work.tiles.begin - 1;
                at.cursor = 0;
            }
        } else if constexpr (Traits::kTilesInOrder) {
            work.range.advance(at, work.first_position.head);
        } else {
            work.range.advance(at);
        }
    }
    __device__ __forceinline__ bool is_edge(int tile) const {
        if constexpr (Traits::kBlockMask) {
            return context.tile().tiles.is_edge(tile);
        } else {
            return context.tile().range.is_edge(tile);
        }
    }
};

}  // namespace libflash::cuda::sm90
