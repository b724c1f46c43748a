// The consumer warpgroups of the sm_90a forward_tangent kernel, 64 query rows each. The products of a tile with V and tV overlap
// the softmax of the next tile:
//
//   s = Q K^T      ts = tQ K^T + Q tK^T      o += P V      to += P (ts - pivot) V + P tV
//
// From saved out and LSE there is no o.
#pragma once

#include "cuda/attention/edge_mask.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward_tangent_rows.cuh"
#include "cuda/sm90/forward_tangent_softmax.cuh"
#include "cuda/sm90/forward_tangent_storage.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardTangentConsumer {
    using T = typename Traits::T;
    using Storage = ForwardTangentStorage<Traits>;
    using WorkTile = ForwardTangentWorkTile<Traits>;
    using QTile = typename Traits::QTile;
    using KeysTile = typename Traits::KeysTile;
    using VTile = typename Traits::VTile;
    static constexpr bool kFused = Traits::kFused;
    static constexpr int kBlockN = Traits::kBlockN, kScores = kBlockN / 2, kSums = Traits::kHeadDimV / 2;
    static constexpr int kGroupBarrier = 1;  // the first of the named barriers, one for each warpgroup
    using Scores = float[kScores];
    using Fragments = uint32_t[kBlockN / 16][4];

    const ForwardTangentContext<Traits>& context;

    // State of a consumer warp.
    struct State {
        int group, lane;
        PipelineState<Traits::kStages> keys, v;
        PipelineState<1> q;
        int slot;                     // of the work tile
        Scores s, ts;                 // scores and their tangents, then P and P (ts - pivot)
        float o[kFused ? kSums : 1];  // accumulator of P V
        float to[kSums];              // accumulator of P (ts - pivot) V + P tV
        Fragments p, tp;              // P and P (ts - pivot), rounded
        TangentSoftmax<kBlockN, kFused, Traits::kHalf> softmax;
    };

    __device__ __forceinline__ void run() const {
        const int group = uniform_warp() / 4 - 1, lane = static_cast<int>(threadIdx.x & 31);
        State c{group, lane, PipelineState<Traits::kStages>(context.storage.keys),
                PipelineState<Traits::kStages>(context.storage.v), PipelineState<1>(context.storage.q)};
        c.slot = 0;
#pragma unroll 1
        while (true) {
            c.q.wait_full();
            if (context.storage.work_tiles[c.slot].is_end()) return;
            compute_work_tile(c);
            c.slot = Storage::next_slot(c.slot);
        }
    }

private:
    __device__ __forceinline__ const WorkTile& work_tile(const State& c) const { return context.storage.work_tiles[c.slot]; }
    __device__ __forceinline__ const GroupKeyTiles& key_tiles(const State& c) const { return work_tile(c).of_group[c.group]; }
    __device__ __forceinline__ ForwardTangentRows<Traits> rows_of(const State& c) const {
        return {context.params, work_tile(c), static_cast<int>(threadIdx.x) - 128, c.lane};
    }

    __device__ __forceinline__ void compute_work_tile(State& c) const {
        const int begin = key_tiles(c).begin, end = key_tiles(c).end;
        skip_stages(c, work_tile(c).keys.end - end);
        c.softmax.clear();
        if constexpr (!kFused) rows_of(c).keep_lse(c.softmax);
        if (begin < end) {
            compute_tiles(c, begin, end);
        } else {
            clear_sums(c);
            release_q(c);
        }
        skip_stages(c, begin - work_tile(c).keys.begin);
        rows_of(c).finish(c.softmax, c.o, c.to);
    }

    // Key tiles from the last to the first.
    __device__ __forceinline__ void compute_tiles(State& c, int begin, int end) const {
        compute_first_tile(c, end - 1);
        bool first = true;
#pragma unroll 1
        for (int tile = end - 2; tile >= begin; --tile) {
            zero_rows_beyond_sequence(c, tile + 1);
            c.keys.wait_full();
            wait_for_scores(c);
            step(c, tile, first);
            first = false;
        }
        release_q(c);
        zero_rows_beyond_sequence(c, begin);
        issue_values(c, first);
        wgmma_wait<0>();
        wait_for_sums(c);
        release(c, c.v);
    }
    __device__ __forceinline__ void compute_first_tile(State& c, int tile) const {
        float factor[2];
        c.keys.wait_full();
        wgmma_fence();
        issue_scores(c);
        issue_tangents(c);
        wgmma_commit();
        wgmma_wait<0>();
        wait_for_scores(c);
        release(c, c.keys);
        const bool edge = is_edge(c, tile);
        exponentiate(c, tile, edge, factor);
        multiply_tangents(c, edge, factor);
        round_weights(c);
    }
    // The scores of a tile, and the products with V and tV of the tile before it.
    __device__ __forceinline__ void step(State& c, int tile, bool first) const {
        float factor[2];
        wgmma_fence();
        issue_scores(c);
        if constexpr (!Traits::kLateTangents) issue_tangents(c);
        wgmma_commit();
        issue_values(c, first);
        wgmma_wait<1>();
        wait_for_scores(c);
        if constexpr (!Traits::kLateTangents) release(c, c.keys);
        const bool edge = is_edge(c, tile);
        bool rescale = exponentiate(c, tile, edge, factor);
        if constexpr (!Traits::kLateTangents) rescale |= multiply_tangents(c, edge, factor);
        c.softmax.finish_before_wait(Traits::kLateTangents ? c.softmax.sum : c.softmax.mean);
        wgmma_wait<0>();
        wait_for_sums(c);
        release(c, c.v);
        if constexpr (Traits::kLateTangents) {
            wgmma_fence();
            issue_tangents(c);
            wgmma_commit();
        }
        if (rescale) rescale_sums(c, factor);
        if constexpr (Traits::kLateTangents) wait_for_late_tangents(c, edge);
        round_weights(c);
    }
    __device__ __forceinline__ void wait_for_late_tangents(State& c, bool edge) const {
        float factor[2] = {1.0f, 1.0f};
        wgmma_wait<0>();
        wgmma_fence_operand(c.ts);
        release(c, c.keys);
        if (multiply_tangents(c, edge, factor)) rescale_sums(c, factor);
    }

    // Issues s = Q K^T.
    __device__ __forceinline__ void issue_scores(State& c) const { multiply(c, c.s, context.tiles.q(c.group), 0, false); }
    // Issues ts = Q tK^T + tQ K^T.
    __device__ __forceinline__ void issue_tangents(State& c) const {
        multiply(c, c.ts, context.tiles.q(c.group), kBlockN, false);
        multiply(c, c.ts, context.tiles.tq(c.group), 0, true);
    }
    // `rows`: address of Q or tQ. `first_key`: of K or tK.
    __device__ __forceinline__ void multiply(const State& c, Scores& sums, uint32_t rows, int first_key, bool accumulate) const {
        const uint32_t keys = context.tiles.keys(c.keys.stage);
#pragma unroll
        for (int step = 0; step < Traits::kHeadDim / 16; ++step)
            Wgmma<T, kBlockN>::template multiply_shared<false>(sums, QTile::k_major_operand(rows, step),
                                                               KeysTile::k_major_operand(keys, step, first_key),
                                                               accumulate || step > 0);
    }

    // Issues o += P V and to += P (ts - pivot) V + P tV. `first`: of the work tile; the accumulators hold nothing yet.
    __device__ __forceinline__ void issue_values(State& c, bool first) const {
        constexpr int kSteps = kBlockN / 16;
        c.v.wait_full();
        const uint32_t v = context.tiles.v(c.v.stage), tv = v + VTile::kBytes;
        wgmma_fence();
        if constexpr (kFused) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
                Wgmma<T, Traits::kHeadDimV>::template multiply<true>(c.o, c.p[step], VTile::mn_major_operand(v, step),
                                                                     step > 0 || !first);
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            Wgmma<T, Traits::kHeadDimV>::template multiply<true>(c.to, c.tp[step], VTile::mn_major_operand(v, step),
                                                                 step > 0 || !first);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            Wgmma<T, Traits::kHeadDimV>::template multiply<true>(c.to, c.p[step], VTile::mn_major_operand(tv, step), true);
        wgmma_commit();
    }
    __device__ __forceinline__ void wait_for_scores(State& c) const {
        wgmma_fence_operand(c.s);
        wgmma_fence_operand(c.ts);
    }
    __device__ __forceinline__ void wait_for_sums(State& c) const {
        if constexpr (kFused) wgmma_fence_operand(c.o);
        wgmma_fence_operand(c.to);
    }

    // Where only the device knows the lengths, rows of V and tV beyond a sequence hold data of others, possibly NaN or infinity,
    // and products would multiply these by 0. Each warpgroup zeroes them, so none waits for another.
    __device__ __forceinline__ void zero_rows_beyond_sequence(const State& c, int tile) const {
        constexpr int kVectors = VTile::kChunks * 8;  // of 16 bytes in a row
        const int count = work_tile(c).keys.length_k - tile * kBlockN;
        if (count >= kBlockN || !(context.params.k_lengths.cu || context.params.k_lengths.used)) return;
        c.v.wait_full();
        const int thread = static_cast<int>(threadIdx.x % 128);
#pragma unroll 1
        for (int i = count * kVectors + thread; i < kBlockN * kVectors; i += 128) {
            const int offset = VTile::offset(i / kVectors, i % kVectors);
            store_zeros_16(context.tiles.v(c.v.stage) + offset);
            store_zeros_16(context.tiles.tv(c.v.stage) + offset);
        }
        fence_shared_for_async();
        __syncwarp();
        named_barrier_wait(kGroupBarrier + c.group, 128);
    }

    __device__ __forceinline__ bool is_edge(const State& c, int tile) const {
        const GroupKeyTiles& tiles = key_tiles(c);
        return tile < tiles.unmasked_begin || tile >= tiles.unmasked_end;
    }
    // From complete scores to probabilities. Returns true if the sums must be multiplied by `factor`.
    __device__ __forceinline__ bool exponentiate(State& c, int tile, bool edge, float (&factor)[2]) const {
        if (edge) mask(c, tile);
        return c.softmax.exponentiate(c.s, context.params.scale_log2, factor);
    }
    __device__ __forceinline__ bool multiply_tangents(State& c, bool edge, float (&factor)[2]) const {
        return c.softmax.multiply_tangents(c.s, c.ts, context.params.softmax_scale, edge, factor);
    }
    __device__ __forceinline__ void mask(State& c, int tile) const {
        const int first_col = tile * kBlockN + (hide_from_compiler(c.lane) & 3) * 2;
        mask_edge(work_tile(c).keys, first_col, [&](const auto& for_row) {
            for_accumulator_rows(c.s, [&](int, int r, const auto& for_scores) { for_row(rows_of(c).row(r), for_scores); });
        });
    }

    __device__ __forceinline__ void rescale_sums(State& c, const float (&factor)[2]) const {
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            if constexpr (kFused) c.o[i] *= factor[i / 2 % 2];
            c.to[i] *= factor[i / 2 % 2];
        }
    }
    __device__ __forceinline__ void clear_sums(State& c) const {
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            if constexpr (kFused) c.o[i] = 0.0f;
            c.to[i] = 0.0f;
        }
    }
    __device__ __forceinline__ void round_weights(State& c) const {
#pragma unroll
        for (int step = 0; step < kBlockN / 16; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = 8 * step + 2 * i;
                c.p[step][i] = pack_pair(c.s[at], c.s[at + 1], T());
                c.tp[step][i] = pack_pair(c.ts[at], c.ts[at + 1], T());
            }
    }

    template <class AnyPipelineState>
    __device__ __forceinline__ void release(const State& c, AnyPipelineState& pipeline) const {
        if (c.lane == 0) pipeline.empty().arrive();
        pipeline.advance();
    }
    __device__ __forceinline__ void release_q(State& c) const {
        __syncwarp();  // all lanes have written the rows of the previous work tile
        release(c, c.q);
    }
    // Releases `count` stages of K and V without using them: only when they are full, because an earlier arrival could count for
    // the previous phase, and when all lanes have seen that.
    __device__ __forceinline__ void skip_stages(State& c, int count) const {
#pragma unroll 1
        for (; count > 0; --count) {
            c.keys.wait_full();
            __syncwarp();
            release(c, c.keys);
            c.v.wait_full();
            __syncwarp();
            release(c, c.v);
        }
    }
};

}  // namespace libflash::cuda::sm90
