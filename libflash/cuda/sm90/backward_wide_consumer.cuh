// The consumer warpgroups of the sm_90a backward kernels for wide heads. As in forward (forward_wide_consumer.cuh) both have the
// same 64 rows. Each has half of the channels of the sums, and computes the weights of every second tile of columns, which it
// writes to shared memory for the other one. For dv a warpgroup computes, for each of its own tiles:
//
//   S, a product with the streamed tensor,
//   the sums of the previous tile, whose weights the other warpgroup has written, while it computes P and writes it,
//   the sums of its own tile.
//
// dk and dq compute S from the added tensor, of which shared memory has room for one tile. So the sums of the previous tile come
// first; while the added tensor is loaded again, the tensor cores compute dP of the next tile. dP of one warpgroup also overlaps
// dS of the other one.
#pragma once

#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/uniform.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/backward_wide_weights.cuh"
#include "cuda/sm90/warp_roles.cuh"
#include "cuda/tile/quad.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardWideConsumer {
    using T = typename Traits::T;
    using Tile = typename Traits::Tile;
    using WeightTile = typename Traits::WeightTile;
    using Weights = BackwardWideWeights<Traits>;
    static constexpr int kPieces = Traits::kPieces, kSums = Traits::kPiece / 2, kSteps = 4;

    const BackwardWideContext<Traits>& context;

    struct State {
        int group, warp, lane;  // warp: of the warpgroup
        int head, tile;         // of the columns
        int stage;              // of the streamed tensor
        uint32_t phases;        // of its stages: a bit each
        Weights weights;
        typename Weights::Scores s, dp;
        typename Weights::Fragments w;
        float sums[kPieces][kSums];
    };

    __device__ __forceinline__ void run() const {
        const int warp = uniform_warp() - 4;
        State c{warp / 4, warp % 4, static_cast<int>(threadIdx.x & 31), work_tile().first_head, work_tile().tiles.begin, 0,
                0,        {context}};
#pragma unroll
        for (int i = 0; i < kPieces * kSums; ++i) c.sums[i / kSums][i % kSums] = 0.0f;
        fence_sums(c);  // the compiler must not move the zeros to the first products
        c.weights.load_row_statistics(first_row(c));
        if (work_tile().number_of_tiles > 0) add_up(c);
        if constexpr (Traits::kKeys) {
            const auto vector = [&](int n) -> float* { return c.sums[4 * n / kSums] + 4 * n % kSums; };
            const int thread = hide_from_compiler(static_cast<int>(threadIdx.x)) - 128;
            if (!typename Traits::Parts(context.params.part, static_cast<int>(blockIdx.x), Traits::kDifferences, thread)
                     .add_parts(vector))
                return;
        }
        store(c);
    }

private:
    __device__ __forceinline__ const BackwardWideWorkTile<Traits>& work_tile() const { return context.storage.work_tile; }
    // The lane's first row in its sequence. It is recomputed, so that it needs no register in the loop.
    __device__ __forceinline__ int first_row(const State& c) const {
        return work_tile().first_row() + 16 * c.warp + hide_from_compiler(c.lane) / 4;
    }

    __device__ __forceinline__ void add_up(State& c) const {
        const int tiles = work_tile().number_of_tiles;
        int number = c.group;
        if (c.group == 1) {
            skip_streamed(c);
            work_tile().advance(c.head, c.tile, 1);
        }
        context.storage.full_of_rows().wait(0);
        if constexpr (Traits::kDifferences) {
#pragma unroll 1
            for (; number < tiles; advance(c, number)) {
                multiply_streamed(c, c.dp);
                if (number > 0) add_tile_of_other(c, number - 1);
                multiply_added(c, number);
                weigh_and_publish(c, number);
                add_own_tile(c, number);
            }
        } else {
            if (number == 0) {
                multiply_streamed(c, c.s);
                weigh_and_publish(c, number);
                add_own_tile(c, number);
                advance(c, number);
            }
#pragma unroll 1
            for (; number < tiles; advance(c, number)) {
                multiply_streamed(c, c.s);
                begin_tile_of_other(c, number - 1);
                weigh_and_publish(c, number);
                finish_sums(c);
                add_own_tile(c, number);
            }
        }
        if (number == tiles) add_tile_of_other(c, number - 1);
    }
    // Skips the chunks of the streamed tensor that the other warpgroup reads.
    __device__ __forceinline__ void skip_streamed(State& c) const {
        c.stage = (c.stage + streamed_chunks<Traits>(context.params)) % Traits::kStreamStages;
    }
    // Moves on to the next tile of this warpgroup.
    __device__ __forceinline__ void advance(State& c, int& number) const {
        skip_streamed(c);
        work_tile().advance(c.head, c.tile, 2);
        number += 2;
    }

    // x = rows columns', of the streamed tensor, as soon as each chunk has arrived.
    __device__ __forceinline__ void multiply_streamed(State& c, typename Weights::Scores& x) const {
        const int chunks = streamed_chunks<Traits>(context.params);
        uint32_t rows = uniform(context.tiles.rows_of_streamed());
        int before = c.stage;
        multiply_stage(c, x, rows, false);
#pragma unroll 1
        for (int chunk = 1; chunk < chunks; ++chunk) {
            const int stage = c.stage;
            multiply_stage(c, x, rows += Tile::kChunkBytes, true);
            wgmma_wait<1>();
            release(c, context.storage.empty_of_streamed(before));
            before = stage;
        }
        wgmma_wait<0>();
        wgmma_fence_operand(x);
        release(c, context.storage.empty_of_streamed(before));
    }
    __device__ __forceinline__ void multiply_stage(State& c, typename Weights::Scores& x, uint32_t rows, bool accumulate) const {
        const int stage = static_cast<int>(uniform(static_cast<uint32_t>(c.stage)));
        context.storage.full_of_streamed(c.group, stage).wait(c.phases >> stage & 1);
        c.phases ^= 1u << stage;
        wgmma_fence();
        multiply_chunk(x, rows, uniform(context.tiles.streamed(0)) + stage * Tile::kChunkBytes, accumulate);
        c.stage = stage + 1 == Traits::kStreamStages ? 0 : stage + 1;
    }
    // s = rows columns', of the added tensor.
    __device__ __forceinline__ void multiply_added(State& c, int number) const {
        const int chunks = score_chunks(context.params);
        multiply_added_chunk(c, 0, number, false);
#pragma unroll 1
        for (int n = 1; n < Traits::kChunks; ++n)
            if (const int chunk = added_chunk<Traits>(n); chunk < chunks) multiply_added_chunk(c, chunk, number, true);
        wgmma_wait<0>();
        wgmma_fence_operand(c.s);
    }
    __device__ __forceinline__ void multiply_added_chunk(State& c, int chunk, int number, bool accumulate) const {
        context.storage.full_of_added(chunk).wait(static_cast<uint32_t>(number) & 1);
        const uint32_t rows = uniform(context.tiles.rows + chunk * Tile::kChunkBytes);
        wgmma_fence();
        multiply_chunk(c.s, rows, rows + (context.tiles.added() - context.tiles.rows), accumulate);
    }
    __device__ __forceinline__ static void multiply_chunk(typename Weights::Scores& x, uint32_t rows, uint32_t columns,
                                                          bool accumulate) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            Wgmma<T, 64>::template multiply_shared<false>(x, Tile::k_major_operand(rows, step),
                                                          Tile::k_major_operand(columns, step), accumulate || step > 0);
        wgmma_commit();
    }

    // Computes the weights of this warpgroup's tile in s, rounds them to w, and writes w to shared memory for the other
    // warpgroup. The buffer is free: see kWeightBuffers.
    __device__ __forceinline__ void weigh_and_publish(State& c, int number) const {
        uint32_t statistics = 0;
        if constexpr (Traits::kKeys) {
            statistics = shared_address(&context.storage.statistics[c.group]) +
                         (c.lane & 3) * 2 * static_cast<int>(sizeof(SoftmaxStatistics));
            context.storage.full_of_statistics(c.group).wait(static_cast<uint32_t>(number / Traits::kGroups) & 1);
        }
        c.weights.weigh(c.s, c.dp, statistics);
        if constexpr (Traits::kKeys) {
            __syncwarp();  // all lanes have read the statistics
            release(c, context.storage.empty_of_statistics(c.group));
        }
        if (work_tile().tiles.is_edge(c.tile)) c.weights.hide(c.s, first_row(c), c.tile * 64 + (c.lane & 3) * 2);
        Weights::round(c.s, c.w);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            WeightTile::store_fragment(context.tiles.weights(number % Traits::kWeightBuffers), 16 * c.warp, 2 * step, c.lane,
                                       c.w[step]);
        fence_shared_for_async();
        __syncwarp();
        context.storage.exchanges.p_is_written(c.group).arrive();
    }

    // Adds the previous tile, whose weights the other warpgroup computes.
    __device__ __forceinline__ void add_tile_of_other(State& c, int number) const {
        begin_tile_of_other(c, number);
        finish_sums(c);
    }
    __device__ __forceinline__ void begin_tile_of_other(State& c, int number) const {
        context.storage.exchanges.p_is_written(1 - c.group).wait(number / Traits::kGroups);
        const uint32_t weights = uniform(context.tiles.weights(number % Traits::kWeightBuffers)),
                       added = receive(c, number, work_tile().before(c.tile));
        wgmma_fence();
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
                Wgmma<T, Traits::kPiece>::template multiply_shared<true>(
                    c.sums[piece], WeightTile::k_major_operand(weights, step), operand(added, piece, step), true);
            wgmma_commit();
        }
    }
    __device__ __forceinline__ void add_own_tile(State& c, int number) const {
        const uint32_t added = receive(c, number, c.tile);
        wgmma_fence();
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
                Wgmma<T, Traits::kPiece>::template multiply<true>(c.sums[piece], c.w[step], operand(added, piece, step), true);
            wgmma_commit();
        }
        finish_sums(c);
    }
    // Waits for the sums, and releases the added tensor piece by piece.
    __device__ __forceinline__ void finish_sums(State& c) const {
        wgmma_wait<1>();
        release(c, context.storage.empty_of_added(c.group * kPieces));
        wgmma_wait<0>();
        release(c, context.storage.empty_of_added(c.group * kPieces + 1));
        fence_sums(c);
    }
    __device__ __forceinline__ static void fence_sums(State& c) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) wgmma_fence_operand(c.sums[piece]);
    }
    // Waits for this warpgroup's channels of the added tensor. Returns their address.
    __device__ __forceinline__ uint32_t receive(const State& c, int number, int tile) const {
        constexpr int kOwnChunks = kPieces * Traits::kPieceChunks;
        const uint32_t parity = static_cast<uint32_t>(number) & 1;
#pragma unroll
        for (int chunk = 0; chunk < kOwnChunks; ++chunk) context.storage.full_of_added(c.group * kOwnChunks + chunk).wait(parity);
        if (context.maps.zero_fill) zero_columns(c, tile);
        return uniform(context.tiles.added() + c.group * kPieces * Traits::kPieceBytes);
    }
    // Zeroes columns after the last one, because they may be NaN or infinity and products multiply them by 0.
    __device__ __forceinline__ void zero_columns(const State& c, int tile) const {
        constexpr int kVectors = Traits::kHalf / 8;
        const int count = work_tile().columns.length - tile * 64;
        if (count >= 64) return;
#pragma unroll 1
        for (int i = count * kVectors + 32 * c.warp + c.lane; i < 64 * kVectors; i += 128)
            store_zeros_16(context.tiles.added() + Tile::offset(i / kVectors, c.group * kVectors + i % kVectors));
        fence_shared_for_async();
        __syncwarp();
        named_barrier_wait(kGroupBarrier + c.group, 128);
    }
    // The descriptor of sixteen columns of a piece of the added tensor.
    __device__ __forceinline__ static uint64_t operand(uint32_t added, int piece, int step) {
        return Tile::mn_major_operand(added + piece * Traits::kPieceBytes, step);
    }
    __device__ __forceinline__ static void release(const State& c, const MBarrier& empty) {
        if (arrives_for_warp(c.lane)) empty.arrive();
    }

    __device__ __forceinline__ void store(const State& c) const {
        const BackwardParams& params = context.params;
        const RowsParams& to = Traits::kGradient == WideGradient::dq ? params.dq : Traits::kDifferences ? params.dk : params.dv;
        const int channels = Traits::kDifferences ? params.head_dim : params.head_dim_v;
        const float factor = undo_exponent_shift<T>() * (Traits::kDifferences ? params.softmax_scale : 1.0f);
#pragma unroll
        for (int r = 0; r < 2; ++r) store_row(c, to, channels, factor, r);
    }
    // Writes sixteen bytes at a time: the four lanes of a row exchange their pairs. Rows beyond the used length become zeros.
    __device__ __forceinline__ void store_row(const State& c, const RowsParams& to, int channels, float factor, int r) const {
        const auto& work = work_tile();
        const int row = first_row(c) + 8 * r;
        const bool exists = row < work.rows.owned, used = row < work.rows.length;
        T* const out = static_cast<T*>(to.data) + work.at.batch * to.batch + work.at.head * to.head +
                       int64_t{work.rows.start + row} * to.row;
        constexpr int kBlocks = Traits::kPiece / 8;
#pragma unroll
        for (int n = 0; n < kPieces * kBlocks; n += 4) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* const pair = c.sums[n / kBlocks] + (n % kBlocks + i) * 4 + 2 * r;
                words[i] = used ? pack_pair(pair[0] * factor, pair[1] * factor, T()) : 0;
            }
            transpose_quad(words, c.lane);
            const int col = c.group * Traits::kHalf + (n + c.lane % 4) * 8;
            if (exists && col < channels)
                *reinterpret_cast<uint4*>(out + col) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
};

}  // namespace libflash::cuda::sm90
