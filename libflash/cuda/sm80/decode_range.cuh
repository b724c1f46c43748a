// Flash-Decoding for sm_80 and later: a few query rows per sequence against its KV cache (split-KV). A thread block computes one
// split for one key head, or two adjacent ones; the rows of all query heads that share a key head are packed into one query tile.
//
// Each warp loads 16 keys of a tile by itself (cp.async, kStages tiles in flight, or one fewer). Block table entries are loaded
// with an earlier tile (key_lookup.cuh). Memory bandwidth limits the speed, so each multiprocessor has about 100 KB of loads in
// flight.
//   up to 16 rows    each warp works on the keys that it loaded, without barriers; at the end their results are combined
//   more rows        each warp has its own 16 rows and works on all keys of the tile (kSharesKeys)
//
// The maximum of a row is kept until a score exceeds it by more than kSlack (base-2 units). With several splits each result,
// divided by its own row sum, goes to the workspace; combine_splits.cuh computes the output.
#pragma once

#include "cuda/attention/decode_keys.cuh"
#include "cuda/attention/edge_mask.cuh"
#include "cuda/attention/element.cuh"
#include "cuda/attention/online_softmax.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/params.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/nanosleep.cuh"
#include "cuda/sm80/appended_row.cuh"
#include "cuda/sm80/combine_splits.cuh"
#include "cuda/sm80/decode_products.cuh"
#include "cuda/sm80/key_lookup.cuh"
#include "cuda/tile/quad.cuh"

namespace libflash::cuda::sm80 {

// kAppends: the kernel appends one new row per sequence and rotates it and the queries (appended_row.cuh). A separate instance,
// because this code costs time even if it is skipped.
//
// kHeads: adjacent key heads per thread block; each has kWarps / kHeads of the warps. With two, reads of a key are longer and
// there are fewer thread blocks.
template <class T, int kHeadDim, int kWarps, int kStages, bool kSharesKeys, bool kAppends, int kHeads = 1>
struct Decode {
    using Products = DecodeProducts<T, kHeadDim>;
    static constexpr int kThreads = kWarps * 32;
    using NewRow = AppendedRow<T, kHeadDim, kThreads, kHeads>;  // with kAppends
    static constexpr int kTileK = kWarps / kHeads * kDecodeSlab;
    static constexpr int kTileRows = (kSharesKeys ? kWarps : kHeads) * kDecodeSlab;
    static_assert(kHeads == 1 || !kSharesKeys);
    static constexpr int kChunkValues = 16 / sizeof(T);
    static constexpr int kChunks = kHeadDim / kChunkValues;
    static constexpr int kLanesPerRow = kChunks < 32 ? kChunks : 32, kRowsAtOnce = 32 / kLanesPerRow;
    using Slab = typename Products::template Tile<kDecodeSlab>;
    static constexpr int kSlabBytes = Slab::kBytes, kRowBytes = Slab::kRowBytes;
    static constexpr int kStageBytes = 2 * kWarps * kSlabBytes;  // K, then V
    static constexpr int kQueryBytes = kTileRows * Slab::kRowBytes;
    static constexpr int kSharedBytes = decode_shared_bytes(kHeadDim, kWarps* kDecodeSlab, kStages, sizeof(T), kTileRows);
    static_assert(kSharedBytes == kStages * kStageBytes + kQueryBytes + kStages * kWarps * (1 + kDecodeSlab) * 4,
                  "the host counts the same");
    // Results of the warps; they reuse the memory of the stages.
    static constexpr int kPartRow = kHeadDim + 8;
    static_assert((kWarps * kDecodeSlab * (kPartRow + 4)) * 4 <= kStages * kStageBytes, "they fit");
    static constexpr float kSlack = 8.0f;       // `half` can represent 2^8 and, as its smallest number, 2^-24
    static constexpr uint32_t kDelayNs = 3000;  // delay; longer than memory is idle between two thread blocks
    static constexpr int kDelayMinTiles = 16;   // splits with fewer tiles are not delayed: it would cost too much

    // The work tile of a thread block. Consecutive thread blocks take the query tiles of one key head, so that they find the keys
    // in the L2 cache; then follow heads, splits and sequences.
    struct WorkTile {
        int batch, head_k, split, first_row, rows;  // rows: those of the tile that exist

        __device__ __forceinline__ WorkTile(const DecodeParams& params, int index) {
            const int head = divide(index, params.by_tiles), range = divide(head, params.by_head_groups);
            batch = divide(range, params.by_splits);
            split = range - batch * params.splits;
            head_k = (head - range * static_cast<int>(params.by_head_groups.divisor)) * kHeads;
            first_row = (index - head * static_cast<int>(params.by_tiles.divisor)) * kTileRows;
            rows = min(kHeads > 1 ? kDecodeSlab : kTileRows, params.seqlen_q * params.group_size - first_row);
        }
    };

    const DecodeParams& params;
    char* shared;
    int lane, warp;
    WorkTile work_tile;
    Products products;
    float s[2][4], o[kHeadDim / 8][4];
    float base[2], row_sum[2];
    // Of the lane's two rows.
    VisibleRange visible[2];
    int diagonal[2];
    float slope[2];

    __device__ __forceinline__ Decode(const DecodeParams& p, char* memory)
        : params(p), shared(memory), lane(threadIdx.x % 32), warp(threadIdx.x / 32), work_tile(p, static_cast<int>(blockIdx.x)) {}

    __device__ __forceinline__ char* keys(int stage, int group) const {
        return shared + stage * kStageBytes + group * kSlabBytes;
    }
    __device__ __forceinline__ char* values(int stage, int group) const { return keys(stage, kWarps + group); }
    __device__ __forceinline__ char* queries() const { return shared + kStages * kStageBytes; }
    __device__ __forceinline__ uint32_t& existing(int stage, int group) const {
        return reinterpret_cast<uint32_t*>(queries() + kQueryBytes)[stage * kWarps + group];
    }
    using Lookup = KeyLookup<kTileK, kStages>;
    __device__ __forceinline__ Lookup key_lookup(const KeyLocations& locations, const VisibleKeys& range) const {
        int32_t* const entries = reinterpret_cast<int32_t*>(&existing(kStages, 0));  // after the last `existing`
        return {locations, range, entries + warp * kDecodeSlab, kWarps * kDecodeSlab, own_keys(), lane};
    }
    __device__ __forceinline__ float* part(int slab, int row) const {
        return reinterpret_cast<float*>(shared) + (slab * kDecodeSlab + row) * kPartRow;
    }
    // Four numbers per row and slab: base, row sum, weight of this part, and the factor for the sum of all parts.
    __device__ __forceinline__ float* part_statistics(int slab, int row) const {
        return reinterpret_cast<float*>(shared) + kWarps * kDecodeSlab * kPartRow + (slab * kDecodeSlab + row) * 4;
    }
    // Warps with partial results of the same row.
    static constexpr int kParts = kSharesKeys ? 1 : kWarps / kHeads;
    // Existing row number n. Heads vary fastest: row 0 of all heads, then row 1 of all heads.
    struct ExistingRow {
        int head_k, packed, slab, in_slab;
    };
    __device__ __forceinline__ ExistingRow existing_row(int n) const {
        const int head = n % kHeads, row = n / kHeads;
        return {work_tile.head_k + head, work_tile.first_row + row, kHeads > 1 ? head : row / kDecodeSlab, row % kDecodeSlab};
    }
    __device__ __forceinline__ int own_head() const { return work_tile.head_k + (kHeads > 1 ? warp % kHeads : 0); }
    __device__ __forceinline__ int own_keys() const { return warp / kHeads * kDecodeSlab; }

    static __device__ __forceinline__ void synchronize() {
        if constexpr (kSharesKeys) {
            __syncthreads();
        } else {
            __syncwarp();
        }
    }

    __device__ __forceinline__ int query_row(int row) const { return divide(row, params.by_group); }
    template <class Numbers = PlainLoad>
    static __device__ __forceinline__ VisibleKeys keys_of(const DecodeParams& params, const WorkTile& work_tile) {
        const int first = divide(work_tile.first_row, params.by_group),
                  last = divide(work_tile.first_row + work_tile.rows - 1, params.by_group);
        return VisibleKeys(params, KeyCount::of<Numbers>(params.cache, work_tile.batch), first, last, work_tile.split, kTileK);
    }
    __device__ __forceinline__ int query_head(int head_k, int row) const {
        return head_k * params.group_size + row - query_row(row) * params.group_size;
    }

    // Copies `count` values of any alignment; the rest of the chunk becomes zeros.
    static __device__ __forceinline__ void copy_slowly(char* to, const T* from, int count) {
#pragma unroll 1
        for (int i = 0; i < kChunkValues; ++i) reinterpret_cast<T*>(to)[i] = i < count ? from[i] : T(0.0f);
    }

    __device__ __forceinline__ void load_queries() {
        for (int i = threadIdx.x; i < kTileRows * kChunks; i += kThreads) {
            const int row = i / kChunks, chunk = i % kChunks, of_head = kHeads > 1 ? row % kDecodeSlab : row;
            const int head_k = work_tile.head_k + (kHeads > 1 ? row / kDecodeSlab : 0),
                      packed = work_tile.first_row + min(of_head, work_tile.rows - 1);
            const T* from = static_cast<const T*>(params.q.data) + work_tile.batch * params.q.batch +
                            query_row(packed) * params.q.row + query_head(head_k, packed) * params.q.head + chunk * kChunkValues;
            const int count = of_head < work_tile.rows ? params.head_dim - chunk * kChunkValues : 0;
            char* const to = queries() + Slab::offset(row, chunk);
            if (params.vector_q) {
                cp_async_16(shared_address(to), from, count > 0);
            } else {
                copy_slowly(to, from, count);
            }
        }
    }

    // Starts the loads of this warp's 16 keys and values of a tile. Keys that do not exist become zeros.
    __device__ __forceinline__ void load_keys(int head_k, int stage, const KeyLocation& location) {
        const CacheParams& cache = params.cache;
        const bool exists = static_cast<uint32_t>(location.page) < static_cast<uint32_t>(cache.pages);
        const uint32_t all = __ballot_sync(0xffffffffu, exists);
        if (lane == 0) existing(stage, warp) = all;
        const T* const k = static_cast<const T*>(cache.k.data) + head_k * cache.k.head;
        const T* const v = static_cast<const T*>(cache.v.data) + head_k * cache.v.head;
        const auto copy_rows = [&](int step, const auto& copy) {
            const int row = step * kRowsAtOnce + lane / kLanesPerRow;
            const int64_t page = __shfl_sync(0xffffffffu, location.page, row);
            const int64_t at = __shfl_sync(0xffffffffu, location.row, row);
            const bool there = all >> row & 1;
#pragma unroll
            for (int chunk = lane % kLanesPerRow; chunk < kChunks; chunk += kLanesPerRow) {
                const int first = chunk * kChunkValues, offset = Slab::offset(row, chunk);
                copy(keys(stage, warp) + offset, k + page * cache.k.batch + at * cache.k.row + first,
                     there ? params.head_dim - first : 0);
                copy(values(stage, warp) + offset, v + page * cache.v.batch + at * cache.v.row + first,
                     there ? params.head_dim_v - first : 0);
            }
        };
        if (params.vector_kv) {
#pragma unroll(kRowBytes > 512 ? 2 : kDecodeSlab)
            for (int step = 0; step < kDecodeSlab / kRowsAtOnce; ++step)
                copy_rows(step, [](char* to, const T* rows, int count) { cp_async_16(shared_address(to), rows, count > 0); });
        } else {
#pragma unroll 1
            for (int step = 0; step < kDecodeSlab / kRowsAtOnce; ++step) copy_rows(step, copy_slowly);
        }
    }

    __device__ __forceinline__ void prepare_rows(const VisibleKeys& range) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int packed =
                work_tile.first_row + min((kSharesKeys ? warp * kDecodeSlab : 0) + r * 8 + lane / 4, work_tile.rows - 1);
            const int row = query_row(packed);
            visible[r] = {range.first_visible(params, row), range.end_of_visible(params, row)};
            diagonal[r] = row + range.length - params.seqlen_q;
            slope[r] = params.alibi_slopes.data
                           ? head_number<T>(params.alibi_slopes, work_tile.batch, query_head(own_head(), packed)) * kLog2e
                           : 0.0f;
            base[r] = kNoScore;
            row_sum[r] = 0.0f;
        }
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[n][e] = 0.0f;
    }

    // Calls rule(score, r, key) for all scores of this lane.
    template <class Rule>
    __device__ __forceinline__ void for_all_scores(int first_key, const Rule& rule) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) rule(s[n][e], e / 2, first_key + 8 * n + lane % 4 * 2 + e % 2);
    }

    // From dot products to scores in base-2 units.
    __device__ __forceinline__ void apply_rules(int first_key) {
        scale_and_cap(params.softcap, params.softmax_scale, kLog2e, params.scale_log2,
                      [&](const auto& rule) { for_all_scores(first_key, rule); });
        if (params.alibi_slopes.data) {
            for_all_scores(first_key, [&](float& score, int r, int key) { subtract_alibi(score, slope[r], diagonal[r], key); });
        }
    }

    __device__ __forceinline__ void mask_keys(int first_key, uint32_t exist) {
        for_all_scores(first_key, [&](float& score, int r, int key) {
            if (key < visible[r].begin || key >= visible[r].end || !(exist >> (key - first_key) & 1)) score = -INFINITY;
        });
    }

    // Raises the base of the lane's two rows to the maximum of the new scores and rescales their sums and accumulators.
    __device__ __forceinline__ void move_base() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float largest = fmaxf(fmaxf(s[0][2 * r], s[0][2 * r + 1]), fmaxf(s[1][2 * r], s[1][2 * r + 1]));
            const float factor = raise_base(base[r], quad_max(largest));
            row_sum[r] *= factor;
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n) {
                o[n][2 * r] *= factor;
                o[n][2 * r + 1] *= factor;
            }
        }
    }

    // Attention of the warp's 16 rows to 16 keys from `first_key` on.
    __device__ __forceinline__ void attend(int stage, int group, int first_key, const VisibleKeys& range) {
        const uint32_t exist = existing(stage, group);
        if (exist == 0) return;
        products.scores(s, keys(stage, group), lane);
        apply_rules(first_key);
        if (exist != 0xffffu || first_key < range.plain || first_key + kDecodeSlab > range.plain_end) mask_keys(first_key, exist);
        bool high = false;
        for_all_scores(first_key, [&](float& score, int r, int) { high |= score - base[r] > kSlack; });
        if (__any_sync(0xffffffffu, high)) move_base();
        for_all_scores(first_key, [&](float& score, int r, int) {
            score = exp2_approx(score - base[r]);
            row_sum[r] += score;
        });
        products.add_values(o, s, values(stage, group), lane);
    }

    // Prepares the queries before the first tile. All threads have loaded them, in the cp.async group of that tile.
    __device__ __forceinline__ void begin_products(const NewRow& new_row) {
        __syncthreads();
        if constexpr (kAppends) {
            new_row.rotate_queries(kHeads * work_tile.rows, [&](int n, int channel) -> T& {
                const ExistingRow row = existing_row(n);
                const int in_tile = row.slab * kDecodeSlab + row.in_slab;
                return reinterpret_cast<T*>(queries() + Slab::offset(in_tile, channel / kChunkValues))[channel % kChunkValues];
            });
            __syncthreads();
        }
        products.load_queries(queries() + (kSharesKeys ? warp : warp % kHeads) * kSlabBytes, lane);
    }

    __device__ __forceinline__ void attend_tile(int stage, int first, const VisibleKeys& range) {
        if constexpr (kSharesKeys) {
#pragma unroll 1
            for (int group = 0; group < kWarps; ++group) attend(stage, group, first + group * kDecodeSlab, range);
        } else {
            attend(stage, warp, first + own_keys(), range);
        }
    }

    // Waits until the oldest of `stages` tiles has arrived, including the parts that other threads loaded.
    static __device__ __forceinline__ void wait_for_oldest(int stages) {
        if (stages == kStages) {
            cp_async_wait<kStages - 1>();
        } else {
            cp_async_wait<kStages - 2>();
        }
        synchronize();
    }

    // Prologue and main loop in one: the first iteration for each stage only loads. A short split would end before the
    // instructions of a separate prologue were fetched.
    __device__ __forceinline__ void loop_over_keys(const VisibleKeys& range, const KeyLocations& locations) {
        const int begin = range.first / kTileK * kTileK;
        int stage = 0;
        const int stages = params.stages;
        const Lookup lookup = key_lookup(locations, range);
        const bool has_table = __builtin_expect(locations.table != nullptr, false);
        typename Lookup::FirstEntries first_entries;
        if (has_table) first_entries = lookup.load_first(stages, begin);
        const int old = range.length - params.cache.seqlen_new;
        bool to_append = kAppends && range.last > old;
        NewRow new_row{{params}};
        if constexpr (kAppends) new_row.load(locations, work_tile.batch, work_tile.head_k, old, to_append);
        prepare_rows(range);
        if (has_table) lookup.store_first(first_entries, stages);
#pragma unroll 1
        for (int loading = begin; loading < range.last + stages * kTileK; loading += kTileK) {
            const int first = loading - stages * kTileK;  // the tile whose stage the new one overwrites
            // Appends as late as possible, with the loads of the first tiles in flight, but before the tile with the new key is
            // loaded.
            if (to_append && (first == begin || loading + kTileK > old)) {
                new_row.append(work_tile.head_k);
                __syncthreads();
                to_append = false;
            }
            if (first >= begin) {
                wait_for_oldest(stages);
                if (first == begin) begin_products(new_row);
                attend_tile(stage, first, range);
                synchronize();  // the stage is no longer read
            }
            if (loading < range.last) {
                load_keys(own_head(), stage, lookup.look_up(stage, loading));
                if (has_table) lookup.begin(stage, loading + stages * kTileK);
            }
            if (loading == begin) load_queries();
            cp_async_commit();
            stage = stage + 1 == stages ? 0 : stage + 1;
        }
        cp_async_wait<0>();
    }

    // Stores the results of each warp in shared memory.
    __device__ __forceinline__ void store_partial_results() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            row_sum[r] = quad_sum(row_sum[r]);
        }
        __syncthreads();  // no warp reads or writes a stage
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = r * 8 + lane / 4;
            if (lane % 4 == 0) {
                part_statistics(warp, row)[0] = base[r];
                part_statistics(warp, row)[1] = row_sum[r];
            }
            float* to = part(warp, row) + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n)
                *reinterpret_cast<float2*>(to + n * 8) = make_float2(o[n][2 * r], o[n][2 * r + 1]);
        }
        __syncthreads();
    }

    // For each row: the LSE of its parts, and the weights by which the parts are added, including the division by the row sum.
    __device__ __forceinline__ void compute_weights() {
        for (int n = threadIdx.x; n < kHeads * work_tile.rows; n += kThreads) {
            const ExistingRow row = existing_row(n);
            const auto statistics_of = [&](int w) { return part_statistics(row.slab + w * kHeads, row.in_slab); };
            float largest = kNoScore, total = 0.0f;
#pragma unroll
            for (int w = 0; w < kParts; ++w) largest = fmaxf(largest, statistics_of(w)[0]);
#pragma unroll
            for (int w = 0; w < kParts; ++w) {
                const float* statistics = statistics_of(w);
                total += exp2_approx(statistics[0] - largest) * statistics[1];
            }
            const float inverse = total != 0.0f ? 1.0f / total : 0.0f;  // 0: the row sees no key
            const float lse = total != 0.0f ? largest + __log2f(total) : -INFINITY;
#pragma unroll
            for (int w = 0; w < kParts; ++w) {
                float* statistics = statistics_of(w);
                statistics[2] = exp2_approx(statistics[0] - largest) * inverse;
            }
            store_lse(row, lse);
        }
        __syncthreads();
    }

    // Stores the LSE of this split in the workspace or, without splits, the LSE of the row in the output, and then the factor
    // that the sink leaves for the result.
    __device__ __forceinline__ void store_lse(const ExistingRow& row, float lse) {
        const int head = query_head(row.head_k, row.packed);
        if (params.splits > 1) {
            params.partial_lse[partial_row(params, work_tile.batch, row.head_k, row.packed) * params.splits + work_tile.split] =
                lse;
        } else {
            part_statistics(row.slab, row.in_slab)[3] = finish_row(params, work_tile.batch, query_row(row.packed), head, lse,
                                                                   sink_of<T>(params, work_tile.batch, head), true);
        }
    }

    // Weighted sum of the parts of a row, for two channels.
    __device__ __forceinline__ float2 sum_of_parts(const ExistingRow& row, int channel) const {
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < kParts; ++w) {
            const float factor = part_statistics(row.slab + w * kHeads, row.in_slab)[2];
            const float2 x = *reinterpret_cast<const float2*>(part(row.slab + w * kHeads, row.in_slab) + channel);
            if (factor == 0.0f) continue;  // the part may hold NaN
            sum.x = fmaf(factor, x.x, sum.x);
            sum.y = fmaf(factor, x.y, sum.y);
        }
        return sum;
    }

    __device__ __forceinline__ void store_rows() {
        constexpr int kPairs = kHeadDim / 2;
        for (int i = threadIdx.x; i < kHeads * work_tile.rows * kPairs; i += kThreads) {
            const ExistingRow row = existing_row(i / kPairs);
            const int channel = i % kPairs * 2;
            const float2 x = sum_of_parts(row, channel);
            if (params.splits > 1) {
                const int64_t range =
                    partial_row(params, work_tile.batch, row.head_k, row.packed) * params.splits + work_tile.split;
                *reinterpret_cast<float2*>(params.partial_out + range * kHeadDim + channel) = x;
            } else {
                const float weight = part_statistics(row.slab, row.in_slab)[3];
                store_pair<T>(params, work_tile.batch, query_row(row.packed), query_head(row.head_k, row.packed), channel,
                              {x.x * weight, x.y * weight});
            }
        }
    }

    // For a split without keys: only the LSE, because combine does not use the partial result.
    __device__ __forceinline__ void store_without_keys() {
        for (int n = threadIdx.x; n < kHeads * work_tile.rows; n += kThreads) store_lse(existing_row(n), -INFINITY);
    }
    __device__ __forceinline__ void store_result() {
        store_partial_results();
        compute_weights();
        store_rows();
    }

    // Prefetches the first tile into the L2 cache while the previous kernel ends and memory is idle. This is correct even if that
    // kernel still writes to the KV cache, because its writes go through L2, too. Lengths and block table may still change; no
    // result depends on what is read here.
    static __device__ __forceinline__ void fetch_early(const DecodeParams& params) {
        constexpr int kLine = 128 / sizeof(T), kLines = (kHeadDim + kLine - 1) / kLine;  // of a key of one head
        const WorkTile work_tile(params, static_cast<int>(blockIdx.x));
        const CacheParams& cache = params.cache;
        const VisibleKeys range = keys_of<RelaxedLoad>(params, work_tile);
        const KeyLocationsOf<RelaxedLoad> locations(cache, work_tile.batch);
        const int begin = range.first / kTileK * kTileK;
#pragma unroll 1
        for (int i = threadIdx.x; i < kTileK * kHeads * kLines; i += kThreads) {
            const int key = begin + i / (kHeads * kLines), head_k = work_tile.head_k + i / kLines % kHeads,
                      channel = i % kLines * kLine;
            if (key < range.first || key >= range.last) continue;
            const KeyLocation at = locations.of(key);
            if (static_cast<uint32_t>(at.page) >= static_cast<uint32_t>(cache.pages)) continue;
            const auto fetch = [&](const RowsParams& rows, int channels) {
                const T* row = static_cast<const T*>(rows.data) + at.page * rows.batch + at.row * rows.row + head_k * rows.head;
                if (channel < channels) prefetch_to_l2(row + channel);
            };
            fetch(cache.k, params.head_dim);
            fetch(cache.v, params.head_dim_v);
        }
    }

    __device__ __forceinline__ void run() {
        const VisibleKeys range = keys_of(params, work_tile);
        const KeyLocations locations(params.cache, work_tile.batch);
        if (blockIdx.x - params.delayed_begin < params.delayed_count && range.last - range.first >= kDelayMinTiles * kTileK)
            nanosleep(kDelayNs);
        if (range.first < range.last) {
            loop_over_keys(range, locations);
        } else if (params.splits > 1) {
            store_without_keys();
            return;
        } else {
            prepare_rows(range);
        }
        store_result();
    }
};

}  // namespace libflash::cuda::sm80
