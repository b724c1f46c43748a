// Flash-Decoding for sm_80 and later: attention of a few query rows per sequence to its KV cache (split-KV). A thread block
// computes one split for one key head or for two adjacent key heads; the rows of all query heads that share a key head are packed
// into one query tile.
//
// Each warp loads 16 keys of a tile (cp.async, kStages tiles in flight, or one fewer). Block table entries are loaded with an
// earlier tile (key_lookup.cuh). Memory bandwidth limits the speed, so each multiprocessor has about 100 KB of loads in flight.
//   up to 16 rows    each warp works on the keys that it loaded, without barriers; at the end their results are combined
//   more rows        each warp has its own 16 rows and works on all keys of the tile (kSharesKeys)
//
// The kept maxima of a warp's rows are raised only when a score exceeds one of them by more than kSlack (base-2 units); with
// invariant rows each row is raised for its own scores alone. With several splits the result of each split, divided by its own
// row sum, goes to the workspace; combine_splits.cuh computes the output.
#pragma once

#include "cuda/attention/decode_keys.cuh"
#include "cuda/attention/edge_mask.cuh"
#include "cuda/attention/element.cuh"
#include "cuda/attention/few_rows.h"
#include "cuda/attention/online_softmax.cuh"
#include "cuda/attention/ragged_keys.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/params.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/nanosleep.cuh"
#include "cuda/sm80/appended_codes.cuh"
#include "cuda/sm80/appended_row.cuh"
#include "cuda/sm80/decode_codes.cuh"
#include "cuda/sm80/decode_continued.cuh"
#include "cuda/sm80/decode_few_rows.cuh"
#include "cuda/sm80/decode_loads.cuh"
#include "cuda/sm80/decode_products.cuh"
#include "cuda/sm80/decode_results.cuh"
#include "cuda/sm80/decode_scales.cuh"
#include "cuda/sm80/key_lookup.cuh"
#include "cuda/tile/quad.cuh"

#include <type_traits>

namespace libflash::cuda::sm80 {

enum class DecodeRows { equal, any, general };

// kAppends: the kernel appends one new row per sequence and rotates this row and the queries (appended_row.cuh; to a cache of
// codes appended_codes.cuh). This is a separate instance, because the code costs time even if it is skipped.
//
// kHeads: adjacent key heads per thread block; each has kWarps / kHeads of the warps. With two heads more contiguous bytes are
// read of each key, and there are fewer thread blocks.
//
// kStorage: the cache has scales (decode_scales.cuh), or holds codes of 8 bits (decode_codes.cuh).
//
// kRows: `equal`: all sequences have the same number of query rows. `any`: rows of any lengths, positions and trees
// (ragged_keys.cuh); the kernel finds the sequence of the work tile. `general`: as `any`, with the rare options of the cache:
// scales of groups of channels, a shard of the keys, k_rope_cache, float32 results, invariant rows.
//
// kValueDim: channels of the values. With wide heads two warps have the same rows and keys. Both compute all scores, which costs
// less than exchanging them, and each has half of the channels of O.
//
// kContinues: the sums over keys that sequences share are in the workspace (decode_continued.cuh).
//
// kFewRows: at most 8 query rows of a key head, over codes (decode_few_rows.cuh).
template <class T, int kHeadDim, int kWarps, int kStages, bool kSharesKeys, bool kAppends, int kHeads = 1,
          DecodeStorage kStorage = DecodeStorage::plain, DecodeRows kRows = DecodeRows::equal, int kValueDim = kHeadDim,
          bool kContinues = false, bool kFewRows = false>
struct Decode {
    using Element = T;
    static constexpr bool kRagged = kRows != DecodeRows::equal, kHasRareOptions = kRows == DecodeRows::general;
    static constexpr bool kCodes = kStorage == DecodeStorage::codes, kScales = kStorage != DecodeStorage::plain;
    // Codes become operands in registers; else each tile is converted in shared memory.
    static constexpr bool kConvertsInRegisters = kCodes && !kSharesKeys && !kHasRareOptions;
    static constexpr int kParts = decode_parts(kHeadDim);  // warps with the same rows and keys
    static_assert(kParts == 1 || (kRows == DecodeRows::general && !kSharesKeys), "the instances of wide heads");
    static_assert(kParts == 1 || kWarps == 1, "warps without keys would leave before the barriers of warps with the same keys");
    static_assert(!kFewRows || kConvertsInRegisters);
    using Products = std::conditional_t<kFewRows, DecodeFewRows<T, kHeadDim>, DecodeProducts<T, kHeadDim, kValueDim, kParts>>;
    static constexpr bool kHasFewRows = kFewRows;
    static constexpr int kLaneRows = kFewRows ? 1 : 2, kElements = 2 * kLaneRows;  // kElements: in use in s[n]
    static constexpr int kQueryRows = kFewRows ? kMaxFewRows : kDecodeSlab;        // of a key head in shared memory
    static constexpr int kChannels = kHeadDim, kValueChannels = kValueDim, kHeadsOfBlock = kHeads;
    // Accumulator blocks of a warp's O: 8 channels and 16 rows each or, with few rows, 16 channels and 8 rows.
    static constexpr int kBlocks = kValueDim / (kFewRows ? 16 : 8) / kParts;
    static constexpr bool kSameKeys = kSharesKeys;
    static constexpr int kThreads = kWarps * kParts * 32;
    static constexpr bool kAppendsCodes = kAppends && kCodes;
    using NewRow = std::conditional_t<kAppendsCodes, AppendedCodes<T, kHeadDim, kThreads, kHeads>,
                                      AppendedRow<T, kHeadDim, kThreads, kHeads>>;
    static constexpr int kTileK = kWarps / kHeads * kDecodeSlab;
    static constexpr int kTileRows = (kSharesKeys ? kWarps : kHeads) * kQueryRows;
    static_assert(kHeads == 1 || !kSharesKeys);
    static_assert(!kRagged || (kHeads == 1 && !kAppends));
    using Range = std::conditional_t<kRagged, RaggedKeysOf<kHasRareOptions>, VisibleKeys>;
    static constexpr int kChunkValues = 16 / sizeof(T);
    using Slab = typename Products::template Tile<kDecodeSlab>;
    static constexpr int kSlabBytes = Slab::kBytes;
    using Stored = std::conditional_t<kCodes, uint8_t, T>;  // elements of the cache and of a stage
    static constexpr int kStoredSlabBytes = kCodes ? kDecodeSlab * kHeadDim : kSlabBytes;
    // With codes, channels of k_rope_cache are stored in a separate part of the stage.
    static constexpr int kRopeChannels = most_rope_channels(kHeadDim);
    static constexpr int kRopeBytes = kCodes && kHasRareOptions ? kDecodeSlab * kRopeChannels * static_cast<int>(sizeof(T)) : 0;
    // float32 with wide heads: the values of a tile overwrite its keys.
    static constexpr bool kLoadsInTurn = decode_loads_in_turn(kStages);
    static_assert(!kLoadsInTurn || (kParts > 1 && !kCodes));
    static constexpr int kSlabs = kLoadsInTurn ? 1 : 2;
    static constexpr int kStageBytes = kWarps * (kSlabs * kStoredSlabBytes + kRopeBytes);  // K, V, then k_rope_cache
    static constexpr bool kHasConvertedTile =
        kCodes && !kConvertsInRegisters;  // a converted copy of the tile in use, after the stages
    static constexpr bool kConvertsInTurn = kHasConvertedTile && kParts > 1;  // the values overwrite the keys in the copy
    static constexpr int kConvertedBytes = kHasConvertedTile ? (kConvertsInTurn ? 1 : 2) * kWarps * kSlabBytes : 0;
    static constexpr int kStagesBytes = kStages * kStageBytes + kConvertedBytes;
    static constexpr int kQueryBytes = kTileRows * Slab::kRowBytes;
    static constexpr int kScaleBytes =
        kScales ? kStages * kWarps * decode_slab_scales(kHeadDim, kValueDim, kHasRareOptions) * 4 : 0;
    // After the queries: `existing` and the block table entries, then the scales, which are read in pairs.
    static constexpr int kLookupBytes = (kStages * kWarps * (1 + kParts * kDecodeSlab) * 4 + 7) / 8 * 8;
    static constexpr int kTileBytes = kStagesBytes + kQueryBytes + kLookupBytes + kScaleBytes;
    static constexpr int kNewRowBegin = (kTileBytes + 15) / 16 * 16;  // with kAppendsCodes
    static constexpr int new_row_end() {
        if constexpr (kAppendsCodes) return kNewRowBegin + NewRow::kBytes;
        return kTileBytes;
    }
    static constexpr int kSharedBytes = new_row_end();
    static_assert(kScales || kParts > 1 ||
                      kTileBytes == decode_shared_bytes(kHeadDim, kWarps* kDecodeSlab, kStages, sizeof(T), kTileRows),
                  "the host counts the same");
    static_assert(!kConvertsInRegisters ||
                      kTileBytes == decode_code_shared_bytes(kHeadDim, kWarps* kDecodeSlab, kStages, kTileRows),
                  "the host counts the same");
    static constexpr float kSlack = kDecodeSlack;
    // How long some thread blocks wait before they start, so that not all end at the same time (decode_plan.cpp). Longer than the
    // time in which a multiprocessor loads nothing because one thread block has ended and the next has not begun to load.
    static constexpr uint32_t kDelayNs = 3000;
    // Registers are scarce: lane and warp numbers are recomputed where they are needed, and find_row_rules() is called again for
    // each use of its results. The latter also with few rows.
    static constexpr bool kFewRegisters = kRagged && (kScales || kParts > 1) && kHeadDim > 128;
    static constexpr bool kFindsRulesAgain = kFewRegisters || kFewRows;
    static constexpr int kDelayMinTiles = 16;  // splits with fewer tiles are not delayed: the delay would cost too much

    // The work tile of a thread block. The order is: first the query tiles of one key head, so that their thread blocks find the
    // keys in the L2 cache, then heads, splits and sequences.
    struct WorkTile {
        int batch, head_k, split, first_row, rows;  // rows: how many rows of the tile exist

        __device__ __forceinline__ WorkTile(const DecodeParams& params, int index) {
            const int head = divide(index, params.by_tiles), range = divide(head, params.by_head_groups);
            batch = divide(range, params.by_splits);
            split = range - batch * params.splits;
            head_k = (head - range * static_cast<int>(params.by_head_groups.divisor)) * kHeads;
            first_row = (index - head * static_cast<int>(params.by_tiles.divisor)) * kTileRows;
            rows = min(kHeads > 1 ? kQueryRows : kTileRows, params.seqlen_q * params.group_size - first_row);
        }
    };

    const DecodeParams& params;
    char* shared;
    int lane, warp;  // the kParts warps with the same rows and keys have the same number `warp`
    std::conditional_t<kRagged, const RaggedWorkTile&, WorkTile> work_tile;
    Products products;
    float s[2][4], o[kBlocks][4];
    float kept_maximum[kLaneRows], row_sum[kLaneRows];
    static constexpr int kValueBases = kHasRareOptions ? 2 : 1;  // one per row of the lane, or one for both
    float value_base[kValueBases];                               // with kScales (decode_scales.cuh)
    bool scales_stay;                                            // with few rows: all keys have the same scales
    bool continued = false;                                      // with kContinues: the sums start from those of shared keys
    KeyLocation location;                                        // with kLoadsInTurn: of the keys in the stage
    // The mask and ALiBi of the lane's rows, set by find_row_rules().
    VisibleRange visible[kLaneRows];
    int diagonal[kLaneRows];
    float slope[kLaneRows];

    __device__ __forceinline__ Decode(const DecodeParams& p, char* memory)
        : params(p), shared(memory), lane(threadIdx.x % 32), warp(threadIdx.x / (32 * kParts)),
          work_tile(p, static_cast<int>(blockIdx.x)) {}
    __device__ __forceinline__ Decode(const DecodeParams& p, char* memory, const RaggedWorkTile& tile)
        : params(p), shared(memory), lane(threadIdx.x % 32), warp(threadIdx.x / (32 * kParts)), work_tile(tile) {}

    // Which of the kParts warps with the same rows and keys this is: the warp accumulates this part of the channels of O.
    __device__ __forceinline__ int part() const {
        if constexpr (kParts == 1) return 0;
        return threadIdx.x / 32 % kParts;
    }
    // Addresses in shared memory of 16 keys or values: those that warp number `group` loads. stored_...: as loads write them;
    // keys(), values(): as products read them.
    __device__ __forceinline__ char* stored_keys(int stage, int group) const {
        return shared + stage * kStageBytes + group * kStoredSlabBytes;
    }
    __device__ __forceinline__ char* stored_values(int stage, int group) const {
        return stored_keys(stage, kLoadsInTurn ? group : kWarps + group);
    }
    __device__ __forceinline__ char* stored_rope(int stage, int group) const {
        return stored_keys(stage, 2 * kWarps) + group * kRopeBytes;
    }
    __device__ __forceinline__ char* keys(int stage, int group) const {
        return kHasConvertedTile ? shared + kStages * kStageBytes + group * kSlabBytes : stored_keys(stage, group);
    }
    // Values that are channels of the keys are not loaded again.
    static constexpr bool kMayBeInKeys = kParts > 1;
    __device__ __forceinline__ char* values(int stage, int group) const {
        const bool same_slab = kConvertsInTurn || kLoadsInTurn || (kMayBeInKeys && params.values_in_keys);
        return keys(stage, same_slab ? group : kWarps + group);
    }
    // The byte offset of a 16-byte chunk of a row in a stage. For codes that are converted through shared memory, the two halves
    // of each 128 bytes of an odd row are exchanged, so that its chunks are in other banks than those of an even row. With 64 and
    // 576 channels this is so without an exchange.
    static __device__ __forceinline__ int stored_offset(int row, int chunk) {
        if (!kCodes) return Slab::offset(row, chunk);
        if (kConvertsInRegisters) return CodeSlab<kHeadDim>::offset(row, chunk);
        return row * kHeadDim + (kHeadDim % 128 == 0 ? chunk ^ row % 2 * 4 : chunk) * 16;
    }
    __device__ __forceinline__ char* queries() const { return shared + kStagesBytes; }
    __device__ __forceinline__ uint32_t& existing(int stage, int group) const {
        return reinterpret_cast<uint32_t*>(queries() + kQueryBytes)[stage * kWarps + group];
    }
    using Lookup = KeyLookup<kTileK, kStages>;
    // With kScales: the scales of the stages, after the block table entries.
    __device__ __forceinline__ float* scales() const { return reinterpret_cast<float*>(queries() + kQueryBytes + kLookupBytes); }
    using Loads = DecodeLoads<Decode>;
    using Codes = DecodeCodes<Decode>;
    using Scales = DecodeScales<Decode>;
    using Results = DecodeResults<Decode>;
    using Continued = DecodeContinued<Decode>;
    __device__ __forceinline__ Lookup key_lookup(const KeyLocations& locations, const VisibleKeys& range) const {
        int32_t* const entries = reinterpret_cast<int32_t*>(&existing(kStages, 0));  // after the last `existing`
        return {locations,  range, entries + (warp * kParts + part()) * kDecodeSlab, kWarps * kParts * kDecodeSlab,
                own_keys(), lane};
    }
    // The place of the n-th row that exists. Rows are counted across heads: row 0 of each head, then row 1 of each head, and so
    // on. packed: its number among all query rows of the key head. slab, in_slab: its place in shared memory.
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
        if constexpr (kSharesKeys || kParts > 1) {
            __syncthreads();
        } else {
            __syncwarp();
        }
    }

    // Synchronises the warps that have the same keys.
    static __device__ __forceinline__ void synchronize_parts() {
        if constexpr (kParts > 1) {
            __syncthreads();
        } else {
            __syncwarp();
        }
    }

    __device__ __forceinline__ int query_row(int row) const { return divide(row, params.by_group); }
    // The row in the batch entry or the packed tensor.
    __device__ __forceinline__ int tensor_row(int row) const {
        if constexpr (kRagged) return work_tile.sequence.start + query_row(row);
        return query_row(row);
    }
    // The row of the workspace (combine_splits.cuh).
    __device__ __forceinline__ int64_t workspace_row(int head_k, int row) const {
        if constexpr (kRagged) {
            if (params.ragged.most_rows > 0) return short_partial_row(params, kWarps * kDecodeSlab, work_tile.batch, head_k, row);
            const int batch = params.ragged.queries.cu ? 0 : work_tile.batch;
            return partial_row(params, batch, head_k, work_tile.sequence.start * params.group_size + row);
        }
        return partial_row(params, work_tile.batch, head_k, row);
    }
    template <class Numbers = PlainLoad>
    static __device__ __forceinline__ VisibleKeys keys_of(const DecodeParams& params, const WorkTile& work_tile) {
        const int first = divide(work_tile.first_row, params.by_group),
                  last = divide(work_tile.first_row + work_tile.rows - 1, params.by_group);
        return VisibleKeys(params, KeyCount::of<Numbers>(params.cache, work_tile.batch), first, last, work_tile.split, kTileK);
    }
    __device__ __forceinline__ int query_head(int head_k, int row) const {
        return head_k * params.group_size + row - query_row(row) * params.group_size;
    }

    // The packed number of the lane's row r; if this row does not exist, that of the last row of the tile.
    __device__ __forceinline__ int packed_row(int r) const {
        return work_tile.first_row + min((kSharesKeys ? warp * kDecodeSlab : 0) + r * 8 + lane / 4, work_tile.rows - 1);
    }

    __device__ __forceinline__ void find_row_rules(const Range& range) {
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
            const int packed = packed_row(r), row = query_row(packed);
            if constexpr (kRagged) {
                visible[r] = range.range(range.tree_bits(), row);
                diagonal[r] = range.position(row);
            } else {
                visible[r] = {range.first_visible(params, row), range.end_of_visible(params, row)};
                diagonal[r] = row + range.length - params.seqlen_q;
            }
            slope[r] = params.alibi_slopes.data
                           ? head_number<T>(params.alibi_slopes, work_tile.batch, query_head(own_head(), packed)) * kLog2e
                           : 0.0f;
        }
    }

    __device__ __forceinline__ void prepare_rows(const Range& range) {
        if constexpr (!kFindsRulesAgain) find_row_rules(range);
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
            kept_maximum[r] = kNoScore;
            row_sum[r] = 0.0f;
        }
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[n][e] = 0.0f;
        if constexpr (kScales) Scales{*this}.begin();
        if constexpr (kContinues) {
            if (continued) Continued{*this}.load_sums();
        }
    }

    // Calls rule(score, r, key) for all scores of this lane.
    template <class Rule>
    __device__ __forceinline__ void for_all_scores(int first_key, const Rule& rule) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < kElements; ++e) rule(s[n][e], e / 2, first_key + 8 * n + lane % 4 * 2 + e % 2);
    }

    // Converts dot products to scores in base-2 units.
    __device__ __forceinline__ void apply_rules(int first_key, const Range& range) {
        scale_and_cap_log2(params, [&](const auto& rule) { for_all_scores(first_key, rule); });
        if (params.alibi_slopes.data) {
            if constexpr (kFindsRulesAgain) find_row_rules(range);
            for_all_scores(first_key, [&](float& score, int r, int key) {
                if constexpr (kRagged) key = range.key_position(key);
                subtract_alibi(score, slope[r], diagonal[r], key);
            });
        }
    }

    __device__ __forceinline__ void mask_keys(int first_key, uint32_t exist, const Range& range) {
        if constexpr (kFindsRulesAgain) find_row_rules(range);
        for_all_scores(first_key, [&](float& score, int r, int key) {
            if (key < visible[r].begin || key >= visible[r].end || !(exist >> (key - first_key) & 1)) score = -INFINITY;
        });
        if constexpr (kRagged) hide_gaps(first_key, range);
    }
    // Hides the gaps: keys in a row's range that the row does not see. It processes one score after the other, because registers
    // are scarce.
    __device__ __forceinline__ void hide_gaps(int first_key, const Range& range) {
        const TreeBits bits = range.tree_bits();
        if (!range.has_gaps(bits)) return;
        uint32_t hidden = 0;
#pragma unroll 1
        for (int i = 0; i < 8; ++i) {
            const int row = query_row(packed_row(i / 2 % 2)), key = first_key + i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (!range.sees(bits, row, key)) hidden |= 1u << i;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (hidden >> i & 1) s[i / 4][i % 4] = -INFINITY;
    }

    // Raises the kept maximum of the lane's rows to the maximum of the new scores and rescales their sums and accumulators. With
    // invariant rows it does so only for rows whose own scores require it.
    __device__ __forceinline__ void update_max() {
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
            float largest = fmaxf(fmaxf(s[0][2 * r], s[0][2 * r + 1]), fmaxf(s[1][2 * r], s[1][2 * r + 1]));
            largest = quad_max(largest);
            if constexpr (kHasRareOptions || kContinues) {
                if (params.invariant && !(largest - kept_maximum[r] > kSlack)) largest = kept_maximum[r];
            }
            const float factor = raise_kept_maximum(kept_maximum[r], largest);
            row_sum[r] *= factor;
            if constexpr (kFewRows) {
                multiply_columns(factor);
            } else {
#pragma unroll
                for (int n = 0; n < kBlocks; ++n) {
                    o[n][2 * r] *= factor;
                    o[n][2 * r + 1] *= factor;
                }
            }
        }
    }

    // With few rows: multiplies O by the factors of its query rows. `factor`: of the query row of this lane's scores. The lane's
    // O is of two other query rows, whose factors come from other lanes.
    __device__ __forceinline__ void multiply_columns(float factor) {
        const float even = __shfl_sync(0xffffffffu, factor, lane % 4 * 8),
                    odd = __shfl_sync(0xffffffffu, factor, lane % 4 * 8 + 4);
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) o[n][0] *= even, o[n][1] *= odd, o[n][2] *= even, o[n][3] *= odd;
    }

    // Attention of the warp's rows to 16 keys from `first_key` on.
    __device__ __forceinline__ void attend(int stage, int group, int first_key, const Range& range) {
        if constexpr (kFewRegisters) lane = hide_from_compiler(lane);
        const uint32_t exist = existing(stage, group);
        if (exist == 0) return;
        if constexpr (kScales) {
            Scales{*this}.scaled_products(stage, group);
        } else {
            multiply_keys(stage, group);
        }
        apply_rules(first_key, range);
        if (exist != 0xffffu || first_key < range.plain || first_key + kDecodeSlab > range.plain_end)
            mask_keys(first_key, exist, range);
        bool high = false;
        for_all_scores(first_key, [&](float& score, int r, int) { high |= score - kept_maximum[r] > kSlack; });
        if (__any_sync(0xffffffffu, high)) update_max();
        for_all_scores(first_key, [&](float& score, int r, int) {
            score = exp2_approx(score - kept_maximum[r]);
            row_sum[r] += score;
        });
        if constexpr (kConvertsInTurn) Codes{*this}.convert_values(stage);
        if constexpr (kLoadsInTurn) load_values(stage, exist);
        if constexpr (kScales) {
            Scales{*this}.add_scaled_values(stage, group);
        } else {
            add_values(stage, group);
        }
    }
    // With kLoadsInTurn: loads the values in the place of the keys, when the scores have been computed.
    __device__ __forceinline__ void load_values(int stage, uint32_t exist) {
        if (params.values_in_keys) return;
        synchronize();
        Loads{*this}.template load_rows<false, true>(own_head(), stage, location, exist);
        cp_async_commit();
        cp_async_wait<0>();
        synchronize();
    }
    __device__ __forceinline__ void multiply_keys(int stage, int group) {
        if constexpr (kConvertsInRegisters) {
            Codes{*this}.multiply_keys(stage, group);
        } else {
            products.scores(s, keys(stage, group), lane);
        }
    }
    __device__ __forceinline__ void add_values(int stage, int group) {
        if constexpr (kConvertsInRegisters) {
            Codes{*this}.add_values(stage, group);
        } else {
            products.add_values(o, s, values(stage, group), lane, part());
        }
    }

    // Prepares the queries before the first tile. All threads have loaded them in the cp.async group of the first tile.
    __device__ __forceinline__ void begin_products(const NewRow& new_row) {
        __syncthreads();
        if constexpr (kAppends) {
            new_row.rotate_queries(kHeads * work_tile.rows, [&](int n, int channel) -> T& {
                const ExistingRow row = existing_row(n);
                const int in_tile = row.slab * kQueryRows + row.in_slab;
                return reinterpret_cast<T*>(queries() + Slab::offset(in_tile, channel / kChunkValues))[channel % kChunkValues];
            });
            __syncthreads();
        }
        products.load_queries(queries() + (kSharesKeys ? warp : warp % kHeads) * kQueryRows * Slab::kRowBytes, lane);
    }

    __device__ __forceinline__ void attend_tile(int stage, int first, const Range& range) {
        if constexpr (kSharesKeys) {
#pragma unroll 1
            for (int group = 0; group < kWarps; ++group) attend(stage, group, first + group * kDecodeSlab, range);
        } else {
            attend(stage, warp, first + own_keys(), range);
        }
    }

    // Waits until the oldest of `stages` tiles has arrived, including the parts that other threads loaded.
    static __device__ __forceinline__ void wait_for_oldest(int stages) {
        constexpr int kLater = kStages - 1;  // tiles that may still arrive; with one stage fewer in use, one less
        if (stages == kStages) {
            cp_async_wait<kLater>();
        } else {
            cp_async_wait<(kLater > 0 ? kLater - 1 : 0)>();
        }
        synchronize();
    }

    __device__ __forceinline__ NewRow make_new_row() const {
        if constexpr (kAppendsCodes) {
            return {{params}, shared + kNewRowBegin};
        } else {
            return {{params}};
        }
    }
    // `key`: the number of the new key. `all_stages`: the loads for all stages have been issued.
    __device__ __forceinline__ void append(NewRow& new_row, const KeyLocations& locations, int key, bool all_stages) const {
        if constexpr (kAppendsCodes) {
            NewRow::template wait<kStages>(all_stages);
            new_row.append(locations, work_tile.batch, work_tile.head_k, key);
        } else {
            new_row.append(work_tile.head_k);
        }
    }

    // Prologue and main loop in one: the first iteration for each stage only loads. A short split would end before the
    // instructions of a separate prologue were fetched.
    __device__ __forceinline__ void loop_over_keys(const Range& range, const KeyLocations& locations) {
        const int begin = range.first / kTileK * kTileK;
        int stage = 0;
        // Rows of any lengths over codes: params.stages does not apply, because the two Bodies of RaggedInstance have different
        // numbers of stages.
        const int stages = kRagged && kScales ? kStages : params.stages;
        const Lookup lookup = key_lookup(locations, range);
        if constexpr (kFewRows) scales_stay = Scales::stay(params);
        const bool has_pages = kFewRows && PageLookup::serves(params.cache);
        const bool has_table = __builtin_expect(locations.table != nullptr, false) && !has_pages;
        PageLookup pages;
        typename Lookup::FirstEntries first_entries;
        if (has_table) first_entries = lookup.load_first(stages, begin);
        const int old = range.length - params.cache.seqlen_new;
        bool to_append = kAppends && range.last > old;
        NewRow new_row = make_new_row();
        if constexpr (kAppends) new_row.load(locations, work_tile.batch, work_tile.head_k, old, to_append);
        prepare_rows(range);
        if (has_table) lookup.store_first(first_entries, stages);
#pragma unroll 1
        for (int loading = begin; loading < range.last + stages * kTileK; loading += kTileK) {
            if constexpr (kFewRegisters) lane = hide_from_compiler(lane), warp = hide_from_compiler(warp);
            const int first = loading - stages * kTileK;  // the tile whose stage the new one overwrites
            // Appends as late as possible, with the loads of the first tiles in flight, but before the tile with the new key is
            // loaded.
            if (to_append && (first == begin || loading + kTileK > old)) {
                append(new_row, locations, old, first == begin);
                __syncthreads();
                to_append = false;
            }
            if (first >= begin) {
                wait_for_oldest(stages);
                if constexpr (kHasConvertedTile) {
                    Codes{*this}.convert(stage);
                    synchronize();
                }
                if (first == begin) begin_products(new_row);
                attend_tile(stage, first, range);
                synchronize();  // the stage is no longer read
            }
            if (loading < range.last) {
                const KeyLocation location =
                    has_pages ? pages.look_up<kTileK>(locations, range, (loading - begin) / kTileK, loading + own_keys(), lane)
                              : lookup.look_up(stage, loading);
                if constexpr (kLoadsInTurn) this->location = location;
                Loads{*this}.load_keys(own_head(), stage, location, kFewRows && !has_table && params.vector_kv);
                if constexpr (kScales) {
                    if (first < begin || !kFewRows || !scales_stay)
                        Scales{*this}.load_scales(own_head(), stage, location, first < begin);
                }
                if (has_table) lookup.begin(stage, loading + stages * kTileK);
            }
            if (loading == begin) Loads{*this}.load_queries();
            cp_async_commit();
            stage = stage + 1 == stages ? 0 : stage + 1;
        }
        cp_async_wait<0>();
    }

    __device__ __forceinline__ void run() {
        if constexpr (kContinues) {
            VisibleKeys range = keys_of(params, work_tile);
            continued = Continued{*this}.skip_shared_keys(range);
            run(range);
        } else {
            run(keys_of(params, work_tile));
        }
    }
    __device__ __forceinline__ void run(const Range& range) {
        const KeyLocations locations(params.cache, work_tile.batch);
        if (blockIdx.x - params.delayed_begin < params.delayed_count && range.last - range.first >= kDelayMinTiles * kTileK)
            nanosleep(kDelayNs);
        if (range.first < range.last) {
            loop_over_keys(range, locations);
        } else if (params.splits > 1 && !continued) {
            Results{*this}.store_without_keys();
            return;
        } else {
            prepare_rows(range);
        }
        if constexpr (kScales) Scales{*this}.finish();
        Results{*this}.store_result();
    }
};

}  // namespace libflash::cuda::sm80
