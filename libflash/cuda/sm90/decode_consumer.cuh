// The consumer warpgroups of the sm_90a decode kernel. Both have the same 64 rows. Each has half of the channels of O and
// computes the scores of every second key tile. For each of its own tiles, a warpgroup
//
//   begins S = Q K^T with the channels that are loaded first,
//   adds P V of the tile before, whose P the other warpgroup has left in shared memory, and releases its channels of that tile,
//   finishes S, turns it into P,
//   leaves P in shared memory, and adds its own P V.
//
// The channels of K that are still missing are loaded into the memory that P V of an earlier tile releases. So this P V comes
// before the end of S: otherwise the loads of a tile would wait for all loads of the tile before. While a warpgroup waits or
// computes P, the tensor cores work for the other one. Both process the tiles in the same order, so that they have the same
// kept maxima.
#pragma once

#include "cuda/ptx/uniform.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/decode_results.cuh"
#include "cuda/sm90/decode_shared_storage.cuh"
#include "cuda/sm90/decode_softmax.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct DecodeConsumer {
    using T = typename Traits::T;
    using QTile = typename Traits::QTile;
    using KTile = typename Traits::KTile;
    using PTile = typename Traits::PTile;
    using Softmax = DecodeSoftmax<Traits>;
    static constexpr int kBlockN = Traits::kBlockN, kPieces = Traits::kPieces, kSums = Traits::kPiece / 2;

    const DecodeContext<Traits>& context;

    struct State {
        int group, warp, lane;  // warp: of the warpgroup
        typename Softmax::Scores s;
        typename Softmax::Fragments p;
        float o[kPieces][kSums];
        Softmax softmax;
    };

    __device__ __forceinline__ void run() const {
        const int warp = uniform_warp() - 4;
        State c{warp / 4, warp % 4, static_cast<int>(threadIdx.x & 31)};
        load_queries(warp, c.lane);
        c.softmax.clear();
#pragma unroll
        for (int i = 0; i < kPieces * kSums; ++i) c.o[i / kSums][i % kSums] = 0.0f;
        const int tiles = work_tile().tiles;
        int tile = c.group;
        if (tile == 0) {
            begin_scores(c, tile);
            finish_scores(c, tile);
            compute_probabilities(c, tile);
            add_own_values(c, tile, false);
            tile += 2;
        }
#pragma unroll 1
        for (; tile < tiles; tile += 2) {
            begin_scores(c, tile);
            add_values_of_other(c, tile - 1);
            finish_scores(c, tile);
            const bool raised = compute_probabilities(c, tile);
            add_own_values(c, tile, raised);
        }
        if (tile == tiles) add_values_of_other(c, tile - 1);
        DecodeResults<Traits>{context, c.group, c.warp, c.lane}.finish(c.softmax, c.o);
    }

private:
    __device__ __forceinline__ const DecodeWorkTile& work_tile() const { return context.storage.work_tile; }
    __device__ __forceinline__ static uint32_t parity_of(int tile) { return static_cast<uint32_t>(tile / Traits::kStages) & 1; }

    // Copies the rows of the tile. Rows that do not exist become zeros.
    __device__ __forceinline__ void load_queries(int warp, int lane) const {
        const DecodeParams& params = context.params;
        const RaggedWorkTile& rows = work_tile().rows;
        constexpr int kVectors = Traits::kHeadDim / 8;
#pragma unroll 1
        for (int row = warp; row < Traits::kBlockM; row += Traits::kConsumers / 32) {
            const bool exists = row < rows.rows;
            const int packed = rows.first_row + (exists ? row : 0), query = divide(packed, params.by_group);
            const int head = rows.head_k * params.group_size + packed - query * params.group_size;
            const T* const from = static_cast<const T*>(params.q.data) + rows.batch * params.q.batch +
                                  (rows.sequence.start + query) * params.q.row + head * params.q.head;
#pragma unroll
            for (int vector = lane; vector < (kVectors + 31) / 32 * 32; vector += 32)
                if (vector < kVectors) cp_async_16(context.tiles.q + QTile::offset(row, vector), from + vector * 8, exists);
        }
        cp_async_commit();
        cp_async_wait<0>();
        fence_shared_for_async();
        __syncwarp();
        named_barrier_wait(kAllConsumers, Traits::kConsumers);
    }

    __device__ __forceinline__ void begin_scores(State& c, int tile) const { multiply<0, Traits::kEarlyChunks>(c, tile); }
    __device__ __forceinline__ void finish_scores(State& c, int tile) const {
        multiply<Traits::kEarlyChunks, Traits::kChunks>(c, tile);
        wgmma_wait<0>();
        wgmma_fence_operand(c.s);
        release(c, c.group, Traits::kValueParts);
    }
    // s = Q K^T, or more of its terms, as soon as each chunk of K has arrived.
    template <int kFrom, int kTo>
    __device__ __forceinline__ void multiply(State& c, int tile) const {
        constexpr int kChunkSteps = KTile::kChunkCols / 16;
        // Recomputed for each tile in uniform registers; otherwise the compiler would keep all descriptors in registers, which
        // are too few.
        const int group = static_cast<int>(uniform(static_cast<uint32_t>(c.group))), stage = group;
        const uint32_t q = uniform(context.tiles.q), k = q + (context.tiles.k(stage) - context.tiles.q), parity = parity_of(tile);
        wgmma_fence();
#pragma unroll
        for (int n = kFrom; n < kTo; ++n) {
            const int chunk = Traits::chunk_in_order(n, group);
            context.storage.full_of(stage, chunk).wait(parity);
            const uint32_t q_chunk = q + chunk * QTile::kChunkBytes, k_chunk = k + chunk * KTile::kChunkBytes;
#pragma unroll
            for (int step = 0; step < kChunkSteps; ++step)
                Wgmma<T, kBlockN>::template multiply_shared<false>(c.s, QTile::k_major_operand(q_chunk, step),
                                                                   KTile::k_major_operand(k_chunk, step), n + step > 0);
        }
        wgmma_commit();
    }

    // Computes P in c.s, and P in 16 bits in c.p. Returns whether a kept maximum was raised.
    __device__ __forceinline__ bool compute_probabilities(State& c, int tile) const {
        const int first_key = work_tile().begin + tile * kBlockN;
        if (work_tile().is_edge(first_key, kBlockN))
            Softmax::mask(c.s, context.storage.seen, 16 * c.warp + c.lane / 4, first_key + c.lane % 4 * 2);
        const uint32_t absent = context.storage.absent[c.group];
        if (absent) Softmax::hide_absent(c.s, absent);
        const bool raised = c.softmax.exponentiate(c.s, context.params.scale_log2);
        Softmax::round(c.s, c.p);
        return raised;
    }

    // o += P V for a tile whose P the other warpgroup has computed.
    __device__ __forceinline__ void add_values_of_other(State& c, int tile) const {
        const int stage = 1 - c.group;
        context.storage.exchanges.p_is_written(stage).wait(tile / Traits::kGroups);
        const float* const raised = context.storage.maximum + 16 * c.warp + c.lane / 4;
        if (c.softmax.take_maxima(raised[0], raised[8])) rescale(c);
        const uint32_t v = values(c, stage, parity_of(tile));
        wgmma_fence();
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
            for (int step = 0; step < kBlockN / 16; ++step)
                Wgmma<T, Traits::kPiece>::template multiply_shared<true>(
                    c.o[piece], PTile::k_major_operand(context.tiles.p(), step), operand(v, piece, step), true);
            wgmma_commit();
        }
        finish_values(c, stage);
    }
    // Waits for the products with V, and releases V piece by piece.
    __device__ __forceinline__ void finish_values(State& c, int stage) const {
        wgmma_wait<1>();
        release(c, stage, c.group * kPieces);
        wgmma_wait<0>();
        release(c, stage, c.group * kPieces + 1);
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) wgmma_fence_operand(c.o[piece]);
    }

    // Writes P to shared memory for the other warpgroup, and adds P V of this warpgroup's tile.
    __device__ __forceinline__ void add_own_values(State& c, int tile, bool raised) const {
        publish(c, tile);
        if (raised) rescale(c);
        const uint32_t v = values(c, c.group, parity_of(tile));
        wgmma_fence();
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
            for (int step = 0; step < kBlockN / 16; ++step)
                Wgmma<T, Traits::kPiece>::template multiply<true>(c.o[piece], c.p[step], operand(v, piece, step), true);
            wgmma_commit();
        }
        finish_values(c, c.group);
    }
    __device__ __forceinline__ void publish(State& c, int tile) const {
        named_barrier_wait(kGroupBarrier + c.group, 128);  // all warps of the group have read P of the previous tile
#pragma unroll
        for (int step = 0; step < kBlockN / 16; ++step)
            PTile::store_fragment(context.tiles.p(), 16 * c.warp, 2 * step, c.lane, c.p[step]);
        float* const maximum = context.storage.maximum + 16 * c.warp + c.lane / 4;
        if (c.lane % 4 == 0) maximum[0] = c.softmax.kept_maximum[0], maximum[8] = c.softmax.kept_maximum[1];
        const bool zeroed = zero_values(c, tile);
        fence_shared_for_async();
        __syncwarp();
        if (zeroed) named_barrier_wait(kGroupBarrier + c.group, 128);
        context.storage.exchanges.p_is_written(c.group).arrive();
    }

    // Zeroes values of keys outside the split, because they may be NaN or infinity and products multiply them by 0. Returns
    // whether there are any.
    __device__ __forceinline__ bool zero_values(const State& c, int tile) const {
        const int first_key = work_tile().begin + tile * kBlockN;
        const int before = work_tile().first - first_key, count = work_tile().last - first_key;
        if (before <= 0 && count >= kBlockN) return false;
        constexpr int kVectors = Traits::kHeadDimV / 8;
#pragma unroll 1
        for (int i = 32 * c.warp + c.lane; i < kBlockN * kVectors; i += 128) {
            const int row = i / kVectors;
            if (row < before || row >= count) store_zeros_16(context.tiles.k(c.group) + KTile::offset(row, i % kVectors));
        }
        return true;
    }

    // Waits for this warpgroup's channels of V. Returns their address.
    __device__ __forceinline__ uint32_t values(const State& c, int stage, uint32_t parity) const {
        const int first = c.group * Traits::kGroupChunks;
#pragma unroll
        for (int chunk = 0; chunk < Traits::kGroupChunks; ++chunk) context.storage.full_of(stage, first + chunk).wait(parity);
        return address_in_block(context.tiles.k(stage)) + first * KTile::kChunkBytes;
    }
    // The descriptor of sixteen keys of a piece of V at address `v`.
    __device__ __forceinline__ static uint64_t operand(uint32_t v, int piece, int step) {
        return KTile::mn_major_operand(v + piece * Traits::kPartChunks * KTile::kChunkBytes, step);
    }
    __device__ __forceinline__ void release(const State& c, int stage, int part) const {
        const MBarrier empty = context.storage.empty_of(stage, part);
        if (arrives_for_warp(c.lane)) empty.arrive();
        const DecodePair<Traits> pair(context.params);
        if (c.lane == 1 && !pair.loads(stage, part)) empty.arrive_in_cluster(static_cast<uint32_t>(pair.other()));
    }
    __device__ __forceinline__ void rescale(State& c) const {
#pragma unroll
        for (int i = 0; i < kPieces * kSums; ++i) c.o[i / kSums][i % kSums] *= c.softmax.factor[i / 2 % 2];
    }
};

}  // namespace libflash::cuda::sm90
