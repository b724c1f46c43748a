// The warps of the sm_90a forward kernel that load a cache of 8-bit codes by TMA, for the warps that convert the codes
// (forward_code_converter.cuh): one loads K, also the scales of rows, and finds out which keys are absent; another one loads V.
// The tiles of both take the stages of codes in turn.
#pragma once

#include "cuda/ptx/copy_barrier.cuh"
#include "cuda/sm90/forward_cached_keys.cuh"
#include "cuda/sm90/forward_producer.cuh"

namespace libflash::cuda::sm90 {

// kValues: the warp that loads V.
template <class Traits, bool kValues>
struct ForwardCodeLoader : ForwardProducer<Traits> {
    using Producer = ForwardProducer<Traits>;
    using Producer::context, Producer::scheduler;
    using typename Producer::Storage, typename Producer::WorkTile;
    using CachedKeys = ForwardCachedKeys<Traits>;
    using PageRow = typename CachedKeys::PageRow;
    static constexpr int kBlockN = Traits::kBlockN, kUnit = CachedKeys::kUnit;

    struct State : Producer::State {
        PipelineState<Traits::kCodeStages> codes;
    };

    __device__ __forceinline__ explicit ForwardCodeLoader(const ForwardContext<Traits>& of_kernel) : Producer{of_kernel} {}

    __device__ __forceinline__ void run() const {
        State p{this->initial_state(), PipelineState<Traits::kCodeStages>(context.storage.dynamic.codes)};
        ScheduleCursor cursor{};
        wait_for_previous_kernel();
        do {
            while (this->wait_for_work_tile(p)) load_work_tile(p);
            this->go_to_next_slot(p);
            cursor.exact_maximum = context.storage.work_tiles[Storage::previous_slot(p.slot)].exact_maximum;
        } while (scheduler.start_recompute(cursor));
    }

private:
    // Key tiles from the last to the first; V of a tile after K of the next tile.
    __device__ __forceinline__ void load_work_tile(State& p) const {
        const WorkTile& work_tile = context.storage.work_tiles[p.slot];
        const CachedKeys cached{context};
        const int begin = work_tile.keys.begin, last = work_tile.keys.end - 1;
        PageRow pages{};
        int back = CachedKeys::kTilesAtOnce;
        const auto load = [&](int tile) {
            if (back == CachedKeys::kTilesAtOnce) {
                back = 0;
                pages = cached.read_pages(work_tile, tile);
            }
            load_tile(p, work_tile, tile, cached.of_tile(pages, back++));
        };
#pragma unroll 1
        for (int tile = last; tile >= begin - 1; --tile) {
            if (tile >= begin) {
                if constexpr (!kValues) load(tile);
                p.codes.advance();
            }
            if (tile < last) {
                if constexpr (kValues) load(tile + 1);
                p.codes.advance();
            }
        }
        this->go_to_next_slot(p);
    }
    __device__ __forceinline__ void load_tile(const State& p, const WorkTile& work_tile, int tile, const PageRow& at) const {
        p.codes.wait_empty();
        load_codes(p, kValues ? context.maps.v : context.maps.k, work_tile.kv_head, at);
        if constexpr (!kValues) describe_keys(p, work_tile, tile, at);
        __syncwarp();
        if (p.leader) p.codes.full().arrive();
        arrive_after_copies(p.codes.full());
    }

    // Each box is found while the one before it is loaded.
    __device__ __forceinline__ void load_codes(const State& p, const CUtensorMap& map, int kv_head, const PageRow& at) const {
        const MBarrier full = p.codes.full();
        const uint32_t to = context.tiles.codes(p.codes.stage);
        const unsigned box_rows = context.maps.box_rows;
        if (p.leader) full.arrive_and_expect(Traits::kCodeBytes);
        PageRow next = cached_place(at, 0);
#pragma unroll 1
        for (unsigned row = 0; row < kBlockN; row += box_rows) {
            const PageRow box = next;
            next = cached_place(at, (row + box_rows) / kUnit);
            if (p.leader) tma_load(to + row * Traits::kHeadDim, map, full, 0, box.row, kv_head, box.page);
        }
    }
    // The page and row of a unit.
    __device__ __forceinline__ static PageRow cached_place(const PageRow& at, unsigned unit) {
        return {__shfl_sync(0xffffffffu, at.page, unit), __shfl_sync(0xffffffffu, at.row, unit)};
    }

    // What the consumers need to know of the keys; the warps that convert them pass it on.
    __device__ __forceinline__ void describe_keys(const State& p, const WorkTile& work_tile, int tile, const PageRow& at) const {
        const uint32_t absent = CachedKeys{context}.absent_units(at);
        auto& of_keys = context.storage.dynamic.of_codes[p.codes.stage];
        if (lane() < kBlockN / 32) {
            const uint32_t units = absent >> 2 * lane();
            of_keys.absent[lane()] = (units & 1 ? 0xffffu : 0u) | (units & 2 ? 0xffff0000u : 0u);
        }
        const CacheScaleParams &k_scale = context.params.k_scale, &v_scale = context.params.v_scale;
        if (!k_scale.of_rows && !v_scale.of_rows) return;
        // A lane has one key of every 32. The scale of a key that no row sees is 0, because in the cache it may be any number.
        const VisibleRange seen = work_tile.keys.seen_by_tile(work_tile.q_rows.length);
#pragma unroll 1
        for (int i = lane(); i < kBlockN; i += 32) {
            const int key = tile * kBlockN + i;
            const PageRow place = cached_place(at, i / kUnit);
            const bool exists = key >= seen.begin && key < seen.end && place.page < context.params.cache.pages;
            const PageRow of_key{exists ? place.page : 0, exists ? place.row + (i & (context.maps.box_rows - 1)) : 0};
            if (k_scale.of_rows) copy_scale(k_scale, of_key, work_tile.kv_head, exists, of_keys.k_scale + i);
            if (v_scale.of_rows) copy_scale(v_scale, of_key, work_tile.kv_head, exists, of_keys.v_scale + i);
        }
    }
    __device__ __forceinline__ static void copy_scale(const CacheScaleParams& scales, const PageRow& at, int head, bool exists,
                                                      float* to) {
        if (exists) {
            cp_async_4(shared_address(to), scales.data + at.page * scales.block + at.row * scales.row + head * scales.head);
        } else {
            store_shared(shared_address(to), 0);
        }
    }
    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
};

}  // namespace libflash::cuda::sm90
