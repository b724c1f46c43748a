// Decode of invariant rows: a row has the same bits as in the prefill kernel of sm90, however many rows a call has. A thread
// block has up to 16 query rows of a key head and one segment of the keys, some or all. Each warp multiplies 16 keys of a tile,
// and the warps exchange the scores through shared memory. Then each warp has the scores of all keys of the tile, in the layout
// of the prefill kernel, and computes a part of the channels of P V. So every sum has the same order as in that kernel: tiles
// from the last to the first, the keys of a tile ascending, in one accumulator. If the thread block has all segments it folds
// them, otherwise it stores each one for fold_segments.cuh. attention/invariant_softmax.cuh has the softmax of a row.
#pragma once

#include "cuda/attention/invariant_segments.h"
#include "cuda/attention/invariant_softmax.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/sm80/decode_instance.h"
#include "cuda/sm80/decode_range.cuh"
#include "cuda/sm80/fold_segments.cuh"

namespace libflash::cuda::sm80 {

template <class Kernel>
using DecodeOfInvariantRows =
    Decode<ElementOf<Kernel::config.dtype>, Kernel::config.head_dim, Kernel::config.tile_k / kDecodeSlab, Kernel::config.stages,
           false, false, 1, DecodeStorage::plain, DecodeRows::any>;

template <class Kernel>
struct InvariantDecode : DecodeOfInvariantRows<Kernel> {
    using Base = DecodeOfInvariantRows<Kernel>;
    using Base::params, Base::shared, Base::lane, Base::warp, Base::work_tile, Base::products, Base::s;
    using typename Base::Loads, typename Base::Lookup, typename Base::NewRow, typename Base::Range;
    using T = typename Base::Element;
    static constexpr int kHeadDim = Base::kChannels, kTileK = Base::kTileK, kThreads = Base::kThreads;
    static constexpr int kStages = Kernel::config.stages, kWarps = kTileK / kDecodeSlab;
    using Values = DecodeProducts<T, kHeadDim, kHeadDim, kWarps>;  // products with the warp's channels of V
    static constexpr int kBlocks = kHeadDim / 8 / kWarps;
    using Softmax = InvariantSoftmax<kTileK>;
    // After the shared memory of Decode: the scores of a tile. Rows are padded so that the lanes of a warp access different
    // banks.
    static constexpr int kScoreRow = kTileK + 8;
    static constexpr int kSharedBytes = Base::kSharedBytes + kDecodeSlab * kScoreRow * static_cast<int>(sizeof(float));
    // With at most 64 channels registers suffice for three thread blocks per multiprocessor, else for two.
    static constexpr int kMinBlocks =
        decode_blocks_at_once(kSharedBytes, 227 * 1024, kThreads, (kHeadDim <= 64 ? 3 : 2) * kThreads);
    static_assert(Base::kSharedBytes % 16 == 0);

    Softmax softmax;
    typename Values::Sums o;  // the warp's channels
    // The folded results of the segments that have ended, if the thread block has all segments (params.splits is 1).
    typename Values::Sums folded_o;
    InvariantFold folded[2];
    int segment = 0, segment_begin = 0;  // the number and the first key of the current segment

    __device__ __forceinline__ InvariantDecode(const DecodeParams& p, char* memory, const RaggedWorkTile& tile)
        : Base(p, memory, tile) {}

    __device__ __forceinline__ void run(Range& range) {
        take_segments(range);
        if (params.splits > 1 && range.first >= range.last) return;
        softmax.clear();
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[n][e] = folded_o[n][e] = 0.0f;
        if (range.first < range.last) loop_over_keys(range, KeyLocations(params.cache, work_tile.batch));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = quad_sum(softmax.sum[r]);
            const int row = r * 8 + lane / 4;
            if (row >= work_tile.rows) continue;
            params.splits > 1 ? store_segment(work_tile.first_row + row, r, sum) : store_row(work_tile.first_row + row, r, sum);
        }
    }

private:
    __device__ __forceinline__ int segment_of_key(int key) const {
        return params.segment > 0 ? key / params.segment : segment_of(key);
    }
    __device__ __forceinline__ int64_t begin_of(int n) const {
        return params.segment > 0 ? int64_t{n} * params.segment : begin_of_segment(n);
    }
    __device__ __forceinline__ void begin_segment(int n) { segment = n, segment_begin = static_cast<int>(begin_of(n)); }
    // Restricts the range to the segments of group `work_tile.split`. The groups have about equally many keys, up to whole
    // segments; where segments are longer than that, some groups have none. Stores that the rows see no key of those segments
    // that are outside of the range.
    __device__ __forceinline__ void take_segments(Range& range) {
        const int keys = max(range.last - range.first, 0), groups = params.segment_groups, group = work_tile.split;
        const unsigned each = (static_cast<unsigned>(keys) + groups - 1) / groups;
        // The segments of the first key and after the last one, the first segment of this group and of the next one. Each is
        // found by one lane of four: code that a thread block runs once takes the time to fetch it.
        const int which = lane % 4;
        const unsigned wanted = which == 0 ? 0 : (which == 1 ? keys : each * (group + which - 2)),
                       before = min(wanted, static_cast<unsigned>(keys));
        const bool after_last = before == static_cast<unsigned>(keys);
        const int of_lane = keys > 0 ? segment_of_key(range.first + before - after_last) + after_last : 0;
        const int first = __shfl_sync(0xffffffffu, of_lane, 0), end = __shfl_sync(0xffffffffu, of_lane, 1),
                  own = __shfl_sync(0xffffffffu, of_lane, 2), next = __shfl_sync(0xffffffffu, of_lane, 3);
        const auto begin = static_cast<int>(min(begin_of(which == 0 ? own : next - which % 2), int64_t{INT32_MAX}));
        range.first = max(__shfl_sync(0xffffffffu, begin, 0), range.first);
        segment = next - 1, segment_begin = __shfl_sync(0xffffffffu, begin, 1);
        range.last = own < next ? min(__shfl_sync(0xffffffffu, begin, 2), range.last) : range.first;
#pragma unroll 1
        for (int n = params.splits > 1 ? group : 1; n < params.splits; n += groups) {
            if (n >= first && n < end) continue;
            if (static_cast<int>(threadIdx.x) < work_tile.rows)
                store_statistics(place_of(work_tile.first_row + threadIdx.x, n), make_float2(kNoScore, 0.0f));
        }
    }

    __device__ __forceinline__ float* scores() const { return reinterpret_cast<float*>(shared + Base::kSharedBytes); }
    // The lane's elements of rows r = 0, 1 and the keys from 8 * block on.
    __device__ __forceinline__ float2& pair_of_scores(int r, int block) const {
        return *reinterpret_cast<float2*>(scores() + (r * 8 + lane / 4) * kScoreRow + block * 8 + lane % 4 * 2);
    }

    // As Decode::loop_over_keys(), with descending tiles. A stage is free again when all warps have multiplied its values.
    __device__ __forceinline__ void loop_over_keys(const Range& range, const KeyLocations& locations) {
        const int begin = range.first / kTileK * kTileK, tiles = (range.last - begin + kTileK - 1) / kTileK;
        const auto first_key = [&](int tile) { return begin + (tiles - 1 - tile) * kTileK; };
        const Lookup lookup = this->key_lookup(locations, range);
        const bool has_table = __builtin_expect(locations.table != nullptr, false);
        typename Lookup::FirstEntries first_entries;
        if (has_table) first_entries = lookup.load_first(kStages, first_key(0), -kTileK);
        this->find_row_rules(range);
        if (has_table) lookup.store_first(first_entries, kStages);
        int stage = 0;
#pragma unroll 1
        for (int loading = 0; loading < tiles + kStages; ++loading) {
            const int done = loading - kStages;
            if (done >= 0) {
                cp_async_wait<kStages - 1>();
                __syncwarp();
                if (done == 0) this->begin_products(NewRow{{params}});
                attend(stage, first_key(done), range);
                __syncthreads();  // the stage and the scores are no longer read
            }
            if (loading < tiles) {
                Loads{*this}.load_keys(this->own_head(), stage, lookup.look_up(stage, first_key(loading)));
                if (has_table) lookup.begin(stage, first_key(loading + kStages));
            }
            if (loading == 0) Loads{*this}.load_queries();
            cp_async_commit();
            stage = stage + 1 == kStages ? 0 : stage + 1;
        }
        cp_async_wait<0>();
    }

    // Whether apply_rules() converts the scores to base-2 units before the softmax: with options that change scores.
    __device__ __forceinline__ bool are_scaled() const {
        return params.softcap > 0.0f || params.alibi_slopes.data || !(params.softmax_scale > 0.0f);
    }

    // Computes the scores of the warp's own 16 keys and stores them for all warps.
    __device__ __forceinline__ void share_scores(int stage, int first_key, const Range& range) {
        const int first = first_key + this->own_keys();
        const uint32_t exist = this->existing(stage, warp);
        products.scores_in_order(s, this->keys(stage, warp), lane);
        if (are_scaled()) this->apply_rules(first, range);
        if (exist != 0xffffu || first < range.plain || first + kDecodeSlab > range.plain_end)
            this->mask_keys(first, exist, range);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) pair_of_scores(r, 2 * warp + n) = make_float2(s[n][2 * r], s[n][2 * r + 1]);
    }
    __device__ __forceinline__ void read_scores(typename Softmax::Scores& all) const {
#pragma unroll
        for (int n = 0; n < kTileK / 8; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float2 pair = pair_of_scores(r, n);
                all[4 * n + 2 * r] = pair.x, all[4 * n + 2 * r + 1] = pair.y;
            }
    }

    // Whether the previous tile was the last one of a segment, before which the thread block has another.
    __device__ __forceinline__ bool ended_segment(int first_key) const { return first_key + kTileK == segment_begin; }
    // Stores the segment that has ended.
    __device__ __forceinline__ void store() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = quad_sum(softmax.sum[r]);
            const int row = r * 8 + lane / 4;
            if (row < work_tile.rows) store_segment(work_tile.first_row + row, r, sum);
        }
        softmax.begin_segment();
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[n][e] = 0.0f;
    }
    __device__ __forceinline__ void fold() {
        InvariantFold::Factors factors[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) factors[r] = folded[r].add(softmax.kept_maximum[r], quad_sum(softmax.sum[r]));
        softmax.begin_segment();
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                folded_o[n][e] = factors[e / 2].of(folded_o[n][e], o[n][e]);
                o[n][e] = 0.0f;
            }
    }

    __device__ __forceinline__ void attend(int stage, int first_key, const Range& range) {
        if (ended_segment(first_key)) {
            params.splits > 1 ? store() : fold();
            begin_segment(segment - 1);
        }
        share_scores(stage, first_key, range);
        __syncthreads();  // the scores are complete, and the values that other warps loaded have arrived
        typename Softmax::Scores p;
        float factor[2];
        if (probabilities(p, factor)) {
#pragma unroll
            for (int n = 0; n < kBlocks; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[n][e] *= factor[e / 2];
        }
#pragma unroll
        for (int step = 0; step < kWarps; ++step) {
            uint32_t pf[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) pf[i] = pack_pair(p[8 * step + 2 * i], p[8 * step + 2 * i + 1], T());
            Values::add_values(o, pf, this->values(stage, step), lane, warp);
        }
    }
    // Converts the scores of the tile to probabilities; all warps compute the same. Returns whether O must be multiplied by
    // `factor`.
    __device__ __forceinline__ bool probabilities(typename Softmax::Scores& p, float (&factor)[2]) {
        const float scale = are_scaled() ? 1.0f : params.scale_log2;
        const Softmax before = softmax;
        read_scores(p);
        const bool rescale = softmax.apply(p, scale, false, factor);
        if (__builtin_expect(!__any_sync(0xffffffffu, softmax.is_unsafe(0) || softmax.is_unsafe(1)), true)) return rescale;
        softmax = before;
        read_scores(p);
        return softmax.apply(p, scale, true, factor);
    }

    // The place of a segment of a row in the workspace.
    __device__ __forceinline__ int64_t place_of(int packed, int n) const {
        return partial_row_of(work_tile.head_k, packed) * params.splits + n;
    }
    // The kept maximum and the row sum of a segment. If the sum is 0, fold_segments.cuh does not use the accumulators.
    __device__ __forceinline__ void store_statistics(int64_t place, float2 statistics) const {
        reinterpret_cast<float2*>(params.partial_lse)[place] = statistics;
    }
    __device__ __forceinline__ int first_channel() const { return warp * kBlocks * 8 + lane % 4 * 2; }
    __device__ __forceinline__ bool leads() const { return warp == 0 && lane % 4 == 0; }
    // `sum`: the row sum of the segment.
    __device__ __forceinline__ void store_segment(int packed, int r, float sum) const {
        const int64_t place = place_of(packed, segment);
        if (leads()) store_statistics(place, make_float2(softmax.kept_maximum[r], sum));
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
            *reinterpret_cast<float2*>(params.partial_out + place * kHeadDim + first_channel() + n * 8) =
                make_float2(o[n][2 * r], o[n][2 * r + 1]);
    }
    __device__ __forceinline__ void store_row(int packed, int r, float sum) const {
        InvariantFold fold = folded[r];
        const InvariantFold::Factors factors = fold.add(softmax.kept_maximum[r], sum);
        const FoldedRow<T> row(params, work_tile.batch, this->tensor_row(packed), this->query_head(work_tile.head_k, packed),
                               fold);
        if (leads()) row.store_lse();
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
            row.store(first_channel() + n * 8,
                      {factors.of(folded_o[n][2 * r], o[n][2 * r]), factors.of(folded_o[n][2 * r + 1], o[n][2 * r + 1])});
    }
    __device__ __forceinline__ int64_t partial_row_of(int head_k, int packed) const {
        if (params.ragged.most_rows > 0) return short_partial_row(params, kDecodeSlab, work_tile.batch, head_k, packed);
        const int batch = params.ragged.queries.cu ? 0 : work_tile.batch;
        return partial_row(params, batch, head_k, work_tile.sequence.start * params.group_size + packed);
    }
};

template <class Kernel>
__global__ void __launch_bounds__(InvariantDecode<Kernel>::kThreads, InvariantDecode<Kernel>::kMinBlocks)
    invariant_decode_kernel(const __grid_constant__ DecodeParams params) {
    extern __shared__ __align__(128) char shared[];
    using Body = InvariantDecode<Kernel>;
    allow_next_kernel();
    wait_for_previous_kernel();
    // The order of thread blocks: first the tiles of a key head, then the key heads, then the groups of segments. The last
    // segments come first, because they are longer.
    const int head_of_all = divide(blockIdx.x, params.by_tiles), from_last = divide(head_of_all, params.by_heads);
    [[maybe_unused]] const int head = head_of_all - from_last * params.heads_k;  // unused where nvcc compiles for the host
    const int group = params.segment_groups - 1 - from_last;
    const int index = static_cast<int>(blockIdx.x) - head_of_all * static_cast<int>(params.by_tiles.divisor);
    __shared__ RaggedWorkTile work_tile;
    const auto run_tile = [&](const RaggedTile& tile, const RaggedSequence& sequence) {
        const int rows = sequence.rows * params.group_size, first = tile.tile * kDecodeSlab;
        if (threadIdx.x == 0) work_tile = {tile.batch, head, group, first, min(kDecodeSlab, rows - first), sequence};
        __syncthreads();
        const int first_row = divide(first, params.by_group), last_row = divide(first + work_tile.rows - 1, params.by_group);
        typename Body::Range range(params, work_tile.sequence, first_row, last_row, 0, Body::kTileK);
        Body(params, shared, work_tile).run(range);
    };
    // If the prefill kernel computes long chunks, most other sequences have one row. So each sequence has only the thread blocks
    // for one row, and sequences with more rows loop: with more thread blocks most would find no rows.
    const bool beside_long = params.ragged.most_rows > 0;
    const int step = beside_long ? (params.group_size + kDecodeSlab - 1) / kDecodeSlab : 1;  // tiles_of_a_row()
    RaggedTile tile = beside_long ? RaggedTile{index / step, index % step} : find_ragged_tile(params, index, kDecodeSlab);
    if (tile.batch < 0) return;
    const RaggedSequence sequence = RaggedSequence::of(params.ragged, tile.batch);
    if (beside_long && sequence.rows > params.ragged.most_rows) return;
    const int end = beside_long ? ragged_tiles(sequence.rows * params.group_size, kDecodeSlab) : tile.tile + 1;
#pragma unroll 1
    for (bool again = false; tile.tile < end; tile.tile += step, again = true) {
        if (again) __syncthreads();  // no thread uses the work tile and shared memory any more
        run_tile(tile, sequence);
    }
}

}  // namespace libflash::cuda::sm80
