// The consumer warpgroups of the sm_90a forward kernel for wide heads. As in decode (decode_consumer.cuh) both have the same 64
// query rows; each has half of the channels of O and computes the scores of every second key tile. For each of its own tiles, a
// warpgroup
//
//   computes S = Q K^T,
//   adds P V of the previous tile, whose P the other warpgroup has written to shared memory, while it computes P from S
//   and writes P to shared memory,
//   adds P V of its own tile.
//
// While a warpgroup waits or computes P, the tensor cores work for the other one. Both process the tiles in the same order, so
// that they have the same kept maxima.
#pragma once

#include "cuda/attention/long_sums.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/ptx/uniform.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward_wide_epilogue.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardWideConsumer {
    using T = typename Traits::T;
    using QTile = typename Traits::QTile;
    using KTile = typename Traits::KTile;
    using VTile = typename Traits::VTile;
    using PTile = typename Traits::PTile;
    using Softmax = ForwardWideSoftmax<Traits>;
    static constexpr int kBlockN = Traits::kBlockN, kPieces = Traits::kPieces, kSums = Traits::kPiece / 2;

    const ForwardWideContext<Traits>& context;

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
        c.softmax.clear();
#pragma unroll
        for (int i = 0; i < kPieces * kSums; ++i) c.o[i / kSums][i % kSums] = 0.0f;
        if (has_long_sums()) long_sums().clear();
        if (work_tile().tiles() > 0) add_up(c);
        if (has_long_sums()) add_long_sums(c);
        ForwardWideEpilogue<Traits>{context, c.group, c.warp, c.lane}.finish(c.softmax, c.o);
    }

private:
    __device__ __forceinline__ const ForwardWideWorkTile<Traits>& work_tile() const { return context.storage.work_tile; }

    __device__ __forceinline__ void add_up(State& c) const {
        const int tiles = work_tile().tiles();
        int number = c.group, pairs_left = kPairsPerSum;
        context.storage.full_of_q().wait(0);
        if (number == 0) {
            compute_scores(c, number);
            compute_probabilities(c, number);
            publish(c, number);
            add_own_values(c, number, false);
            number += 2;
        }
#pragma unroll 1
        for (; number < tiles; number += 2) {
            compute_scores(c, number);
            begin_values_of_other(c, number - 1);
            const bool raised = compute_probabilities(c, number);
            publish(c, number);
            c.softmax.finish_before_wait();
            finish_values(c);
            add_own_values(c, number, raised);
            if (__builtin_expect(--pairs_left == 0 && has_long_sums(), false)) {
                pairs_left = kPairsPerSum;
                long_sums().take(0, blocks_of_sums(c), c.softmax.sum, c.softmax.kept_maximum);
            }
        }
        if (number == tiles) {
            begin_values_of_other(c, number - 1);
            finish_values(c);
        }
    }

    static constexpr int kTilesPerSum = tiles_per_sum(kBlockN), kPairsPerSum = kTilesPerSum > 1 ? kTilesPerSum / 2 : 1;
    __device__ __forceinline__ bool has_long_sums() const { return context.params.long_sums != nullptr; }
    __device__ __forceinline__ LongSums<Traits::kConsumers, 1, Traits::kHalf / 8> long_sums() const {
        return {context.params.long_sums, hide_from_compiler(static_cast<int>(threadIdx.x)) - 128};
    }
    __device__ __forceinline__ static auto blocks_of_sums(State& c) {
        return [&c](int n) -> float* { return c.o[4 * n / kSums] + 4 * n % kSums; };
    }
    __device__ __forceinline__ void add_long_sums(State& c) const {
        long_sums().finish(0, c.softmax.sum, c.softmax.kept_maximum);
        if (long_sums().has_finished(0)) long_sums().add(0, blocks_of_sums(c));
    }

    // s = Q K^T, as soon as each chunk of K has arrived. A chunk is released when the products with it are complete, so that the
    // next tile follows it.
    __device__ __forceinline__ void compute_scores(State& c, int number) const {
        const int group = static_cast<int>(uniform(static_cast<uint32_t>(c.group))), chunks = used_chunks<Traits>(context.params);
        const uint32_t parity = static_cast<uint32_t>(number / Traits::kGroups) & 1;
        const uint32_t q = uniform(context.tiles.q), k = q + (context.tiles.k() - context.tiles.q);
        context.storage.full_of_k(group, 0).wait(parity);
        wgmma_fence();
        multiply_chunk(c, q, k, false);
#pragma unroll 1
        for (int chunk = 1; chunk < chunks; ++chunk) {
            context.storage.full_of_k(group, chunk).wait(parity);
            wgmma_fence();
            multiply_chunk(c, q + chunk * QTile::kChunkBytes, k + chunk * KTile::kChunkBytes, true);
            wgmma_wait<1>();
            release(c, context.storage.empty_of_k(chunk - 1));
        }
        wgmma_wait<0>();
        wgmma_fence_operand(c.s);
        release(c, context.storage.empty_of_k(chunks - 1));
    }
    __device__ __forceinline__ static void multiply_chunk(State& c, uint32_t q, uint32_t k, bool accumulate) {
#pragma unroll
        for (int step = 0; step < KTile::kChunkCols / 16; ++step)
            Wgmma<T, kBlockN>::template multiply_shared<false>(c.s, QTile::k_major_operand(q, step),
                                                               KTile::k_major_operand(k, step), accumulate || step > 0);
        wgmma_commit();
    }

    // Computes P in c.s, and P in 16 bits in c.p. Returns whether a kept maximum was raised.
    __device__ __forceinline__ bool compute_probabilities(State& c, int number) const {
        scale_scores(c);
        if (work_tile().is_edge(number)) mask(c, work_tile().first_key_of(number));
        const bool raised = c.softmax.exponentiate(c.s);
        Softmax::round(c.s, c.p);
        return raised;
    }
    // Converts dot products to scores in base-2 units.
    __device__ __forceinline__ void scale_scores(State& c) const {
        const struct {
            float softcap, softmax_scale, scale_log2;
        } scale{context.params.rare.softcap, context.params.softmax_scale, context.params.scale_log2};
        scale_and_cap_log2(scale, [&](const auto& rule) {
#pragma unroll
            for (float& score : c.s) rule(score, 0, 0);
        });
    }
    __device__ __forceinline__ void mask(State& c, int first_key) const {
        const int first_row = work_tile().keys.first_row + 16 * c.warp + c.lane / 4;
        mask_edge(work_tile().keys, first_key + c.lane % 4 * 2, [&](const auto& for_row) {
            for_accumulator_rows(c.s, [&](int, int r, const auto& for_scores) { for_row(first_row + 8 * r, for_scores); });
        });
    }

    // Issues o += P V for a tile whose P the other warpgroup has computed.
    __device__ __forceinline__ void begin_values_of_other(State& c, int number) const {
        context.storage.exchanges.p_is_written(1 - c.group).wait(number / Traits::kGroups);
        const int buffer = number % Traits::kPBuffers;
        const float* const raised = context.storage.maximum[buffer] + 16 * c.warp + c.lane / 4;
        if (c.softmax.take_maxima(raised[0], raised[8])) rescale(c);
        const uint32_t v = values(c, number);
        wgmma_fence();
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
            for (int step = 0; step < kBlockN / 16; ++step)
                Wgmma<T, Traits::kPiece>::template multiply_shared<true>(
                    c.o[piece], PTile::k_major_operand(context.tiles.p(buffer), step), operand(v, piece, step), true);
            wgmma_commit();
        }
    }
    // Waits for the products with V, and releases V piece by piece.
    __device__ __forceinline__ void finish_values(State& c) const {
        wgmma_wait<1>();
        release(c, context.storage.empty_of_v(c.group * kPieces));
        wgmma_wait<0>();
        release(c, context.storage.empty_of_v(c.group * kPieces + 1));
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) wgmma_fence_operand(c.o[piece]);
    }

    // Adds P V of this warpgroup's tile.
    __device__ __forceinline__ void add_own_values(State& c, int number, bool raised) const {
        if (raised) rescale(c);
        const uint32_t v = values(c, number);
        wgmma_fence();
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
            for (int step = 0; step < kBlockN / 16; ++step)
                Wgmma<T, Traits::kPiece>::template multiply<true>(c.o[piece], c.p[step], operand(v, piece, step), true);
            wgmma_commit();
        }
        finish_values(c);
    }
    // Writes P to shared memory for the other warpgroup. The buffer is free: this warpgroup itself was the last to read it, and
    // since then all its warps have waited together for P of the previous tile.
    __device__ __forceinline__ void publish(const State& c, int number) const {
        const int buffer = number % Traits::kPBuffers;
#pragma unroll
        for (int step = 0; step < kBlockN / 16; ++step)
            PTile::store_fragment(context.tiles.p(buffer), 16 * c.warp, 2 * step, c.lane, c.p[step]);
        float* const maximum = context.storage.maximum[buffer] + 16 * c.warp + c.lane / 4;
        if (c.lane % 4 == 0) maximum[0] = c.softmax.kept_maximum[0], maximum[8] = c.softmax.kept_maximum[1];
        fence_shared_for_async();
        __syncwarp();
        context.storage.exchanges.p_is_written(c.group).arrive();
    }

    // Waits for this warpgroup's channels of V. Returns their address.
    __device__ __forceinline__ uint32_t values(const State& c, int number) const {
        const uint32_t parity = static_cast<uint32_t>(number) & 1;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) context.storage.full_of_v(c.group * kPieces + piece).wait(parity);
        const int count = work_tile().keys.length_k - work_tile().first_key_of(number);
        if (count < kBlockN && context.maps.zero_fill_values) zero_values(c, count);
        return context.tiles.v() + c.group * kPieces * Traits::kPieceBytes;
    }
    // Values of keys after the last one may be NaN or infinity, and products multiply these by 0.
    __device__ __forceinline__ void zero_values(const State& c, int count) const {
        constexpr int kVectors = Traits::kHalf / 8;
#pragma unroll 1
        for (int i = count * kVectors + 32 * c.warp + c.lane; i < kBlockN * kVectors; i += 128)
            store_zeros_16(context.tiles.v() + VTile::offset(i / kVectors, c.group * kVectors + i % kVectors));
        fence_shared_for_async();
        __syncwarp();
        wait_for_group(c);
    }
    // The descriptor of sixteen keys of a piece of V at address `v`.
    __device__ __forceinline__ static uint64_t operand(uint32_t v, int piece, int step) {
        return VTile::mn_major_operand(v + piece * Traits::kPieceBytes, step);
    }
    __device__ __forceinline__ static void wait_for_group(const State& c) { named_barrier_wait(kGroupBarrier + c.group, 128); }
    __device__ __forceinline__ static void release(const State& c, const MBarrier& empty) {
        if (arrives_for_warp(c.lane)) empty.arrive();
    }
    __device__ __forceinline__ void rescale(State& c) const {
#pragma unroll
        for (int i = 0; i < kPieces * kSums; ++i) c.o[i / kSums][i % kSums] *= c.softmax.factor[i / 2 % 2];
    }
};

}  // namespace libflash::cuda::sm90
