// Additions to the dQ accumulator in a fixed order (deterministic=True): key tiles add to a query tile one after another, the
// last one first. The dQ warpgroup leaves its sums in shared memory; two threads of the producer warpgroup add them, each in
// every other turn. The counter of a turn (backward_dq_counters.cuh) says whose it is: it is the number of key tiles that have yet
// to add. README.md of this folder explains why no thread block waits for ever.
#pragma once

#include "cuda/attention/key_range.cuh"
#include "cuda/ptx/counter.cuh"
#include "cuda/sm90/backward_dq_counters.cuh"
#include "cuda/sm90/backward_query_tiles.cuh"

namespace libflash::cuda::sm90 {

// Buffers of sums in shared memory: part `part` of piece `piece` of a tile goes into one, in turn.
template <class Traits>
struct BackwardSumBuffers {
    static constexpr int kParts = Traits::kPieceParts, kBuffers = Traits::kSumBuffers;
    static constexpr int kUses = Traits::kPieces * kParts / kBuffers;  // of a buffer per tile
    static constexpr int kUsesOfTurn = kUses / Traits::kTurns;
    static_assert(kUsesOfTurn * kBuffers * Traits::kTurns == Traits::kPieces * kParts, "all buffers are used as often in a turn");
    static constexpr int kBufferBytes = 4 * Traits::kSumBytes;

    __device__ static __forceinline__ int buffer(int piece, int part) { return (piece * kParts + part) % kBuffers; }
    // The phase of the buffer's empty barrier, when `tiles` tiles were there before; only their parity counts.
    __device__ static __forceinline__ uint32_t phase(int piece, int part, int tiles) {
        return static_cast<uint32_t>((piece * kParts + part) / kBuffers + kUses * tiles) & 1;
    }
    // Whether a turn has an odd number among those of all tiles; the same.
    __device__ static __forceinline__ int turn_is_odd(int tiles, int turn) { return (tiles * Traits::kTurns + turn) & 1; }
    // The number of turns before the next tile, when there were that many before this one. Only the last two bits count: which of
    // the two threads has a turn, and the parity of its turns before.
    __device__ static __forceinline__ int turns_after(int before) {
        return Traits::kTurns % 4 == 0 ? 0 : (before + Traits::kTurns) & 3;
    }
    // The phase of the full barrier of the thread whose turn it is. `piece`: of the turn; `number`: of the turn.
    __device__ static __forceinline__ uint32_t phase_of_turn(int piece, int part, int number) {
        return static_cast<uint32_t>((piece * kParts + part) / kBuffers + kUsesOfTurn * (number / 2)) & 1;
    }
};

template <class Traits>
struct BackwardFixedOrder {
    using Accumulator = typename Traits::Accumulator;
    using Tiles = BackwardSharedTiles<Traits>;
    using Buffers = BackwardSumBuffers<Traits>;
    using Position = typename BackwardQueryTiles<Traits>::Position;

    const BackwardContext<Traits>& context;
    const BackwardQueryTiles<Traits> query_tiles{context};

    __device__ __forceinline__ bool active() const {
        return (Traits::kRareOptions || !Traits::kBlockMask) && context.params.next_work_tile;
    }
    // Takes the turns whose number, of all tiles, is odd (1) or even (0).
    __device__ __forceinline__ void add_tiles(int odd) const {
        auto at = query_tiles.first();
        int before = 0;
#pragma unroll 1
        for (; at.left > 0; query_tiles.advance(at)) {
#pragma unroll 1
            for (int turn = (before + odd) & 1; turn < Traits::kTurns; turn += 2) take_turn(at, turn, before + turn);
            before = Buffers::turns_after(before);
        }
    }

private:
    // `number`: of the turn among those of all tiles; see turns_after().
    __device__ __forceinline__ void take_turn(const Position& at, int turn, int number) const {
        const auto& storage = context.storage;
        const int64_t first_unit = storage.first_unit(context.params, at);
        int* const counter = dq_counters<Traits::kBlockM, Traits::kTurns>(context.params, first_unit, at.tile) + turn;
        const int key_tiles = key_tiles_left(at.tile);
        wait_for_count(counter, key_tiles);
        add_sums(context.params.dq_accumulator + Accumulator::tile_offset(first_unit, at.tile), turn * Traits::kTurnPieces,
                 number);
        tma_store_wait<0>();
        set_count(counter, key_tiles - 1);
    }
    // The number of key tiles of this one and of those before it that see the query tile.
    __device__ __forceinline__ int key_tiles_left(int tile) const {
        const auto& storage = context.storage;
        KeyRange<Traits::kBlockM, Traits::kBlockN> range;
        range.init(context.params.mask, tile, storage.tiles.length_q, storage.tiles.length_k);
        return storage.work.tile - range.begin + 1;
    }
    // Of the pieces of a turn, from `first` on.
    __device__ __forceinline__ void add_sums(float* sums, int first, int number) const {
        const uint32_t buffers = Tiles::sums(context.tiles.k());
#pragma unroll 1
        for (int piece = first; piece < first + Traits::kTurnPieces; ++piece)
#pragma unroll 1
            for (int part = 0; part < Buffers::kParts; ++part) {
                const int buffer = Buffers::buffer(piece, part);
                context.storage.sum_is_full(number & 1, buffer).wait(Buffers::phase_of_turn(piece - first, part, number));
                add_buffer(sums + piece * 4 * Accumulator::kWarpFloats + part * Traits::kSumBytes / 4,
                           buffers + buffer * Buffers::kBufferBytes);
                tma_store_wait_read<0>();
                context.storage.sum_is_empty(buffer).arrive();
            }
    }
    // The parts of the four warps, which are consecutive where a piece is one part.
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
