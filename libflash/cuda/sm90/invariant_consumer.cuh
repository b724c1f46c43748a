// The consumer warpgroups of the sm_90a prefill kernel for invariant rows, 64 query rows each: ForwardConsumer with the rule of
// attention/invariant_softmax.cuh, whose units are halves of a key tile. Scores are computed for a whole tile, and P V of the
// previous tile overlaps the softmax. Where registers are scarce (kWholeTiles is false), P of only one half at a time is in
// registers. It is computed while P V of the other half runs, and P V of the earlier half is issued after the scores of the next
// tile.
#pragma once

#include "cuda/attention/invariant_segments.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/uniform.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward_consumer_stages.cuh"
#include "cuda/sm90/forward_epilogue.cuh"
#include "cuda/sm90/forward_scores.cuh"
#include "cuda/sm90/forward_tile_scheduler.cuh"
#include "cuda/sm90/invariant_sums.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct InvariantConsumer : ForwardConsumerStages<Traits> {
    using Stages = ForwardConsumerStages<Traits>;
    using Stages::context, Stages::key_tiles, Stages::has_key_tiles, Stages::begin_work_tile, Stages::skip_values;
    using Stages::word_of_stage, Stages::release, Stages::release_k, Stages::release_v, Stages::skip_stage;
    using typename Stages::Position, typename Stages::Storage;
    using T = typename Traits::T;
    using QTile = typename Traits::QTile;
    using KTile = typename Traits::KTile;
    using VTile = typename Traits::VTile;
    static constexpr int kBlockN = Traits::kBlockN, kUnit = kInvariantUnit, kSteps = kUnit / 16;
    static constexpr int kUnitScores = kUnit / 2, kSums = Traits::kHeadDimV / 2;
    static_assert(kBlockN == 2 * kUnit && kFirstSegment % kBlockN == 0 && !Traits::kSeparateFirstTile && Traits::kCache);
    static constexpr bool kWholeTiles = kSums - Traits::kSumsInShared <= 32;  // P of a whole tile is in registers
    enum Half { kEarlier, kLater };
    using HalfScores = float[kUnitScores];
    using Folded = InvariantSums<kSums, Traits::kSumsInShared>;
    using Factors = typename Folded::Factors;

    const ForwardTileScheduler<Traits> scheduler{context};
    const ForwardScores<Traits> scores{context};
    const ForwardEpilogue<Traits> epilogue{context};

    // If P of a whole tile is in registers: how its P V must be issued.
    struct Pending {
        bool accumulates;  // o += P V, otherwise o = P V
        bool rescales;     // o is multiplied by `factor` between the halves
        bool folds;        // first, o is folded: a segment ended with the previous tile
        float factor[2];
        Factors of_segment;
    };
    // State of a consumer warp.
    struct State : Position {
        float s[2 * kUnitScores];                    // scores, then probabilities; the half with the earlier keys is first
        float o[kSums];                              // accumulator of P V of a segment
        uint32_t p[kWholeTiles ? 2 : 1][kSteps][4];  // probabilities, rounded: both halves as in s, or one half
        InvariantSoftmax<kUnit> softmax;
        Folded folded;     // the segments that have ended
        float inverse[2];  // the factors of the rows of the work tile that has ended,
        bool writes;       // and whether this warp writes them
        std::conditional_t<kWholeTiles, Pending, Empty> pending;
    };
    static constexpr int kVotes = 1;    // named barrier of the first warpgroup
    static constexpr int kNoTile = -1;  // State::tile before the first work tile
    // Of a key tile: whether it is the last of the work tile, whether it is an edge tile, and its absent units.
    struct TileInfo {
        bool last, edge;
        uint32_t absent;
    };

    __device__ __forceinline__ explicit InvariantConsumer(const ForwardContext<Traits>& of_kernel) : Stages(of_kernel) {}

    __device__ __forceinline__ void run() const {
        State c{this->first_position()};
        ScheduleCursor cursor{};
        do {
            c.q.wait_full();
            if (is_careful(c) && context.storage.work_tiles[c.slot].has_keys()) skip_stage(c, c.v);  // the stage without data
            while (context.storage.work_tiles[c.slot].has_keys()) {
                is_careful(c) ? compute_carefully(c) : compute_work_tiles(c);
                if (c.writes) write_rows(c);
            }
            cursor.exact_maximum = is_careful(c);
            __syncwarp();
            release(c, c.q.empty());
            c.q.advance();
            c.slot = Storage::next_slot(c.slot);
            if (Traits::kTmaStore && c.thread.lane == 0) tma_store_wait<0>();  // recomputation writes the same rows again
        } while (scheduler.start_recompute(cursor));
    }

private:
    // The index in State::p of P of a half.
    __device__ __forceinline__ static constexpr int place_of(Half half) { return kWholeTiles ? half : 0; }
    template <Half kHalf>
    __device__ __forceinline__ static HalfScores& half(State& c) {
        return *reinterpret_cast<HalfScores*>(c.s + kHalf * kUnitScores);
    }
    // Whether the work tile is being recomputed.
    __device__ __forceinline__ bool is_careful(const State& c) const { return context.storage.work_tiles[c.slot].exact_maximum; }
    __device__ __forceinline__ float scale() const { return context.params.scale_log2; }
    // The slot of the work tile that has ended.
    __device__ __forceinline__ int ended_slot(const State& c) const { return Storage::previous_slot(c.slot); }
    __device__ __forceinline__ void go_to_next_work_tile(State& c) const {
        c.slot = Storage::next_slot(c.slot);
        c.q.wait_full();
    }

    // Computes work tiles until a work tile has no key tiles for this group. The rows of the last one are then in c.o. Begins as
    // if the previous work tile had P = 0; the producer provides a stage of V without data for it.
    __device__ __forceinline__ void compute_work_tiles(State& c) const {
        c.softmax.clear();
        c.folded.clear();
        clear(c.o);
#pragma unroll
        for (auto& of_half : c.p)
#pragma unroll
            for (auto& fragment : of_half)
#pragma unroll
                for (uint32_t& pair : fragment) pair = 0;
        if constexpr (kWholeTiles) c.pending.accumulates = true, c.pending.rescales = c.pending.folds = false;
        wgmma_wait<0>();  // nothing is pending; without it the compiler adds a wait in the loop
        c.v.wait_full();
        c.tile = kNoTile;
#pragma unroll 1
        while (has_key_tiles(c)) {
            step<true>(c);
#pragma unroll 1
            while (!c.last) step<false>(c);
            go_to_next_work_tile(c);
        }
        issue_last_values(c);
        wgmma_wait<0>();
        wgmma_fence_operand(c.o);
        release_v(c);
        Factors factors;
        finish_softmax(c, factors);
        c.folded.fold_into(c.o, factors, sums_in_shared(c));
    }

    // kFirst: the tile is the first of a work tile.
    template <bool kFirst>
    __device__ __forceinline__ void step(State& c) const {
        [[maybe_unused]] const bool has_previous = c.tile != kNoTile;
        if constexpr (kFirst) {
            begin_work_tile(c);
        } else {
            --c.tile;
        }
        wgmma_fence_operand(c.s);
        issue_scores(c);
        issue_last_values(c);
        const bool ended = !kFirst && begins_segment((c.tile + 1) * kBlockN);  // a segment ended with the previous tile
        [[maybe_unused]] Factors factors;
        if (ended) c.folded.end_segment(c.softmax, of_ended_segment(c, factors));
        const TileInfo tile_info = tile_info_of(c);
        wgmma_wait<kWholeTiles ? 2 : 1>();
        wgmma_fence_operand(c.s);
        if (kFirst && has_previous) finish_softmax(c, factors);
        release_k(c, tile_info);
        hide(c, tile_info);
        float factor[2];
        const bool rescale = c.softmax.apply(half<kLater>(c), scale(), false, factor);
        if constexpr (kWholeTiles) {
            c.pending.rescales = c.softmax.apply(half<kEarlier>(c), scale(), false, c.pending.factor);
            c.pending.accumulates = !kFirst;
            c.pending.folds = ended;
            wait_for_k_unless_last(c);
        }
        wgmma_wait<0>();
        wgmma_fence_operand(c.o);
        release_v(c);
        if constexpr (kFirst) {
            if (has_previous) {
                c.folded.fold_into(c.o, factors, sums_in_shared(c));
                if (c.writes) write_rows(c);
            }
            skip_values(c);
        } else if (ended) {
            if constexpr (!kWholeTiles) fold(c, factors);
        } else if (rescale) {
            multiply(c.o, factor);
        }
        round_probabilities<kLater>(c);
        if constexpr (kWholeTiles) {
            round_probabilities<kEarlier>(c);
        } else {
            c.v.wait_full();
            issue_values<kLater>(c, !kFirst);
            attend_to_earlier_half(c);
        }
    }
    // The factors of a segment that has ended. With kWholeTiles they are kept in the state: P V of a tile is issued after the
    // scores of the next tile, and o is not folded before.
    __device__ __forceinline__ static Factors& of_ended_segment(State& c, [[maybe_unused]] Factors& of_step) {
        if constexpr (kWholeTiles) {
            return c.pending.of_segment;
        } else {
            return of_step;
        }
    }
    // Computes P of the earlier half while P V of the later half runs.
    __device__ __forceinline__ void attend_to_earlier_half(State& c) const {
        float factor[2];
        const bool rescale = c.softmax.apply(half<kEarlier>(c), scale(), false, factor);
        wait_for_k_unless_last(c);
        wgmma_wait<0>();
        wgmma_fence_operand(c.o);
        if (rescale) multiply(c.o, factor);
        round_probabilities<kEarlier>(c);
    }
    // Issues those P V of the previous tile that have not been issued.
    __device__ __forceinline__ void issue_last_values(State& c) const {
        if constexpr (kWholeTiles) {
            if (c.pending.folds) fold(c, c.pending.of_segment);
            c.v.wait_full();
            // The warps of a warpgroup must agree, because they wait for products together.
            const bool rescales = uniform(named_barrier_or(kVotes + c.thread.group, 128, c.pending.rescales));
            issue_values<kLater>(c, c.pending.accumulates);
            if (__builtin_expect(rescales, false)) {
                wgmma_wait<0>();
                wgmma_fence_operand(c.o);
                multiply(c.o, c.pending.factor);
            }
        }
        issue_values<kEarlier>(c, true);
    }
    // Called while P V still runs; no product runs between P V and the next step.
    __device__ __forceinline__ void wait_for_k_unless_last(State& c) const {
        if (!c.last) c.k.wait_full();
    }

    // Recomputes a work tile with rows whose sums left their range on the fast path of the softmax: unit by unit, without
    // overlap. This is rare, so the code is short rather than fast.
    __device__ __forceinline__ void compute_carefully(State& c) const {
        begin_work_tile(c);
        skip_values(c);
        c.softmax.clear();
        c.folded.clear();
        clear(c.o);
        Factors factors;
        while (true) {
            c.v.wait_full();
            const TileInfo tile_info = tile_info_of(c);
#pragma unroll 1
            for (int unit = 1; unit >= 0; --unit) careful_unit(c, unit, tile_info.absent, factors);
            release_k(c, tile_info);
            release_v(c);
            if (c.last) break;
            --c.tile;
            c.k.wait_full();
        }
        go_to_next_work_tile(c);
        finish_softmax(c, factors);
        c.folded.fold_into(c.o, factors, sums_in_shared(c));
    }
    __device__ __forceinline__ void careful_unit(State& c, int unit, uint32_t absent, Factors& factors) const {
        const uint32_t q = context.tiles.q(c.q.stage, c.thread.group), k = context.tiles.k(c.k.stage),
                       v = context.tiles.v(c.v.stage);
        const int first_key = c.tile * kBlockN + unit * kUnit;
        HalfScores& s = half<kEarlier>(c);
        wgmma_fence_operand(s);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Traits::kHeadDim / 16; ++step)
            Wgmma<T, kUnit>::template multiply_shared<false>(s, QTile::k_major_operand(q, step),
                                                             KTile::k_major_operand(k, step, unit * kUnit), step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_fence_operand(s);
        if (begins_segment(first_key + kUnit)) {
            c.folded.end_segment(c.softmax, factors);
            fold(c, factors);
        }
        scores.mask_part(s, context.storage.work_tiles[c.slot], first_key, c.thread);
        scores.hide_absent(s, absent >> unit * kSteps & ((1u << kSteps) - 1));
        float factor[2];
        if (c.softmax.apply(s, scale(), true, factor)) multiply(c.o, factor);
        round_probabilities<kEarlier>(c);
        wgmma_fence_operand(c.o);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            Wgmma<T, Traits::kHeadDimV>::template multiply<true>(c.o, c.p[0][step],
                                                                 VTile::mn_major_operand(v, unit * kSteps + step), true);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_fence_operand(c.o);
    }

    // Called when all scores of a work tile are complete. Writes its LSE, computes the factors of its rows, and resets the
    // softmax.
    __device__ __forceinline__ void finish_softmax(State& c, Factors& factors) const {
        c.folded.end_segment(c.softmax, factors);
        auto rows = c.folded.rows(c.softmax);
        c.writes = epilogue.finish_softmax(rows, context.storage.work_tiles[ended_slot(c)], c.thread, c.inverse);
        c.folded.clear_rows();
        c.softmax.clear();
    }
    // Called after the last P V of a segment, except for the last segment.
    __device__ __forceinline__ void fold(State& c, const Factors& factors) const {
        // A zero that the compiler does not recognise. It would move a known zero through uniform registers.
        const float zero = scale() - scale();
        if (Traits::kTmaStore && Traits::kSumsInShared > 0)
            ForwardEpilogue<Traits>::RowStore::wait_for_rows(c.thread.lane);  // the rows were in the same memory
        c.folded.fold(c.o, factors, zero, sums_in_shared(c));
    }
    __device__ __forceinline__ uint32_t sums_in_shared(const State& c) const { return context.tiles.sums(c.thread.warp()); }
    __device__ __forceinline__ void write_rows(State& c) const {
        epilogue.write_rows(c.o, c.inverse, context.storage.work_tiles[ended_slot(c)], c.thread);
    }

    // Issues s = Q K^T.
    __device__ __forceinline__ void issue_scores(State& c) const {
        const uint32_t q = context.tiles.q(c.q.stage, c.thread.group), k = context.tiles.k(c.k.stage);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Traits::kHeadDim / 16; ++step)
            Wgmma<T, kBlockN>::template multiply_shared<false>(c.s, QTile::k_major_operand(q, step),
                                                               KTile::k_major_operand(k, step), step > 0);
        wgmma_commit();
    }
    // Issues o += P V of a half, or o = P V.
    template <Half kHalf>
    __device__ __forceinline__ void issue_values(State& c, bool accumulate) const {
        const uint32_t v = context.tiles.v(c.v.stage);
        wgmma_fence_operand(c.o);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            Wgmma<T, Traits::kHeadDimV>::template multiply<true>(
                c.o, c.p[place_of(kHalf)][step], VTile::mn_major_operand(v, kHalf * kSteps + step), step > 0 || accumulate);
        wgmma_commit();
    }

    __device__ __forceinline__ TileInfo tile_info_of(const State& c) const {
        const GroupKeyTiles& of_group = key_tiles(c);
        const uint32_t absent = word_of_stage(c);
        return {c.tile == of_group.begin, c.tile < of_group.unmasked_begin || c.tile >= of_group.unmasked_end, absent};
    }
    __device__ __forceinline__ void hide(State& c, const TileInfo& tile_info) const {
        if (tile_info.edge) scores.mask_part(c.s, context.storage.work_tiles[c.slot], c.tile * kBlockN, c.thread);
        scores.hide_absent(c.s, tile_info.absent);
    }
    template <Half kHalf>
    __device__ __forceinline__ void round_probabilities(State& c) const {
        const HalfScores& s = half<kHalf>(c);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                c.p[place_of(kHalf)][step][i] = pack_pair(s[8 * step + 2 * i], s[8 * step + 2 * i + 1], T());
    }

    __device__ __forceinline__ static void clear(float (&sums)[kSums]) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
    }
    __device__ __forceinline__ static void multiply(float (&sums)[kSums], const float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] *= factor[i / 2 % 2];
    }
};

}  // namespace libflash::cuda::sm90
