// The conversion of the dQ accumulator to dq in the dQ warpgroup of the sm_90a backward kernel. Each warp counts its additions to a
// query tile when they are complete, and the warp that counts last converts its part of the tile. Additions are counted a tile late, and the count
// is looked at another tile later, so that no warp waits for either.
#pragma once

#include "cuda/attention/scores.cuh"
#include "cuda/ptx/counter.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm90/backward_context.cuh"
#include "cuda/sm90/backward_dq_counters.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardDqConversion {
    using T = typename Traits::T;
    using Accumulator = typename Traits::Accumulator;
    static constexpr int kBlockM = Traits::kBlockM, kPieces = Traits::kPieces;

    const BackwardContext<Traits>& context;

    // A query tile of a head; tile < 0: none.
    struct Tile {
        int head, tile;
    };

    __device__ __forceinline__ bool active() const {
        return Traits::kRareOptions ? context.params.dq_counters != nullptr : !Traits::kBlockMask;
    }
    // The additions to a tile were issued. `count`: in lane 0 the counter of the tile two before it, before this warp counted there. Returns that
    // of the tile before it.
    __device__ __forceinline__ int go_on(const Tile& issued, int count, int warp, int lane) const {
        const Tile previous = before(issued);
        convert_if_last(before(previous), count, warp, lane);
        return count_additions<kPieces>(previous, warp, lane);
    }
    // Counts and converts what is left. `count`: the last one that go_on() returned.
    __device__ __forceinline__ void finish(int count, int warp, int lane) const {
        const auto& storage = context.storage;
        const int end_head = (storage.work.head + 1) * context.params.group_size;
        Tile last = storage.range.begin < storage.range.end ? Tile{end_head - 1, storage.range.end - 1} : Tile{0, -1};
        Tile counted = before(last);
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            convert_if_last(counted, count, warp, lane);
            count = count_additions<0>(last, warp, lane);
            counted = last;
            last.tile = -1;
        }
    }

private:
    // The tile before another one in the order of BackwardQueryTiles.
    __device__ __forceinline__ Tile before(const Tile& tile) const {
        const auto& storage = context.storage;
        if (tile.tile > storage.range.begin) return {tile.head, tile.tile - 1};
        const bool is_first = tile.tile < 0 || tile.head == storage.work.head * context.params.group_size;
        return {tile.head - 1, is_first ? -1 : storage.range.end - 1};
    }
    // Counts the additions to a tile when at most kPending later ones are incomplete.
    template <int kPending>
    __device__ __forceinline__ int count_additions(const Tile& tile, int warp, int lane) const {
        if (lane != 0 || tile.tile < 0) return 0;
        tma_store_wait<kPending>();
        return count_down(dq_counter<kBlockM>(context.params, first_unit(tile), tile.tile) + warp);
    }
    // `count`: in lane 0 the counter before this warp counted.
    __device__ __forceinline__ void convert_if_last(const Tile& tile, int count, int warp, int lane) const {
        if (__shfl_sync(0xffffffffu, count, 0) != 1) return;
        acquire_counted();
#pragma unroll 1
        for (int piece = 0; piece < kPieces; ++piece) convert(tile, piece, warp, hide_from_compiler(lane));
    }
    __device__ __forceinline__ int64_t first_unit(const Tile& tile) const {
        return QueryUnits::first(context.params, context.storage.work.batch, tile.head, context.storage.q_rows.start);
    }

    // Converts 16 rows x kPieceCols channels. In the order of the accumulator the sums of 8 channels of rows g and g + 8 stand
    // together, lane 4 * g + t converts those of every fourth 8 channels.
    __device__ __forceinline__ void convert(const Tile& tile, int piece, int warp, int lane) const {
        constexpr int kSteps = Traits::kPieceCols / 32;
        const int row = lane / 4, block = lane % 4;
        const float* sums = context.params.dq_accumulator + Accumulator::tile_offset(first_unit(tile), tile.tile) +
                            (piece * 4 + warp) * Accumulator::kWarpFloats + block * 128 + row * 16;
        float4 x[kSteps][4];
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[step][i] = load_counted(sums + step * 512 + i * 4);
        const int first_row = tile.tile * kBlockM + warp * 16 + row, channel = piece * Traits::kPieceCols + block * 8;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            store(tile.head, first_row, channel + step * 32, x[step]);
        }
    }
    // Rounds and writes 8 channels of rows `row` and row + 8.
    __device__ __forceinline__ void store(int head, int row, int channel, const float4 (&x)[4]) const {
        const BackwardParams& params = context.params;
        const auto& storage = context.storage;
        if (channel >= params.head_dim) return;
        const float factor = undo_exponent_shift<T>() * params.softmax_scale;
        T* const first = static_cast<T*>(params.dq.data) + storage.work.batch * params.dq.batch + head * params.dq.head + channel;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int at = row + r * 8;
            if (at >= storage.q_rows.owned) return;
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t pair =
                    r == 0 ? pack_pair(x[i].x * factor, x[i].y * factor, T()) : pack_pair(x[i].z * factor, x[i].w * factor, T());
                words[i] = at < storage.q_rows.length ? pair : 0;
            }
            write(first + int64_t{storage.q_rows.start + at} * params.dq.row, words);
        }
    }
    // head_dim is a multiple of 8 here, but rows may begin at any address.
    __device__ __forceinline__ void write(T* channels, const uint32_t (&words)[4]) const {
        if (context.params.vector_out) {
            *reinterpret_cast<uint4*>(channels) = make_uint4(words[0], words[1], words[2], words[3]);
        } else {
            uint16_t* const values = reinterpret_cast<uint16_t*>(channels);
#pragma unroll
            for (int i = 0; i < 8; ++i) values[i] = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
        }
    }
};

}  // namespace libflash::cuda::sm90
