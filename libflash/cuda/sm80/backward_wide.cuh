// dq, dk and dv with more than 256 channels, for sm_80 and later. One kernel, launched once for each output: a thread block has
// a tile of rows of one side (queries for dq, keys for the others) and loops over the tiles of the other side. Nothing is added
// to global memory, so the order of all additions is fixed. Each launch recomputes the scores: 8 products instead of 5.
//
//   dq = scale dS K     dk = scale dS' Q     dv = (R P)' dO     R: dropout, ': transposed
//
// The tile of the thread block is called rows, the tiles of the other side are called columns. Two warps share 16 rows. Each
// multiplies half of the channels of Q and K (dO and V); the parts of the scores are added through shared memory. Then each
// computes half of the channels of the output. In float32 four warps share 16 rows (backward_wide_f32.cuh).
#pragma once

#include "cuda/attention/backward_steps.cuh"
#include "cuda/attention/dropout.cuh"
#include "cuda/attention/element.cuh"
#include "cuda/attention/key_tiles.cuh"
#include "cuda/attention/query_tiles.cuh"
#include "cuda/attention/query_units.cuh"
#include "cuda/attention/rare_gradients.cuh"
#include "cuda/attention/shard.cuh"
#include "cuda/params.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/sm80/backward_tiles.h"
#include "cuda/sm80/backward_wide_f32.cuh"
#include "cuda/sm80/score_parts.cuh"
#include "cuda/tile/float_rows.cuh"
#include "cuda/tile/product.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace libflash::cuda::sm80 {

enum class WideGradient : int { dq, dk, dv, dbias };  // dbias: only in the float32 kernel

template <class T, int kHeadDim, int kTileRows>
struct WideBackward {
    static constexpr bool kFloat = std::is_same<T, float>::value;
    static constexpr int kCols = wide_columns(kTileRows, sizeof(T)), kBlocks = kCols / 8;  // rows of the other side
    static constexpr int kParts = wide_parts(sizeof(T)), kPartSteps = kHeadDim / 16 / kParts;
    static constexpr int kThreads = kTileRows / 16 * kParts * 32;
    using RowTile = SharedTile<kTileRows, kHeadDim, sizeof(T)>;
    using ColTile = SharedTile<kCols, kHeadDim, sizeof(T)>;
    using Rows = FloatRows<kTileRows, kHeadDim, kThreads>;
    static_assert(Rows::kBytes <= 2 * RowTile::kBytes, "outputs take the place of the rows");
    using Scores = float[1][kBlocks][4];
    // Values that are the same for all threads. They are in shared memory because registers are scarce.
    struct Common {
        TileCoordinates work;  // work.head: a query head for dq, else a key head
        SequenceRows q_rows, k_rows;
        KeyTiles<kTileRows, kCols> key_tiles;      // dq
        QueryTiles<kCols, kTileRows> query_tiles;  // dk, dv
        int units_before;                          // see QueryUnits
        int batch, length_q, length_k;             // as apply_rare_options() needs them
    };
    static_assert(sizeof(Common) <= kWideCommonBytes, "the host and the kernel must agree");

    // Shared memory: the tiles of the rows and of the columns (Q, dO and K, V, or the reverse); the softmax statistics of the
    // queries; Common; the range of the other side that each row sees or is seen by; in float32 parts of scores.
    static constexpr int kColsAt = 2 * RowTile::kBytes;
    static constexpr int kStatisticsAt = kColsAt + wide_column_tiles(sizeof(T)) * ColTile::kBytes;
    static constexpr int kCommonAt = kStatisticsAt + kTileRows * static_cast<int>(sizeof(SoftmaxStatistics));
    using Shard = ShardTile<kTileRows>;
    static constexpr int kShardAt = kCommonAt + kWideCommonBytes;
    static constexpr int kPartsAt = kShardAt + kWideShardBytes + kTileRows * 8;
    static constexpr int kSharedBytes = kPartsAt + wide_part_bytes(kTileRows, sizeof(T));
    static_assert(sizeof(Shard) <= kWideShardBytes + kTileRows * 8, "the host and the kernel must agree");
    // In 16 bits warps exchange parts of scores through a tile of the columns: 2 * kBlocks * 4 floats per thread.
    static_assert(kThreads * 2 * kBlocks * 16 <= ColTile::kBytes);

    const BackwardParams& params;
    const WideGradient output;
    char* shared;
    int thread, lane;
    Scores s, dp;
    float sums[1][2 * kPartSteps][4];

    __device__ __forceinline__ WideBackward(const BackwardParams& p, WideGradient gradient, char* shared_memory)
        : params(p), output(gradient), shared(shared_memory), thread(threadIdx.x), lane(threadIdx.x % 32) {}

    __device__ __forceinline__ bool computes_dbias() const { return kFloat && output == WideGradient::dbias; }
    __device__ __forceinline__ bool transposed() const {
        if constexpr (kFloat) {
            return output == WideGradient::dk || output == WideGradient::dv;
        } else {
            return output != WideGradient::dq;
        }
    }
    __device__ __forceinline__ int part() const { return hide_from_compiler(thread) / 32 % kParts; }
    __device__ __forceinline__ int warp_row() const { return hide_from_compiler(thread) / 32 / kParts * 16; }
    __device__ __forceinline__ uint32_t smem() const { return shared_address(shared); }
    __device__ __forceinline__ Common& common() const { return *reinterpret_cast<Common*>(shared + kCommonAt); }
    __device__ __forceinline__ Shard& shard() const { return *reinterpret_cast<Shard*>(shared + kShardAt); }
    __device__ __forceinline__ const SequenceRows& sequence(bool keys) const { return keys ? common().k_rows : common().q_rows; }
    __device__ __forceinline__ int first_row() const { return common().work.tile * kTileRows; }

    // Loads both tensors of one side from row `first` on: Q and dO or, if `keys`, K and V. With kOne only tensor number `only`.
    template <class Tile, bool kOne = false>
    __device__ __forceinline__ void load_side(int offset, bool keys, int head, int first, int only = 0) {
        const SequenceRows& rows = sequence(keys);
#pragma unroll 1
        for (int i = kOne ? only : 0; i < (kOne ? only + 1 : 2); ++i) {
            const RowsParams& from = i == 0 ? (keys ? params.k : params.q) : (keys ? params.v : params.dout);
            const int channels = i == 0 ? params.head_dim : params.head_dim_v, at = offset + (kOne ? 0 : i * Tile::kBytes);
            const T* matrix = static_cast<const T*>(from.data) + common().work.batch * from.batch + rows.start * from.row +
                              int64_t{head} * from.head;
            const int me = hide_from_compiler(thread);
            if (params.vector_loads) {
                Tile::template load_async<kThreads>(smem() + at, matrix, from.row, first, rows.length, channels, me);
            } else {
                Tile::template load_slow<kThreads>(shared + at, matrix, from.row, first, rows.length, channels, me);
            }
        }
    }
    // Loads the softmax statistics of `count` queries of a head, from row `first` on.
    __device__ __forceinline__ void load_statistics(int head, int first, int count) {
        const int64_t at = QueryUnits::first(params, head, common().units_before) * kUnitRows + first;
        const int copy = thread * 2;  // 16 bytes hold the statistics of two rows
        if (copy < count) cp_async_16(smem() + kStatisticsAt + thread * 16, params.softmax_statistics + at + copy, true);
    }
    __device__ __forceinline__ const SoftmaxStatistics& statistics_of(int n, int e) const {
        const int at = transposed() ? n * 8 + lane % 4 * 2 + (e & 1) : warp_row() + (e >> 1) * 8 + lane / 4;
        return reinterpret_cast<const SoftmaxStatistics*>(shared + kStatisticsAt)[at];
    }

    // c = A B^T over this warp's half of the channels. `tensor`: 0 for Q and K, 1 for dO and V.
    __device__ __forceinline__ void multiply(Scores& c, int tensor) const {
        const int at = hide_from_compiler(lane), first = part() * kPartSteps;
        const auto a_address = RowTile::template skip_columns<kPartSteps>(
            RowTile::a_address(smem() + tensor * RowTile::kBytes, warp_row(), at), first);
        const auto b_address = ColTile::template skip_columns<kPartSteps>(
            ColTile::b_address(smem() + kColsAt + tensor * ColTile::kBytes, at), first);
        auto product = make_product<T, kPartSteps, 1, 1, kBlocks>(
            [=](int step, uint32_t (&f)[1][4]) { ldmatrix_x4(f[0], a_address.at(0, step)); },
            [=](int step, int pair, uint32_t (&f)[4]) { ldmatrix_x4(f, b_address.at(pair * 16, step)); });
        clear(c);
        product.start();
        product.add_to(c, [](int) {});
    }

    // Adds the other warp's parts of s and dp. They overwrite tile `free_tile` of the columns, which is no longer needed.
    // Contains barriers of the thread block.
    __device__ __forceinline__ void add_other_part(int free_tile) {
        using Parts = ScoreParts<2, kThreads, kBlocks>;
        static_assert(Parts::kBytes <= ColTile::kBytes);
        Parts{smem() + kColsAt + free_tile * ColTile::kBytes, thread}.add(s, dp);
    }

    // Where element i = 4 * n + e of the scores is. `own`: its row in the tile of rows. `other`: its row in the sequence of the
    // other side.
    struct ScoreIndex {
        int own, other;
    };
    __device__ __forceinline__ ScoreIndex index_of(int i, int first_col) const {
        return {warp_row() + (i >> 1 & 1) * 8 + lane / 4, first_col + i / 4 * 8 + lane % 4 * 2 + (i & 1)};
    }

    // Bit i is set if dropout keeps element i.
    __device__ __forceinline__ uint32_t keep_elements(int head, int first_col) const {
        const DropoutParams& dropout = params.rare.dropout;
        if (!dropout.active) return 0xffffffffu;
        const uint32_t batch_head = dropout_head(params.shard, common().work.batch, head);
        const int rows = first_row() + warp_row();
        const ShardRows& all = shard().all;
        if (all.has_positions) {
            const auto own = [&](int i) { return first_row() + index_of(i, first_col).own; };
            const auto other = [&](int i) { return index_of(i, first_col).other; };
            return keep_bits_of_elements<kBlocks * 4>(
                dropout, batch_head, [&](int i) { return all.rows.at(transposed() ? other(i) : own(i)); },
                [&](int i) { return all.columns.at(transposed() ? own(i) : other(i)); });
        }
        if (transposed()) return keep_bits_transposed<kBlocks, 1>(dropout, batch_head, first_col + lane % 4 * 2, rows, lane);
        uint32_t keep = 0;
#pragma unroll
        for (int n = 0; n < kBlocks; n += 2)
            keep |=
                keep_bits<2, 2, 4>(dropout, batch_head, first_col + n * 8, lane, [&](int r) { return rows + r * 8 + lane / 4; })
                << n * 4;
        return keep;
    }

    // Converts the dot products s and dp to P and dS, both times 2^exponent_shift().
    __device__ __forceinline__ void apply_rules(int head, int tile) {
        const int first_col = tile * kCols;
        const Common& c = common();
        const auto element = [&](int i) -> GradientElement {
            const ScoreIndex at = index_of(i, first_col);
            const int own = first_row() + at.own;
            const SoftmaxStatistics& f = statistics_of(i / 4, i % 4);
            return {s[0][i / 4][i % 4],
                    dp[0][i / 4][i % 4],
                    transposed() ? at.other : own,
                    transposed() ? own : at.other,
                    f.lse_log2,
                    f.delta};
        };
        const auto hide = [&] {
            if (!(transposed() ? c.query_tiles.is_edge(tile) : c.key_tiles.is_edge(tile))) return;
#pragma unroll
            for (int i = 0; i < kBlocks * 4; ++i) {
                const ScoreIndex at = index_of(i, first_col);
                const int2 seen = shard().seen[at.own];
                if (at.other < seen.x || at.other >= seen.y) s[0][i / 4][i % 4] = -INFINITY;
            }
        };
        apply_rare_options<T, kBlocks * 4>(params.rare, params.softmax_scale, c, shard().all.alibi_shift, head,
                                           keep_elements(head, first_col), element, hide, !computes_dbias());
    }

    // sums += W C for this warp's half of the channels. C: tensor `tensor` of the columns. Tensor cores truncate when they add,
    // so each tile has its own accumulators, which are added to `sums` with rounding. So sums may have many terms.
    __device__ __forceinline__ void add_sums(const Scores& w, int tensor) {
        constexpr int kSteps = kCols / 16;
        const auto b_address = ColTile::template skip_columns<kPartSteps>(
            ColTile::b_trans_address(smem() + kColsAt + tensor * ColTile::kBytes, hide_from_compiler(lane)), part() * kPartSteps);
        uint32_t af[kSteps][4], bf[2][4];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) to_fragment<T>(af[step], w[0][2 * step], w[0][2 * step + 1]);
        const auto load = [&](int t) { ldmatrix_x4_trans(bf[t % 2], b_address.at(t % kSteps * 16, t / kSteps)); };
        load(0);
#pragma unroll
        for (int pair = 0; pair < kPartSteps; ++pair) {
            if (pair % 2 == 0) __syncwarp();  // keeps the compiler from loading more fragments than there are registers for
            float c[2][4] = {};
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                const int t = pair * kSteps + step;
                if (t + 1 < kPartSteps * kSteps) load(t + 1);
                mma_m16n8k16(c[0], af[step], bf[t % 2][0], bf[t % 2][1], T());
                mma_m16n8k16(c[1], af[step], bf[t % 2][2], bf[t % 2][3], T());
            }
#pragma unroll
            for (int e = 0; e < 8; ++e) sums[0][2 * pair + e / 4][e % 4] += c[e / 4][e % 4];
        }
    }

    // Adds one tile of the other side, for one query head.
    __device__ __forceinline__ void add_tile(int head, int tile) {
        __syncthreads();  // no warp reads the previous tile
        load_side<ColTile>(kColsAt, !transposed(), transposed() ? head : head / params.group_size, tile * kCols);
        if (transposed()) load_statistics(head, tile * kCols, kCols);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        const bool of_values = output == WideGradient::dv;
        if (of_values) {
            clear(dp);
        } else {
            multiply(dp, 1);
        }
        multiply(s, 0);
        add_other_part(of_values ? 0 : 1);
        apply_rules(head, tile);
        if (of_values) {
#pragma unroll
            for (int n = 0; n < kBlocks; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) dp[0][n][e] = s[0][n][e];
        }
        add_sums(dp, of_values ? 1 : 0);
    }

    __device__ __forceinline__ void loop() {
        const Common& c = common();
        int first_head = c.work.head, heads = 1, cursor = 0;
        if (transposed()) first_head *= params.group_size, heads = params.group_size;
        const auto next = [&](int head, int tile) {
            return transposed() ? c.query_tiles.next(params.block_cols, head, tile, cursor) : c.key_tiles.previous(tile, cursor);
        };
#pragma unroll 1
        for (int head = first_head; head < first_head + heads; ++head) {
            cursor = transposed() ? 0 : c.key_tiles.list_count;
            int tile = transposed() ? c.query_tiles.begin - 1 : c.key_tiles.end;
#pragma unroll 1
            while ((tile = next(head, tile)) >= 0) add_tile(head, tile);
        }
    }

    // Returns false if the thread block has no work.
    __device__ __forceinline__ bool prepare() {
        const ScheduleParams& schedule = transposed() ? params.key_schedule : params.query_tile_schedule;
        const LengthsParams& lengths = transposed() ? params.k_lengths : params.q_lengths;
        const TileCoordinates work = tile_coordinates<kTileRows>(schedule, lengths, params.batch);
        if (work.batch < 0) return false;
        const SequenceRows q_rows = SequenceRows::of(params.q_lengths, work.batch);
        const SequenceRows k_rows = SequenceRows::of(params.k_lengths, work.batch);
        if (work.tile * kTileRows >= (transposed() ? k_rows.owned : q_rows.owned)) return false;
        begin(work, q_rows, k_rows);
        return true;
    }
    // Prepares Common and the ranges for a tile of rows; after a barrier, starts to load the rows.
    __device__ __forceinline__ void begin(const TileCoordinates& work, const SequenceRows& q_rows, const SequenceRows& k_rows) {
        ShardRows all;
        all.init(params.shard, params.mask, q_rows, k_rows, work.batch);
        const int first = work.tile * kTileRows;
        for (int i = thread; i < kTileRows; i += kThreads)
            shard().seen[i] = transposed() ? all.rows_of(first + i) : all.keys_of(first + i);
        if (thread == 0) {
            Common& c = common();
            c.work = work;
            c.q_rows = q_rows;
            c.k_rows = k_rows;
            c.units_before = QueryUnits::before(params, work.batch, q_rows.owned);
            c.batch = work.batch;
            c.length_q = q_rows.length;
            c.length_k = k_rows.length;
            if (transposed()) {
                c.query_tiles.init(params, work, q_rows.length, k_rows.length);
            } else {
                c.key_tiles.init(params.mask, params.block_rows, work, q_rows, k_rows);
            }
            shard().all = all;
        }
        __syncthreads();
        if (all.has_positions) {  // the tiles follow from what the first and the last row see
            const int last = min(kTileRows, sequence(transposed()).length - first) - 1;
            if (thread == 0 && last >= 0) {
                if (transposed()) {
                    common().query_tiles.set_ranges(params, shard().seen[0], shard().seen[last]);
                } else {
                    common().key_tiles.set_ranges(shard().seen[0], shard().seen[last]);
                    common().key_tiles.set_blocks(params.block_rows, common().work);
                }
            }
            __syncthreads();
        }
        load_side<RowTile>(0, transposed(), work.head, first_row());
        if (!transposed()) load_statistics(work.head, first_row(), kTileRows);
        cp_async_commit();
    }

    // Writes the output. It is staged in shared memory, in the place of the rows.
    __device__ __forceinline__ void store() {
        const bool of_values = output == WideGradient::dv;
        const SequenceRows& rows = sequence(transposed());
        const float factor = undo_exponent_shift<T>() * (of_values ? params.rare.dropout.keep_factor : params.softmax_scale);
        const Rows staged{shared};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int in_tile = warp_row() + r * 8 + lane / 4;
            const float by = first_row() + in_tile < rows.length ? factor : 0.0f;
            const auto value = [&](int n, int e) { return by == 0.0f ? 0.0f : sums[0][n][2 * r + e] * by; };
#pragma unroll
            for (int n = 0; n < 2 * kPartSteps; ++n)
                *reinterpret_cast<float2*>(staged.chunk(in_tile, part() * 2 * kPartSteps + n) + lane % 4 * 2) =
                    make_float2(value(n, 0), value(n, 1));
        }
        __syncthreads();
        const bool wide = output == WideGradient::dq ? params.wide_dq : of_values ? params.wide_dv : params.wide_dk;
        if (kFloat || wide) {
            store_rows<float>(staged);
        } else {
            store_rows<T>(staged);
        }
    }
    template <class Out>
    __device__ __forceinline__ void store_rows(const Rows& staged) {
        const bool of_values = output == WideGradient::dv;
        const RowsParams& to = output == WideGradient::dq ? params.dq : of_values ? params.dv : params.dk;
        const SequenceRows& rows = sequence(transposed());
        Out* matrix = static_cast<Out*>(to.data) + common().work.batch * to.batch + common().work.head * to.head +
                      int64_t{rows.start + first_row()} * to.row;
        staged.store(
            matrix, to.row, min(kTileRows, rows.owned - first_row()), of_values ? params.head_dim_v : params.head_dim,
            params.vector_out, [&](int) { return params.adds ? 1.0f : 0.0f; }, thread);
    }

    __device__ __forceinline__ void run() {
        if (!prepare()) return;
        clear(sums);
        loop();
        cp_async_wait<0>();
        __syncthreads();
        store();
    }
};

template <class T, int kHeadDim, int kTileRows>
using WideBackwardBody =
    std::conditional_t<std::is_same<T, float>::value, WideBackwardFloat<WideBackward<float, kHeadDim, kTileRows>>,
                       WideBackward<T, kHeadDim, kTileRows>>;
template <class Kernel>
using WideBackwardOf = WideBackwardBody<ElementOf<Kernel::config.dtype>, Kernel::config.head_dim, Kernel::config.tile_q>;

template <class Kernel>
__global__ void __launch_bounds__(WideBackwardOf<Kernel>::kThreads, WideBackwardOf<Kernel>::kThreads <= 128 ? 2 : 1)
    wide_backward_kernel(const __grid_constant__ BackwardParams params, int output) {
    extern __shared__ __align__(128) char shared[];
    WideBackwardOf<Kernel> body(params, static_cast<WideGradient>(output), shared);
    body.run();
}

template <class Kernel>
int launch_wide_gradient(WideGradient output, const LaunchShape& shape, const BackwardParams& params, cudaStream_t stream) {
    if (shape.blocks == 0) return cudaSuccess;
    const auto kernel = wide_backward_kernel<Kernel>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    const int number = static_cast<int>(output);
    kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, shape.shared_bytes, stream>>>(params, number);
    return cudaGetLastError();
}

// dv, dk and dq, and with float32 dbias.
template <class Kernel>
int launch_wide_gradients(const BackwardPlan& plan, BackwardParams params, cudaStream_t stream) {
    params.part = {0, 0, params.group_size, 0, INT32_MAX, nullptr, true, true, 0, 0};
    int error = launch_wide_gradient<Kernel>(WideGradient::dv, plan.dk_dv, params, stream);
    if (error == cudaSuccess) error = launch_wide_gradient<Kernel>(WideGradient::dk, plan.dk_dv, params, stream);
    if (error == cudaSuccess) error = launch_wide_gradient<Kernel>(WideGradient::dq, plan.dq, params, stream);
    if (error == cudaSuccess && WideBackwardOf<Kernel>::kFloat)
        error = launch_wide_gradient<Kernel>(WideGradient::dbias, plan.dbias, params, stream);
    return error;
}

template <class Kernel>
KernelResources wide_backward_resources(BackwardStep step) {
    using Body = WideBackwardOf<Kernel>;
    static_assert(Body::kSharedBytes == wide_backward_shared_bytes(Kernel::config.head_dim, Kernel::config.tile_q,
                                                                   element_bytes(Kernel::config.dtype)),
                  "the host and the kernel must agree");
    switch (step) {
        case BackwardStep::statistics: return {SoftmaxStatisticsOf<Kernel>::kThreads, 0};
        case BackwardStep::dsink: return {DsinkOf<Kernel>::kThreads, 0};
        case BackwardStep::dbias:
            if constexpr (!Body::kFloat) return {DbiasOf<Kernel>::kThreads, DbiasOf<Kernel>::kSharedBytes};
            [[fallthrough]];
        default: return {Body::kThreads, Body::kSharedBytes};
    }
}

}  // namespace libflash::cuda::sm80
