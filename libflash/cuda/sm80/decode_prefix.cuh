// Decode of the keys that the sequences of a group share, before the attention kernel: query rows of several sequences are packed
// into one tile, so that keys are read once for all of them. The attention kernel continues from the sums (decode_continued.cuh)
// and combines the results. sm90/decode_prefix.cuh does the same, with the same bits.
//
// The hint (shared_groups) must not change a bit of the result. In the attention kernel a warp has the rows of one sequence and
// every kClasses-th group of 16 keys. The keys of such a warp form a class. Here a thread block has the keys of one class, and
// each warp has 16 rows of whole sequences. For these rows the warp does what the warp of that class does in the attention
// kernel, in the same order: the rows of a matrix product do not influence each other, and the kept maximum of a row is raised
// only where a row of its own sequence requires it. For each row the kernel stores the accumulators, the kept maximum and the row
// sums of the four lanes. The splits are those of the call without the hint.
#pragma once

#include "cuda/attention/combine_splits.cuh"
#include "cuda/attention/decode_keys.cuh"
#include "cuda/attention/edge_mask.cuh"
#include "cuda/attention/element.cuh"
#include "cuda/attention/launch_dependent.cuh"
#include "cuda/attention/online_softmax.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/shared_prefix.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm80/decode_instance.h"
#include "cuda/sm80/decode_loads.cuh"
#include "cuda/sm80/decode_products.cuh"
#include "cuda/sm80/key_lookup.cuh"
#include "cuda/tile/quad.cuh"

namespace libflash::cuda::sm80 {

template <class T, int kHeadDim, int kClasses, int kStages>
struct DecodePrefix {
    // Names that DecodeLoads needs.
    using Element = T;
    using Stored = T;
    using Products = DecodeProducts<T, kHeadDim>;
    using Slab = typename Products::template Tile<kDecodeSlab>;
    static constexpr int kChannels = kHeadDim, kValueChannels = kHeadDim, kHeadsOfBlock = 1, kParts = 1, kQueryRows = kDecodeSlab;
    static constexpr bool kHasRareOptions = false, kCodes = false, kMayBeInKeys = false, kLoadsInTurn = false,
                          kHasFewRows = false;
    static constexpr int kWarps = kPrefixWarps, kThreads = kWarps * 32, kTileRows = kPrefixRows;
    static constexpr int kChunkValues = 16 / sizeof(T);
    static constexpr int kTileK = kWarps * kClasses * kDecodeSlab;  // of all classes; a stage has the keys of one class
    using Loads = DecodeLoads<DecodePrefix>;

    static constexpr int kBlocks = kHeadDim / 8;
    static constexpr int kSlabBytes = Slab::kBytes, kStagesBytes = kStages * 2 * kWarps * kSlabBytes,
                         kQueryBytes = kTileRows * Slab::kRowBytes;
    // After the queries: `existing` and block table entries of each stage, rows() and row_keys().
    static constexpr int kSharedBytes =
        kStagesBytes + kQueryBytes + kStages * kWarps * (1 + kDecodeSlab) * 4 + kTileRows * (sizeof(int2) + sizeof(VisibleRange));

    struct KeyRange {
        int first, last;
    };
    using Lookup = KeyLookup<kTileK, kStages, KeyRange>;

    const DecodeParams& params;
    char* shared;
    const int lane, warp, head_k, split, of_class;
    Products products;
    float s[2][4], o[kBlocks][4];
    float kept_maximum[2], row_sum[2];
    VisibleRange visible[2];           // of the lane's two rows
    int begin, end, plain, plain_end;  // [begin, end): keys that some row of the warp sees; [plain, plain_end): that all rows see
    // For each of the lane's rows: the lanes whose scores can raise its kept maximum, first in rows 0 to 7, then in rows 8 to 15.
    uint64_t voters[2];

    __device__ __forceinline__ DecodePrefix(const DecodeParams& p, char* memory, int head, int range, int number)
        : params(p), shared(memory), lane(threadIdx.x % 32), warp(threadIdx.x / 32), head_k(head), split(range),
          of_class(number) {}

    static __device__ __forceinline__ int part() { return 0; }
    static __device__ __forceinline__ int stored_offset(int row, int chunk) { return Slab::offset(row, chunk); }
    __device__ __forceinline__ char* stored_keys(int stage, int group) const {
        return shared + (stage * 2 * kWarps + group) * kSlabBytes;
    }
    __device__ __forceinline__ char* stored_values(int stage, int group) const { return stored_keys(stage, kWarps + group); }
    __device__ __forceinline__ char* queries() const { return shared + kStagesBytes; }
    __device__ __forceinline__ uint32_t& existing(int stage, int group) const {
        return reinterpret_cast<uint32_t*>(queries() + kQueryBytes)[stage * kWarps + group];
    }
    __device__ __forceinline__ int32_t* entries() const { return reinterpret_cast<int32_t*>(&existing(kStages, 0)); }
    // For each row of the tile: its sequence (negative: there is no row) and its number in the sequence.
    __device__ __forceinline__ int2* rows() const { return reinterpret_cast<int2*>(entries() + kStages * kWarps * kDecodeSlab); }
    __device__ __forceinline__ VisibleRange* row_keys() const { return reinterpret_cast<VisibleRange*>(rows() + kTileRows); }
    __device__ __forceinline__ int first_key(int loading, int group) const {
        return loading + (group * kClasses + of_class) * kDecodeSlab;
    }

    // Stores which rows the tile has and which of the shared keys each row sees in this split.
    __device__ __forceinline__ void find_rows(const PrefixTile& tile) const {
        const int row = threadIdx.x;
        if (row < kTileRows) {
            const PrefixRow found = PrefixRow::of(params, tile, row, split, kClasses * kDecodeSlab);
            rows()[row] = make_int2(found.batch, found.packed);
            row_keys()[row] = found.keys;
        }
        __syncthreads();
    }

    // The range of keys that some row of the tile sees.
    __device__ __forceinline__ KeyRange range_of_tile() const {
        const VisibleRange low = row_keys()[lane], high = row_keys()[lane + 32];
        return {__reduce_min_sync(0xffffffffu, min(low.begin, high.begin)),
                __reduce_max_sync(0xffffffffu, max(low.end, high.end))};
    }

    __device__ __forceinline__ void prepare_rows() {
        const int slab = warp * kDecodeSlab;
        const VisibleRange own = row_keys()[slab + lane % kDecodeSlab];
        const bool exists = rows()[slab + lane % kDecodeSlab].x >= 0;
        begin = __reduce_min_sync(0xffffffffu, own.begin);
        end = __reduce_max_sync(0xffffffffu, own.end);
        plain = __reduce_max_sync(0xffffffffu, exists ? own.begin : 0);
        plain_end = __reduce_min_sync(0xffffffffu, exists ? own.end : INT32_MAX);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = r * 8 + lane / 4;
            visible[r] = row_keys()[slab + row];
            voters[r] = voters_of_row(params, row);
            // The scores of rows that do not exist are 0, so they never raise this maximum.
            kept_maximum[r] = rows()[slab + row].x >= 0 ? kNoScore : 0.0f;
            row_sum[r] = 0.0f;
        }
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[n][e] = 0.0f;
    }

    __device__ __forceinline__ void load_queries() const {
        constexpr int kChunks = kHeadDim / kChunkValues;
        for (int i = threadIdx.x; i < kTileRows * kChunks; i += kThreads) {
            const int row = i / kChunks, chunk = i % kChunks;
            const int2 own = rows()[row];
            const int in_sequence = divide(own.y, params.by_group),
                      head = head_k * params.group_size + own.y - in_sequence * params.group_size;
            const T* from = static_cast<const T*>(params.q.data) + max(own.x, 0) * params.q.batch + in_sequence * params.q.row +
                            head * params.q.head + chunk * kChunkValues;
            const int count = own.x >= 0 ? params.head_dim - chunk * kChunkValues : 0;
            char* const to = queries() + Slab::offset(row, chunk);
            if (params.vector_q) {
                cp_async_16(shared_address(to), from, count > 0);
            } else {
                Loads::copy_slowly(to, from, count);
            }
        }
    }

    // Calls rule(score, r, key) for all scores of this lane.
    template <class Rule>
    __device__ __forceinline__ void for_all_scores(int first, const Rule& rule) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) rule(s[n][e], e / 2, first + 8 * n + lane % 4 * 2 + e % 2);
    }

    // `votes`: lanes with a score that exceeds the kept maximum by too much, of rows 0 to 7 and then of rows 8 to 15.
    __device__ __forceinline__ void update_max(uint64_t votes) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest = fmaxf(fmaxf(s[0][2 * r], s[0][2 * r + 1]), fmaxf(s[1][2 * r], s[1][2 * r + 1]));
            largest = quad_max(largest);
            if (!(votes & voters[r])) largest = kept_maximum[r];
            const float factor = raise_kept_maximum(kept_maximum[r], largest);
            row_sum[r] *= factor;
#pragma unroll
            for (int n = 0; n < kBlocks; ++n) {
                o[n][2 * r] *= factor;
                o[n][2 * r + 1] *= factor;
            }
        }
    }

    // Attention to 16 keys from `first` on, whose dot products are in `s`: the steps of Decode::attend() after the product.
    __device__ __forceinline__ void finish_keys(int stage, int group, uint32_t exist, int first) {
        if (exist == 0 || first >= end || first + kDecodeSlab <= begin) return;
        scale_and_cap_log2(params, [&](const auto& rule) { for_all_scores(first, rule); });
        if (exist != 0xffffu || first < plain || first + kDecodeSlab > plain_end) {
            for_all_scores(first, [&](float& score, int r, int key) {
                if (key < visible[r].begin || key >= visible[r].end || !(exist >> (key - first) & 1)) score = -INFINITY;
            });
        }
        bool high[2] = {false, false};
        for_all_scores(first, [&](float& score, int r, int) { high[r] |= score - kept_maximum[r] > kDecodeSlack; });
        if (__any_sync(0xffffffffu, high[0] || high[1])) {
            const uint64_t low = __ballot_sync(0xffffffffu, high[0]);
            update_max(low | uint64_t{__ballot_sync(0xffffffffu, high[1])} << 32);
        }
        for_all_scores(first, [&](float& score, int r, int) {
            score = exp2_approx(score - kept_maximum[r]);
            row_sum[r] += score;
        });
        products.add_values(o, s, stored_values(stage, group), lane);
    }

    // The products with the next 16 keys are issued before the scores of the current keys are used.
    __device__ __forceinline__ void attend_stage(int stage, int loading) {
        float next[2][4], odd[2][4];
        uint32_t exist[kWarps];
#pragma unroll
        for (int group = 0; group < kWarps; ++group) exist[group] = existing(stage, group);
        products.scores(s, stored_keys(stage, 0), lane);
#pragma unroll
        for (int group = 0; group < kWarps; ++group) {
            const bool last = group + 1 == kWarps;
            if (!last) products.begin_scores(next, odd, stored_keys(stage, group + 1), lane);
            finish_keys(stage, group, exist[group], first_key(loading, group));
            if (last) break;
            products.end_scores(next, odd);
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[n][e] = next[n][e];
        }
    }

    __device__ __forceinline__ void loop_over_keys(const KeyRange& range, const KeyLocations& locations) {
        const int start = range.first / kTileK * kTileK;
        const Lookup lookup{locations, range, entries() + warp * kDecodeSlab, kWarps * kDecodeSlab, first_key(0, warp), lane};
        const bool has_table = locations.table != nullptr;
        if (has_table) lookup.store_first(lookup.load_first(kStages, start), kStages);
        int stage = 0;
#pragma unroll 1
        for (int loading = start; loading < range.last + kStages * kTileK; loading += kTileK) {
            const int first = loading - kStages * kTileK;  // of the stage that is overwritten
            if (first >= start) {
                cp_async_wait<kStages - 1>();
                __syncthreads();
                if (first == start) products.load_queries(queries() + warp * kSlabBytes, lane);
                attend_stage(stage, first);
                __syncthreads();  // the stage is no longer read
            }
            if (loading < range.last) {
                Loads{*this}.load_keys(head_k, stage, lookup.look_up(stage, loading));
                if (has_table) lookup.begin(stage, loading + kStages * kTileK);
            }
            if (loading == start) load_queries();
            cp_async_commit();
            stage = stage + 1 == kStages ? 0 : stage + 1;
        }
        cp_async_wait<0>();
    }

    __device__ __forceinline__ void store_sums() const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int2 own = rows()[warp * kDecodeSlab + r * 8 + lane / 4];
            if (own.x < 0) continue;
            float* const to =
                prefix_sums_of<kHeadDim>(params, partial_row(params, own.x, head_k, own.y), split, kClasses, of_class);
            store_prefix_sums<kHeadDim>(to, lane, kept_maximum[r], row_sum[r],
                                        [&](int n) { return make_float2(o[n][2 * r], o[n][2 * r + 1]); });
        }
    }

    __device__ __forceinline__ void run(const PrefixTile& tile) {
        find_rows(tile);
        const KeyRange range = range_of_tile();
        if (range.first >= range.last) return;
        prepare_rows();
        loop_over_keys(range, KeyLocations(params.cache, tile.first));
        store_sums();
    }
};

// kClasses: the number of warps with different keys in the attention kernel.
template <class Kernel, int kClasses>
using PrefixOf = DecodePrefix<ElementOf<Kernel::config.dtype>, Kernel::config.head_dim, kClasses, Kernel::config.stages>;

template <class Kernel, int kClasses>
__global__ void __launch_bounds__(PrefixOf<Kernel, kClasses>::kThreads)
    decode_prefix_kernel(const __grid_constant__ DecodeParams params) {
    extern __shared__ __align__(128) char shared[];
    using Body = PrefixOf<Kernel, kClasses>;
    allow_next_kernel();
    wait_for_previous_kernel();
    // The order of thread blocks: first the classes of a key head, then key heads, tiles and splits. So the keys of a split are
    // read at about the same time.
    const int of_class = static_cast<int>(blockIdx.x % kClasses), index = static_cast<int>(blockIdx.x / kClasses);
    const int head_of_all = divide(index, params.by_heads), head = index - head_of_all * params.heads_k;
    const int split = head_of_all / params.shared.tiles, number = head_of_all - split * params.shared.tiles;
    const PrefixTile tile = find_prefix_tile(params.shared, params.batch, number, sequences_of_prefix_tile(params, kPrefixRows));
    if (tile.begin >= 0) Body(params, shared, head, split, of_class).run(tile);
}

template <class Kernel, int kClasses>
int launch_prefix_of(const DecodePlan& plan, const DecodeParams& params, cudaStream_t stream) {
    const auto kernel = decode_prefix_kernel<Kernel, kClasses>;
    const LaunchShape& shape = plan.prefix;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    return launch_dependent(kernel, shape.blocks, shape.threads, shape.shared_bytes, stream, plan.dependent_launch, params);
}

template <class Kernel>
int launch_prefix(const DecodePlan& plan, const DecodeParams& params, cudaStream_t stream) {
    if (plan.prefix.blocks == 0) return cudaSuccess;
    constexpr int kClasses = Kernel::config.tile_k / kDecodeSlab;
    return plan.key_heads == 2 ? launch_prefix_of<Kernel, kClasses / 2>(plan, params, stream)
                               : launch_prefix_of<Kernel, kClasses>(plan, params, stream);
}

}  // namespace libflash::cuda::sm80
