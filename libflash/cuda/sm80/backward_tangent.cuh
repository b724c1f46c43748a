// The tangent of backward for sm_80 and later. One kernel, launched for each of tdq, tdk and tdv: a thread block has a tile of
// rows of one side, with the sums of its output in registers, and loops over the tiles of the other side, so the order of all
// additions is fixed. Formulas, with a row for each query and a column for each key; a leading t is a tangent:
//
//   x = g (R dp - delta)     y = g (R tdp - tdelta) - 2 tanh(z / cap) tz / cap x     g = 1 - tanh(z / cap)^2
//   dz = p x                 tdz = p ((ts - mu) x + y)
//   tdq = scale (tdz K + dz tK)     tdk = scale (tdz' Q + dz' tQ)     tdv = (R p (ts - mu))' dO + (R p)' tdO
//
// z: scale q . k, before the softcap `cap`; s: score; R: dropout, 0 or 1 / (1 - p_drop); mu: tangent of the LSE; ': transposed.
//
// For tdk and tdv all scores are transposed: the rows are keys. tdbias is one more launch of the kernel
// (backward_tangent_dbias.cuh).
//
// With more than 256 channels (float32: 128) four warps share their rows, each with a quarter of the channels, and the tensors of
// both sides are loaded one after the other (backward_tangent_in_turn.cuh).
#pragma once

#include "cuda/attention/bias_tile.cuh"
#include "cuda/attention/dropout.cuh"
#include "cuda/attention/edge_mask.cuh"
#include "cuda/attention/element.cuh"
#include "cuda/attention/key_tiles.cuh"
#include "cuda/attention/query_tiles.cuh"
#include "cuda/attention/query_units.cuh"
#include "cuda/attention/score_tangents.cuh"
#include "cuda/attention/tangent_params.h"
#include "cuda/attention/tangent_statistics.cuh"
#include "cuda/params.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm80/backward_tangent_dbias.cuh"
#include "cuda/sm80/backward_tangent_in_turn.cuh"
#include "cuda/sm80/backward_tangent_tiles.h"
#include "cuda/sm80/tangent_products.cuh"
#include "cuda/tile/product.cuh"
#include "cuda/tile/shared_tile.cuh"
#include "cuda/tile/store_floats.cuh"

#include <type_traits>

namespace libflash::cuda::sm80 {

enum class TangentOutput : int { tdq, tdk, tdv };

template <class T, int kHeadDim, int kBlockM, int kBlockN>
struct BackwardTangent {
    using Element = T;
    static constexpr bool kFloat = std::is_same<T, float>::value, kInTurn = loads_in_turn(kHeadDim, sizeof(T));
    using Products = TangentProducts<T, kHeadDim, kBlockM, kBlockN, 1>;
    static constexpr int kParts = Products::kParts, kPartDim = Products::kPartDim;
    static constexpr int kWarps = kBlockM / 16 * kParts, kThreads = kWarps * 32;
    static constexpr int kBlockRows = kBlockM, kBlockCols = kBlockN;
    static constexpr int kBlocks = Products::kBlocks, kChannelBlocks = Products::kChannelBlocks;
    using RowTile = typename Products::RowTile;
    using ColTile = typename Products::ColTile;
    using Scores = typename Products::Scores;
    struct Common {
        TileCoordinates work;  // work.head: a query head or, if transposed(), a key head
        SequenceRows q_rows, k_rows;
        KeyTiles<kBlockM, kBlockN> key_tiles;      // for tdq
        QueryTiles<kBlockN, kBlockM> query_tiles;  // if transposed()
        BiasRows<kBlockM> bias_rows;               // only for tdbias
        int units_before;                          // see QueryUnits
    };
    static_assert(sizeof(Common) <= kBackwardTangentCommonBytes, "the host and the kernel must agree");

    // Shared memory: four tiles of the rows and four of the columns (Q, tQ, dO, tdO and K, tK, V, tV, or the reverse), with
    // kInTurn two of the rows and one of the columns; statistics of the queries; Common.
    static constexpr int kColsAt = (kInTurn ? 2 : 4) * RowTile::kBytes;
    static constexpr int kStatisticsAt = kColsAt + (kInTurn ? 1 : 4) * ColTile::kBytes;
    static constexpr int kCommonAt = kStatisticsAt + kBlockM * static_cast<int>(sizeof(TangentStatistics));
    static constexpr int kSharedBytes = kCommonAt + kBackwardTangentCommonBytes;
    __device__ static constexpr int row_tile(int i) { return (kInTurn ? i % 2 : i) * RowTile::kBytes; }
    __device__ static constexpr int col_tile(int i) { return kColsAt + (kInTurn ? 0 : i) * ColTile::kBytes; }

    const BackwardTangentParams& params;
    const TangentOutput output;
    char* shared;
    int thread, warp, lane;
    Scores s, ts, x, y;
    typename Products::Sums sums;

    __device__ __forceinline__ BackwardTangent(const BackwardTangentParams& p, TangentOutput wanted, char* shared_memory)
        : params(p), output(wanted), shared(shared_memory) {
        thread = threadIdx.x;
        warp = thread / 32;
        lane = thread % 32;
    }

    __device__ __forceinline__ uint32_t smem() const { return shared_address(shared); }
    __device__ __forceinline__ Common& common() const { return *reinterpret_cast<Common*>(shared + kCommonAt); }
    __device__ __forceinline__ const SequenceRows& sequence(bool keys) const { return keys ? common().k_rows : common().q_rows; }
    __device__ __forceinline__ int first_row() const { return common().work.tile * kBlockM; }
    __device__ __forceinline__ Products products() const { return {smem(), warp, lane}; }
    __device__ __forceinline__ int warp_row() const { return products().warp_row(); }
    __device__ __forceinline__ int part() const { return products().part(); }
    __device__ __forceinline__ bool transposed() const { return output != TangentOutput::tdq; }
    __device__ __forceinline__ bool of_scores() const { return output != TangentOutput::tdv; }  // needs dP and tdP
    __device__ __forceinline__ bool computes_dbias() const { return output == TangentOutput::tdq && params.tdbias.data; }
    __device__ __forceinline__ TangentOfDbias<BackwardTangent> of_dbias() { return {*this}; }

    // The tensors of one side, each followed by its tangent.
    __device__ __forceinline__ const RowsParams& tensor(bool keys, int i) const {
        switch (i) {
            case 0: return keys ? params.k : params.q;
            case 1: return keys ? params.tk : params.tq;
            case 2: return keys ? params.v : params.dout;
            default: return keys ? params.tv : params.tdout;
        }
    }
    // Loads `count` tensors of a side, from number `from_tensor` on, unless they are absent.
    template <class Tile>
    __device__ __forceinline__ void load_side(int offset, bool keys, int head, int first, int from_tensor = 0, int count = 4) {
        const SequenceRows& rows = sequence(keys);
#pragma unroll 1
        for (int i = from_tensor; i < from_tensor + count; ++i) {
            const RowsParams& from = tensor(keys, i);
            if (!from.data) continue;
            const int channels = i < 2 ? params.head_dim : params.head_dim_v, at = offset + (i - from_tensor) * Tile::kBytes;
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
    // Loads the statistics of `count` queries of a head, from row `first` on.
    __device__ __forceinline__ void load_statistics(int head, int first, int count) {
        const int64_t at = QueryUnits::first(params, head, common().units_before) * kUnitRows + first;
        for (int i = thread; i < count; i += kThreads)
            cp_async_16(smem() + kStatisticsAt + i * 16, params.statistics + at + i, true);
    }

    // c += A B^T over the warp's channels. A: the warp's rows of the tile at rows_at. B: the tile at cols_at.
    __device__ __forceinline__ void add_product(Scores& c, int rows_at, int cols_at, int channels) const {
        products().add_scores(c, rows_at, cols_at, channels);
    }
    // sums += W C for the warp's channels of the tile C at cols_at.
    __device__ __forceinline__ void add_sums(const Scores& w, int cols_at, int channels) {
        products().add_values(sums, w, cols_at, channels);
    }
    // a = X C^T and ta = tX C^T + X tC^T. X and C: tensor number `pair` of the rows and of the columns; tX and tC: tensors number
    // `pair` + 1.
    __device__ __forceinline__ void multiply(Scores& a, Scores& ta, int pair, int channels) const {
        clear(a);
        clear(ta);
        add_product(a, row_tile(pair), col_tile(pair), channels);
        if (tensor(transposed(), pair + 1).data) add_product(ta, row_tile(pair + 1), col_tile(pair), channels);
        if (tensor(!transposed(), pair + 1).data) add_product(ta, row_tile(pair), col_tile(pair + 1), channels);
    }
    // Calls rule(n, e, row, key) for all elements of this lane.
    template <class Rule>
    __device__ __forceinline__ void for_elements(int first_col, const Rule& rule) const {
        const int row0 = first_row() + warp_row() + lane / 4, col0 = first_col + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < kBlocks * 4; ++i) {
            const int n = i / 4, e = i % 4, row = row0 + (e >> 1) * 8, col = col0 + n * 8 + (e & 1);
            rule(n, e, transposed() ? col : row, transposed() ? row : col);
        }
    }
    __device__ __forceinline__ TangentStatistics statistics_of(int n, int e) const {
        const int at = transposed() ? n * 8 + lane % 4 * 2 + (e & 1) : warp_row() + (e >> 1) * 8 + lane / 4;
        return reinterpret_cast<const TangentStatistics*>(shared + kStatisticsAt)[at];
    }

    // Bit 4 * n + e is set if dropout keeps the element.
    __device__ __forceinline__ uint32_t keep_elements(int head, int first_col) const {
        const DropoutParams& dropout = params.rare.dropout;
        if (!dropout.active) return 0xffffffffu;
        const uint32_t batch_head = dropout_head(common().work.batch, params.heads_q, head);
        const int rows = first_row() + warp_row();
        if (transposed()) return keep_bits_transposed<kBlocks, 1>(dropout, batch_head, first_col + lane % 4 * 2, rows, lane);
        uint32_t keep = 0;
#pragma unroll
        for (int n = 0; n < kBlocks; n += 2)
            keep |=
                keep_bits<2, 2, 4>(dropout, batch_head, first_col + n * 8, lane, [&](int r) { return rows + r * 8 + lane / 4; })
                << n * 4;
        return keep;
    }

    // dP and tdP become R dp - delta and R tdp - tdelta.
    __device__ __forceinline__ void subtract_deltas(uint32_t keep) {
        const float factor = params.rare.dropout.keep_factor;
#pragma unroll
        for (int i = 0; i < kBlocks * 4; ++i) {
            const TangentStatistics row = statistics_of(i / 4, i % 4);
            float &a = x[0][i / 4][i % 4], &b = y[0][i / 4][i % 4];
            a = (keep >> i & 1 ? a * factor : 0.0f) - row.delta;
            b = (keep >> i & 1 ? b * factor : 0.0f) - row.tdelta;
        }
    }

    // Converts the dot products to scores in base-2 units and their tangents, and multiplies in the slope of the softcap: x and y
    // become those of the formulas above.
    __device__ __forceinline__ void apply_rules(int head, int tile) {
        const int first_col = tile * kBlockN, rows = common().q_rows.length, keys = common().k_rows.length;
        const auto for_pairs = [&](const auto& rule) {
            for_elements(first_col, [&](int n, int e, int row, int key) { rule(s[0][n][e], ts[0][n][e], row, key); });
        };
        const auto for_all = [&](const auto& rule) {
            for_pairs([&](float& score, float&, int row, int key) { rule(score, row, key); });
        };
        const auto for_each = [&](const auto& rule) {
            for_all([&](float& score, int row, int key) {
                if (row < rows && key < keys) rule(score, row, key);
            });
        };
        scale_and_cap(params.rare, params.softmax_scale, for_all);
        const float inverse = params.rare.softcap > 0.0f ? 1.0f / params.rare.softcap : 0.0f;
#pragma unroll
        for (int i = 0; i < kBlocks * 4; ++i) {
            const int n = i / 4, e = i % 4;
            const float capped = s[0][n][e] * inverse, slope = fmaf(-capped, capped, 1.0f);
            const float tz = ts[0][n][e] * params.softmax_scale;
            if (of_scores() && !computes_dbias()) {
                x[0][n][e] *= slope;
                y[0][n][e] = fmaf(-2.0f * capped * inverse * tz, x[0][n][e], slope * y[0][n][e]);
            }
            ts[0][n][e] = slope * tz;
        }
        ScoreRules<T> rules;
        BiasTangent bias_tangent;
        rules.init(params.rare, common().work.batch, head, keys - rows);
        bias_tangent.template init<T>(params.tbias, common().work.batch, head);
        bias_tangent.template add<T>(params.tbias, rows, keys, for_pairs);
        add_and_hide<T>(params.rare, rules, for_all, for_each);
        mask_edge(tile, for_all);
    }
    template <class ForAll>
    __device__ __forceinline__ void mask_edge(int tile, const ForAll& for_all) const {
        if (transposed()) {
            if (common().query_tiles.is_edge(tile)) mask_edge_by_element(common().query_tiles, for_all);
        } else {
            if (common().key_tiles.is_edge(tile)) mask_edge_by_element(common().key_tiles, for_all);
        }
    }

    // x = dz and y = tdz, or for tdv s = R p and ts = R p (ts - mu); all times 2^exponent_shift(). Here R is 0 or 1; store()
    // multiplies by 1 / (1 - p_drop).
    __device__ __forceinline__ void make_weights(uint32_t keep) {
#pragma unroll
        for (int i = 0; i < kBlocks * 4; ++i) {
            const int n = i / 4, e = i % 4;
            const TangentStatistics row = statistics_of(n, e);
            const bool hidden = s[0][n][e] == -INFINITY || row.lse_log2 == INFINITY;
            const float p = exp2_approx(min_or_nan(s[0][n][e] - row.lse_log2, exponent_shift<T>()));
            const float below = ts[0][n][e] - row.mu;
            if (of_scores()) {
                y[0][n][e] = hidden ? 0.0f : p * fmaf(below, x[0][n][e], y[0][n][e]);
                x[0][n][e] = hidden ? 0.0f : p * x[0][n][e];
            } else {
                const bool drops = hidden || !(keep >> i & 1);
                s[0][n][e] = drops ? 0.0f : p;
                ts[0][n][e] = drops ? 0.0f : p * below;
            }
        }
    }

    // The head of the columns for a query head.
    __device__ __forceinline__ int column_head(int head) const { return transposed() ? head : head / params.group_size; }

    // Adds one tile of the other side, for one query head.
    __device__ __forceinline__ void add_tile(int head, int tile) {
        if constexpr (kInTurn) return BackwardTangentInTurn<BackwardTangent>{*this}.add_tile(head, tile);
        __syncthreads();  // no warp reads the previous tile
        load_side<ColTile>(kColsAt, !transposed(), column_head(head), tile * kBlockN);
        if (transposed()) load_statistics(head, tile * kBlockN, kBlockN);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        const uint32_t keep = keep_elements(head, tile * kBlockN);
        if (of_scores()) {
            multiply(x, y, 2, params.head_dim_v);
            subtract_deltas(keep);
        }
        multiply(s, ts, 0, params.head_dim);
        apply_rules(head, tile);
        make_weights(keep);
        if (computes_dbias()) return of_dbias().add();
        if (!of_scores()) copy_scores();
        const int pair = of_scores() ? 0 : 2, channels = of_scores() ? params.head_dim : params.head_dim_v;
        add_sums(y, col_tile(pair), channels);
        if (tensor(!transposed(), pair + 1).data) add_sums(x, col_tile(pair + 1), channels);
    }
    // x = s, y = ts: the weights of tdv are P and its tangent, which have the registers of s and ts.
    __device__ __forceinline__ void copy_scores() {
#pragma unroll
        for (int i = 0; i < kBlocks * 4; ++i) {
            x[0][i / 4][i % 4] = s[0][i / 4][i % 4];
            y[0][i / 4][i % 4] = ts[0][i / 4][i % 4];
        }
    }

    __device__ __forceinline__ void loop() {
        if (transposed()) {
            const auto& tiles = common().query_tiles;
#pragma unroll 1
            for (int i = 0; i < params.group_size; ++i) {
                const int head = common().work.head * params.group_size + i;
                int cursor = 0;
#pragma unroll 1
                for (int tile = tiles.next(params.block_cols, head, tiles.begin - 1, cursor); tile >= 0;
                     tile = tiles.next(params.block_cols, head, tile, cursor))
                    add_tile(head, tile);
            }
        } else {
            const auto& tiles = common().key_tiles;
            int cursor = tiles.list_count;
#pragma unroll 1
            for (int tile = tiles.previous(tiles.end, cursor); tile >= 0; tile = tiles.previous(tile, cursor))
                add_tile(common().work.head, tile);
        }
    }

    // The tile of rows of this thread block, except for tdbias. batch < 0: the thread block has no work.
    __device__ __forceinline__ TileCoordinates find_rows() const {
        const ScheduleParams& schedule = transposed() ? params.key_schedule : params.query_schedule;
        const LengthsParams& lengths = transposed() ? params.k_lengths : params.q_lengths;
        const TileCoordinates work = tile_coordinates<kBlockM>(schedule, lengths, params.batch);
        if (work.batch >= 0 && work.tile * kBlockM >= SequenceRows::of(lengths, work.batch).owned) return {-1, 0, 0};
        return work;
    }

    // Prepares Common for a tile of rows; after a barrier, starts to load the rows, unless there is no tile of keys.
    __device__ __forceinline__ void begin(const TileCoordinates& work) {
        if (thread == 0) {
            const SequenceRows q_rows = SequenceRows::of(params.q_lengths, work.batch);
            const SequenceRows k_rows = SequenceRows::of(params.k_lengths, work.batch);
            Common& c = common();
            c.work = work;
            c.q_rows = q_rows;
            c.k_rows = k_rows;
            c.units_before = QueryUnits::before(params, work.batch, q_rows.owned);
            if (transposed()) {
                c.query_tiles.init(params, work, q_rows.length, k_rows.length);
            } else {
                c.key_tiles.init(params.mask, params.block_rows, work, q_rows, k_rows);
                if (computes_dbias() && params.tdbias.extent[3] != 1) c.key_tiles.keep_tile(c.bias_rows.tile.col);
            }
        }
        __syncthreads();
        if (!transposed() && common().key_tiles.begin >= common().key_tiles.end) return;
        if (!kInTurn) load_side<RowTile>(0, transposed(), work.head, first_row());
        if (!transposed()) load_statistics(work.head, first_row(), kBlockM);
        cp_async_commit();
    }

    __device__ __forceinline__ void store() {
        const RowsParams& to = !transposed() ? params.tdq : of_scores() ? params.tdk : params.tdv;
        const SequenceRows& rows = sequence(transposed());
        const float factor = undo_exponent_shift<T>() * (of_scores() ? params.softmax_scale : params.rare.dropout.keep_factor);
        const int channels = of_scores() ? params.head_dim : params.head_dim_v, col = part() * kPartDim + lane % 4 * 2;
        T* matrix =
            static_cast<T*>(to.data) + common().work.batch * to.batch + common().work.head * to.head + rows.start * to.row;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int in_tile = warp_row() + r * 8 + lane / 4, row = first_row() + in_tile;
            const float by = row < rows.length ? factor : 0.0f;
            const auto value = [&](int n, int e) { return by == 0.0f ? 0.0f : sums[0][n][2 * r + e] * by; };
            if constexpr (kFloat) {
                if (row < rows.owned)
                    store_floats<kChannelBlocks>(matrix + row * to.row + col, channels - col, params.vector_out, value);
            } else {
#pragma unroll
                for (int n = 0; n < kChannelBlocks; ++n)
                    store_shared(smem() + RowTile::offset(in_tile, part() * kChannelBlocks + n) + lane % 4 * 4,
                                 pack_pair(value(n, 0), value(n, 1), T()));
            }
        }
        if constexpr (!kFloat) {
            __syncthreads();
            RowTile::template store<kThreads>(shared, matrix, to.row, first_row(), rows.owned, channels, params.vector_out,
                                              thread);
        }
    }

    __device__ __forceinline__ void run() {
        TileCoordinates work;
        if (!computes_dbias()) {
            work = find_rows();
            if (work.batch < 0) return;
        } else {
            of_dbias().start();
        }
        clear(sums);
#pragma unroll 1
        do {
            if (computes_dbias() && (work = of_dbias().next_rows()).batch < 0) break;
            begin(work);
            loop();
        } while (computes_dbias());
        cp_async_wait<0>();
        __syncthreads();
        if (computes_dbias()) {
            of_dbias().store();
        } else {
            store();
        }
    }
};

template <class Kernel>
using BackwardTangentBody =
    BackwardTangent<ElementOf<Kernel::config.dtype>, Kernel::config.head_dim, Kernel::config.tile_q, Kernel::config.tile_k>;

template <class Kernel>
__global__ void __launch_bounds__(TangentStatisticsUnit<ElementOf<Kernel::config.dtype>>::kThreads)
    tangent_statistics_kernel(const __grid_constant__ BackwardTangentParams params, TangentOutput) {
    TangentStatisticsUnit<ElementOf<Kernel::config.dtype>> unit{params, {}, {}};
    unit.run();
}

template <class Kernel>
__global__ void __launch_bounds__(BackwardTangentBody<Kernel>::kThreads, loads_in_turn(Kernel::config) ? 1 : 2)
    backward_tangent_kernel(const __grid_constant__ BackwardTangentParams params, TangentOutput output) {
    extern __shared__ __align__(128) char shared[];
    BackwardTangentBody<Kernel> body(params, output, shared);
    body.run();
}

template <class Kernel>
__global__ void __launch_bounds__(TangentDsink<ElementOf<Kernel::config.dtype>>::kThreads)
    tangent_dsink_kernel(const __grid_constant__ BackwardTangentParams params, TangentOutput) {
    TangentDsink<ElementOf<Kernel::config.dtype>>::run(params);
}

inline int enqueue_tangent(void (*kernel)(BackwardTangentParams, TangentOutput), const LaunchShape& shape,
                           const BackwardTangentParams& params, cudaStream_t stream, TangentOutput output = TangentOutput::tdq) {
    if (shape.blocks == 0) return cudaSuccess;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, shape.shared_bytes, stream>>>(params, output);
    return cudaGetLastError();
}

}  // namespace libflash::cuda::sm80

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_backward_tangent(int step, int) {
    using Body = sm80::BackwardTangentBody<Kernel>;
    static_assert(Body::kSharedBytes == backward_tangent_shared_bytes(Kernel::config), "the host and the kernel must agree");
    using T = ElementOf<Kernel::config.dtype>;
    switch (static_cast<BackwardTangentStep>(step)) {
        case BackwardTangentStep::statistics: return {TangentStatisticsUnit<T>::kThreads, 0};
        case BackwardTangentStep::dsink: return {TangentDsink<T>::kThreads, 0};
        default: return {Body::kThreads, Body::kSharedBytes};
    }
}

// Enqueues the work on `stream` and returns the CUDA error.
template <class Kernel>
int launch_backward_tangent(const BackwardTangentPlan& plan, const BackwardTangentParams& params, void* stream) {
    using sm80::enqueue_tangent, sm80::TangentOutput;
    const auto on = static_cast<cudaStream_t>(stream);
    const auto gradients = sm80::backward_tangent_kernel<Kernel>;
    BackwardTangentParams without_bias = params;
    without_bias.tdbias.data = nullptr;
    int error = enqueue_tangent(sm80::tangent_statistics_kernel<Kernel>, plan.statistics, params, on);
    if (error == cudaSuccess) error = enqueue_tangent(gradients, plan.tdq, without_bias, on, TangentOutput::tdq);
    if (error == cudaSuccess) error = enqueue_tangent(gradients, plan.tdk, params, on, TangentOutput::tdk);
    if (error == cudaSuccess) error = enqueue_tangent(gradients, plan.tdv, params, on, TangentOutput::tdv);
    if (error == cudaSuccess) error = enqueue_tangent(sm80::tangent_dsink_kernel<Kernel>, plan.dsink, params, on);
    if (error == cudaSuccess) error = enqueue_tangent(gradients, plan.dbias, params, on, TangentOutput::tdq);
    return error;
}

}  // namespace libflash::cuda
