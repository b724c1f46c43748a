// The consumer warpgroups of the sm_90a backward_tangent kernels. Each has 64 rows and loops over the tiles of columns, with its
// sums in registers. Names as in backward_tangent_traits.cuh, a tile of rows times a tile of columns:
//
//   S = first first'       tS = tfirst first' + first tfirst'        tdQ or tdK += tdS first + dS tfirst
//   dP = second second'    tdP = tsecond second' + second tsecond'   tdV += tP dO + P tdO
#pragma once

#include "cuda/ptx/uniform.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/backward_tangent_epilogue.cuh"
#include "cuda/sm90/backward_tangent_weights.cuh"
#include "cuda/sm90/warp_roles.cuh"
#include "cuda/sm90/zero_rows.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardTangentConsumer {
    using T = typename Traits::T;
    using RowTile = typename Traits::RowTile;
    using ColTile = typename Traits::ColTile;
    using SecondColTile = typename Traits::SecondColTile;
    using Weights = BackwardTangentWeights<Traits>;
    using Numbers = typename Weights::Numbers;
    static constexpr bool kKeys = Traits::kKeys;
    static constexpr int kHeadDim = Traits::kHeadDim, kBlockN = Traits::kBlockN, kSteps = kBlockN / 16, kSums = kHeadDim / 2;
    static constexpr int kGroupBarrier = 1;  // the first of the named barriers, one for each warpgroup
    using Pair = float[kBlockN];             // values, then their tangents
    using Fragments = uint32_t[kSteps][4];
    using Operand = uint32_t[kHeadDim / 16][4];

    const BackwardTangentContext<Traits>& context;
    const Weights weights{context};

    // State of a consumer warp.
    struct State {
        int group, lane;
        uint32_t rows;                                        // shared address of the first tensor's rows of the warpgroup
        Operand operands[std::max(1, Traits::kRowOperands)];  // the warp's rows of the first tensors
        PipelineState<1> row_tiles;
        PipelineState<Traits::kStages> columns;
        typename Weights::RowStatistics statistics;
        Pair s, dp;                // of the current tile
        Fragments ds, tds, p, tp;  // rounded
        float sums[kSums];         // of tdQ or tdK
        float tdv[kKeys ? kSums : 1];
    };

    __device__ __forceinline__ void run() const {
        const int warp = uniform_warp() - 4, lane = static_cast<int>(threadIdx.x & 31);
        State c{warp / 4,
                lane,
                context.tiles.rows(0, warp / 4),
                {},
                PipelineState<1>(context.storage.rows),
                PipelineState<Traits::kStages>(context.storage.columns)};
#pragma unroll 1
        while (true) {
            c.row_tiles.wait_full();
            if (work_tile(c).is_end()) return;
            clear(c);
            load_row_statistics(c, warp);
            load_operands(c, warp % 4);
            compute_tiles(c, warp);
            store(c, warp);
            c.row_tiles.advance();
        }
    }

private:
    __device__ __forceinline__ const BackwardTangentWorkTile<Traits>& work_tile(const State& c) const {
        return context.storage.work_tiles[c.row_tiles.phase];
    }
    __device__ __forceinline__ static void clear(State& c) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            c.sums[i] = 0.0f;
            if constexpr (kKeys) c.tdv[i] = 0.0f;
        }
    }
    __device__ __forceinline__ void load_operands(State& c, int warp) const {
#pragma unroll
        for (int tensor = 0; tensor < Traits::kRowOperands; ++tensor)
#pragma unroll
            for (int step = 0; step < kHeadDim / 16; ++step)
                RowTile::load_fragment(context.tiles.rows(tensor, c.group), warp * 16, step * 2, c.lane,
                                       c.operands[tensor][step]);
    }
    __device__ __forceinline__ int first_row_of_lane(const State& c, int warp) const {
        return work_tile(c).first_row() + warp * 16 + (hide_from_compiler(c.lane) >> 2);
    }
    __device__ __forceinline__ void load_row_statistics(State& c, int warp) const {
        if constexpr (kKeys) return;
        const auto& work = work_tile(c);
        const int64_t unit = QueryUnits::first(context.params, work.at.head, work.units_before);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first_row_of_lane(c, warp) + 8 * r;
            c.statistics.of[r] = {INFINITY, 0.0f, 0.0f, 0.0f};
            if (row < work.rows.owned) c.statistics.of[r] = context.params.statistics[unit * kUnitRows + row];
        }
    }

    __device__ __forceinline__ const GroupColumnTiles& tiles_of(const State& c) const { return work_tile(c).of_group[c.group]; }
    __device__ __forceinline__ void compute_tiles(State& c, int warp) const {
        auto at = work_tile(c).first();
        bool has_rows = true;
#pragma unroll 1
        while (true) {
            skip_hidden_tiles(c, at);
            if (at.left == 0) break;
            compute_visible_tiles(c, at, warp);
            has_rows = at.left > 0;
        }
        if (has_rows) release_rows(c);
    }
    // Releases the rows. The producer then loads the rows of the next work tile.
    __device__ __forceinline__ void release_rows(const State& c) const {
        __syncwarp();  // all lanes have seen that they are full
        if (arrives_for_warp(c.lane)) c.row_tiles.empty().arrive();
    }
    // Releases tiles that the warpgroup does not see. A stage must be full first, because an earlier arrival could count for the
    // previous phase, and all lanes must have seen that it is full.
    __device__ __forceinline__ void skip_hidden_tiles(State& c, ColumnTilePosition& at) const {
#pragma unroll 1
        while (at.left > 0 && !tiles_of(c).sees(at.tile)) {
            c.columns.wait_full();
            __syncwarp();
            release(c, c.columns.stage);
            advance(c, at);
        }
    }
    __device__ __forceinline__ static Numbers& numbers(Pair& x) { return reinterpret_cast<Numbers&>(x[0]); }
    __device__ __forceinline__ static Numbers& tangents(Pair& x) { return reinterpret_cast<Numbers&>(x[kBlockN / 2]); }

    // Computes tiles up to the next tile that the warpgroup does not see. The products that add a tile to the sums are issued
    // before S of the next tile. The exponentials of the next tile overlap its dP.
    __device__ __forceinline__ void compute_visible_tiles(State& c, ColumnTilePosition& at, int warp) const {
        receive_columns(c, at.tile);
        wgmma_fence();
        issue_scores(c);
        complete_scores(c);
        issue_differences(c);
        int previous;
#pragma unroll 1
        while (true) {
            weigh(c, at.tile, warp);
            previous = c.columns.stage;
            advance(c, at);
            if (at.left == 0 || !tiles_of(c).sees(at.tile)) break;
            receive_columns(c, at.tile);
            wgmma_fence();
            issue_sums(c, previous);
            issue_scores(c);
            wgmma_wait<1>();
            wait_for_sums(c);
            release(c, previous);
            complete_scores(c);
            issue_differences(c);
        }
        if (at.left == 0) release_rows(c);
        wgmma_fence();
        issue_sums(c, previous);
        wgmma_wait<0>();
        wait_for_sums(c);
        release(c, previous);
    }
    __device__ __forceinline__ void advance(State& c, ColumnTilePosition& at) const {
        c.columns.advance();
        work_tile(c).advance(at);
    }
    // Computes the rounded weights of a tile from its products.
    __device__ __forceinline__ void weigh(State& c, int tile, int warp) const {
        const uint32_t cols =
            context.tiles.statistics(c.columns.stage) + (c.lane & 3) * 2 * static_cast<int>(sizeof(TangentStatistics));
        wgmma_wait<1>();
        wgmma_fence_operand(c.s);
        weights.exponentiate(numbers(c.s), tangents(c.s), c.statistics, cols);
        // The branch keeps the compiler from moving the exponentials past the next wait.
        if (tiles_of(c).is_edge(tile))
            weights.mask_edge(numbers(c.s), work_tile(c).tiles, first_row_of_lane(c, warp), c.lane, tile);
        wgmma_wait<0>();
        wgmma_fence_operand(c.dp);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            weights.differentiate(step, numbers(c.s), tangents(c.s), numbers(c.dp), tangents(c.dp), c.statistics, cols,
                                  c.ds[step], c.tds[step], c.p[step], c.tp[step]);
    }

    // Waits for a tile of columns. Where only the device knows the lengths, columns beyond the sequence hold other data, possibly
    // NaN or infinity, which products would multiply by 0. Each warpgroup zeroes all of them, so none waits for another.
    __device__ __forceinline__ void receive_columns(const State& c, int tile) const {
        c.columns.wait_full();
        const int count = work_tile(c).loaded_cols - tile * kBlockN;
        if (count >= kBlockN) return;
        const uint32_t first = context.tiles.first_cols(c.columns.stage), second = context.tiles.second_cols(c.columns.stage);
        zero_rows<ColTile>(first, count, kBlockN);
        zero_rows<ColTile>(first, kBlockN + count, 2 * kBlockN);
        zero_rows<SecondColTile>(second, count, kBlockN);
        if constexpr (Traits::kMovingCols) zero_rows<SecondColTile>(second, kBlockN + count, 2 * kBlockN);
        fence_shared_for_async();
        __syncwarp();
        named_barrier_wait(kGroupBarrier + c.group, 128);
    }

    // The shared address of a tensor's rows. It is recomputed for each tile, because there are no registers to keep all
    // descriptors.
    __device__ __forceinline__ static uint32_t row_tile(const State& c, int tensor) {
        return uniform(static_cast<uint32_t>(hide_from_compiler(static_cast<int>(c.rows)))) +
               tensor * Traits::kGroups * RowTile::kBytes;
    }
    // Issues numbers = rows cols' for a tensor of the rows and 2 * kCount columns from `first` on.
    template <int kTensor, class Tile, int kCount>
    __device__ static __forceinline__ void multiply(const State& c, float (&numbers)[kCount], uint32_t cols, int first,
                                                    bool accumulate = false) {
        using Product = Wgmma<T, 2 * kCount>;
        constexpr bool kInRegisters = kTensor < Traits::kRowOperands;
        const uint32_t rows = kInRegisters ? 0 : row_tile(c, kTensor);
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step) {
            const uint64_t b = Tile::k_major_operand(cols, step, first);
            if constexpr (kInRegisters) {
                Product::template multiply<false>(numbers, c.operands[kTensor][step], b, accumulate || step > 0);
            } else {
                Product::template multiply_shared<false>(numbers, RowTile::k_major_operand(rows, step), b,
                                                         accumulate || step > 0);
            }
        }
    }
    // Issues S and tS, one wgmma group. With kJoinedScores a part of tS is in the registers of tdP.
    __device__ __forceinline__ void issue_scores(State& c) const {
        const uint32_t cols = uniform(context.tiles.first_cols(c.columns.stage));
        if constexpr (Traits::kJoinedScores) {
            multiply<0, ColTile>(c, c.s, cols, 0);
            multiply<1, ColTile>(c, tangents(c.dp), cols, 0);
        } else {
            multiply<0, ColTile>(c, numbers(c.s), cols, 0);
            multiply<0, ColTile>(c, tangents(c.s), cols, kBlockN);
            multiply<1, ColTile>(c, tangents(c.s), cols, 0, true);
        }
        wgmma_commit();
    }
    // Completes tS. Called before the registers of dP and tdP are used.
    __device__ __forceinline__ void complete_scores(State& c) const {
        if constexpr (Traits::kJoinedScores) {
            wgmma_wait<0>();
            wgmma_fence_operand(c.s);
            wgmma_fence_operand(c.dp);
#pragma unroll
            for (int i = kBlockN / 2; i < kBlockN; ++i) c.s[i] += c.dp[i];
        }
        wgmma_fence();
    }
    // Issues dP and tdP, one wgmma group.
    __device__ __forceinline__ void issue_differences(State& c) const {
        const uint32_t cols = uniform(context.tiles.second_cols(c.columns.stage));
        if constexpr (Traits::kJoinedDifferences) {
            multiply<2, SecondColTile>(c, c.dp, cols, 0);
        } else {
            multiply<2, SecondColTile>(c, numbers(c.dp), cols, 0);
            if constexpr (Traits::kMovingCols) multiply<2, SecondColTile>(c, tangents(c.dp), cols, kBlockN);
            if constexpr (Traits::kMovingRows) multiply<3, SecondColTile>(c, tangents(c.dp), cols, 0, Traits::kMovingCols);
        }
        wgmma_commit();
    }
    // Issues sums += weights cols, for columns from `first` on.
    template <class Tile>
    __device__ static __forceinline__ void add(float (&sums)[kSums], const Fragments& weights, uint32_t cols, int first) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            Wgmma<T, kHeadDim>::template multiply<true>(sums, weights[step], Tile::mn_major_operand(cols, first / 16 + step),
                                                        true);
    }
    // Issues the products that add a tile to the sums, one wgmma group.
    __device__ __forceinline__ void issue_sums(State& c, int stage) const {
        const uint32_t first = uniform(context.tiles.first_cols(stage));
        if constexpr (kKeys) {
            const uint32_t second = uniform(context.tiles.second_cols(stage));
            add<SecondColTile>(c.tdv, c.tp, second, 0);
            if constexpr (Traits::kMovingCols) add<SecondColTile>(c.tdv, c.p, second, kBlockN);
        }
        add<ColTile>(c.sums, c.tds, first, 0);
        add<ColTile>(c.sums, c.ds, first, kBlockN);
        wgmma_commit();
    }
    __device__ __forceinline__ void wait_for_sums(State& c) const {
        wgmma_fence_operand(c.sums);
        if constexpr (kKeys) wgmma_fence_operand(c.tdv);
    }
    __device__ __forceinline__ void release(const State& c, int stage) const {
        if (arrives_for_warp(c.lane)) c.columns.empty_of(stage).arrive();
    }

    __device__ __forceinline__ void store(const State& c, int warp) const {
        using Epilogue = BackwardTangentEpilogue<Traits>;
        const BackwardTangentParams& params = context.params;
        const int row = first_row_of_lane(c, warp);
        const float factor = undo_exponent_shift<T>() * params.softmax_scale;
        Epilogue::store(work_tile(c), kKeys ? params.tdk : params.tdq, params.head_dim, row, c.lane, c.sums, factor);
        if constexpr (kKeys)
            Epilogue::store(work_tile(c), params.tdv, params.head_dim_v, row, c.lane, c.tdv, undo_exponent_shift<T>());
    }
};

}  // namespace libflash::cuda::sm90
