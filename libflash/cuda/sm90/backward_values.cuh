// The consumer warpgroup of backward_divided.cuh that computes P and dV.
#pragma once

#include "cuda/sm90/backward_divided_options.cuh"
#include "cuda/sm90/backward_divided_state.cuh"
#include "cuda/sm90/backward_epilogue.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardValuesWarpgroup {
    using T = typename Traits::T;
    using Products = BackwardProducts<Traits>;
    using Tiles = BackwardSharedTiles<Traits>;
    using State = BackwardDividedState<Traits>;
    using Position = typename State::Position;
    using Scores = typename BackwardScores<Traits>::Scores;
    using Fragments = typename BackwardScores<Traits>::Fragments;
    using Bits = typename BackwardDividedOptions<Traits>::Bits;

    BackwardContext<Traits>& context;
    const BackwardWorkTiles<Traits> work_tiles{context};
    const BackwardQueryTiles<Traits> query_tiles{context};
    const BackwardScores<Traits> scores{context};
    const BackwardDividedOptions<Traits> options{context};
    const BackwardZeroFill<Traits> zero_fill{context};
    const BackwardEpilogue<Traits> epilogue{context};

    // `warp`: the number of the warp in the warpgroup.
    __device__ __forceinline__ void run(int warp, int lane) const {
        State c(context, warp, lane);
#pragma unroll 1
        while (work_tiles.wait()) {
            c.clear();
            work_tiles.wait_for_k();
            zero_fill.keys(context.k(), 0, Traits::kBlockN);
            const auto at = query_tiles.first();
            if (at.left > 0) loop_over_queries(c, at);
            work_tiles.release_k(lane);
            c.store_through_free_stage(epilogue, [&](uint32_t stage) {  // through Q's part
                epilogue.store_dv({context.tile(), c.first_key_again(), static_cast<int>(stage)}, lane, c.sums,
                                  undo_exponent_shift<T>() * Traits::kUndoProbabilityShift * keep_factor());
            });
            work_tiles.release();
        }
    }

private:
    __device__ __forceinline__ float keep_factor() const {
        return Traits::kRareOptions ? context.params.rare.dropout.keep_factor : 1.0f;
    }
    // dV of a tile and S of the next tile are issued together. The loop body begins after both are complete, so that no product
    // is in flight at the back edge: otherwise the compiler would serialise the products. dV is issued first because Q of the
    // next tile may not have arrived.
    __device__ __forceinline__ void loop_over_queries(State& c, Position at) const {
        Scores x;     // S, P
        Fragments p;  // P, rounded
        Bits bits{};
        c.wait_for_queries(zero_fill, at);
        issue_s(c, x);
        if constexpr (Traits::kRareOptions) bits = bits_of(c, at);
        wgmma_wait<0>();
        wgmma_fence_operand(x);
        int stage;
#pragma unroll 1
        while (true) {
            if constexpr (Traits::kRareOptions) {
                apply_options(c, x, p, at, bits);
            } else {
                const bool stage_is_empty = c.gradients.is_empty();
                exponentiate(c, x, at.tile);
                scores.round(p, x);
                if (!stage_is_empty) c.gradients.wait_empty();
                Products::store_ds(c.addresses, c.gradients.stage, p);
            }
            hand_over(c);
            stage = c.queries.stage;
            add_values(c, p);
            c.queries.advance();
            query_tiles.advance(at);
            if (at.left <= 0) break;
            c.wait_for_queries(zero_fill, at);
            issue_s(c, x);
            if constexpr (Traits::kRareOptions) bits = bits_of(c, at);
            wgmma_wait<1>();
            wgmma_fence_operand(c.sums);
            c.release_queries(stage);
            wgmma_wait<0>();
            wgmma_fence_operand(x);
        }
        wgmma_wait<0>();
        wgmma_fence_operand(c.sums);
        c.release_queries(stage);
    }
    __device__ __forceinline__ void issue_s(const State& c, Scores& s) const {
        Products::template issue_scores<Traits::kBlockM>(s, uniform(c.addresses.tiles), 0, c.q());
    }
    // dV += P^T dO.
    __device__ __forceinline__ void add_values(State& c, const Fragments& p) const {
        wgmma_fence();
        Products::add(c.sums, p, Tiles::dout_of(c.q()));
        wgmma_commit();
    }
    __device__ __forceinline__ void exponentiate(const State& c, Scores& s, int tile) const {
        scores.exponentiate(s, c.statistics());
        if (query_tiles.is_edge(tile)) scores.mask_edge(s, c.first_key, c.lane, tile);
    }
    __device__ __forceinline__ Bits bits_of(const State& c, const Position& at) const {
        const auto origin = options.origin(at, c.queries.stage, 0, c.first_key_again(), c.lane);
        return options.template bits<Traits::kBlockM>(origin, c.lane);
    }
    // Turns S into rounded P, and stores the weights for dS.
    __device__ __forceinline__ void apply_options(State& c, Scores& x, Fragments& p, const Position& at, Bits bits) const {
        using Chunk = typename BackwardDividedOptions<Traits>::Scores;
        constexpr int kChunk = Traits::kChunk, kSteps = kChunk / 16;
        const bool edge = query_tiles.is_edge(at.tile);
        c.gradients.wait_empty();
#pragma unroll
        for (int first = 0; first < Traits::kBlockM; first += kChunk) {
            const auto origin = options.origin(at, c.queries.stage, first, c.first_key_again(), c.lane);
            auto& chunk = reinterpret_cast<Chunk&>(x[first / 2]);
            Chunk weights;
            options.apply_to_values(chunk, weights, origin, bits, edge);
            uint32_t rounded[kSteps][4];
            scores.round(rounded, weights);
            Products::store_ds(c.addresses, c.gradients.stage, rounded, first);
            scores.round(reinterpret_cast<uint32_t (&)[kSteps][4]>(p[first / 16]), chunk);
            bits = {bits.keep >> kChunk / 2, bits.hidden >> kChunk / 2};
        }
    }
    // Tells the other consumer warpgroup that P, or the weights for dS, are stored.
    __device__ __forceinline__ void hand_over(State& c) const {
        __syncwarp();
        if (c.lane == 0) context.storage.probabilities(c.gradients.stage).arrive();
        c.gradients.advance();
    }
};

}  // namespace libflash::cuda::sm90
