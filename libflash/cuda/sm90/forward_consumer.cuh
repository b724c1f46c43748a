// The consumer warpgroups of the sm_90a forward kernel, 64 query rows each. Q K^T of a tile and P V of the previous tile overlap
// the exponentials, also from one work tile to the next. P stays in registers. The warpgroups are not synchronised with each
// other: taking turns on the tensor cores (ping-pong) is slower.
#pragma once

#include "cuda/attention/long_sums.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward_consumer_stages.cuh"
#include "cuda/sm90/forward_epilogue.cuh"
#include "cuda/sm90/forward_scores.cuh"
#include "cuda/sm90/forward_tile_scheduler.cuh"
#include "cuda/sm90/online_softmax.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

// kBiasOrMask: whether the call may have a bias or a boolean mask.
template <class Traits, bool kBiasOrMask = Traits::kRareOptions>
struct ForwardConsumer : ForwardConsumerStages<Traits> {
    using Stages = ForwardConsumerStages<Traits>;
    using Stages::context, Stages::key_tiles, Stages::has_key_tiles, Stages::begin_work_tile, Stages::skip_values;
    using Stages::wait_for_next_k, Stages::word_of_stage, Stages::has_absent_keys, Stages::release, Stages::release_k,
        Stages::release_v, Stages::skip_stage;
    using typename Stages::Position, typename Stages::Storage;
    using T = typename Traits::T;
    using WorkTile = ForwardWorkTile<Traits>;
    using QTile = typename Traits::QTile;
    using KTile = typename Traits::KTile;
    using VTile = typename Traits::VTile;
    static constexpr int kBlockN = Traits::kBlockN, kScores = kBlockN / 2, kSums = Traits::kHeadDimV / 2;
    static constexpr bool kBlockMask = Traits::kBlockMask, kSeparateFirstTile = Traits::kSeparateFirstTile;
    static constexpr bool kLongSums = Traits::kLongSums;
    static constexpr int kTilesPerSum = tiles_per_sum(kBlockN);
    using Softmax = OnlineSoftmax<kBlockN, Traits::kStatisticsKind, kLongSums, Traits::kGroups == 3>;

    const ForwardTileScheduler<Traits> scheduler{context};
    const ForwardScores<Traits, kBiasOrMask> scores{context};
    const ForwardEpilogue<Traits> epilogue{context};

    // State of a consumer warp.
    struct State : Position {
        float s[kScores];             // scores, then probabilities
        float o[kSums];               // accumulator of P V
        uint32_t p[kBlockN / 16][4];  // probabilities, rounded
        Softmax softmax;
        // The previous work tile, until its rows are written: the factors of its rows, and its slot. Other values of
        // pending_output: kNothingToWrite, before the first P V of a work tile; kAccumulating, P V of the current work tile has
        // begun; kNoProbabilities, there are no probabilities yet.
        float inverse[2];
        int pending_output;
    };
    static constexpr int kNothingToWrite = -1, kAccumulating = -2, kNoProbabilities = -3;
    // Of a key tile: whether it is the last of the work tile, whether it is an edge tile, whether its maximum must be computed;
    // over a cache, the absent units, or of copied keys whether there are absent ones, and their place in shared memory.
    struct TileInfo {
        bool last, edge, exact_maximum;
        uint32_t absent;
        std::conditional_t<Traits::kCopied, int, Empty> place;
    };

    __device__ __forceinline__ explicit ForwardConsumer(const ForwardContext<Traits>& of_kernel) : Stages(of_kernel) {}

    __device__ __forceinline__ void run() const {
        State c{this->first_position()};
        ScheduleCursor cursor{};
        do {
            c.q.wait_full();
            if (kLongSums && context.params.long_sums) long_sums().clear();
            if constexpr (Traits::kSkipsWorkTiles) {
                while (context.storage.work_tiles[c.slot].has_keys())
                    has_key_tiles(c) ? compute_work_tiles(c) : skip_work_tile(c);
            } else {
                if (context.storage.work_tiles[c.slot].has_keys()) compute_work_tiles(c);
            }
            cursor.exact_maximum = context.storage.work_tiles[c.slot].exact_maximum;
            __syncwarp();
            release(c, c.q.empty());
            c.q.advance();
            c.slot = Storage::next_slot(c.slot);
            if (Traits::kTmaStore && c.thread.lane == 0) tma_store_wait<0>();  // recomputation writes the same rows again
            // Recomputation shares no keys: both arrivals of a warp at an empty barrier are then in this thread block.
            if constexpr (Traits::kPairs) c.release_to = rank_of_pair(context.params.in_pairs);
        } while (scheduler.start_recompute(cursor));
    }

private:
    // Releases all stages of a work tile in which this group has no key tiles.
    __device__ __forceinline__ void skip_work_tile(State& c) const {
        const auto& keys = context.storage.work_tiles[c.slot].keys;
#pragma unroll 1
        for (int tile = keys.end; tile > keys.begin; --tile) {
            skip_stage(c, c.k);
            skip_stage(c, c.v);
        }
        release(c, c.q.empty());
        c.q.advance();
        c.slot = Storage::next_slot(c.slot);
        c.q.wait_full();
    }

    // Computes work tiles until a work tile has no key tiles for this group. A step issues the scores of a tile and P V of the
    // previous tile, even if the two tiles belong to different work tiles. The rows of a work tile are written while the scores
    // of the second tile after its last tile are computed.
    __device__ __forceinline__ void compute_work_tiles(State& c) const {
        c.softmax.clear();
        if constexpr (kSeparateFirstTile) {
            begin_first_work_tile(c);
        } else {
            begin_with_zero_probabilities(c);
        }
        while (true) {
            // The steps between work tiles. Their code is separate, so that the code of the main loop below stays small and
            // contiguous.
#pragma unroll 1
            do {
                const bool first = c.last;
                if (first) {
                    c.slot = Storage::next_slot(c.slot);
                    c.q.wait_full();
                    if (!has_key_tiles(c)) return finish_last_work_tile(c);
                }
                step<true>(c, first);
            } while (c.last || c.pending_output != kAccumulating);
            main_loop(c);
        }
    }
    // The other steps of a work tile, whose scores and P V belong to the same work tile. Long sums: tiles are in descending
    // order, so a sum ends at each multiple of kTilesPerSum; with a block mask the tiles are counted.
    __device__ __forceinline__ void main_loop(State& c) const {
        int tiles_left = kTilesPerSum;
#pragma unroll 1
        while (!c.last) {
            step<false>(c, false);
            if constexpr (kLongSums) {
                const bool complete = kBlockMask ? --tiles_left == 0 : c.tile % kTilesPerSum == 0;
                if (__builtin_expect(complete && context.params.long_sums, false)) {
                    tiles_left = kTilesPerSum;
                    if constexpr (Softmax::kEntropy) c.softmax.take_weighted(0, c.softmax.sum);
                    long_sums().take(0, blocks_of_sums(c), c.softmax.sum, c.softmax.kept_maximum);
                }
            }
        }
    }

    // The scores and the softmax of the first tile, without an overlapping P V.
    __device__ __forceinline__ void begin_first_work_tile(State& c) const {
        c.pending_output = kNothingToWrite;
        begin_work_tile(c);
        issue_scores(c);
        const TileInfo tile_info = tile_info_of(c);
        wgmma_wait<0>();
        wgmma_fence_operand(c.s);
        const InShared beside_k = in_shared(c);
        if (beside_k == InShared::nothing) release_k(c, tile_info);
        float factor[2];
        softmax_step(c, tile_info, beside_k, factor);
        skip_values(c);
        if (!c.last) wait_for_next_k(c);
        round_probabilities(c, tile_info);
    }
    // The alternative to begin_first_work_tile(): begins as if the previous work tile had P = 0. This executes less code that is
    // not yet in the instruction cache.
    __device__ __forceinline__ void begin_with_zero_probabilities(State& c) const {
        c.pending_output = kNoProbabilities;
        c.slot = Storage::previous_slot(c.slot);
        c.last = true;
#pragma unroll
        for (int i = 0; i < kScores; ++i) c.s[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < kSums; ++i) c.o[i] = 0.0f;
        round_probabilities(c);
        wgmma_wait<0>();  // nothing is pending; without it the compiler adds a wait where rows are written
    }

    // kBetween: between work tiles. `first`: the scores are the first of a work tile.
    template <bool kBetween>
    __device__ __forceinline__ void step(State& c, bool first) const {
        const bool no_probabilities = kBetween && !kSeparateFirstTile && c.pending_output == kNoProbabilities;
        if constexpr (!kBlockMask) --c.tile;
        if (kBetween && first) begin_work_tile(c);
        wgmma_fence_operand(c.s);
        issue_scores(c);
        issue_values<kBetween>(c);
        TileInfo tile_info;
        if constexpr (Traits::kTileInfoBeforeWait) tile_info = tile_info_of(c);
        wgmma_wait<1>();
        wgmma_fence_operand(c.s);
        if (kBetween && first && !no_probabilities) finish_softmax(c, Storage::previous_slot(c.slot));
        if constexpr (!Traits::kTileInfoBeforeWait) tile_info = tile_info_of(c);
        const InShared beside_k = in_shared(c);
        if (beside_k == InShared::nothing) release_k(c, tile_info);
        float factor[2];
        const bool rescale = softmax_step(c, tile_info, beside_k, factor);
        if (!c.last) wait_for_next_k(c);  // here, while P V still runs; no product runs between P V and the next step
        wgmma_wait<0>();
        wgmma_fence_operand(c.o);
        release_v(c);
        if (kBetween && first) {
            add_long_sums(c);
            skip_values(c);
        } else if (rescale) {
#pragma unroll
            for (int i = 0; i < kSums; ++i) c.o[i] *= factor[i / 2 % 2];
        }
        round_probabilities(c, tile_info);
    }

    // After the last scores of the last work tile.
    __device__ __forceinline__ void finish_last_work_tile(State& c) const {
        issue_values<true>(c);
        wgmma_wait<0>();
        wgmma_fence_operand(c.o);
        release_v(c);
        finish_softmax(c, Storage::previous_slot(c.slot));
        add_long_sums(c);
        if (c.pending_output >= 0) write_rows(c);
    }
    __device__ __forceinline__ void finish_softmax(State& c, int slot) const {
        if (kLongSums && context.params.long_sums) long_sums().finish(0, c.softmax.sum, c.softmax.kept_maximum);
        const bool writes = epilogue.finish_softmax(c.softmax, context.storage.work_tiles[slot], c.thread, c.inverse);
        c.softmax.clear();
        c.pending_output = writes ? slot : kNothingToWrite;
    }
    __device__ __forceinline__ void write_rows(State& c) const {
        epilogue.write_rows(c.o, c.inverse, context.storage.work_tiles[c.pending_output], c.thread);
    }

    __device__ __forceinline__ LongSums<Traits::kConsumerWarps * 32, 1, Traits::kHeadDimV / 8> long_sums() const {
        return {context.params.long_sums, hide_from_compiler(static_cast<int>(threadIdx.x)) - 128};
    }

    // After finish_softmax and the last P V of a work tile: all sums are in c.o.
    __device__ __forceinline__ void add_long_sums(State& c) const {
        if (kLongSums && context.params.long_sums && long_sums().has_finished(0)) long_sums().add(0, blocks_of_sums(c));
    }
    __device__ __forceinline__ static auto blocks_of_sums(State& c) {
        return [&c](int n) -> float* { return c.o + 4 * n; };
    }

    // Issues s = Q K^T.
    __device__ __forceinline__ void issue_scores(State& c) const {
        const uint32_t q = context.tiles.q(c.q.stage, c.thread.group), k = context.tiles.k(c.k.stage);
        // Here, because in the warps that copy a fence would also wait for the copies of later tiles.
        if constexpr (Traits::kCopied && !Traits::kCodes) fence_shared_for_async();
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Traits::kHeadDim / 16; ++step)
            Wgmma<T, kBlockN>::template multiply_shared<false>(c.s, QTile::k_major_operand(q, step),
                                                               KTile::k_major_operand(k, step), step > 0);
        wgmma_commit();
    }
    // Issues o += P V; for the first tile of a work tile o = P V, after the rows of the previous work tile are written. Before
    // the very first tile (kNoProbabilities) the producer provides a stage of V without data, and the result is not used: without
    // a product here, the compiler would add a wait for the previous product.
    template <bool kBetween>
    __device__ __forceinline__ void issue_values(State& c) const {
        const bool first = kBetween && c.pending_output != kAccumulating,
                   no_probabilities = kBetween && !kSeparateFirstTile && c.pending_output == kNoProbabilities;
        if (kBetween && c.pending_output >= 0) write_rows(c);
        if (kBetween) c.pending_output = no_probabilities ? kNothingToWrite : kAccumulating;
        c.v.wait_full();
        const uint32_t v = Traits::kPairs ? address_in_block(context.tiles.v(c.v.stage)) : context.tiles.v(c.v.stage);
        if constexpr (Traits::kCopied && !Traits::kCodes) fence_shared_for_async();
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kBlockN / 16; ++step)
            Wgmma<T, Traits::kHeadDimV>::template multiply<true>(c.o, c.p[step], VTile::mn_major_operand(v, step),
                                                                 step > 0 || !first);
        wgmma_commit();
    }

    __device__ __forceinline__ int tile_of(const State& c) const {
        if constexpr (kBlockMask) return c.word.tile();
        return c.tile;
    }
    __device__ __forceinline__ TileInfo tile_info_of(const State& c) const {
        const GroupKeyTiles& of_group = key_tiles(c);
        const int tile = tile_of(c);
        uint32_t absent = 0;
        if constexpr (Traits::kCopied) {
            absent = has_absent_keys(c);
        } else if constexpr (Traits::kCache) {
            absent = word_of_stage(c);
        }
        return {kBlockMask ? c.word.last() : tile == of_group.begin,
                tile < of_group.unmasked_begin || tile >= of_group.unmasked_end || absent != 0,
                context.storage.work_tiles[c.slot].exact_maximum, absent, place_of_keys(c)};
    }

    __device__ __forceinline__ static auto place_of_keys([[maybe_unused]] const State& c) {
        if constexpr (Traits::kCopied) {
            return place_of_stage(c.k);
        } else {
            return Empty{};
        }
    }

    // What the stage of K holds beside K. It is then released when the options have been applied.
    __device__ __forceinline__ static InShared in_shared(const State& c) {
        if constexpr (Traits::kBiasTiles && kBiasOrMask) return c.word.in_shared();
        return InShared::nothing;
    }
    // Turns complete scores into probabilities; releases K unless that is done. Returns true if the sums of P V must be
    // multiplied by `factor`.
    __device__ __forceinline__ bool softmax_step(State& c, const TileInfo& tile_info, InShared beside_k,
                                                 float (&factor)[2]) const {
        const WorkTile& work_tile = context.storage.work_tiles[c.slot];
        // Computed early. The first condition always holds; without it the compiler allocates registers differently.
        const bool scaled = !Traits::kInvariant && tile_info.exact_maximum;
        if constexpr (Traits::kCopied) {
            if (context.params.k_scale.of_rows) scores.scale_columns(c.s, copied(tile_info).k_scale, c.thread);
        }
        scores.prepare(c.s, work_tile, tile_of(c), c.thread, tile_info.edge, scaled, beside_k, context.tiles.bias(c.k.stage));
        if (beside_k != InShared::nothing) {
            __syncwarp();
            release_k(c, tile_info);
        }
        if constexpr (Traits::kCopied) {
            if (tile_info.absent) scores.hide_absent_keys(c.s, copied(tile_info).absent, c.thread);
        } else if constexpr (Traits::kCache) {
            scores.hide_absent(c.s, tile_info.absent);
        }
        const bool take_maximum = tile_info.edge || tile_info.exact_maximum;
        bool weighs = Softmax::kAlwaysWeighs;
        if constexpr (Traits::kStatisticsKind == RowStatisticsKind::either) weighs = context.params.entropy.data != nullptr;
        const bool rescale = c.softmax.apply(c.s, scores.softmax_scale(work_tile, scaled), take_maximum, factor, weighs);
        if constexpr (Traits::kRareOptions) {
            if (scores.options.has(ScoreOptions::kDropout)) scores.drop(c.s, work_tile, c.word, c.thread);
        }
        return rescale;
    }
    __device__ __forceinline__ const auto& copied(const TileInfo& tile_info) const {
        return context.storage.dynamic.copied[tile_info.place];
    }
    // With scales of rows the probabilities are multiplied by those of the values; the row sums have been added up before.
    __device__ __forceinline__ void round_probabilities(State& c, const TileInfo& tile_info) const {
        if constexpr (Traits::kCopied) {
            if (context.params.v_scale.of_rows) scores.scale_columns(c.s, copied(tile_info).v_scale, c.thread);
        }
        round_probabilities(c);
    }
    __device__ __forceinline__ void round_probabilities(State& c) const {
#pragma unroll
        for (int step = 0; step < kBlockN / 16; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) c.p[step][i] = pack_pair(c.s[8 * step + 2 * i], c.s[8 * step + 2 * i + 1], T());
    }
};

}  // namespace libflash::cuda::sm90
