// The conversion of the dQ accumulator to dq in the sm_90a backward kernel. When the four warps of the dQ warpgroup have added to
// a query tile, a thread of the producer warpgroup counts that, and the thread block that counts last converts the tile.
// Additions are counted when those of the next tile have been issued, and the count is looked at another tile later, so that no
// warp of the dQ warpgroup waits for either.
#pragma once

#include "cuda/attention/scores.cuh"
#include "cuda/ptx/counter.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm90/backward_context.cuh"
#include "cuda/sm90/backward_dq_counters.cuh"
#include "cuda/sm90/backward_query_tiles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardDqConversion {
    using T = typename Traits::T;
    using Accumulator = typename Traits::Accumulator;
    static constexpr int kBlockM = Traits::kBlockM, kPieces = Traits::kPieces;
    static constexpr int kStages = Traits::kScoreStages;
    static_assert(kStages == 2, "the stage before a stage is the other one");

    const BackwardContext<Traits>& context;
    const BackwardQueryTiles<Traits> query_tiles{context};

    // A query tile of a head.
    struct Tile {
        int head, tile;
    };

    __device__ __forceinline__ bool active() const {
        return Traits::kRareOptions ? context.params.dq_counters != nullptr : !Traits::kBlockMask;
    }
    // The thread that counts. The first announcement concerns no tile.
    __device__ __forceinline__ void count_tiles() const {
        auto& storage = context.storage;
        PipelineState<kStages> announced(storage.dq_counts);
        auto at = query_tiles.first();
#pragma unroll 1
        for (bool any = false; at.left > 0; any = true) {
            announced.wait_full();
            bool last = false;
            if (any) {
                last = count(at);
                query_tiles.advance(at);
            }
            storage.is_last[announced.stage] = last;
            announced.empty().arrive();
            announced.advance();
        }
    }
    // A warp of the dQ warpgroup has issued its additions to a tile, whose dS is in `stage`, or has left its sums to those that
    // add in a fixed order. These report a tile before they add to the next but one, so the warp must see that here.
    __device__ __forceinline__ void go_on(const Tile& issued, const PipelineState<kStages>& stage, int warp, int lane) const {
        PipelineState<kStages> reported = stage;
        Tile complete = before(issued);
        if (ordered()) {
            reported.advance();
        } else {
            complete = before(complete);
        }
        if (is_last(reported)) convert(complete, warp, lane);
        if (lane == 0 && !ordered()) announce<kPieces * Traits::kPieceParts>(stage);
    }
    // The warp has done so for all tiles. `stage`: that of a next tile.
    __device__ __forceinline__ void finish(PipelineState<kStages> stage, int warp, int lane) const {
        const auto& storage = context.storage;
        if (storage.range.begin >= storage.range.end) return;
        int left = 1;
        if (ordered()) {
            stage.advance();
            left = 0;
        }
#pragma unroll 1
        for (; left >= 0; --left) {
            if (is_last(stage)) {
                const Tile last{storage.first_head(context.params) + context.params.part.heads - 1, storage.range.end - 1};
                convert(left == 1 ? before(last) : last, warp, lane);
            }
            if (left == 1 && lane == 0) announce<0>(stage);
            stage.advance();
        }
    }

private:
    __device__ __forceinline__ bool ordered() const { return context.params.next_work_tile != nullptr; }
    __device__ __forceinline__ bool count(const QueryTilePosition& at) const {
        const int64_t first_unit = context.storage.first_unit(context.params, at);
        if (count_down(dq_counter<kBlockM>(context.params, first_unit, at.tile)) != 1) return false;
        acquire_counted();
        return true;
    }
    __device__ __forceinline__ PipelineState<kStages> with_stage(int stage, uint32_t phase) const {
        return PipelineState<kStages>(context.storage.dq_counts, stage, phase);
    }
    // Tells the counting thread that the additions to the tile before that of `stage` are complete, when at most kPending later
    // ones are not.
    template <int kPending>
    __device__ __forceinline__ void announce(const PipelineState<kStages>& stage) const {
        tma_store_wait<kPending>();
        with_stage(stage.stage, stage.phase).full().arrive();
    }
    // Whether this thread block was the last one to add to the tile two before that of `stage`; false if there is none.
    __device__ __forceinline__ bool is_last(const PipelineState<kStages>& stage) const {
        const auto counted = with_stage(stage.stage ^ 1, stage.stage == 0 ? stage.phase ^ 1 : stage.phase);
        counted.empty().wait(counted.phase);
        const bool last = context.storage.is_last[counted.stage];
        __syncwarp();  // all lanes have seen this phase before the warp announces another tile of the stage
        return last;
    }
    // The tile before another one, in the order of BackwardQueryTiles without block mask.
    __device__ __forceinline__ Tile before(const Tile& tile) const {
        const auto& range = context.storage.range;
        return tile.tile > range.begin ? Tile{tile.head, tile.tile - 1} : Tile{tile.head - 1, range.end - 1};
    }
    __device__ __forceinline__ void convert(const Tile& tile, int warp, int lane) const {
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
