// The consumer warpgroups of the sm_90a backward_tangent kernels for more than 128 channels. A warpgroup computes all steps of a
// tile of columns. For tdq and tdk both warpgroups have the same rows, and each computes every second tile; for tdv each has rows
// of its own and computes all tiles:
//
//   S = first first'       tS = tfirst first' + first tfirst'        tdQ or tdK += tdS first + dS tfirst
//   dP = second second'    tdP = tsecond second' + second tsecond'   tdV += tP dO + P tdO
//
// The first and the second tensor of a tile have separate barriers, so that each can be loaded again as soon as it has been used.
#pragma once

#include "cuda/ptx/uniform.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/backward_tangent_epilogue.cuh"
#include "cuda/sm90/backward_tangent_weights.cuh"
#include "cuda/sm90/warp_roles.cuh"
#include "cuda/sm90/zero_rows.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardTangentWideConsumer {
    using T = typename Traits::T;
    using RowTile = typename Traits::RowTile;
    using ColTile = typename Traits::ColTile;
    using SecondColTile = typename Traits::SecondColTile;
    using Weights = BackwardTangentWeights<Traits>;
    using Numbers = typename Weights::Numbers;
    static constexpr bool kKeys = Traits::kKeys, kDifferences = Traits::kDifferences, kSharedRows = Traits::kSharedRows;
    static constexpr int kHeadDim = Traits::kHeadDim, kBlockN = Traits::kBlockN, kSteps = kBlockN / 16, kSums = kHeadDim / 2;
    static constexpr int kGroupBarrier = 1, kMergeBarrier = 3;  // named barriers; kGroupBarrier: one for each warpgroup
    using Pair = float[kBlockN];                                // values, then their tangents
    using Fragments = uint32_t[kSteps][4];
    using Columns = PipelineState<Traits::kStages>;

    const BackwardTangentContext<Traits>& context;
    const Weights weights{context};

    // State of a consumer warp.
    struct State {
        int group, lane;
        PipelineState<1> row_tiles;
        Columns columns;  // the first tensor
        typename Weights::RowStatistics statistics;
        float sums[kSums];
    };

    __device__ __forceinline__ void run() const {
        const int lane = static_cast<int>(threadIdx.x & 31);
        State c{uniform_warp() / 4 - 1, lane, PipelineState<1>(context.storage.rows), Columns(context.storage.columns)};
#pragma unroll 1
        while (true) {
            c.row_tiles.wait_full();
            if (work_tile(c).is_end()) return;
#pragma unroll
            for (int i = 0; i < kSums; ++i) c.sums[i] = 0.0f;
            load_row_statistics(c);
            compute_tiles(c);
            if constexpr (kSharedRows) merge(c);
            release_rows(c);
            if (!kSharedRows || c.group == 0) store(c);
            c.row_tiles.advance();
        }
    }

private:
    __device__ __forceinline__ const BackwardTangentWorkTile<Traits>& work_tile(const State& c) const {
        return context.storage.work_tiles[c.row_tiles.phase];
    }
    __device__ __forceinline__ const GroupColumnTiles& tiles_of(const State& c) const {
        return work_tile(c).of_group[row_group(c)];
    }
    // The group of rows that a warpgroup has.
    __device__ __forceinline__ static int row_group(const State& c) { return kSharedRows ? 0 : c.group; }
    __device__ __forceinline__ int first_row_of_lane(const State& c) const {
        const int thread = hide_from_compiler(static_cast<int>(threadIdx.x)) % 128;
        return work_tile(c).first_row() + row_group(c) * Traits::kGroupRows + thread / 32 * 16 + thread % 32 / 4;
    }
    __device__ __forceinline__ void load_row_statistics(State& c) const {
        if constexpr (kKeys) return;
        const auto& work = work_tile(c);
        const int64_t unit = QueryUnits::first(context.params, work.at.head, work.units_before);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = first_row_of_lane(c) + 8 * r;
            c.statistics.of[r] = {INFINITY, 0.0f, 0.0f, 0.0f};
            if (row < work.rows.owned) c.statistics.of[r] = context.params.statistics[unit * kUnitRows + row];
        }
    }

    __device__ __forceinline__ void compute_tiles(State& c) const {
#pragma unroll 1
        for (auto at = work_tile(c).first(); at.left > 0; work_tile(c).advance(at)) {
            const bool takes = !kSharedRows || c.columns.stage == c.group;
            if (takes && tiles_of(c).sees(at.tile)) {
                compute_tile(c, at.tile);
            } else if (takes) {
                skip_tile(c);
            }
            c.columns.advance();
        }
    }
    // Releases a tensor only when it is full, because an earlier arrival could count for the previous phase, and when all lanes
    // have seen that it is full. Releases the second tensor first, because the producer may wait for this before it loads the
    // first tensor.
    __device__ __forceinline__ void skip_tile(State& c) const {
        for (const Columns& pipeline : {second(c), c.columns}) {
            pipeline.wait_full();
            __syncwarp();
            release(c, pipeline);
        }
    }
    // The second tensor of the same tile.
    __device__ __forceinline__ Columns second(const State& c) const {
        Columns pipeline = c.columns;
        pipeline.barriers = shared_address(&context.storage.second_columns);
        return pipeline;
    }
    __device__ __forceinline__ static void release(const State& c, const Columns& pipeline) {
        if (arrives_for_warp(c.lane)) pipeline.empty().arrive();
    }

    __device__ __forceinline__ static Numbers& numbers(Pair& x) { return reinterpret_cast<Numbers&>(x[0]); }
    __device__ __forceinline__ static Numbers& tangents(Pair& x) { return reinterpret_cast<Numbers&>(x[kBlockN / 2]); }

    __device__ __forceinline__ void compute_tile(State& c, int tile) const {
        Pair s, dp;
        Numbers ts;  // one part of tS in a separate accumulator; the product that computes S also computes the other part
        Fragments tw, w;
        const uint32_t statistics =
            context.tiles.statistics(c.columns.stage) + (c.lane & 3) * 2 * static_cast<int>(sizeof(TangentStatistics));
        if constexpr (kDifferences) {
            receive<SecondColTile, Traits::kMovingCols>(c, second(c), second_cols(c), tile);
            wgmma_fence();
            issue_differences(c, dp);
        }
        receive<ColTile, true>(c, c.columns, first_cols(c), tile);
        wgmma_fence();
        issue_scores(c, s, ts);
        if constexpr (kDifferences) {
            wgmma_wait<1>();
            wgmma_fence_operand(dp);
            release(c, second(c));
        }
        wgmma_wait<0>();
        wgmma_fence_operand(s);
        wgmma_fence_operand(ts);
        weigh(c, tile, s, ts, dp, statistics, w, tw);
        if constexpr (!kDifferences) {
            __syncwarp();  // all lanes have read the statistics, which come with the first tensor
            release(c, c.columns);
            receive<SecondColTile, Traits::kMovingCols>(c, second(c), second_cols(c), tile);
        }
        wgmma_fence();
        issue_sums(c, w, tw);
        wgmma_wait<0>();
        wgmma_fence_operand(c.sums);
        release(c, kDifferences ? c.columns : second(c));
    }

    // Waits for a tensor of a tile. Where only the device knows the lengths, columns beyond the sequence hold other data,
    // possibly NaN or infinity, which products would multiply by 0. Each warpgroup that reads them zeroes them.
    template <class Tile, bool kWithTangents>
    __device__ __forceinline__ void receive(const State& c, const Columns& pipeline, uint32_t cols, int tile) const {
        pipeline.wait_full();
        const int count = work_tile(c).loaded_cols - tile * kBlockN;
        if (count >= kBlockN) return;
        zero_rows<Tile>(cols, count, kBlockN);
        if constexpr (kWithTangents) zero_rows<Tile>(cols, kBlockN + count, 2 * kBlockN);
        fence_shared_for_async();
        __syncwarp();
        named_barrier_wait(kGroupBarrier + c.group, 128);
    }

    // Shared addresses are recomputed for each tile, because there are no registers to keep descriptors.
    __device__ __forceinline__ static uint32_t anew(uint32_t address) {
        return uniform(static_cast<uint32_t>(hide_from_compiler(static_cast<int>(address))));
    }
    __device__ __forceinline__ uint32_t row_tile(const State& c, int tensor) const {
        return anew(context.tiles.rows(tensor, row_group(c)));
    }
    __device__ __forceinline__ uint32_t first_cols(const State& c) const {
        return anew(context.tiles.first_cols(c.columns.stage));
    }
    __device__ __forceinline__ uint32_t second_cols(const State& c) const {
        return anew(context.tiles.second_cols(c.columns.stage));
    }
    // Issues numbers = rows cols' for a tensor of the rows and 2 * kCount columns from `first` on.
    template <class Tile, int kCount>
    __device__ static __forceinline__ void multiply(float (&numbers)[kCount], uint32_t rows, uint32_t cols, int first = 0,
                                                    bool accumulate = false) {
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step)
            Wgmma<T, 2 * kCount>::template multiply_shared<false>(
                numbers, RowTile::k_major_operand(rows, step), Tile::k_major_operand(cols, step, first), accumulate || step > 0);
    }
    // Issues S and tS, one wgmma group.
    __device__ __forceinline__ void issue_scores(const State& c, Pair& s, Numbers& ts) const {
        const uint32_t cols = first_cols(c);
        multiply<ColTile>(s, row_tile(c, 0), cols);
        multiply<ColTile>(ts, row_tile(c, 1), cols);
        wgmma_commit();
    }
    // Issues dP and tdP, one wgmma group. There are no registers for a separate part of tdP.
    __device__ __forceinline__ void issue_differences(const State& c, Pair& dp) const {
        const uint32_t cols = second_cols(c), rows = row_tile(c, 2);
        if constexpr (Traits::kMovingCols && !Traits::kMovingRows) {
            multiply<SecondColTile>(dp, rows, cols);
        } else {
            multiply<SecondColTile>(numbers(dp), rows, cols);
            if constexpr (Traits::kMovingCols) multiply<SecondColTile>(tangents(dp), rows, cols, kBlockN);
            multiply<SecondColTile>(tangents(dp), row_tile(c, 3), cols, 0, Traits::kMovingCols);
        }
        wgmma_commit();
    }
    // Computes the rounded weights of a tile from its products: dS and tdS, or P and tP.
    __device__ __forceinline__ void weigh(const State& c, int tile, Pair& s, const Numbers& ts, Pair& dp, uint32_t statistics,
                                          Fragments& w, Fragments& tw) const {
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i) tangents(s)[i] += ts[i];
        weights.exponentiate(numbers(s), tangents(s), c.statistics, statistics);
        if (tiles_of(c).is_edge(tile)) weights.mask_edge(numbers(s), work_tile(c).tiles, first_row_of_lane(c), c.lane, tile);
        uint32_t unused[4];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if constexpr (kDifferences) {
                weights.template differentiate<false>(step, numbers(s), tangents(s), numbers(dp), tangents(dp), c.statistics,
                                                      statistics, w[step], tw[step], unused, unused);
            } else {
                weights.round_probabilities(step, numbers(s), tangents(s), w[step], tw[step]);
            }
        }
    }
    // Issues the products that add a tile to the sums, one wgmma group.
    __device__ __forceinline__ void issue_sums(State& c, const Fragments& w, const Fragments& tw) const {
        if constexpr (kDifferences) {
            const uint32_t cols = first_cols(c);
            add<ColTile>(c.sums, tw, cols, 0);
            add<ColTile>(c.sums, w, cols, kBlockN);
        } else {
            const uint32_t cols = second_cols(c);
            add<SecondColTile>(c.sums, tw, cols, 0);
            if constexpr (Traits::kMovingCols) add<SecondColTile>(c.sums, w, cols, kBlockN);
        }
        wgmma_commit();
    }
    template <class Tile>
    __device__ static __forceinline__ void add(float (&sums)[kSums], const Fragments& weights, uint32_t cols, int first) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            Wgmma<T, kHeadDim>::template multiply<true>(sums, weights[step], Tile::mn_major_operand(cols, first / 16 + step),
                                                        true);
    }

    // Adds the sums of the second warpgroup to those of the first one, through the shared memory of the first two tensors of the
    // rows, which are no longer read.
    __device__ __forceinline__ void merge(State& c) const {
        static_assert(2 * RowTile::kBytes >= kSums * 128 * static_cast<int>(sizeof(float)), "the sums fit there");
        const uint32_t memory = context.tiles.rows(0, 0) + threadIdx.x % 128 * 16;
        const ExchangeBarrier barrier{kMergeBarrier, 256, {shared_address(&context.storage.merge)}};
        barrier.arrive_and_wait(0);
        if (c.group == 1) {
#pragma unroll
            for (int i = 0; i < kSums; i += 4)
                store_shared_16(memory + i / 4 * 2048, c.sums[i], c.sums[i + 1], c.sums[i + 2], c.sums[i + 3]);
        }
        barrier.arrive_and_wait(1);
        if (c.group == 0) {
#pragma unroll
            for (int i = 0; i < kSums; i += 4) {
                const float4 x = load_shared_16(memory + i / 4 * 2048);
                c.sums[i] += x.x, c.sums[i + 1] += x.y, c.sums[i + 2] += x.z, c.sums[i + 3] += x.w;
            }
        }
        fence_shared_for_async();  // before the rows of the next work tile are loaded there
    }
    __device__ __forceinline__ void release_rows(const State& c) const {
        __syncwarp();
        if (arrives_for_warp(c.lane)) c.row_tiles.empty().arrive();
    }
    __device__ __forceinline__ void store(const State& c) const {
        using Epilogue = BackwardTangentEpilogue<Traits>;
        const BackwardTangentParams& params = context.params;
        const int row = first_row_of_lane(c);
        if constexpr (kDifferences) {
            const float factor = undo_exponent_shift<T>() * params.softmax_scale;
            Epilogue::store(work_tile(c), kKeys ? params.tdk : params.tdq, params.head_dim, row, c.lane, c.sums, factor);
        } else {
            Epilogue::store(work_tile(c), params.tdv, params.head_dim_v, row, c.lane, c.sums, undo_exponent_shift<T>());
        }
    }
};

}  // namespace libflash::cuda::sm90
