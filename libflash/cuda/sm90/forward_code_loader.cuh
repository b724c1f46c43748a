// The warp of the sm_90a forward kernel that loads keys and values of a cache of 8-bit codes by TMA, for the warps that convert
// them (forward_code_converter.cuh). It also loads the scales of rows, and finds out which keys are absent.
#pragma once

#include "cuda/ptx/copy_barrier.cuh"
#include "cuda/sm90/forward_cached_keys.cuh"
#include "cuda/sm90/forward_producer.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
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
    // Loads key tiles from the last to the first; V of a tile after K of the next tile.
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
                load(p, context.maps.k, work_tile.kv_head, of_k);
                describe_keys(p, work_tile, tile, of_k);
                announce(p);
            }
            if (tile < last) {
                load(p, context.maps.v, work_tile.kv_head, of_v);
                announce(p);
            }
            of_v = of_k;
        }
        this->go_to_next_slot(p);
    }

    __device__ __forceinline__ void load(const State& p, const CUtensorMap& map, int kv_head, const PageRow& at) const {
        p.codes.wait_empty();
        const MBarrier full = p.codes.full();
        const uint32_t to = context.tiles.codes(p.codes.stage);
        const int box_rows = context.maps.box_rows;
        if (p.leader) full.arrive_and_expect(Traits::kCodeBytes);
#pragma unroll 2
        for (int row = 0; row < kBlockN; row += box_rows) {
            const int page = __shfl_sync(0xffffffffu, at.page, row / kUnit),
                      row_of_page = __shfl_sync(0xffffffffu, at.row, row / kUnit);
            if (p.leader) tma_load(to + row * Traits::kHeadDim, map, full, 0, row_of_page, kv_head, page);
        }
    }

    // What the consumers need to know of the keys; the warps that convert them pass it on.
    __device__ __forceinline__ void describe_keys(const State& p, const WorkTile& work_tile, int tile, const PageRow& at) const {
        const uint32_t absent = CachedKeys{context}.absent_units(at);
        auto& of_keys = context.storage.dynamic.of_codes[p.codes.stage];
        if (lane() < kBlockN / 32) {
            const uint32_t units = absent >> 2 * lane();
            of_keys.absent[lane()] = (units & 1 ? 0xffffu : 0u) | (units & 2 ? 0xffff0000u : 0u);
        }
        if (context.params.k_scale.of_rows) copy_scales(context.params.k_scale, work_tile, tile, at, of_keys.k_scale);
        if (context.params.v_scale.of_rows) copy_scales(context.params.v_scale, work_tile, tile, at, of_keys.v_scale);
    }
    // The scale of a key that no row sees is 0, because in the cache it may be any number.
    __device__ __forceinline__ void copy_scales(const CacheScaleParams& scales, const WorkTile& work_tile, int tile,
                                                const PageRow& at, float* to) const {
        const VisibleRange seen = work_tile.keys.seen_by_tile(work_tile.q_rows.length);
#pragma unroll 1
        for (int i = lane(); i < kBlockN; i += 32) {
            const int key = tile * kBlockN + i;
            const int page = __shfl_sync(0xffffffffu, at.page, i / kUnit),
                      row = __shfl_sync(0xffffffffu, at.row, i / kUnit) + i % context.maps.box_rows;
            const uint32_t address = shared_address(to + i);
            if (key < seen.begin || key >= seen.end || page >= context.params.cache.pages) {
                store_shared(address, 0);
            } else {
                cp_async_4(address, scales.data + page * scales.block + row * scales.row + work_tile.kv_head * scales.head);
            }
        }
    }
    __device__ __forceinline__ void announce(State& p) const {
        __syncwarp();
        if (p.leader) p.codes.full().arrive();
        arrive_after_copies(p.codes.full());
        p.codes.advance();
    }
    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
};

}  // namespace libflash::cuda::sm90
