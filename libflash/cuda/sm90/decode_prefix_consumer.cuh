// The consumer warpgroups of the sm_90a kernel for keys that sequences share: each has 64 rows, with P and O in registers. While
// a warpgroup computes P from the scores of a tile, the tensor cores compute the scores of the next tile; while it scales and
// masks these scores, the tensor cores compute P V. A warp stalls when it issues a product while more than about four are in
// flight. So the even steps of Q K^T, its odd steps (with 128 channels four of each), and the four products with V are issued a
// third of a tile apart.
//
// Sums have the order of sm80/decode_prefix.cuh. Scores are sums over the even and over the odd steps of channels. Each of the
// four units of a tile may raise kept maxima: then O is rescaled between their products (attend_units()). This is rare, so the
// warps first vote; if no unit raises a kept maximum, one batch of products computes the whole tile.
#pragma once

#include "cuda/attention/combine_splits.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/uniform.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/decode_prefix_softmax.cuh"
#include "cuda/sm90/decode_prefix_storage.cuh"
#include "cuda/sm90/release_stage.cuh"
#include "cuda/sm90/warp_roles.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct DecodePrefixConsumer {
    using T = typename Traits::T;
    using QTile = typename Traits::QTile;
    using KTile = typename Traits::KTile;
    using VTile = typename Traits::VTile;
    using Tiles = DecodePrefixTiles<Traits>;
    using NoValues = typename Tiles::NoValues;
    using Softmax = DecodePrefixSoftmax<Traits>;
    using Pipeline = PipelineState<Traits::kStages>;
    static constexpr int kBlockN = Traits::kBlockN, kSteps = Traits::kHeadDim / 16, kUnits = Traits::kUnits;
    static constexpr int kScores = Softmax::kScores, kSums = Traits::kHeadDim / 2;
    static constexpr int kAllConsumers = 1, kVotes = 2;  // named barriers; kVotes: of the first warpgroup

    const DecodePrefixContext<Traits>& context;

    struct State {
        int group, lane, row;               // row: the first one of the thread
        typename Softmax::Scores s;         // of the tile
        float even[kScores], odd[kScores];  // of the next tile: the sums over even and over odd steps
        typename Softmax::Weights p;
        float o[kSums];
        uint32_t queries;             // shared address of Q of the warpgroup
        PrefixWorkTile::Tiles plain;  // the tiles whose keys all rows see
        bool raises;                  // some score of the tile raises a kept maximum
        Softmax softmax;
    };

    __device__ __forceinline__ void run() const {
        const int warp = uniform_warp() - 4;  // of all consumers
        State c;
        c.group = warp / 4, c.lane = hide_from_compiler(static_cast<int>(threadIdx.x & 31)), c.row = 16 * warp + c.lane / 4;
        c.queries = uniform(context.tiles.q_of(c.group));
        load_queries();
        if (context.storage.rows[c.group * Traits::kGroupRows].batch < 0)
            return skip_tiles(Pipeline(context.storage.k), Pipeline(context.storage.v), work_tile().tiles, c.lane);
        const bool exists[2] = {context.storage.rows[c.row].batch >= 0, context.storage.rows[c.row + 8].batch >= 0};
        c.softmax.begin(context.params, c.lane / 4, exists);
#pragma unroll
        for (int i = 0; i < kSums; ++i) c.o[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < kScores; ++i) c.s[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < kUnits * 4; ++i) c.p[i / 4][i % 4] = 0;
        c.raises = false;
        Pipeline k(context.storage.k), v(context.storage.v);
        const int tiles = work_tile().tiles;
        c.plain = work_tile().plain_tiles(kBlockN);
#pragma unroll 1
        for (int tile = -1; tile < tiles; ++tile) {  // first only the scores of tile 0
            if (c.raises) attend_units(c, v);
            attend_tile(c, k, v, tile, tile + 1 < tiles);
        }
        store(c);
    }

private:
    __device__ __forceinline__ const PrefixWorkTile& work_tile() const { return context.storage.work_tile; }

    // Whether the condition holds in any thread of the warpgroup.
    __device__ __forceinline__ static bool any_of_group(const State& c, bool condition) {
        return __any_sync(0xffffffffu, named_barrier_or(kVotes + c.group, 128, condition));
    }

    __device__ __forceinline__ static int consumer_thread() { return static_cast<int>(threadIdx.x) - 128; }

    // Copies the rows of the tile. Rows and channels that do not exist are zeros.
    __device__ __forceinline__ void load_queries() const {
        const DecodeParams& params = context.params;
        constexpr int kVectors = Traits::kHeadDim / 8;
#pragma unroll 1
        for (int i = consumer_thread(); i < Traits::rows() * kVectors; i += Traits::consumers()) {
            const int row = i / kVectors, vector = i % kVectors;
            const PrefixRow& own = context.storage.rows[row];
            const int query = divide(own.packed, params.by_group),
                      head = work_tile().head_k * params.group_size + own.packed - query * params.group_size;
            const T* const from = static_cast<const T*>(params.q.data) + max(own.batch, 0) * params.q.batch +
                                  query * params.q.row + head * params.q.head + vector * 8;
            cp_async_16(context.tiles.q_of(row / Traits::kGroupRows) + QTile::offset(row % Traits::kGroupRows, vector), from,
                        own.batch >= 0 && vector * 8 < params.head_dim);
        }
        for (int at = consumer_thread() * 16; at < Tiles::kNoValuesBytes; at += Traits::consumers() * 16)
            store_zeros_16(context.tiles.no_values() + at);
        cp_async_commit();
        cp_async_wait<0>();
        fence_shared_for_async();
        named_barrier_wait(kAllConsumers, Traits::consumers());
    }

    // Adds a tile to O, given its scores, and computes the scores of the next tile. The compiler would serialise products that
    // are issued under a condition. So the scores are computed even after the last tile, and not used; and where there is no tile
    // yet, or attend_units() has already added the tile to O, zeros take the place of V.
    __device__ __forceinline__ void attend_tile(State& c, Pipeline& k, Pipeline& v, int tile, bool has_next) const {
        const bool exists = tile >= 0, added = c.raises;
        const float sums[2] = {c.softmax.row_sum[0], c.softmax.row_sum[1]};
        if (has_next) k.wait_full();
        begin_scores<0>(c, k);
        if (exists) c.softmax.template exponentiate<0, kUnits / 2>(c.s, c.p);
        if (exists) v.wait_full();
        begin_scores<1>(c, k);
        if (exists) c.softmax.template exponentiate<kUnits / 2, kUnits>(c.s, c.p);
        if (added) c.softmax.row_sum[0] = sums[0], c.softmax.row_sum[1] = sums[1];
        begin_values(c, v, exists && !added);
        wgmma_wait<1>();
        if (has_next) take_scores(c, k, tile + 1);
        finish_values(c);
        if (exists) release_stage(v, c.lane);
    }

    // Issues the even (kOdd = 0) or the odd steps of Q K^T.
    template <int kOdd>
    __device__ __forceinline__ void begin_scores(State& c, const Pipeline& k) const {
        const uint32_t keys = context.tiles.k(k.stage);
        wgmma_fence();
#pragma unroll
        for (int step = kOdd; step < kSteps; step += 2)
            Wgmma<T, kBlockN>::template multiply_shared<false>(kOdd ? c.odd : c.even, QTile::k_major_operand(c.queries, step),
                                                               KTile::k_major_operand(keys, step), step > 1);
        wgmma_commit();
    }

    // Issues O += P V, or with zeros in place of V.
    __device__ __forceinline__ void begin_values(State& c, const Pipeline& v, bool with_values) const {
        const uint32_t values = context.tiles.v(v.stage), none = context.tiles.no_values();
        wgmma_fence();
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit)
            Wgmma<T, Traits::kHeadDim>::template multiply<true>(
                c.o, c.p[unit], with_values ? VTile::mn_major_operand(values, unit) : NoValues::mn_major_operand(none, 0), true);
        wgmma_commit();
    }
    __device__ __forceinline__ void finish_values(State& c) const {
        wgmma_wait<0>();
        wgmma_fence_operand(c.o);
    }

    // Turns complete dot products into scores in base-2 units, and decides whether they raise kept maxima.
    __device__ __forceinline__ void take_scores(State& c, Pipeline& k, int tile) const {
        wgmma_fence_operand(c.even);
        wgmma_fence_operand(c.odd);
#pragma unroll
        for (int i = 0; i < kScores; ++i) c.s[i] = c.even[i] + c.odd[i];
        const uint32_t absent = context.storage.absent[k.stage];  // units of the tile that do not exist
        release_stage(k, c.lane);
        scale_and_cap(c.s);
        if (tile < c.plain.first || tile >= c.plain.end) mask(c, tile);
        if (absent) {
#pragma unroll
            for (int i = 0; i < kScores; ++i)
                if (absent >> i / Softmax::kOfUnit & 1) c.s[i] = -INFINITY;
        }
        c.raises = any_of_group(c, c.softmax.exceeds(c.s));
    }
    __device__ __forceinline__ void scale_and_cap(typename Softmax::Scores& s) const {
        const auto take = [&](int count) {
            scale_and_cap_log2(context.params, [&](const auto& rule) {
#pragma unroll
                for (int i = 0; i < count; ++i) rule(s[i], 0, 0);
            });
        };
        if (!(context.params.softcap > 0.0f)) return take(kScores);
        // A loop over units, because the code is long.
#pragma unroll 1
        for (int unit = 0; unit < kUnits; ++unit) {
            take(Softmax::kOfUnit);
            rotate(s);
        }
    }
    // Rotates the scores, so that the next unit becomes the first one.
    __device__ __forceinline__ static void rotate(typename Softmax::Scores& s) {
#pragma unroll
        for (int i = 0; i < Softmax::kOfUnit; ++i) {
            const float first = s[i];
#pragma unroll
            for (int at = i; at + Softmax::kOfUnit < kScores; at += Softmax::kOfUnit) s[at] = s[at + Softmax::kOfUnit];
            s[kScores - Softmax::kOfUnit + i] = first;
        }
    }
    __device__ __forceinline__ void mask(State& c, int tile) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const VisibleRange seen = context.storage.rows[c.row + 8 * r].keys;
#pragma unroll
            for (int i = 0; i < kScores; ++i) {
                if (i / 2 % 2 != r) continue;
                const int key = work_tile().key_of(tile, kBlockN, i / 4 * 8 + i % 2) + c.lane % 4 * 2;
                if (key < seen.begin || key >= seen.end) c.s[i] = -INFINITY;
            }
        }
    }

    // Adds the tile to O unit by unit, because each unit may raise kept maxima.
    __device__ __forceinline__ void attend_units(State& c, const Pipeline& v) const {
        v.wait_full();
        const uint32_t values = uniform(context.tiles.v(v.stage));
#pragma unroll 1
        for (int unit = 0; unit < kUnits; ++unit) {
            float factor[2];
            if (c.softmax.raise(c.s, factor)) {
#pragma unroll
                for (int i = 0; i < kSums; ++i) c.o[i] *= factor[i / 2 % 2];
            }
            c.softmax.template exponentiate<0, 1>(c.s, c.p);
            wgmma_fence_operand(c.o);
            wgmma_fence();
            Wgmma<T, Traits::kHeadDim>::template multiply<true>(c.o, c.p[0], VTile::mn_major_operand(values, unit), true);
            wgmma_commit();
            finish_values(c);
            rotate(c.s);
        }
    }

    __device__ __forceinline__ void store(const State& c) const {
        const DecodeParams& params = context.params;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const PrefixRow& own = context.storage.rows[c.row + 8 * r];
            if (own.batch < 0) continue;
            const int64_t row = partial_row(params, own.batch, work_tile().head_k, own.packed);
            float* const to =
                prefix_sums_of<Traits::kHeadDim>(params, row, work_tile().split, work_tile().classes, work_tile().of_class);
            store_prefix_sums<Traits::kHeadDim>(to, c.lane, c.softmax.kept_maximum[r], c.softmax.row_sum[r],
                                                [&](int n) { return make_float2(c.o[4 * n + 2 * r], c.o[4 * n + 2 * r + 1]); });
        }
    }
};

}  // namespace libflash::cuda::sm90
