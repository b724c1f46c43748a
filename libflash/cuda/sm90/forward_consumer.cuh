// The consumer warpgroups of the sm_90a forward kernel, 64 query rows each. Q K^T of a tile and P V of the previous tile overlap
// the exponentials, also across two work tiles. P stays in registers. The warpgroups are not synchronised with each other: taking
// turns at the tensor cores is slower.
#pragma once

#include "cuda/attention/dropout.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward_producer.cuh"
#include "cuda/sm90/online_softmax.cuh"
#include "cuda/tile/quad.cuh"

namespace libflash::cuda::sm90 {

template <class Kernel, ForwardInstance kInstance>
struct Forward : ForwardProducer<Kernel, kInstance> {
    using Base = ForwardProducer<Kernel, kInstance>;
    using Base::Base, Base::common, Base::finish_row, Base::following, Base::k_smem, Base::kBlockN, Base::kDynamic,
        Base::kGeneral, Base::kConsumerRegisters, Base::kFirstApart, Base::kGroupRows, Base::kGroups, Base::kHeadDim,
        Base::kHeadDimV, Base::kProducerRegisters, Base::kQStages, Base::kSendsRows, Base::kSkipsWorkTiles, Base::kStages,
        Base::kVStages, Base::kBlockMask, Base::length_of, Base::schedule_ahead, Base::mark_for_recompute, Base::maps,
        Base::zero_fill_values, Base::out_smem, Base::owned_of, Base::params, Base::preceding, Base::prepare, Base::produce,
        Base::q_tile, Base::row_of_out, Base::start_recompute, Base::start_of, Base::v_smem, Base::write_eight,
        Base::write_empty_work_tiles;
    using typename Base::GroupTiles, typename Base::WorkTile, typename Base::KTile, typename Base::OutTile, typename Base::QTile,
        typename Base::ScheduleCursor, typename Base::T, typename Base::VTile;
    using Softmax = OnlineSoftmax<kBlockN>;
    static constexpr int kScores = kBlockN / 2, kSums = kHeadDimV / 2;
    // Whether TileInfo is read before the wait for the scores, or after it. Only speed depends on it.
    static constexpr bool kTileInfoAhead = kHeadDim == 128;

    // State of a consumer warp.
    struct Consumer {
        int group, lane;
        PipelineState<kStages> k;
        PipelineState<kVStages> v;
        PipelineState<kQStages> q;
        int slot;                     // of the work tile whose scores come next
        int tile;                     // the key tile whose scores were issued last
        TileWord word;                // the same with a block mask
        bool last;                    // it is the last one of the work tile
        float s[kScores];             // scores, then probabilities
        float o[kSums];               // accumulator of P V
        uint32_t p[kBlockN / 16][4];  // probabilities, rounded
        Softmax softmax;
        // The previous work tile until its rows are written: the factors of its rows, and its slot. Instead of a slot:
        // kNothingYet, nothing to write before the first P V of a work tile; kClosed, P V of the current work tile has begun;
        // kNoneBefore, there are no probabilities yet.
        float inverse[2];
        int closing_slot;
    };
    // Of a key tile: the last of the work tile; an edge tile; take the maximum in any case.
    struct TileInfo {
        bool last, edge, safe;
    };
    static constexpr int kNothingYet = -1, kClosed = -2, kNoneBefore = -3;

    __device__ __forceinline__ void consume() {
        // The shuffle tells the compiler that the warp number is uniform.
        const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
        const int group = warp / 4 - 1;
        const int lane = static_cast<int>(threadIdx.x & 31);
        Consumer c{group, lane, PipelineState<kStages>(common.k), PipelineState<kVStages>(common.v),
                   PipelineState<kQStages>(common.q[group])};
        c.slot = 0;
        ScheduleCursor rounds{};
        do {
            c.q.wait_full();
            if constexpr (kSkipsWorkTiles) {
                while (has_keys(c.slot)) works(c) ? compute_work_tiles(c) : skip_work_tile(c);
            } else {
                if (has_keys(c.slot)) compute_work_tiles(c);
            }
            rounds.safe = common.work_tiles[c.slot].safe;
            __syncwarp();
            release(c, c.q.empty());
            c.q.advance();
            c.slot = following(c.slot);
            if (kSendsRows && c.lane == 0) tma_store_wait<0>();  // recomputation writes the same rows again
        } while (start_recompute(rounds));
    }

    __device__ __forceinline__ bool has_keys(int slot) const {
        const WorkTile& work_tile = common.work_tiles[slot];
        return work_tile.keys.begin != work_tile.keys.end;
    }

    __device__ __forceinline__ const GroupTiles& tiles_of(const Consumer& c) const {
        return common.work_tiles[c.slot].of_group[c.group];
    }
    // Whether this group has key tiles in the work tile.
    __device__ __forceinline__ bool works(const Consumer& c) const { return tiles_of(c).begin != tiles_of(c).end; }
    // Releases all stages of a work tile in which this group has no key tiles.
    __device__ __forceinline__ void skip_work_tile(Consumer& c) const {
        const auto& keys = common.work_tiles[c.slot].keys;
#pragma unroll 1
        for (int tile = keys.end; tile > keys.begin; --tile) {
            skip(c, c.k);
            skip(c, c.v);
        }
        release(c, c.q.empty());
        c.q.advance();
        c.slot = following(c.slot);
        c.q.wait_full();
    }

    // Computes work tiles until one without key tiles for this group. A step issues the scores of a tile and P V of the previous
    // tile, whichever work tiles these belong to. The rows of a work tile are written while the scores of the second tile
    // after its last tile are computed.
    __device__ __forceinline__ void compute_work_tiles(Consumer& c) {
        c.softmax.clear();
        if constexpr (kFirstApart) {
            begin_first_work_tile(c);
        } else {
            begin_with_none(c);
        }
        while (true) {
            // The steps between work tiles. Their code is separate, so that the code of the main loop below stays small and
            // contiguous.
#pragma unroll 1
            do {
                const bool enters = c.last;
                if (enters) {
                    c.slot = following(c.slot);
                    c.q.wait_full();
                    if (!works(c)) return end(c);
                }
                step<true>(c, enters);
            } while (c.last || c.closing_slot != kClosed);
#pragma unroll 1
            while (!c.last) step<false>(c, false);
        }
    }

    // The scores and the softmax of the first tile, without a P V at the same time.
    __device__ __forceinline__ void begin_first_work_tile(Consumer& c) const {
        c.closing_slot = kNothingYet;
        begin_work_tile(c);
        start_scores(c);
        const TileInfo tile_info = tile_info_of(c);
        wgmma_wait<0>();
        wgmma_settle(c.s);
        release_scores(c, tile_info);
        float factor[2];
        take_scores(c, tile_info, factor);
        skip_values(c);
        if (!c.last) wait_for_next(c);
        round_probabilities(c);
    }
    // The alternative: begin as if a work tile with P = 0 had come before. This executes less code that is not yet in the
    // instruction cache.
    __device__ __forceinline__ void begin_with_none(Consumer& c) const {
        c.closing_slot = kNoneBefore;
        c.slot = preceding(c.slot);
        c.last = true;
#pragma unroll
        for (int i = 0; i < kScores; ++i) c.s[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < kSums; ++i) c.o[i] = 0.0f;
        round_probabilities(c);
        wgmma_wait<0>();  // nothing is pending; without it the compiler adds a wait where rows are written
    }

    // kBetween: the scores may be the first of the next work tile (`enters`), and P V may be the first of a work tile.
    template <bool kBetween>
    __device__ __forceinline__ void step(Consumer& c, bool enters) const {
        const bool none_before = kBetween && !kFirstApart && c.closing_slot == kNoneBefore;
        if constexpr (!kBlockMask) --c.tile;
        if (kBetween && enters) begin_work_tile(c);
        wgmma_settle(c.s);
        start_scores(c);
        start_values<kBetween>(c);
        TileInfo tile_info;
        if constexpr (kTileInfoAhead) tile_info = tile_info_of(c);
        wgmma_wait<1>();
        wgmma_settle(c.s);
        if (kBetween && enters && !none_before) finish(c, preceding(c.slot));
        if constexpr (!kTileInfoAhead) tile_info = tile_info_of(c);
        release_scores(c, tile_info);
        float factor[2];
        const bool moved = take_scores(c, tile_info, factor);
        if (!c.last) wait_for_next(c);  // here, while P V still runs: after it no product runs until the next step
        wgmma_wait<0>();
        wgmma_settle(c.o);
        release_values(c);
        if (kBetween && enters) {
            skip_values(c);
        } else if (moved) {
#pragma unroll
            for (int i = 0; i < kSums; ++i) c.o[i] *= factor[i / 2 % 2];
        }
        round_probabilities(c);
    }

    // After the last scores of the last work tile.
    __device__ __forceinline__ void end(Consumer& c) const {
        start_values<true>(c);
        wgmma_wait<0>();
        wgmma_settle(c.o);
        release_values(c);
        finish(c, preceding(c.slot));
        if (c.closing_slot >= 0) write_rows(c);
    }

    // All scores of a work tile are complete: writes the LSE, and computes the factors for the sums of P V.
    __device__ __forceinline__ void finish(Consumer& c, int slot) const {
        const WorkTile& work_tile = common.work_tiles[slot];
        const bool writes =
            // __any_sync tells the compiler that the value is uniform.
            __any_sync(0xffffffffu, work_tile.writers >> warp_of_work_tile() & 1);
        bool overflowed = false;
        const bool past_the_end[2] = {c.softmax.finish(0), c.softmax.finish(1)};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int place = place_of(c, r);
            const bool counts = place < length_of(work_tile) - work_tile.keys.first_row;  // other rows may hold anything
            overflowed |= past_the_end[r] && counts;
            c.inverse[r] = finish_row(work_tile, place, counts, c.softmax.base[r], c.softmax.sum[r], writes && (c.lane & 3) == 0);
        }
        if (__any_sync(0xffffffffu, overflowed)) request_recompute(c, work_tile);
        c.closing_slot = writes ? slot : kNothingYet;
        c.softmax.clear();
    }
    __device__ __forceinline__ int warp_of_work_tile() const { return static_cast<int>(threadIdx.x) / 32 - 4; }
    __device__ __forceinline__ void request_recompute(const Consumer& c, const WorkTile& work_tile) const {
        if (!work_tile.safe && c.lane == 0) mark_for_recompute(work_tile.round, warp_of_work_tile());
    }

    // Writes the rows of the previous work tile.
    __device__ __forceinline__ void write_rows(Consumer& c) const {
        const WorkTile& work_tile = common.work_tiles[c.closing_slot];
        bool overflowed = false;
        // A TMA store writes 16 rows. It must not reach beyond the end of a sequence, where the rows of another one begin.
        const bool sends =
            kSendsRows && !(kDynamic && __any_sync(0xffffffffu, first_row_of_warp(work_tile) + 16 > owned_of(work_tile)));
        if (sends) {
            overflowed = send_rows(c, work_tile);
        } else if constexpr (!kSendsRows || kDynamic) {
#pragma unroll
            for (int r = 0; r < 2; ++r) overflowed |= write_row(c, work_tile, r, c.inverse[r]);
        }
        if (__any_sync(0xffffffffu, overflowed)) request_recompute(c, work_tile);
    }
    __device__ __forceinline__ int first_row_of_warp(const WorkTile& work_tile) const {
        return work_tile.keys.first_row + warp_of_work_tile() * 16;
    }

    // Writes the warp's rows through shared memory, by TMA. Returns true if a row has values that are not finite although its
    // factor is not NaN: the sum of P V may have overflowed float.
    __device__ __forceinline__ bool send_rows(const Consumer& c, const WorkTile& work_tile) const {
        const int warp = warp_of_work_tile();
        const uint32_t tile = out_smem + warp * OutTile::kBytes;
        const int lane = kDynamic ? hide_from_compiler(c.lane) : c.lane;  // recompute addresses where registers are short
        if (c.lane == 0) tma_store_wait_read<0>();
        __syncwarp();
        uint32_t trace[2] = {};
#pragma unroll
        for (int group = 0; group < kHeadDimV / 8; group += 2) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float inverse = c.inverse[i % 2], *o = c.o + 4 * group + 2 * i;
                words[i] = inverse == 0.0f ? 0 : pack_pair(o[0] * inverse, o[1] * inverse, T());
                trace_pair(trace[i % 2], words[i], T());
            }
            OutTile::store_fragment(tile, 0, group, lane, words);
        }
        fence_shared_for_async();
        __syncwarp();
        if (c.lane == 0) store_rows(tile, work_tile);
        return (trace[0] != 0 && c.inverse[0] == c.inverse[0]) || (trace[1] != 0 && c.inverse[1] == c.inverse[1]);
    }

    __device__ __forceinline__ void store_rows(uint32_t tile, const WorkTile& work_tile) const {
        const int row = first_row_of_warp(work_tile);
        if (row >= owned_of(work_tile)) return;
#pragma unroll
        for (int chunk = 0; chunk < OutTile::kChunks; ++chunk)
            tma_store(tile + chunk * OutTile::kChunkBytes, maps.out, chunk * 64, start_of(work_tile) + row, work_tile.work.head,
                      work_tile.work.batch);
        tma_store_commit();
    }

    __device__ __forceinline__ void release(const Consumer& c, const MBarrier& empty) const {
        if (c.lane == 0) empty.arrive();
    }
    // Issues s = Q K^T.
    __device__ __forceinline__ void start_scores(Consumer& c) const {
        const uint32_t q = q_tile(c.q.stage, c.group), k = k_smem + c.k.stage * KTile::kBytes;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step)
            Wgmma<T, kBlockN>::template multiply_shared<false>(c.s, QTile::along_columns(q, step), KTile::along_columns(k, step),
                                                               step > 0);
        wgmma_commit();
    }

    // Goes to the first tile of this group in the work tile: releases K of the tiles skipped before it, waits for its own K.
    __device__ __forceinline__ void begin_work_tile(Consumer& c) const {
        if constexpr (kBlockMask) return wait_for_next(c);
        const int end = tiles_of(c).end;
        for (int tile = common.work_tiles[c.slot].keys.end; tile > end; --tile) skip(c, c.k);
        c.k.wait_full();
        c.tile = end - 1;
    }
    // Releases V of the skipped tiles.
    __device__ __forceinline__ void skip_values(Consumer& c) const {
        if constexpr (!kBlockMask)
            for (int skipped = common.work_tiles[c.slot].keys.end - 1; skipped > c.tile; --skipped) skip(c, c.v);
    }

    // Waits for K of the next tile; with a block mask, also reads its TileWord.
    __device__ __forceinline__ void wait_for_next(Consumer& c) const {
        c.k.wait_full();
        if constexpr (kBlockMask)  // only the lane that releases the stage reads it
            c.word.bits = __shfl_sync(0xffffffffu, c.lane == 0 ? common.dynamic.tiles[c.k.stage].bits : 0, 0);
    }
    __device__ __forceinline__ int tile_of(const Consumer& c) const {
        if constexpr (kBlockMask) return c.word.tile();
        return c.tile;
    }
    // Releases a stage without using it: only when it is full, because an earlier arrival could count for the previous phase, and
    // when all lanes have seen that.
    template <class AnyPipelineState>
    __device__ __forceinline__ void skip(const Consumer& c, AnyPipelineState& ring) const {
        ring.wait_full();
        __syncwarp();
        release(c, ring.empty());
        ring.advance();
    }

    // Issues o += P V; for the first tile of a work tile o = P V, after the rows of the previous work tile are written. Before
    // the first tile of all (kNoneBefore) the producer provides a stage of V without data, and the result is not used: without a
    // product here, the compiler would add a wait for the one before it.
    template <bool kBetween>
    __device__ __forceinline__ void start_values(Consumer& c) const {
        const bool first = kBetween && c.closing_slot != kClosed,
                   none_before = kBetween && !kFirstApart && c.closing_slot == kNoneBefore;
        if (kBetween && c.closing_slot >= 0) write_rows(c);
        if (kBetween) c.closing_slot = none_before ? kNothingYet : kClosed;
        c.v.wait_full();
        const uint32_t v = v_smem + c.v.stage * VTile::kBytes;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kBlockN / 16; ++step)
            Wgmma<T, kHeadDimV>::template multiply<true>(c.o, c.p[step], VTile::down_rows(v, step), step > 0 || !first);
        wgmma_commit();
    }
    __device__ __forceinline__ void release_values(Consumer& c) const {
        release(c, c.v.empty());
        c.v.advance();
    }

    // Turns complete scores into probabilities. Returns true if the sums of P V must be multiplied by `factor`.
    __device__ __forceinline__ bool take_scores(Consumer& c, const TileInfo& tile_info, float (&factor)[2]) const {
        const WorkTile& work_tile = common.work_tiles[c.slot];
        prepare_scores(c, work_tile, tile_of(c), tile_info);
        const bool moved =
            c.softmax.apply(c.s, kGeneral || tile_info.safe ? 1.0f : params.scale_log2, tile_info.edge || tile_info.safe, factor);
        if constexpr (kGeneral) {
            if (params.rare.dropout.active) drop(c, work_tile);
        }
        return moved;
    }

    // Sets the probabilities that dropout removes to 0.
    __device__ __forceinline__ void drop(Consumer& c, const WorkTile& work_tile) const {
        const DropoutParams& dropout = params.rare.dropout;
        const uint32_t batch_head = static_cast<uint32_t>(work_tile.work.batch) * params.heads_q + work_tile.work.head;
#pragma unroll
        for (int block = 0; block < kBlockN / 8; block += 2) {
            uint32_t keep = 0;
#pragma unroll 1
            for (int r = 0; r < 2; ++r) {
                uint2 words[2];
                dropout_words_of_row(dropout, batch_head, row_of(c, work_tile, r), tile_of(c) * kBlockN + block * 8, c.lane,
                                     words);
#pragma unroll
                for (int n = 0; n < 2; ++n)
                    keep |= ((words[n].x >= dropout.threshold ? 1u : 0u) | (words[n].y >= dropout.threshold ? 2u : 0u))
                            << (r * 4 + n * 2);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i)  // row i / 4, block i / 2 % 2, column i % 2
                if (!(keep >> i & 1)) c.s[(block + i / 2 % 2) * 4 + i / 4 * 2 + i % 2] = 0.0f;
        }
    }

    __device__ __forceinline__ TileInfo tile_info_of(const Consumer& c) const {
        const GroupTiles& tiles = tiles_of(c);
        const int tile = tile_of(c);
        return {kBlockMask ? c.word.last() : tile == tiles.begin, tile < tiles.plain_begin || tile >= tiles.plain_end,
                common.work_tiles[c.slot].safe};
    }
    // Releases K of the tile; after the last tile of the work tile, also Q.
    __device__ __forceinline__ void release_scores(Consumer& c, const TileInfo& tile_info) const {
        release(c, c.k.empty());
        c.k.advance();
        c.last = tile_info.last;
        if (!c.last) return;
        release(c, c.q.empty());
        c.q.advance();
    }

    __device__ __forceinline__ void prepare_scores(Consumer& c, const WorkTile& work_tile, int tile,
                                                   const TileInfo& tile_info) const {
        if constexpr (kGeneral) {
            apply_rules(c, work_tile, tile);
        } else if (tile_info.safe) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) c.s[i] *= params.scale_log2;
        }
        if (tile_info.edge) mask_scores(c, work_tile, tile);
    }

    // Turns dot products into scores in base-2 units, with the rare options.
    __device__ __forceinline__ void apply_rules(Consumer& c, const WorkTile& work_tile, int tile) const {
        const int rows = work_tile.q_rows.length, cols = work_tile.keys.length_k;
        const auto for_all = [&](const auto& rule) {
            const int first_col = tile * kBlockN + (hide_from_compiler(c.lane) & 3) * 2;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = row_of(c, work_tile, r);
#pragma unroll
                for (int i = 2 * r; i < kScores; i += 4)
#pragma unroll
                    for (int e = 0; e < 2; ++e) rule(c.s[i + e], row, first_col + i / 4 * 8 + e);
            }
        };
        const auto for_each = [&](const auto& rule) {
            for_all([&](float& score, int row, int col) {
                if (row < rows && col < cols) rule(score, row, col);
            });
        };
        scale_and_cap(params.rare, params.softmax_scale, for_all);
        add_and_hide<T>(params.rare, work_tile.rules, for_all, for_each);
    }

    // Row r of this thread, relative to the first row of the work tile.
    __device__ __forceinline__ int place_of(const Consumer& c, int r) const {
        return (hide_from_compiler(static_cast<int>(threadIdx.x)) >> 5 << 4) - kGroupRows + r * 8 + (c.lane >> 2);
    }
    __device__ __forceinline__ int row_of(const Consumer& c, const WorkTile& work_tile, int r) const {
        return work_tile.keys.first_row + place_of(c, r);
    }

    __device__ __forceinline__ void mask_scores(Consumer& c, const WorkTile& work_tile, int tile) const {
        const int first_col = tile * kBlockN + (hide_from_compiler(c.lane) & 3) * 2;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            // Keys that the row sees, relative to this lane's first column: [begin, end).
            const int row = row_of(c, work_tile, r);
            const int begin = row + work_tile.keys.shift - work_tile.keys.left - first_col;
            const int end = min(work_tile.keys.length_k, row + work_tile.keys.shift + work_tile.keys.right + 1) - first_col;
#pragma unroll
            for (int i = 2 * r; i < kScores; i += 4)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int col = i / 4 * 8 + e;
                    if (col < begin || col >= end) c.s[i + e] = -INFINITY;
                }
        }
    }

    __device__ __forceinline__ void round_probabilities(Consumer& c) const {
#pragma unroll
        for (int step = 0; step < kBlockN / 16; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) c.p[step][i] = pack_pair(c.s[8 * step + 2 * i], c.s[8 * step + 2 * i + 1], T());
    }

    // Writes row r of this thread times `inverse`; if that is 0, zeros, whatever the sums are. Of every 32 channels each of the
    // row's four lanes gets eight neighbouring ones. Returns true if values are not finite although `inverse` is not NaN: the sum
    // of P V may have overflowed float.
    __device__ __forceinline__ bool write_row(const Consumer& c, const WorkTile& work_tile, int r, float inverse) const {
        T* out = row_of_out(work_tile, row_of(c, work_tile, r));
        const int lane = hide_from_compiler(c.lane);
        uint32_t trace = 0;
#pragma unroll
        for (int first = 0; first < kHeadDimV / 8; first += 4) {
            if (first * 8 >= params.head_dim_v) break;  // also keeps the compiler from starting all iterations at once
            uint32_t words[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float left = c.o[4 * (first + k) + 2 * r], right = c.o[4 * (first + k) + 2 * r + 1];
                words[k] = inverse == 0.0f ? 0 : pack_pair(left * inverse, right * inverse, T());
                trace_pair(trace, words[k], T());
            }
            transpose_quad(words, lane);
            write_eight(out, (first + (lane & 3)) * 8, make_uint4(words[0], words[1], words[2], words[3]));
        }
        return trace != 0 && inverse == inverse && row_of(c, work_tile, r) < length_of(work_tile);
    }

    // Three warps wait for the previous kernel: the one that loads, the one that writes work tiles without keys and, with lengths
    // on the device, the one that finds work tiles. The rest need not: what they read and write comes after a load that they have
    // waited for on an mbarrier.
    __device__ __forceinline__ void run() {
        if (threadIdx.x == 0) prepare();
        __syncthreads();
        if (threadIdx.x < 128) {
            give_registers<kProducerRegisters>();
            if (threadIdx.x < 32) {
                produce();
            } else if (threadIdx.x < 64) {
                schedule_ahead();
            } else if (threadIdx.x < 96) {
                if (!maps.all_see_keys) write_empty_work_tiles();
            } else if constexpr (kDynamic) {
                zero_fill_values();
            }
        } else {
            take_registers<kConsumerRegisters>();
            consume();
        }
    }
};

}  // namespace libflash::cuda::sm90
