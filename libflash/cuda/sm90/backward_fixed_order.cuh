// Additions to the dQ accumulator in a fixed order (deterministic=True): key tiles add to a query tile one after another, in the
// order of their work tiles. So a work tile waits only for work tiles that were taken before it; README.md of this folder proves
// that there is no deadlock. The dQ warpgroup writes its sums to shared memory; two threads of the producer warpgroup add them,
// each to every second query tile that the thread block visits. The counter of a query tile (backward_dq_counters.cuh) determines
// which key tile adds next.
#pragma once

#include "cuda/ptx/counter.cuh"
#include "cuda/sm90/backward_dq_counters.cuh"
#include "cuda/sm90/backward_query_tiles.cuh"
#include "cuda/sm90/backward_work_tiles.cuh"

namespace libflash::cuda::sm90 {

// Buffers of sums in shared memory: part `part` of piece `piece` of a tile goes to buffer(piece, part).
template <class Traits>
struct BackwardSumBuffers {
    static constexpr int kParts = Traits::kPieceParts, kBuffers = Traits::kSumBuffers;
    static constexpr int kUses = Traits::kPieces * kParts / kBuffers;  // how often a tile uses a buffer
    static_assert(kUses * kBuffers == Traits::kPieces * kParts, "all buffers are used as often");
    static_assert(kBuffers > 1 || kUses == 1, "a buffer is released when the next addition has begun");
    static constexpr int kBufferBytes = 4 * Traits::kSumBytes;

    __device__ static __forceinline__ int buffer(int piece, int part) { return (piece * kParts + part) % kBuffers; }
    // The parity of the phase of the buffer's barrier after `tiles` earlier tiles; only the parity of `tiles` matters.
    __device__ static __forceinline__ uint32_t phase(int piece, int part, int tiles) {
        return static_cast<uint32_t>((piece * kParts + part) / kBuffers + kUses * tiles) & 1;
    }
};

template <class Traits>
struct BackwardFixedOrder {
    using Accumulator = typename Traits::Accumulator;
    using Tiles = BackwardSharedTiles<Traits>;
    using Buffers = BackwardSumBuffers<Traits>;
    using Position = typename BackwardQueryTiles<Traits>::Position;

    BackwardContext<Traits>& context;
    const BackwardWorkTiles<Traits> work_tiles{context};
    const BackwardQueryTiles<Traits> query_tiles{context};

    // Adds to the query tiles whose number, counted over all work tiles, is odd (`odd` = 1) or even (0). This is also the number
    // of their stage of dS, by which the dQ warpgroup chooses among the full barriers.
    __device__ __forceinline__ void run(int odd) const {
        int number = 0;
#pragma unroll 1
        while (work_tiles.wait()) {
#pragma unroll 1
            for (auto at = query_tiles.first(); at.left > 0; query_tiles.advance(at), ++number)
                if (number % 2 == odd) add_tile(at, odd, number / 2);
            work_tiles.release();
        }
    }

private:
    __device__ __forceinline__ void add_tile(const Position& at, int odd, int round) const {
        const int64_t first_unit = context.tile().first_unit(context.params, at);
        int* const counter = dq_counter<Traits::kBlockM>(context.params, first_unit, at.tile);
        const auto& work = context.tile();
        const DqTurns<Traits::kBlockM, Traits::kBlockN, Traits::kBlockMask> turns(
            context.params, work.work.batch, at.head, at.tile, work.tiles.length_q, work.tiles.length_k);
        const int turn = turns.of(work.work.tile), next = turns.after(turn);
        wait_for_count(counter, turn);
        add_sums(context.params.dq_accumulator + Accumulator::tile_offset(first_unit, at.tile), odd, round);
        tma_store_wait<0>();
        set_count(counter, next);
    }
    // Two additions are in flight: a buffer is released when the addition after it has begun.
    __device__ __forceinline__ void add_sums(float* sums, int odd, int round) const {
        const uint32_t buffers = Tiles::sums(context.tiles.address());
        int added = -1;  // the buffer before
#pragma unroll 1
        for (int piece = 0; piece < Traits::kPieces; ++piece)
#pragma unroll 1
            for (int part = 0; part < Buffers::kParts; ++part) {
                const int buffer = Buffers::buffer(piece, part);
                context.storage.sum_is_full(odd, buffer).wait(Buffers::phase(piece, part, round));
                add_buffer(sums + piece * 4 * Accumulator::kWarpFloats + part * Traits::kSumBytes / 4,
                           buffers + buffer * Buffers::kBufferBytes);
                if (added >= 0) {
                    tma_store_wait_read<1>();
                    context.storage.sum_is_empty(added).arrive();
                }
                added = buffer;
            }
        tma_store_wait_read<0>();
        context.storage.sum_is_empty(added).arrive();
    }
    // Adds the parts of the four warps, which are consecutive if a piece is one part.
    __device__ static __forceinline__ void add_buffer(float* sums, uint32_t buffer) {
        if constexpr (Buffers::kParts == 1) {
            tma_add_floats(sums, buffer, Buffers::kBufferBytes);
        } else {
#pragma unroll 1
            for (int warp = 0; warp < 4; ++warp)
                tma_add_floats(sums + warp * Accumulator::kWarpFloats, buffer + warp * Traits::kSumBytes, Traits::kSumBytes);
        }
        tma_store_commit();
    }
};

}  // namespace libflash::cuda::sm90
