// The warpgroup that loads keys and values of the sm_90a forward kernel over a cache that TMA cannot load as it is: scales, pages
// of any size, 8-bit codes in such pages (codes in other pages: forward_code_loader.cuh). Each warp copies a quarter of the keys
// of every tile by cp.async, and converts codes in place: the 16 bytes that a thread copies become 32 bytes, of which the copy
// occupies one half. So threads need not wait for each other.
#pragma once

#include "cuda/attention/cache_codes.cuh"
#include "cuda/ptx/copy_barrier.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/sm90/forward_tile_scheduler.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardCopyWarpgroup {
    using Storage = ForwardSharedStorage<Traits>;
    using WorkTile = ForwardWorkTile<Traits>;
    using T = typename Traits::T;
    using Tile = typename Traits::KTile;
    static_assert(std::is_same_v<Tile, typename Traits::VTile>, "K and V have the same code");
    static constexpr int kBlockN = Traits::kBlockN, kWarps = 4, kKeys = 32;  // keys of a warp
    static_assert(kWarps * kKeys == kBlockN, "a lane for each key");
    static constexpr int kMostInFlight = 3;  // copies of codes of a tile of K or V

    const ForwardContext<Traits>& context;
    const ForwardTileScheduler<Traits> scheduler{context};

    struct State {
        int warp, lane;
        PipelineState<Traits::kStages> k, k_done;  // of the copies that begin, and of those that end
        PipelineState<Traits::kVStages> v, v_done;
        PipelineState<Storage::kScheduledTiles> scheduled;
        int slot;           // of the work tile
        int in_flight = 0;  // copies of codes
        uint32_t of_v = 0;  // a bit for each of them, the oldest first: whether it is of V
    };
    // Of a lane's key: its page (or cache entry) and the row in it.
    struct PageRow {
        int page, row;
    };
    static constexpr int kHidden = -1, kAbsent = -2;  // keys that are not loaded: no row sees the key; there is no such page

    __device__ __forceinline__ void run() const {
        const int thread = static_cast<int>(threadIdx.x) - (Traits::kThreads - kWarps * 32);
        const PipelineState<Traits::kStages> k(context.storage.k);
        const PipelineState<Traits::kVStages> v(context.storage.v);
        State c{__shfl_sync(0xffffffffu, thread / 32, 0),
                thread % 32,
                k,
                k,
                v,
                v,
                PipelineState<Storage::kScheduledTiles>(context.storage.scheduled),
                0};
        ScheduleCursor cursor{};
        wait_for_previous_kernel();
        do {
            bool found = wait_for_work_tile(c);
            if (found) provide_empty_v(c);
            while (true) {
                context.params.code == CodeType::none ? copy_work_tile<false>(c, found) : copy_work_tile<true>(c, found);
                if (!found) break;
                found = wait_for_work_tile(c);
            }
            cursor.exact_maximum = context.storage.work_tiles[Storage::previous_slot(c.slot)].exact_maximum;
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
    // A stage of V without data, as in ForwardProducer. No copy is in flight.
    __device__ __forceinline__ void provide_empty_v(State& c) const {
        c.v.wait_empty();
        announce(c, c.v.full());
        c.v.advance();
        c.v_done.advance();
    }

    // Copies key tiles from the last to the first; V of a tile after K of the next tile. kCodes: whether the cache has codes;
    // then the end mark (`found` is false) completes the copies in flight.
    template <bool kCodes>
    __device__ __forceinline__ void copy_work_tile(State& c, bool found) const {
        const WorkTile& work_tile = context.storage.work_tiles[c.slot];
        const int begin = work_tile.keys.begin, last = work_tile.keys.end - 1;  // no tile in the end mark
        const Keys keys(context, work_tile, c, found);
        PageRow of_v{}, of_k{}, next{};
        if (found) of_k = keys.find(last);
#pragma unroll 1
        for (int tile = last; tile >= begin - 1; --tile) {
            if (tile > begin) next = keys.find(tile - 1);  // early, because reading the table takes time
            if constexpr (kCodes) make_room(c, tile >= begin, is_free(c.k));
            if (tile >= begin) begin_k<kCodes>(c, work_tile, of_k);
            if constexpr (kCodes) make_room(c, tile < last || !found, found && is_free(c.v));
            if (tile < last && found) begin_v<kCodes>(c, work_tile, of_v);
            of_v = of_k, of_k = next;
        }
        __syncwarp();
        c.slot = Storage::next_slot(c.slot);
    }
    // Before a copy begins: completes copies, so that few are in flight. If the stage is not free, all are completed before the
    // warp waits: the consumers may need them to free the stage.
    __device__ __forceinline__ void make_room(State& c, bool begins, bool free) const {
        const int most = !begins ? kMostInFlight : (free ? kMostInFlight - 1 : 0);
#pragma unroll 1
        while (c.in_flight > most) complete_oldest(c);
    }
    template <class Pipeline>
    __device__ __forceinline__ static bool is_free(const Pipeline& pipeline) {
        return !__any_sync(0xffffffffu, !pipeline.is_empty());
    }

    // The keys of a work tile.
    struct Keys {
        const CacheParams& cache;
        const KeyLocations locations;
        VisibleRange seen;
        int first;  // this lane's key of tile 0

        // The end mark has no sequence, so the entry of another one is read.
        __device__ __forceinline__ Keys(const ForwardContext<Traits>& of_kernel, const WorkTile& work_tile, const State& c,
                                        bool found)
            : cache(of_kernel.params.cache), locations(cache, found ? work_tile.batch() : 0),
              seen(work_tile.keys.seen_by_tile(work_tile.q_rows.length)), first(c.warp * kKeys + c.lane) {}

        // The page and row of this lane's key of a tile. A page that no row sees is not read: it may belong to another sequence,
        // and its block table entry may be stale.
        __device__ __forceinline__ PageRow find(int tile) const {
            const int key = tile * kBlockN + first;
            if (key < seen.begin || key >= seen.end) return {kHidden, 0};
            const KeyLocation at = locations.of(key);
            const bool exists = static_cast<uint32_t>(at.page) < static_cast<uint32_t>(cache.pages);
            return {exists ? at.page : kAbsent, at.row};
        }
    };

    template <bool kCodes>
    __device__ __forceinline__ void begin_k(State& c, const WorkTile& work_tile, const PageRow& at) const {
        const unsigned absent = __ballot_sync(0xffffffffu, at.page == kAbsent);
        c.k.wait_empty();
        auto& copied = context.storage.dynamic.copied[place_of_stage(c.k)];
        if (c.lane == 0) copied.absent[c.warp] = absent;
        copy_scale(c, context.params.k_scale, work_tile.kv_head, at, copied.k_scale);
        copy_scale(c, context.params.v_scale, work_tile.kv_head, at, copied.v_scale);
        copy<kCodes>(c, context.tiles.k(c.k.stage), context.params.cache.k, context.params.head_dim, work_tile.kv_head, at);
        announce_when_complete<kCodes>(c, c.k.full(), 0);
        c.k.advance();
    }
    template <bool kCodes>
    __device__ __forceinline__ void begin_v(State& c, const WorkTile& work_tile, const PageRow& at) const {
        c.v.wait_empty();
        copy<kCodes>(c, context.tiles.v(c.v.stage), context.params.cache.v, context.params.head_dim_v, work_tile.kv_head, at);
        announce_when_complete<kCodes>(c, c.v.full(), 1);
        c.v.advance();
    }

    // Marks a stage full, by 33 arrivals of the warp: as many as announce_when_complete() makes without codes.
    __device__ __forceinline__ void announce(const State& c, const MBarrier& full) const {
        full.arrive();
        if (c.lane == 0) full.arrive();
    }
    // Numbers of the type of Q mark a stage full by themselves, codes when they have been converted.
    template <bool kCodes>
    __device__ __forceinline__ void announce_when_complete(State& c, const MBarrier& full, uint32_t of_v) const {
        if constexpr (kCodes) {
            cp_async_commit();
            c.of_v |= of_v << c.in_flight++;
        } else {
            __syncwarp();
            if (c.lane == 0) full.arrive();  // for what the lanes have stored themselves
            arrive_after_copies(full);
        }
    }

    // Which 16 bytes of the rows a lane copies: of every kRows-th row, from `row` on, the bytes from 16 * vector on. kBytes: of
    // an element.
    template <int kBytes>
    struct Lane {
        static constexpr int kVectors = Traits::kHeadDim * kBytes / 16, kRows = 32 / kVectors, kSteps = kKeys / kRows;
        int row, vector;
        uint32_t first;  // their address in shared memory

        __device__ __forceinline__ Lane(const State& c, uint32_t tile)
            : row(c.lane / kVectors), vector(c.lane % kVectors),
              first(tile + Tile::offset(c.warp * kKeys + row, vector * (2 / kBytes))) {}
        // The address in row `row` + step * kRows: the swizzle differs by the last bits of the number of the row.
        __device__ __forceinline__ uint32_t address(int step) const {
            return (first ^ (step * kRows % 8) << 4) + step * kRows * 128;
        }
    };

    // Begins to copy this warp's rows; writes zeros for keys that are not loaded and for channels that do not exist. Rows are
    // found by their distance from the first one in units of 16 bytes, below 2^32 - 1 (prefill_capabilities.cpp).
    template <bool kCodes>
    __device__ __forceinline__ void copy(const State& c, uint32_t tile, const RowsParams& rows, int channels, int head,
                                         const PageRow& at) const {
        constexpr int kBytes = kCodes ? 1 : 2, kElements = 16 / kBytes;
        const Lane<kBytes> lane(c, tile);
        const bool exists = lane.vector * kElements < channels;
        const char* const from = static_cast<const char*>(rows.data) + head * rows.head * kBytes + lane.vector * 16;
        const uint64_t elements = at.page * rows.batch + at.row * rows.row;
        const uint32_t distance = at.page < 0 ? UINT32_MAX : static_cast<uint32_t>(elements / kElements);
#pragma unroll 4
        for (int step = 0; step < Lane<kBytes>::kSteps; ++step) {
            const uint32_t of_row = __shfl_sync(0xffffffffu, distance, lane.row + step * Lane<kBytes>::kRows);
            cp_async_16(lane.address(step), from + uint64_t{of_row} * 16, exists && of_row != UINT32_MAX);
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

    // Waits for the oldest copy in flight, converts codes, and marks the stage full.
    __device__ __forceinline__ void complete_oldest(State& c) const {
        static_assert(kMostInFlight == 3);
        if (c.in_flight == 1) {
            cp_async_wait<0>();
        } else if (c.in_flight == 2) {
            cp_async_wait<1>();
        } else {
            cp_async_wait<2>();
        }
        const bool of_v = c.of_v & 1;
        --c.in_flight, c.of_v >>= 1;
        const uint32_t tile = of_v ? context.tiles.v(c.v_done.stage) : context.tiles.k(c.k_done.stage);
        const MBarrier full = of_v ? c.v_done.full() : c.k_done.full();
        switch (context.params.code) {
            case CodeType::none: break;  // such copies are not counted
            case CodeType::e4m3: convert<CodeType::e4m3>(c, tile); break;
            case CodeType::e5m2: convert<CodeType::e5m2>(c, tile); break;
            case CodeType::int8: convert<CodeType::int8>(c, tile); break;
        }
        announce(c, full);
        of_v ? c.v_done.advance() : c.k_done.advance();
    }
    // Each lane converts the codes that it has copied, sixteen at a time. The two halves of the result are neighbours.
    template <CodeType kCode>
    __device__ __forceinline__ void convert(const State& c, uint32_t tile) const {
        constexpr int kAtOnce = 4;  // loads, so that one does not wait for the other
        static_assert(Lane<1>::kSteps % kAtOnce == 0);
        const Lane<1> lane(c, tile);
#pragma unroll 1
        for (int first = 0; first < Lane<1>::kSteps; first += kAtOnce) {
            uint4 codes[kAtOnce], low, high;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) codes[i] = load_shared_words(lane.address(first + i));
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                widen_codes<kCode>(codes[i], low, high, T());
                store_shared_words(lane.address(first + i), low);
                store_shared_words(lane.address(first + i) ^ 16, high);
            }
        }
    }
};

}  // namespace libflash::cuda::sm90
