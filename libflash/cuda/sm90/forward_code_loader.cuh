// The warps of the sm_90a forward kernel that load a cache of 8-bit codes by TMA, for the warps that convert the codes
// (forward_code_converter.cuh): one loads K and its scales of rows, and finds out which keys are absent; another one loads V, and
// its scales of rows with K. The tiles of both take the stages of codes in turn, and both warps arrive at the barrier of each.
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
        PageRow pages{}, of_k{}, of_v{};
        int back = CachedKeys::kTilesAtOnce;
#pragma unroll 1
        for (int tile = last; tile >= begin - 1; --tile) {
            if (tile >= begin) {
                if (back == CachedKeys::kTilesAtOnce) {
                    back = 0;
                    pages = cached.read_pages(work_tile, tile);
                }
                of_k = cached.of_tile(pages, back++);
                p.codes.wait_empty();
                if constexpr (!kValues) {
                    load_codes(p, context.maps.k, work_tile.kv_head, of_k);
                    write_absent(p, of_k);
                }
                if (scales().of_rows) load_scales(p, work_tile, tile, of_k);
                announce(p);
            }
            if (tile < last) {
                p.codes.wait_empty();
                if constexpr (kValues) load_codes(p, context.maps.v, work_tile.kv_head, of_v);
                announce(p);
            }
            of_v = of_k;
        }
        this->go_to_next_slot(p);
    }
    __device__ __forceinline__ void announce(State& p) const {
        __syncwarp();
        if (p.leader) p.codes.full().arrive();
        arrive_after_copies(p.codes.full());
        p.codes.advance();
    }

    // Each box is found while the one before it is loaded.
    __device__ __forceinline__ void load_codes(const State& p, const CUtensorMap& map, int kv_head, const PageRow& at) const {
        const MBarrier full = p.codes.full();
        const uint32_t to = context.tiles.codes(p.codes.stage);
        const unsigned box_rows = context.maps.box_rows;
        if (p.leader) full.arrive_and_expect(Traits::kCodeBytes);
        PageRow next = place_of(at, 0);
#pragma unroll 1
        for (unsigned row = 0; row < kBlockN; row += box_rows) {
            const PageRow box = next;
            next = place_of(at, (row + box_rows) / kUnit);
            if (p.leader) tma_load(to + row * Traits::kHeadDim, map, full, 0, box.row, kv_head, box.page);
        }
    }
    // The page and row of a unit.
    __device__ __forceinline__ static PageRow place_of(const PageRow& at, unsigned unit) {
        return {__shfl_sync(0xffffffffu, at.page, unit), __shfl_sync(0xffffffffu, at.row, unit)};
    }

    // A bit for each key that does not exist, and the scales of rows: the warps that convert the keys pass them on to the
    // consumers.
    __device__ __forceinline__ void write_absent(const State& p, const PageRow& at) const {
        const uint32_t absent = CachedKeys{context}.absent_units(at);
        if (lane() >= kBlockN / 32) return;
        const uint32_t units = absent >> 2 * lane();
        context.storage.dynamic.of_codes[p.codes.stage].absent[lane()] =
            (units & 1 ? 0xffffu : 0u) | (units & 2 ? 0xffff0000u : 0u);
    }
    __device__ __forceinline__ const CacheScaleParams& scales() const {
        return kValues ? context.params.v_scale : context.params.k_scale;
    }
    // A lane has one key of every 32. The scale of a key that no row sees is 0, because in the cache it may be any number.
    __device__ __forceinline__ void load_scales(const State& p, const WorkTile& work_tile, int tile, const PageRow& at) const {
        const VisibleRange seen = work_tile.keys.seen_by_tile(work_tile.q_rows.length);
        auto& of_keys = context.storage.dynamic.of_codes[p.codes.stage];
        float* const to = kValues ? of_keys.v_scale : of_keys.k_scale;
        const float* const of_head = scales().data + work_tile.kv_head * scales().head;
#pragma unroll 1
        for (int i = lane(); i < kBlockN; i += 32) {
            const int key = tile * kBlockN + i;
            const PageRow place = place_of(at, i / kUnit);
            const uint32_t address = shared_address(to + i);
            if (key < seen.begin || key >= seen.end || place.page >= context.params.cache.pages) {
                store_shared(address, 0);
            } else {
                const int row = place.row + (i & (context.maps.box_rows - 1));
                cp_async_4(address, of_head + place.page * scales().block + row * scales().row);
            }
        }
    }
    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
};

}  // namespace libflash::cuda::sm90
