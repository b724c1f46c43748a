// FlashAttention-2 forward for sm_80 and later (Dao, arXiv 2307.08691): one thread block computes one tile of query rows of one
// head. Each warp computes its own query rows against all keys; warps share only the tiles of K and V. (With 256 channels or more
// two warps may share rows: row_pair.cuh, channel_pair.cuh.) Q stays in shared memory. All threads load with cp.async: V of a
// tile is loaded during Q K^T of this tile, K of the next tile during the softmax and P V. online_softmax.cuh describes the
// softmax.
#pragma once

#include "cuda/attention/dropout.cuh"
#include "cuda/attention/edge_mask.cuh"
#include "cuda/attention/element.cuh"
#include "cuda/attention/key_tiles.cuh"
#include "cuda/attention/long_sums.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/shard.cuh"
#include "cuda/params.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm80/channel_pair.cuh"
#include "cuda/sm80/forward_epilogue.cuh"
#include "cuda/sm80/forward_instance.h"
#include "cuda/sm80/forward_products.cuh"
#include "cuda/sm80/forward_wide_output.cuh"
#include "cuda/sm80/online_softmax.cuh"
#include "cuda/sm80/row_pair.cuh"
#include "cuda/tile/accumulator.cuh"
#include "cuda/tile/shared_tile.cuh"

#include <type_traits>

namespace libflash::cuda::sm80 {

// Into how many parts the warps that share query rows divide the keys of a tile. With float32 they divide the channels instead,
// and each warp has all keys (channel_pair.cuh).
template <class T>
constexpr int key_sharers(int sharers) {
    return std::is_same<T, float>::value ? 1 : sharers;
}

// kSharers: how many warps share query rows. With two, each has half of the keys and half of the channels (row_pair.cuh).
// kGeneral: supports softcap, ALiBi, bias, mask, dropout, scales that are not positive, rows of any alignment, and shards.
// kLongSums: supports more keys than the accumulators can add up accurately (attention/long_sums.h).
// kStatistics: with statistics of the rows (forward_statistics.cuh).
template <class T, int kHeadDim, int kBlockM, int kBlockN, int kWarps, int kSharers, bool kGeneral, bool kLongSums,
          bool kStatistics = false>
struct Forward : OnlineSoftmax<kBlockM * kSharers / kWarps / 16, kBlockN / key_sharers<T>(kSharers) / 8, kHeadDim / kSharers / 8,
                               kStatistics> {
    static constexpr int kKeySharers = key_sharers<T>(kSharers), kRowSharers = kSharers;
    using Softmax =
        OnlineSoftmax<kBlockM * kSharers / kWarps / 16, kBlockN / kKeySharers / 8, kHeadDim / kSharers / 8, kStatistics>;
    using Params = std::conditional_t<kStatistics, ForwardStatisticsParams, ForwardParams>;
    using Softmax::any_too_large, Softmax::clear, Softmax::rescale_large_sums, Softmax::sums_past_limit, Softmax::update_max;
    using Softmax::kept_maximum, Softmax::o, Softmax::row_sum, Softmax::s, Softmax::scale;
    using Element = T;
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kSlabs = kBlockM * kSharers / kWarps / 16;  // 16-row slabs of a warp
    static constexpr int kKeyBlocks = kBlockN / kKeySharers / 8;     // blocks of 8 keys in a warp's scores
    static constexpr int kChannelBlocks = kHeadDim / kSharers / 8;   // blocks of 8 channels in a warp's O
    static constexpr int kTileRows = kBlockM, kTileKeys = kBlockN, kChannels = kHeadDim;
    static constexpr bool kRare = kGeneral, kHasStatistics = kStatistics;
    using Pair = std::conditional_t<std::is_same<T, float>::value, ChannelPair<Forward>, RowPair<Forward>>;
    using Products = ForwardProducts<Forward>;
    using Epilogue = ForwardEpilogue<Forward>;
    static constexpr bool kHalf = std::is_same<T, __half>::value;
    static constexpr int kTilesPerSum = tiles_per_sum(kBlockN);
    // The instance for wide heads and the one for statistics decide at run time whether to use long sums.
    static constexpr bool kMayHaveLongSums = kLongSums && (kHeadDim > 256 || kStatistics);
    static constexpr bool kLoadsLate = kHeadDim > 256;  // run() starts the first loads, so that their code exists only once

    static constexpr bool kFloat = std::is_same<T, float>::value;
    using QTile = SharedTile<kBlockM, kHeadDim, sizeof(T)>;
    using KvTile = SharedTile<kBlockN, kHeadDim, sizeof(T)>;
    // Values that are the same for all threads. They are in shared memory because registers are scarce.
    struct Common {
        TileCoordinates work;
        SequenceRows q_rows, k_rows;
        KeyTiles<kBlockM, kBlockN> tiles;
        ScoreRules<T> rules;
        const T *q, *k, *v;
    };
    // Wide heads in float32: K and V are loaded one after the other into the same tile.
    static constexpr int kVAt = QTile::kBytes + (kFloat && kSharers == 2 ? 0 : KvTile::kBytes);
    static constexpr int kTileBytes = kVAt + KvTile::kBytes;
    using Shard = ShardTile<kBlockM>;
    static constexpr int kShardAt = kTileBytes + (sizeof(Common) + 15) / 16 * 16;
    static constexpr int kSharedBytes = kShardAt + (kGeneral ? static_cast<int>(sizeof(Shard) + 15) / 16 * 16 : 0);

    const Params& params;
    char* shared;
    int thread, warp, lane;
    typename QTile::LaneAddress q_address;
    __device__ __forceinline__ Forward(const Params& p, char* shared_memory) : params(p), shared(shared_memory) {
        thread = threadIdx.x;
        warp = thread / 32;
        lane = thread % 32;
    }

    __device__ __forceinline__ Common& common() const { return *reinterpret_cast<Common*>(shared + kTileBytes); }
    __device__ __forceinline__ Shard& shard() const { return *reinterpret_cast<Shard*>(shared + kShardAt); }
    // This warp's number among the warps that share its rows; the part of the keys that it has; and its first row in the tile.
    __device__ __forceinline__ int part() const { return warp % kSharers; }
    __device__ __forceinline__ int key_part() const { return kKeySharers == 1 ? 0 : part(); }
    __device__ __forceinline__ int warp_row() const { return warp / kSharers * kSlabs * 16; }
    __device__ __forceinline__ uint32_t q_smem() const { return shared_address(shared); }
    __device__ __forceinline__ uint32_t k_smem() const { return shared_address(shared) + QTile::kBytes; }
    __device__ __forceinline__ uint32_t v_smem() const { return shared_address(shared) + kVAt; }
    // The row in the sequence of accumulator element e of slab a of this lane. In block n the element has column
    // first_column() + 8 * n + e % 2.
    __device__ __forceinline__ int row_of(int a, int e) const {
        if constexpr (kFloat || (kGeneral && kLongSums && kSharers == 1))  // no register is free to keep the row of the lane
            return common().tiles.first_row + (hide_from_compiler(warp) / kSharers * kSlabs + a) * 16 + (e >> 1) * 8 + lane / 4;
        return common().tiles.first_row + (warp / kSharers * kSlabs + a) * 16 + (e >> 1) * 8 + lane / 4;
    }
    __device__ __forceinline__ int first_column(int tile) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1000
        // float32: no register is free to keep the lane's offset from tile to tile. On sm_100 and later recomputing it causes
        // spills.
        if constexpr (kFloat) return tile * kBlockN + hide_from_compiler(lane) % 4 * 2;
#endif
        return tile * kBlockN + key_part() * kKeyBlocks * 8 + lane % 4 * 2;
    }

    // Returns false if the thread block has no work. Otherwise ends with a barrier.
    __device__ __forceinline__ bool prepare() {
        const int index = (kLongSums ? params.first_work_tile : 0) + static_cast<int>(blockIdx.x);
        const TileCoordinates work = tile_coordinates<kBlockM>(params.schedule, params.q_lengths, params.batch, index);
        if (work.batch < 0) return false;
        const SequenceRows q_rows = SequenceRows::of(params.q_lengths, work.batch);
        if (work.tile * kBlockM >= q_rows.owned) return false;
        // Every thread computes these values, so that the first loads need not wait until thread 0 has stored them.
        Common c;
        c.work = work;
        c.q_rows = q_rows;
        c.k_rows = SequenceRows::of(params.k_lengths, work.batch);
        if constexpr (kGeneral) {
            prepare_shard(c);
        } else {
            c.tiles.init(params.mask, params.block_mask, work, q_rows, c.k_rows);
        }
        const int kv_head = work.head / params.group_size;
        c.q = start<const T>(params.q, work.batch, q_rows.start, work.head);
        c.k = start<const T>(params.k, work.batch, c.k_rows.start, kv_head);
        c.v = start<const T>(params.v, work.batch, c.k_rows.start, kv_head);
        if constexpr (!kLoadsLate) load_first(c);
        if (thread == 0) common() = c;
        q_address = QTile::a_address(q_smem(), warp_row(), lane);
        __syncthreads();
        return true;
    }

    // Stores the range of keys that each row of the tile sees. With positions, the key tiles follow from these ranges.
    __device__ __forceinline__ void prepare_shard(Common& c) {
        ShardRows all;
        all.init(params.shard, params.mask, c.q_rows, c.k_rows, c.work.batch);
        for (int i = thread; i < kBlockM; i += kThreads) shard().seen[i] = all.keys_of(c.work.tile * kBlockM + i);
        if (thread == 0) shard().set(all, params.shard, c.work);
        if (all.has_positions) {
            __syncthreads();
            c.tiles.init(params.mask, params.block_mask, c.work, c.q_rows, c.k_rows, shard().seen);
        } else {
            c.tiles.init(params.mask, params.block_mask, c.work, c.q_rows, c.k_rows);
        }
        c.rules.init(params.rare, c.work.batch, c.work.head, all.alibi_shift);
    }

    template <class Element>
    __device__ static __forceinline__ Element* start(const RowsParams& rows, int batch, int row, int head) {
        return static_cast<Element*>(rows.data) + batch * rows.batch + row * rows.row + head * rows.head;
    }

    template <class Tile>
    __device__ __forceinline__ void load(int shared_offset, const T* rows, int64_t stride, int first_row, int row_limit,
                                         int col_limit) {
        // float32: no registers are free to keep addresses from tile to tile.
        const int me = kFloat ? hide_from_compiler(thread) : thread;
        if (kGeneral && !params.vector_loads) {
            Tile::template load_slow<kThreads>(shared + shared_offset, rows, stride, first_row, row_limit, col_limit, me);
        } else {
            Tile::template load_async<kThreads>(q_smem() + shared_offset, rows, stride, first_row, row_limit, col_limit, me);
        }
    }
    __device__ __forceinline__ void load_k(const Common& c, int tile) {
        if (tile >= 0) load<KvTile>(QTile::kBytes, c.k, params.k.row, tile * kBlockN, c.tiles.length_k, params.head_dim);
        cp_async_commit();
    }
    __device__ __forceinline__ void load_v(const Common& c, int tile) {
        load<KvTile>(kVAt, c.v, params.v.row, tile * kBlockN, c.tiles.length_k, params.head_dim_v);
        cp_async_commit();
    }
    // Q and the first tile of K.
    __device__ __forceinline__ void load_first(const Common& c) {
        load<QTile>(0, c.q, params.q.row, c.tiles.first_row, c.q_rows.length, params.head_dim);
        int cursor = c.tiles.list_count;
        load_k(c, c.tiles.previous(c.tiles.end, cursor));
    }

    // Applies the causal mask, the window and the length.
    __device__ __forceinline__ void mask_edge(int tile) {
        const auto for_rows = [&](const auto& for_row) {
            for_accumulator_rows(s, [&](int a, int r, const auto& for_scores) { for_row(row_of(a, 2 * r), for_scores); });
        };
        if constexpr (kGeneral) {
            mask_edge_by_ranges(shard().seen, common().tiles.first_row, first_column(tile), for_rows);
        } else {
            cuda::mask_edge(common().tiles, first_column(tile), for_rows);
        }
    }

    // Calls rule(score, row, col) for all scores of this lane. It does not use for_accumulator_rows(), with which the branches of
    // one instance (256 channels, rare options, sm_120) would be compiled in another order.
    template <class Rule>
    __device__ __forceinline__ void for_all_scores(int tile, const Rule& rule) {
        const int first_col = first_column(tile);
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = row_of(a, 2 * r);
#pragma unroll
                for (int n = 0; n < kKeyBlocks; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) rule(s[a][n][2 * r + e], row, first_col + n * 8 + e);
            }
    }

    // Converts dot products to scores in base-2 units.
    __device__ __forceinline__ void apply_rules(int tile) {
        const int rows = common().q_rows.length, cols = common().tiles.length_k;
        const auto for_all = [&](const auto& rule) { for_all_scores(tile, rule); };
        const auto for_each = [&](const auto& rule) {
            for_all_scores(tile, [&](float& score, int row, int col) {
                if (row < rows && col < cols) rule(score, row, col);
            });
        };
        scale_and_cap(params.rare, params.softmax_scale, for_all);
        add_and_hide<T>(params.rare, common().rules, for_all, for_each);
    }

    // Wide heads with statistics have the fewest free registers.
    using Sums = LongSums<kThreads, kSlabs, kChannelBlocks, kStatistics && (kHeadDim > 256)>;
    __device__ __forceinline__ Sums long_sums() const { return {params.long_sums, hide_from_compiler(thread)}; }
    __device__ __forceinline__ auto blocks_of(int a) {
        return [this, a](int n) -> float* { return o[a][n]; };
    }
    __device__ __forceinline__ bool has_long_sums() const { return kLongSums && (!kMayHaveLongSums || params.long_sums); }
    __device__ __forceinline__ void begin_long_sums() {
        if constexpr (kLongSums) {
            if (has_long_sums()) long_sums().clear();
        }
    }
    // Called after P V of `tile`. Moves the accumulators to the long sums if `next` is beyond a multiple of kTilesPerSum. Tiles
    // come in descending order, so the accumulators never add up more than kTilesPerSum tiles. After the last tile (`next` is -1)
    // add_long_sums() is called instead.
    __device__ __forceinline__ void take_long_sums(int tile, int next) {
        if constexpr (kLongSums) {
            if (has_long_sums() && (tile ^ next) >= kTilesPerSum) {
#pragma unroll
                for (int a = 0; a < kSlabs; ++a) {
                    if constexpr (kStatistics) this->take_weighted(a, row_sum[a]);
                    long_sums().take(a, blocks_of(a), row_sum[a], kept_maximum[a]);
                }
            }
        }
    }
    __device__ __forceinline__ void add_long_sums() {
        if constexpr (kLongSums) {
            if (!has_long_sums()) return;
#pragma unroll
            for (int a = 0; a < kSlabs; ++a) {
                long_sums().finish(a, row_sum[a], kept_maximum[a]);
                if (long_sums().has_finished(a)) long_sums().add(a, blocks_of(a));
            }
        }
    }

    // Main loop over the key tiles. `exact_maximum`: the maximum is updated for every tile.
    __device__ __forceinline__ void loop_over_keys(bool exact_maximum) {
        clear();
        begin_long_sums();
        scale = kGeneral || exact_maximum ? 1.0f : params.scale_log2;
        int cursor = common().tiles.list_count;
        int tile = common().tiles.previous(common().tiles.end, cursor);
        bool first = true;
#pragma unroll 1
        while (tile >= 0) {
            const int next = common().tiles.previous(tile, cursor);
            cp_async_wait<0>();
            __syncthreads();  // K has arrived; no warp reads V of the previous tile
            load_v(common(), tile);
            const bool edge = common().tiles.is_edge(tile);
            if constexpr (kFloat) {
                Products{*this}.multiply_qk_split();
            } else {
                Products{*this}.multiply_qk();
            }
            if constexpr (kGeneral) {
                apply_rules(tile);
            } else if (exact_maximum) {
                for_all_scores(tile, [&](float& score, int, int) { score *= params.scale_log2; });
            }
            if (edge) mask_edge(tile);
            if (exact_maximum || first || edge || (kHalf && any_too_large())) update_max();
            cp_async_wait<0>();
            __syncthreads();  // V has arrived; no warp reads K
            load_k(common(), next);
            if constexpr (kFloat) {
                Products{*this}.multiply_pv_split(tile);
            } else {
                Products{*this}.multiply_pv(tile);
            }
            if (sums_past_limit()) rescale_large_sums();
            take_long_sums(tile, next);
            first = false;
            tile = next;
        }
        cp_async_wait<0>();
        add_long_sums();
    }

    // Applies dropout to two adjacent 8-column blocks, from `block` on.
    __device__ __forceinline__ void drop(int block, int tile) {
        const int first_col = tile * kBlockN + (key_part() * kKeyBlocks + block) * 8;
        const auto row = [&](int i) { return row_of(i / 2, i % 2 * 2); };
        uint32_t keep;
        if (shard().all.has_positions) {
            const auto col = [&](int i) { return first_col + (i >> 1 & 1) * 8 + lane % 4 * 2 + (i & 1); };
            keep = keep_bits_of_elements<kSlabs * 8>(
                params.rare.dropout, shard().batch_head, [&](int i) { return shard().all.rows.at(row(i / 4)); },
                [&](int i) { return shard().all.columns.at(col(i)); });
        } else {
            keep = keep_bits<kSlabs * 2>(params.rare.dropout, shard().batch_head, first_col, lane, row);
        }
        zero_dropped<kSlabs * 2>(keep, [&](int i, int n, int e) -> float& { return s[i / 2][block + n][i % 2 * 2 + e]; });
    }

    // Adds the partial row sums of all lanes of a row. True if any row of the thread block overflowed or its kept maximum is
    // beyond kMaximumLimit.
    __device__ __forceinline__ bool finish_sums() {
        bool bad = false;
#pragma unroll
        for (int a = 0; a < kSlabs; ++a)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                row_sum[a][r] = quad_sum(row_sum[a][r]);
                if constexpr (kKeySharers == 1)
                    bad |= row_sum[a][r] == INFINITY ||
                           (fabsf(kept_maximum[a][r]) > kMaximumLimit && kept_maximum[a][r] != kNoScore);
            }
        if constexpr (kKeySharers == 2) {
            Pair(*this).add_sums();
            Pair::for_rows([&](int a, int r) {
                bad |= row_sum[a][r] == INFINITY || (fabsf(kept_maximum[a][r]) > kMaximumLimit && kept_maximum[a][r] != kNoScore);
            });
        }
        if constexpr (kStatistics) {
            this->finish_statistics();
            if constexpr (kKeySharers == 2) Pair(*this).combine_statistics();
            bad |= this->statistics_overflowed(row_sum);
        }
        return __syncthreads_or(bad || Softmax::values_overflowed());
    }

    __device__ __forceinline__ void run() {
        if (!prepare()) return;
        // One loop, not two calls: a second inlined copy of the main loop costs registers.
        bool exact_maximum = false;
#pragma unroll 1
        while (true) {
            if constexpr (kLoadsLate) load_first(common());
            if constexpr (kSharers == 2) {
                Pair(*this).loop_over_keys(exact_maximum);
            } else {
                loop_over_keys(exact_maximum);
            }
            const bool overflow = finish_sums();
            if (exact_maximum || !overflow) break;
            exact_maximum = true;
            if constexpr (!kLoadsLate) load_first(common());
        }
        if constexpr (kHeadDim > 256) {
            ForwardWideOutput<Forward>{*this}.store();
        } else if constexpr (kSharers == 2) {
            Pair(*this).store_out();
        } else {
            Epilogue epilogue{*this};
            epilogue.normalize([&](int a, int r, float factor) { epilogue.scale_out(a, r, factor); });
            if (epilogue.stores_shard()) return epilogue.store_shard();
            if constexpr (kFloat) {
                epilogue.store_out_floats();
            } else {
                epilogue.store_out();
            }
        }
    }
};

template <class Kernel, bool kGeneral, bool kLongSums>
struct Instance {
    static constexpr KernelConfig config = Kernel::config;
    using T = ElementOf<config.dtype>;
    static constexpr int kWarps = config.tile_q / forward_rows_of_warp(config, kGeneral, kLongSums);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100
    static constexpr int kSharers = forward_sharers(config, true);
#else
    static constexpr int kSharers = forward_sharers(config, false);
#endif
    static constexpr int kMinBlocks = kWarps <= 4 ? 2 : 1;
#if defined(__CUDA_ARCH__)
    static constexpr int kVersion = __CUDA_ARCH__ / 10;
#else
    static constexpr int kVersion = 90;  // host compilation: the largest tiles, so the largest shared memory
#endif
    template <int kTileK>
    using Tiled = Forward<T, config.head_dim, config.tile_q, kTileK, kWarps, kSharers, kGeneral, kLongSums>;
    using Body = Tiled<forward_tile_k_sm80(config, kGeneral, kLongSums, kVersion)>;
    static constexpr bool shared_memory_fits() {  // the host computes the size only for wide heads
        if constexpr (is_wide_forward(config))
            return Body::kSharedBytes + Body::Pair::kStaticBytes <= wide_forward_shared_bytes(config);
        return true;
    }
    static_assert(shared_memory_fits(), "the host and the kernel must agree");
};

template <class Kernel, bool kGeneral, bool kLongSums>
__global__ void __launch_bounds__(Instance<Kernel, kGeneral, kLongSums>::Body::kThreads,
                                  Instance<Kernel, kGeneral, kLongSums>::kMinBlocks)
    forward_kernel(const __grid_constant__ ForwardParams params) {
    extern __shared__ __align__(128) char shared[];
    typename Instance<Kernel, kGeneral, kLongSums>::Body body(params, shared);
    body.run();
}

template <class Kernel, bool kGeneral, bool kLongSums>
int launch(const LaunchShape& shape, int64_t blocks_at_once, ForwardParams params, cudaStream_t stream) {
    const auto kernel = forward_kernel<Kernel, kGeneral, kLongSums>;
    // Set at every launch, because the attribute belongs to the current device.
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    for (int64_t first = 0; first < shape.blocks; first += blocks_at_once) {
        const int64_t blocks = shape.blocks - first < blocks_at_once ? shape.blocks - first : blocks_at_once;
        params.first_work_tile = static_cast<int32_t>(first);
        kernel<<<static_cast<unsigned>(blocks), shape.threads, shape.shared_bytes, stream>>>(params);
    }
    return cudaGetLastError();
}

template <class Kernel, bool kGeneral, bool kLongSums>
constexpr KernelResources forward_resources() {
    using Body = typename Instance<Kernel, kGeneral, kLongSums>::Body;
    return {Body::kThreads, Body::kSharedBytes};
}

// Calls do_with(general, long_sums) with the template parameters of the instance as integral constants.
template <class Kernel, class DoWith>
auto with_instance(int instance, const DoWith& do_with) {
    using std::bool_constant;
    constexpr bool kLongSums = has_long_sums(Kernel::config);
    if constexpr (is_wide_forward(Kernel::config)) {
        return do_with(bool_constant<true>(), bool_constant<kLongSums>());
    } else {
        if (instance == kForwardInstances[3].number) return do_with(bool_constant<true>(), bool_constant<kLongSums>());
        constexpr int kPlainLong = forward_instance_sm80(Kernel::config, false, true).number;
        if (instance == kPlainLong)
            return do_with(bool_constant<kPlainLong == kForwardInstances[3].number>(), bool_constant<kLongSums>());
        if (instance == kGeneralInstance.number) return do_with(bool_constant<true>(), bool_constant<false>());
        return do_with(bool_constant<false>(), bool_constant<false>());
    }
}

}  // namespace libflash::cuda::sm80

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_forward(int, int instance) {
    return sm80::with_instance<Kernel>(instance, [](auto general, auto long_sums) {
        return sm80::forward_resources<Kernel, decltype(general)::value, decltype(long_sums)::value>();
    });
}

// Enqueues the work on `stream` and returns the CUDA error.
template <class Kernel>
int launch_forward(const ForwardPlan& plan, const ForwardParams& params, void* stream) {
    return sm80::with_instance<Kernel>(plan.instance.number, [&](auto general, auto long_sums) {
        const int64_t at_once = plan.blocks_at_once > 0 ? plan.blocks_at_once : plan.attention.blocks;
        return sm80::launch<Kernel, decltype(general)::value, decltype(long_sums)::value>(plan.attention, at_once, params,
                                                                                          static_cast<cudaStream_t>(stream));
    });
}

}  // namespace libflash::cuda
