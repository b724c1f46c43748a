// How a consumer warp of the sm_90a forward kernel advances through the stages of the pipelines: it goes to the first key tile of
// its group in a work tile, and releases stages that it has read or skips.
#pragma once

#include "cuda/sm90/forward_consumer_thread.cuh"
#include "cuda/sm90/forward_context.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardConsumerStages {
    using Storage = ForwardSharedStorage<Traits>;

    const ForwardContext<Traits>& context;

    // Of a consumer warp.
    struct Position {
        ForwardConsumerThread thread;
        PipelineState<Traits::kStages> k;
        PipelineState<Traits::kVStages> v;
        PipelineState<Traits::kQStages> q;
        int slot;        // of the work tile whose scores come next
        int tile;        // the key tile whose scores were issued last
        TileWord word;   // with a block mask, in place of `tile`
        bool last;       // this tile is the last one of the work tile
        int release_to;  // with pairs: the rank of the second thread block in which the warp releases keys
    };

    __device__ __forceinline__ explicit ForwardConsumerStages(const ForwardContext<Traits>& of_kernel) : context(of_kernel) {}

    __device__ __forceinline__ Position first_position() const {
        const int group = uniform_warp() / 4 - 1;
        const int lane = static_cast<int>(threadIdx.x & 31);
        Position p{{group, lane},
                   PipelineState<Traits::kStages>(context.storage.k),
                   PipelineState<Traits::kVStages>(context.storage.v),
                   PipelineState<Traits::kQStages>(context.storage.q[group])};
        p.slot = 0;
        if constexpr (Traits::kPairs) p.release_to = 1 - rank_of_pair(context.params.in_pairs);
        return p;
    }

    __device__ __forceinline__ const GroupKeyTiles& key_tiles(const Position& c) const {
        return context.storage.work_tiles[c.slot].of_group[c.thread.group];
    }
    // Whether this group has key tiles in the work tile.
    __device__ __forceinline__ bool has_key_tiles(const Position& c) const { return key_tiles(c).begin != key_tiles(c).end; }

    // Goes to the first tile of this group in the work tile: releases K of the skipped tiles and waits for K of the first tile.
    __device__ __forceinline__ void begin_work_tile(Position& c) const {
        if constexpr (Traits::kBlockMask) return wait_for_next_k(c);
        const int end = key_tiles(c).end;
        for (int tile = context.storage.work_tiles[c.slot].keys.end; tile > end; --tile) skip_stage(c, c.k);
        c.k.wait_full();
        c.tile = end - 1;
    }
    // Releases V of the skipped tiles.
    __device__ __forceinline__ void skip_values(Position& c) const {
        if constexpr (!Traits::kBlockMask)
            for (int skipped = context.storage.work_tiles[c.slot].keys.end - 1; skipped > c.tile; --skipped) skip_stage(c, c.v);
    }
    // With a block mask, also reads the TileWord of the next tile.
    __device__ __forceinline__ void wait_for_next_k(Position& c) const {
        c.k.wait_full();
        if constexpr (Traits::kBlockMask) c.word.bits = word_of_stage(c);
    }
    // The word that the producer has written for the tile in the current stage of K. Only the lane that releases the stage reads
    // it from shared memory.
    __device__ __forceinline__ uint32_t word_of_stage(const Position& c) const {
        return __shfl_sync(0xffffffffu, c.thread.lane == 0 ? context.storage.dynamic.tiles[c.k.stage].bits : 0, 0);
    }

    // Of copied keys: whether some key of the tile in the current stage of K does not exist. Only the lane that releases the
    // stage reads the words: the compiler does not move this load to the other lanes.
    __device__ __forceinline__ bool has_absent_keys(const Position& c) const {
        uint32_t any = 0;
        if (c.thread.lane == 0) {
            const uint4 words = load_shared_words(shared_address(context.storage.dynamic.copied[place_of_stage(c.k)].absent));
            any = words.x | words.y | words.z | words.w;
        }
        return __shfl_sync(0xffffffffu, any, 0) != 0;
    }

    __device__ __forceinline__ void release(const Position& c, const MBarrier& empty) const {
        if (c.thread.lane == 0) empty.arrive();
    }
    // Releases a stage of K or V, in a pair in both thread blocks. In this one lane 0 does so, since it has read the word of the
    // stage: racecheck sees only the order of an arriving lane.
    __device__ __forceinline__ void release_keys(const Position& c, const MBarrier& empty) const {
        release(c, empty);
        if constexpr (Traits::kPairs) {
            if (context.params.in_pairs && c.thread.lane == 1) empty.arrive_in_cluster(c.release_to);
        }
    }
    // Releases K of the tile; after the last tile of the work tile, also Q.
    template <class TileInfo>
    __device__ __forceinline__ void release_k(Position& c, const TileInfo& tile_info) const {
        release_keys(c, c.k.empty());
        c.k.advance();
        c.last = tile_info.last;
        if (!c.last) return;
        release(c, c.q.empty());
        c.q.advance();
    }
    __device__ __forceinline__ void release_v(Position& c) const {
        release_keys(c, c.v.empty());
        c.v.advance();
    }
    // Releases a stage of K or V without using it. The stage must be full, because an earlier arrival could count for the
    // previous phase, and all lanes must have seen that it is full.
    template <class AnyPipelineState>
    __device__ __forceinline__ void skip_stage(const Position& c, AnyPipelineState& pipeline) const {
        pipeline.wait_full();
        __syncwarp();
        release_keys(c, pipeline.empty());
        pipeline.advance();
    }
};

}  // namespace libflash::cuda::sm90
