// The warpgroup of the sm_90a forward kernel that converts the codes that TMA has loaded (forward_code_loader.cuh) into tiles of
// K and V. Each warp converts a quarter of the keys of every tile.
#pragma once

#include "cuda/attention/cache_codes.cuh"
#include "cuda/sm90/forward_producer.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardCodeConverter : ForwardProducer<Traits> {
    using Producer = ForwardProducer<Traits>;
    using Producer::context, Producer::scheduler;
    using typename Producer::Storage, typename Producer::WorkTile;
    using T = typename Traits::T;
    using Tile = typename Traits::KTile;
    static_assert(std::is_same_v<Tile, typename Traits::VTile>, "K and V have the same code");
    static constexpr int kKeys = Traits::kBlockN / 4, kHeadDim = Traits::kHeadDim;  // keys of a warp
    static_assert(kHeadDim == 64 || kHeadDim == 128, "the layouts of rows of codes");

    struct State : Producer::State {
        PipelineState<Traits::kCodeStages> codes;
        // Addresses of the lane's first codes in a tile of codes, and of their numbers in a tile of K or V.
        uint32_t from, to;
        int row;  // of the tile
    };

    __device__ __forceinline__ explicit ForwardCodeConverter(const ForwardContext<Traits>& of_kernel) : Producer{of_kernel} {}

    __device__ __forceinline__ void run() const {
        State p = first_state();
        ScheduleCursor cursor{};
        wait_for_previous_kernel();
        do {
            bool found = this->wait_for_work_tile(p);
            if (found) provide_empty_v(p);
            for (; found; found = this->wait_for_work_tile(p)) convert_work_tile(p);
            this->go_to_next_slot(p);
            cursor.exact_maximum = context.storage.work_tiles[Storage::previous_slot(p.slot)].exact_maximum;
        } while (scheduler.start_recompute(cursor));
    }

private:
    // A lane converts 16 codes at a time: those from 16 * (lane % 4) on, of one row of every eight, and with 128 channels also
    // those 64 channels later. Eight lanes that access shared memory together have two rows whose places in the swizzle share no
    // bank, neither when they load codes nor when they store numbers.
    __device__ __forceinline__ State first_state() const {
        const int thread = static_cast<int>(threadIdx.x % 128), lane = thread % 32, vector = lane % 4;
        const int of_eight = kHeadDim == 64 ? lane / 4 : lane / 8 ^ (lane & 4 ? 5 : 0), row = thread / 32 * kKeys + of_eight;
        const int place = kHeadDim == 64 ? vector : vector ^ of_eight;
        return {this->initial_state(), PipelineState<Traits::kCodeStages>(context.storage.dynamic.codes),
                static_cast<uint32_t>(row * kHeadDim + place * 16), static_cast<uint32_t>(Tile::offset(row, 2 * vector)), row};
    }

    // A stage of V without data, as in ForwardProducer.
    __device__ __forceinline__ void provide_empty_v(State& p) const {
        p.v.wait_empty();
        __syncwarp();
        arrive(p, p.v.full());
        p.v.advance();
    }
    __device__ __forceinline__ static void arrive(const State& p, const MBarrier& barrier) {
        if (kAllLanesArrive || p.leader) barrier.arrive();
    }

    // In the order of the loads: V of a tile after K of the next tile.
    __device__ __forceinline__ void convert_work_tile(State& p) const {
        const WorkTile& work_tile = context.storage.work_tiles[p.slot];
        const int begin = work_tile.keys.begin, last = work_tile.keys.end - 1;
        int tile = last;
        bool of_v = false;
#pragma unroll 1
        while (true) {
            const MBarrier full = of_v ? p.v.full() : p.k.full();
            const uint32_t to = of_v ? context.tiles.v(p.v.stage) : context.tiles.k(p.k.stage);
            of_v ? p.v.wait_empty() : p.k.wait_empty();
            p.codes.wait_full();
            convert(context.tiles.codes(p.codes.stage) + p.from, to + p.to);
            of_v ? zero_hidden_rows(work_tile, tile + 1, p.row, to + p.to) : describe_keys(p);
            fence_shared_for_async();
            __syncwarp();
            arrive(p, p.codes.empty());
            arrive(p, full);
            p.codes.advance();
            of_v ? p.v.advance() : p.k.advance();
            // The next one: V of the tile before, or K of the next tile.
            if (!of_v && tile < last) {
                of_v = true;
            } else {
                of_v = --tile < begin;
                if (tile < begin - 1) break;
            }
        }
        this->go_to_next_slot(p);
    }

    // Passes on to the consumers what they need to know of this warp's keys. The place is free when the stage of K is.
    __device__ __forceinline__ void describe_keys(const State& p) const {
        const auto& from = context.storage.dynamic.of_codes[p.codes.stage];
        auto& to = context.storage.dynamic.copied[place_of_stage(p.k)];
        const int key = static_cast<int>(threadIdx.x % 128);
        if (context.params.k_scale.of_rows) to.k_scale[key] = from.k_scale[key];
        if (context.params.v_scale.of_rows) to.v_scale[key] = from.v_scale[key];
        if (key % 32 == 0) to.absent[key / 32] = from.absent[key / 32];
    }

    __device__ __forceinline__ void convert(uint32_t from, uint32_t to) const {
        switch (context.params.code) {
            case CodeType::none: break;  // such caches have other instances
            case CodeType::e4m3: convert_codes<CodeType::e4m3>(from, to); break;
            case CodeType::e5m2: convert_codes<CodeType::e5m2>(from, to); break;
            case CodeType::int8: convert_codes<CodeType::int8>(from, to); break;
        }
    }
    template <CodeType kCode>
    __device__ __forceinline__ static void convert_codes(uint32_t from, uint32_t to) {
        constexpr int kChunks = kHeadDim / 64, kRowsAtOnce = 4 / kChunks * 8;  // four loads, so that none waits for another
#pragma unroll 1
        for (int row = 0; row < kKeys; row += kRowsAtOnce, from += kRowsAtOnce * kHeadDim, to += kRowsAtOnce * 128) {
            uint4 codes[4], low, high;
#pragma unroll
            for (int i = 0; i < 4; ++i) codes[i] = load_shared_words((from ^ i % kChunks << 6) + i / kChunks * 8 * kHeadDim);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int offset = i % kChunks * Tile::kChunkBytes + i / kChunks * 8 * 128;
                widen_codes<kCode>(codes[i], low, high, T());
                store_shared_words(to + offset, low);
                store_shared_words((to ^ 16) + offset, high);
            }
        }
    }
    // Rows of V that no query row sees may hold any codes, also NaN.
    __device__ __forceinline__ static void zero_hidden_rows(const WorkTile& work_tile, int tile, int row, uint32_t to) {
        const VisibleRange seen = work_tile.keys.seen_by_tile(work_tile.q_rows.length);
        const int first = tile * Traits::kBlockN;
        if (first >= seen.begin && first + Traits::kBlockN <= seen.end) return;
#pragma unroll 1
        for (int i = 0; i < kKeys; i += 8) {
            const int key = first + row + i;
            if (key >= seen.begin && key < seen.end) continue;
            for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
                const uint32_t at = to + i * 128 + chunk * Tile::kChunkBytes;
                store_shared_words(at, make_uint4(0, 0, 0, 0));
                store_shared_words(at ^ 16, make_uint4(0, 0, 0, 0));
            }
        }
    }
};

}  // namespace libflash::cuda::sm90
