// The consumer warpgroups of the sm_90a forward_tangent kernel for more than 128 channels, 64 query rows each. For each tile a
// warpgroup does one thing after the other:
//
//   s = Q K^T and ts = tQ K^T + Q tK^T,    p = exp(s - LSE) and p (ts - pivot),    to += P (ts - pivot) V + P tV
//
// The warpgroups take turns to compute scores, so while one of them computes weights, the tensor cores work for the other one.
#pragma once

#include "cuda/attention/edge_mask.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/uniform.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward_tangent_rows.cuh"
#include "cuda/sm90/forward_tangent_softmax.cuh"
#include "cuda/sm90/forward_tangent_wide_storage.cuh"
#include "cuda/sm90/warp_roles.cuh"
#include "cuda/sm90/zero_rows.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardTangentWideConsumer {
    using T = typename Traits::T;
    using Storage = ForwardTangentWideStorage<Traits>;
    using WorkTile = ForwardTangentWorkTile<Traits>;
    using QTile = typename Traits::QTile;
    using UnitTile = typename Traits::UnitTile;
    static constexpr int kBlockN = Traits::kBlockN, kSteps = kBlockN / 16, kSums = Traits::kHeadDimV / 2;
    static constexpr int kUnitSums = UnitTile::kChunkCols / 2, kValueUnits = Traits::kValueUnits;
    static constexpr int kGroupBarrier = 1, kTurnBarrier = 3;  // named barriers, one for each warpgroup
    using Scores = float[kBlockN / 2];
    using Fragments = uint32_t[kSteps][4];
    using Units = PipelineState<Traits::kUnits>;

    const ForwardTangentWideContext<Traits>& context;

    // State of a consumer warp.
    struct State {
        int group, lane;
        Units units;
        PipelineState<1> q;
        int slot;  // of the work tile
        float to[kSums];
        TangentSoftmax<kBlockN, false, Traits::kHalf> softmax;
    };

    __device__ __forceinline__ void run() const {
        const int group = uniform_warp() / 4 - 1, lane = static_cast<int>(threadIdx.x & 31);
        State c{group, lane, Units(context.storage.units), PipelineState<1>(context.storage.q[group])};
        c.slot = 0;
        if (c.group == 1) pass_turn(c);
#pragma unroll 1
        while (true) {
            c.q.wait_full();
            if (work_tile(c).is_end()) break;
            compute_work_tile(c);
            c.slot = Storage::next_slot(c.slot);
        }
        if (c.group == 0) take_turn(c);  // the last one that the other warpgroup has passed on
    }

private:
    __device__ __forceinline__ const WorkTile& work_tile(const State& c) const { return context.storage.work_tiles[c.slot]; }
    __device__ __forceinline__ const GroupKeyTiles& key_tiles(const State& c) const { return work_tile(c).of_group[c.group]; }
    __device__ __forceinline__ ForwardTangentRows<Traits> rows_of(const State& c) const {
        return {context.params, work_tile(c), hide_from_compiler(static_cast<int>(threadIdx.x)) - 128, c.lane};
    }
    // A warpgroup waits at its own barrier for its turn; the other one arrives there to pass the turn on. Each warpgroup takes
    // and passes on one turn for each tile, also for a tile that it skips. Warpgroup 0 has the first turn.
    __device__ __forceinline__ static void take_turn(const State& c) { named_barrier_wait(kTurnBarrier + c.group, 256); }
    __device__ __forceinline__ static void pass_turn(const State& c) { named_barrier_arrive(kTurnBarrier + 1 - c.group, 256); }

    __device__ __forceinline__ void compute_work_tile(State& c) const {
        c.softmax.clear();
        rows_of(c).keep_lse(c.softmax);
        rows_of(c).prefetch_out();
#pragma unroll
        for (float& sum : c.to) sum = 0.0f;
        if (key_tiles(c).begin == key_tiles(c).end) release_q(c);
#pragma unroll 1
        for (int tile = work_tile(c).keys.end - 1; tile >= work_tile(c).keys.begin; --tile) {
            if (tile >= key_tiles(c).begin && tile < key_tiles(c).end) {
                compute_tile(c, tile);
            } else {
                skip_tile(c);
            }
        }
        float none[1];
        rows_of(c).finish(c.softmax, none, c.to);
    }
    __device__ __forceinline__ void compute_tile(State& c, int tile) const {
        Scores s, ts;  // then P and P (ts - pivot)
        Fragments p, tp;
        take_turn(c);
        compute_scores(c, s, ts);
        if (tile == key_tiles(c).begin) release_q(c);
        compute_weights(c, tile, s, ts);
        round(s, p);
        round(ts, tp);
        zero_values_beyond_sequence(c, tile);
        add_values(c, p, tp);
    }
    // Releases units only when they are full, because an earlier arrival could count for the previous phase, and when all lanes
    // have seen that.
    __device__ __forceinline__ void skip_tile(State& c) const {
        take_turn(c);
        pass_turn(c);
#pragma unroll 1
        for (int left = key_units<Traits>(context.params) + kValueUnits; left > 0; --left) {
            c.units.wait_full();
            __syncwarp();
            release_unit(c, c.units.stage);
            c.units.advance();
        }
    }

    // s and ts, unit by unit. A unit is released when the products with it are complete.
    __device__ __forceinline__ void compute_scores(State& c, Scores& s, Scores& ts) const {
        uint32_t q = uniform(context.tiles.q(c.group));
        multiply_unit(c, q, s, ts, false);
#pragma unroll 1
        for (int left = key_units<Traits>(context.params) - 1; left > 0; --left) {
            const int previous = c.units.stage;
            c.units.advance();
            q += QTile::kChunkBytes;
            multiply_unit(c, q, s, ts, true);
            wgmma_wait<1>();
            release_unit(c, previous);
        }
        pass_turn(c);
        wgmma_wait<0>();
        wgmma_fence_operand(s);
        wgmma_fence_operand(ts);
        release_unit(c, c.units.stage);
        c.units.advance();
    }
    __device__ __forceinline__ void multiply_unit(const State& c, uint32_t q, Scores& s, Scores& ts, bool accumulate) const {
        c.units.wait_full();
        wgmma_fence();
        multiply(s, ts, q, uniform(context.tiles.unit(c.units.stage)), accumulate);
    }
    // Issues s += Q K^T and ts += tQ K^T + Q tK^T of 64 channels, one wgmma group.
    __device__ __forceinline__ static void multiply(Scores& s, Scores& ts, uint32_t q, uint32_t k, bool accumulate) {
        using Product = Wgmma<T, kBlockN>;
        const uint32_t tq = q + QTile::kBytes, tk = k + ForwardTangentWideTiles<Traits>::kTangents;
#pragma unroll
        for (int step = 0; step < UnitTile::kChunkCols / 16; ++step) {
            const uint64_t rows = QTile::k_major_operand(q, step), keys = UnitTile::k_major_operand(k, step);
            Product::template multiply_shared<false>(s, rows, keys, accumulate || step > 0);
            Product::template multiply_shared<false>(ts, rows, UnitTile::k_major_operand(tk, step), accumulate || step > 0);
            Product::template multiply_shared<false>(ts, QTile::k_major_operand(tq, step), keys, true);
        }
        wgmma_commit();
    }

    // From complete scores and their tangents to P and P (ts - pivot).
    __device__ __forceinline__ void compute_weights(State& c, int tile, Scores& s, Scores& ts) const {
        float factor[2];
        const bool edge = tile < key_tiles(c).unmasked_begin || tile >= key_tiles(c).unmasked_end;
        if (edge) mask(c, tile, s);
        c.softmax.exponentiate(s, context.params.scale_log2, factor);
        if (!c.softmax.multiply_tangents(s, ts, context.params.softmax_scale, edge, factor)) return;
#pragma unroll
        for (int i = 0; i < kSums; ++i) c.to[i] *= factor[i / 2 % 2];
    }
    __device__ __forceinline__ void mask(const State& c, int tile, Scores& s) const {
        const int first_col = tile * kBlockN + (hide_from_compiler(c.lane) & 3) * 2;
        mask_edge(work_tile(c).keys, first_col, [&](const auto& for_row) {
            for_accumulator_rows(s, [&](int, int r, const auto& for_scores) { for_row(rows_of(c).row(r), for_scores); });
        });
    }
    __device__ __forceinline__ static void round(const Scores& weights, Fragments& rounded) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = 8 * step + 2 * i;
                rounded[step][i] = pack_pair(weights[at], weights[at + 1], T());
            }
    }

    // Where only the device knows the lengths, rows of V and tV beyond a sequence hold data of others, possibly NaN or infinity,
    // and products would multiply these by 0. Each warpgroup zeroes them, so none waits for another.
    __device__ __forceinline__ void zero_values_beyond_sequence(const State& c, int tile) const {
        const int count = work_tile(c).keys.length_k - tile * kBlockN;
        if (count >= kBlockN || !(context.params.k_lengths.cu || context.params.k_lengths.used)) return;
        Units units = c.units;
#pragma unroll 1
        for (int unit = 0; unit < kValueUnits; ++unit) {
            units.wait_full();
            zero_rows<UnitTile>(context.tiles.unit(units.stage), count, kBlockN);
            zero_rows<UnitTile>(context.tiles.unit(units.stage) + context.tiles.kTangents, count, kBlockN);
            units.advance();
        }
        fence_shared_for_async();
        __syncwarp();
        named_barrier_wait(kGroupBarrier + c.group, 128);
    }
    // to += P (ts - pivot) V + P tV, unit by unit.
    __device__ __forceinline__ void add_values(State& c, const Fragments& p, const Fragments& tp) const {
        int last = 0;
#pragma unroll
        for (int unit = 0; unit < kValueUnits; ++unit) {
            c.units.wait_full();
            const uint32_t v = uniform(context.tiles.unit(c.units.stage)), tv = v + context.tiles.kTangents;
            wgmma_fence();
            auto& sums = reinterpret_cast<float (&)[kUnitSums]>(c.to[unit * kUnitSums]);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                using Product = Wgmma<T, UnitTile::kChunkCols>;
                Product::template multiply<true>(sums, tp[step], UnitTile::mn_major_operand(v, step), true);
                Product::template multiply<true>(sums, p[step], UnitTile::mn_major_operand(tv, step), true);
            }
            wgmma_commit();
            if (unit > 0) {
                wgmma_wait<1>();
                release_unit(c, last);
            }
            last = c.units.stage;
            c.units.advance();
        }
        wgmma_wait<0>();
        wgmma_fence_operand(c.to);
        release_unit(c, last);
    }

    __device__ __forceinline__ static void release_unit(const State& c, int stage) {
        if (arrives_for_warp(c.lane)) c.units.empty_of(stage).arrive();
    }
    __device__ __forceinline__ static void release_q(State& c) {
        __syncwarp();  // all lanes have written the rows of the previous work tile
        if (arrives_for_warp(c.lane)) c.q.empty().arrive();
        c.q.advance();
    }
};

}  // namespace libflash::cuda::sm90
