// The warpgroup that loads keys and values of the sm_90a forward kernel over a cache that TMA cannot load as it is: 8-bit codes,
// pages of any size. Each warp copies a quarter of the keys of every tile by cp.async, and converts codes in place: the 16 bytes
// that a thread copies become 32 bytes, of which the copy occupies the first 16. So threads need not wait for each other. A step
// begins to copy K or V of a tile, and then completes the step before it.
#pragma once

#include "cuda/attention/cache_codes.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/sm90/forward_tile_scheduler.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardCopyWarpgroup {
    using Storage = ForwardSharedStorage<Traits>;
    using WorkTile = ForwardWorkTile<Traits>;
    using T = typename Traits::T;
    using KTile = typename Traits::KTile;
    using VTile = typename Traits::VTile;
    static constexpr int kBlockN = Traits::kBlockN, kWarps = Traits::kArrivalsOfLoads, kKeys = 32;  // keys of a warp
    static_assert(kWarps * kKeys == kBlockN, "a lane for each key");

    const ForwardContext<Traits>& context;
    const ForwardTileScheduler<Traits> scheduler{context};

    struct State {
        int warp, lane;
        PipelineState<Traits::kStages> k;  // of the copies that begin
        PipelineState<Traits::kVStages> v;
        PipelineState<Storage::kScheduledTiles> scheduled;
        int slot;  // of the work tile
        // The copies that the next step completes: their tile in shared memory (0: none), barrier, and 16-byte groups of a row.
        uint32_t tile, barrier;
        int groups;
    };
    // Of a lane's key: its page (or cache entry) and the row in it. The page is negative if the key is not loaded: no row sees
    // it, or there is no such page.
    struct PageRow {
        int page, row;
        bool absent;  // some row sees it, and there is no such page
    };

    __device__ __forceinline__ void run() const {
        const int thread = static_cast<int>(threadIdx.x) - (Traits::kThreads - kWarps * 32);
        State c{__shfl_sync(0xffffffffu, thread / 32, 0),
                thread % 32,
                PipelineState<Traits::kStages>(context.storage.k),
                PipelineState<Traits::kVStages>(context.storage.v),
                PipelineState<Storage::kScheduledTiles>(context.storage.scheduled),
                0,
                0,
                0,
                0};
        ScheduleCursor cursor{};
        wait_for_previous_kernel();
        do {
            bool found = wait_for_work_tile(c);
            if (found) provide_empty_v(c);
            for (; found; found = wait_for_work_tile(c)) copy_work_tile(c);
            if (c.tile) complete<0>(c);
            c.tile = 0;
            cursor.exact_maximum = context.storage.work_tiles[c.slot].exact_maximum;
            go_to_next_slot(c);
        } while (scheduler.start_recompute(cursor));
    }

private:
    __device__ __forceinline__ bool wait_for_work_tile(State& c) const {
        c.scheduled.wait_full();
        __syncwarp();  // all lanes have seen this phase before it can be full again
        if (c.lane == 0) c.scheduled.empty().arrive();
        c.scheduled.advance();
        return context.storage.work_tiles[c.slot].has_keys();
    }
    __device__ __forceinline__ void go_to_next_slot(State& c) const {
        __syncwarp();
        c.slot = Storage::next_slot(c.slot);
    }
    // A stage of V without data, as in ForwardProducer.
    __device__ __forceinline__ void provide_empty_v(State& c) const {
        c.v.wait_empty();
        if (arrives_for_warp(c.lane)) c.v.full().arrive();
        c.v.advance();
    }

    // Copies key tiles from the last to the first; V of a tile after K of the next tile.
    __device__ __forceinline__ void copy_work_tile(State& c) const {
        const WorkTile& work_tile = context.storage.work_tiles[c.slot];
        const int last = work_tile.keys.end - 1, begin = work_tile.keys.begin;
        PageRow of_v{}, of_k = find(c, work_tile, last), next{};
#pragma unroll 1
        for (int tile = last; tile >= begin - 1; --tile) {
            if (tile > begin) next = find(c, work_tile, tile - 1);  // early, because reading the table takes time
#pragma unroll 1
            for (int part = tile >= begin ? 0 : 1; part < (tile < last ? 2 : 1); ++part) {
                const State before = c;
                part == 0 ? begin_k(c, work_tile, of_k) : begin_v(c, work_tile, of_v);
                cp_async_commit();
                if (before.tile) complete<1>(before);
            }
            of_v = of_k, of_k = next;
        }
        go_to_next_slot(c);
    }

    // The page and row of this lane's key of a tile. A page that no row sees is not read: it may belong to another sequence, and
    // its block table entry may be stale.
    __device__ __forceinline__ PageRow find(const State& c, const WorkTile& work_tile, int tile) const {
        const CacheParams& cache = context.params.cache;
        const int key = tile * kBlockN + c.warp * kKeys + c.lane;
        const VisibleRange seen = work_tile.keys.seen_by_tile(work_tile.q_rows.length);
        if (key < seen.begin || key >= seen.end) return {-1, 0, false};
        const KeyLocation at = KeyLocations(cache, work_tile.batch()).of(key);
        const bool exists = static_cast<uint32_t>(at.page) < static_cast<uint32_t>(cache.pages);
        return {exists ? at.page : -1, at.row, !exists};
    }

    __device__ __forceinline__ void begin_k(State& c, const WorkTile& work_tile, const PageRow& at) const {
        const unsigned absent = __ballot_sync(0xffffffffu, at.absent);
        c.k.wait_empty();
        auto& copied = context.storage.dynamic.copied[place_of_stage(c.k)];
        if (c.lane == 0) copied.absent[c.warp] = absent;
        copy_scale(c, context.params.k_scale, work_tile.kv_head, at, copied.k_scale);
        copy_scale(c, context.params.v_scale, work_tile.kv_head, at, copied.v_scale);
        c.tile = context.tiles.k(c.k.stage), c.barrier = c.k.full().address, c.groups = Traits::kHeadDim / 8;
        copy<Traits::kHeadDim>(c, context.params.cache.k, context.params.head_dim, work_tile.kv_head, at);
        c.k.advance();
    }
    __device__ __forceinline__ void begin_v(State& c, const WorkTile& work_tile, const PageRow& at) const {
        c.v.wait_empty();
        c.tile = context.tiles.v(c.v.stage), c.barrier = c.v.full().address, c.groups = Traits::kHeadDimV / 8;
        copy<Traits::kHeadDimV>(c, context.params.cache.v, context.params.head_dim_v, work_tile.kv_head, at);
        c.v.advance();
    }

    // Begins to copy this warp's rows to c.tile; writes zeros for keys that are not loaded and for channels that do not exist.
    template <int kChannels>
    __device__ __forceinline__ void copy(const State& c, const RowsParams& rows, int channels, int head,
                                         const PageRow& at) const {
        if (context.params.code == CodeType::none) {
            copy_elements<kChannels, 2>(c, rows, channels, head, at);
        } else {
            copy_elements<kChannels, 1>(c, rows, channels, head, at);
        }
    }
    // kBytes: of an element. The lanes copy 16 bytes each, of several rows at a time.
    template <int kChannels, int kBytes>
    __device__ __forceinline__ void copy_elements(const State& c, const RowsParams& rows, int channels, int head,
                                                  const PageRow& at) const {
        constexpr int kElements = 16 / kBytes, kVectors = kChannels / kElements, kOfLane = kKeys * kVectors / 32;
        const char* const data = static_cast<const char*>(rows.data) + head * rows.head * kBytes;
        const int64_t offset = at.page < 0 ? -1 : (at.page * rows.batch + at.row * rows.row) * kBytes;
#pragma unroll 4
        for (int i = 0; i < kOfLane; ++i) {
            const int number = i * 32 + c.lane, row = number / kVectors, vector = number % kVectors;
            const int64_t of_row = __shfl_sync(0xffffffffu, offset, row);
            cp_async_16(c.tile + KTile::offset(c.warp * kKeys + row, vector * (2 / kBytes)),
                        data + (of_row < 0 ? 0 : of_row) + vector * 16, of_row >= 0 && vector * kElements < channels);
        }
    }

    // Scales of rows: begins to copy that of this lane's key.
    __device__ __forceinline__ void copy_scale(const State& c, const CacheScaleParams& scales, int head, const PageRow& at,
                                               float* to) const {
        if (!scales.of_rows) return;
        const uint32_t address = shared_address(to + c.warp * kKeys + c.lane);
        if (at.page < 0) {
            store_shared(address, 0);
        } else {
            cp_async_4(address, scales.data + at.page * scales.block + at.row * scales.row + head * scales.head);
        }
    }

    // Waits until at most kPending younger steps of this thread are in flight, converts codes, and marks the stage full.
    template <int kPending>
    __device__ __forceinline__ void complete(const State& c) const {
        cp_async_wait<kPending>();
        switch (context.params.code) {
            case CodeType::none: break;
            case CodeType::e4m3: convert<CodeType::e4m3>(c); break;
            case CodeType::e5m2: convert<CodeType::e5m2>(c); break;
            case CodeType::int8: convert<CodeType::int8>(c); break;
        }
        fence_shared_for_async();
        __syncwarp();
        if (arrives_for_warp(c.lane)) MBarrier{c.barrier}.arrive();
    }
    // Each thread converts the codes that it has copied, sixteen at a time.
    template <CodeType kCode>
    __device__ __forceinline__ void convert(const State& c) const {
        const int vectors = c.groups / 2;
#pragma unroll 2
        for (int number = c.lane; number < kKeys * vectors; number += 32) {
            const int row = c.warp * kKeys + number / vectors, group = number % vectors * 2;
            const uint32_t first = c.tile + KTile::offset(row, group), second = c.tile + KTile::offset(row, group + 1);
            uint4 low, high;
            widen_codes<kCode>(load_shared_words(first), low, high, T());
            store_shared_words(first, low);
            store_shared_words(second, high);
        }
    }
};

// The warp that loads Q, beside the warpgroup above. Also announces work tiles to the consumers, which wait for Q.
template <class Traits>
struct ForwardQueryProducer : ForwardProducer<Traits> {
    using Producer = ForwardProducer<Traits>;
    using Producer::context, Producer::scheduler;
    using typename Producer::State, typename Producer::Storage;

    __device__ __forceinline__ explicit ForwardQueryProducer(const ForwardContext<Traits>& of_kernel) : Producer{of_kernel} {}

    __device__ __forceinline__ void run() const {
        State p = this->initial_state();
        ScheduleCursor cursor{};
        wait_for_previous_kernel();
        do {
            bool found = true;
            while (found) {
                found = this->wait_for_work_tile(p);
                if (p.leader) this->load_q(p, context.storage.work_tiles[p.slot], found);
                this->go_to_next_slot(p);
            }
            cursor.exact_maximum = context.storage.work_tiles[Storage::previous_slot(p.slot)].exact_maximum;
        } while (scheduler.start_recompute(cursor));
    }
};

}  // namespace libflash::cuda::sm90
