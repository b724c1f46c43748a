// The producers of the sm_90a forward kernel over a cache: one warp loads Q and K, another warp loads V. A page of 16 rows needs
// one load for every 64 channels, and a single warp would not issue the loads as fast as the consumers need them.
#pragma once

#include "cuda/sm90/forward_cached_keys.cuh"
#include "cuda/sm90/forward_producer.cuh"

namespace libflash::cuda::sm90 {

// kValues: the warp that loads V.
template <class Traits, bool kValues>
struct ForwardCachedProducer : ForwardProducer<Traits> {
    using Producer = ForwardProducer<Traits>;
    using Producer::context, Producer::scheduler;
    using typename Producer::State, typename Producer::Storage, typename Producer::WorkTile;
    using CachedKeys = ForwardCachedKeys<Traits>;
    using PageRow = typename CachedKeys::PageRow;
    using Tile = std::conditional_t<kValues, typename Traits::VTile, typename Traits::KTile>;
    static constexpr int kBlockN = Traits::kBlockN;

    __device__ __forceinline__ explicit ForwardCachedProducer(const ForwardContext<Traits>& of_kernel) : Producer{of_kernel} {}

    // All lanes advance through the pipeline's stages.
    __device__ __forceinline__ void run() const {
        State p = this->initial_state();
        ScheduleCursor cursor{};
        wait_for_previous_kernel();
        do {
            bool found = this->wait_for_work_tile(p);
            if (kValues && !Traits::kSeparateFirstTile && found) this->provide_empty_v(p);
            for (; found; found = this->wait_for_work_tile(p)) load_work_tile(p);
            announce_end(p);
            cursor.exact_maximum = context.storage.work_tiles[Storage::previous_slot(p.slot)].exact_maximum;
        } while (scheduler.start_recompute(cursor));
    }

private:
    __device__ __forceinline__ void load_work_tile(State& p) const {
        const WorkTile& work_tile = context.storage.work_tiles[p.slot];
        const CachedKeys cached{context};
        const int last = work_tile.keys.end - 1;
        PageRow pages{};
        int back = CachedKeys::kTilesAtOnce;
#pragma unroll 1
        for (int tile = last; tile >= work_tile.keys.begin; --tile) {
            if (back == CachedKeys::kTilesAtOnce) {
                back = 0;
                pages = cached.read_pages(work_tile, tile);
            }
            const PageRow at = cached.of_tile(pages, back++);
            if constexpr (kValues) {
                load_v(p, work_tile, tile, at);
            } else {
                load_k(p, work_tile, at);
                if (tile == last && p.leader) this->load_q(p, work_tile, true);
            }
        }
        this->go_to_next_slot(p);
    }
    // Announces the end mark to the consumers, which wait for Q, and to the zero-fill warp, which waits for requests.
    __device__ __forceinline__ void announce_end(State& p) const {
        if (p.leader) {
            if constexpr (kValues) {
                context.storage.dynamic.zero_fill.send(p.v.stage, -1).arrive();
            } else {
                this->load_q(p, context.storage.work_tiles[p.slot], false);
            }
        }
        this->go_to_next_slot(p);
    }

    __device__ __forceinline__ void load_k(State& p, const WorkTile& work_tile, const PageRow& at) const {
        const CachedKeys cached{context};
        const uint32_t absent = cached.absent_units(at);
        if (p.leader) {
            p.k.wait_empty();
            context.storage.dynamic.tiles[p.k.stage].bits = absent;
            p.k.full().arrive_and_expect(Tile::kBytes);
        }
        cached.template load<Tile>(p.leader, context.tiles.k(p.k.stage), context.maps.k, p.k.full(), work_tile, at, true);
        p.k.advance();
    }
    __device__ __forceinline__ void load_v(State& p, const WorkTile& work_tile, int tile, const PageRow& at) const {
        const CachedKeys cached{context};
        const int count = work_tile.keys.length_k - tile * kBlockN;
        const MBarrier full = count < kBlockN ? context.storage.dynamic.zero_fill.loaded() : p.v.full();
        if (p.leader) {
            p.v.wait_empty();
            if (count < kBlockN) context.storage.dynamic.zero_fill.send(p.v.stage, max(count, 0));
            full.arrive_and_expect(Tile::kBytes);
        }
        cached.template load<Tile>(p.leader, context.tiles.v(p.v.stage), context.maps.v, full, work_tile, at, count >= kBlockN);
        p.v.advance();
    }
};

}  // namespace libflash::cuda::sm90
