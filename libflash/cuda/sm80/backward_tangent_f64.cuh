// The tangent of backward in float64: the formulas of backward_tangent.cuh with the tiles of tangent_tiles_f64.cuh. One kernel
// computes tdq, tdk, tdv or tdbias: a thread block has a tile of rows of one side, with the sums of its output in registers, and
// loops over the tiles of the other side; or it has a tile of the bias and loops over the pairs of query and key tiles that
// contribute to it. For each pair of tiles it loads both sides twice: dO and V for dP, and Q and K for the scores, with more than
// 256 channels also the other side once more for the last product. The tiles of scores always have a row for each query.
#pragma once

#include "cuda/attention/bias_tile.cuh"
#include "cuda/attention/key_tiles.cuh"
#include "cuda/attention/query_tiles.cuh"
#include "cuda/attention/query_units.cuh"
#include "cuda/attention/tangent_params.h"
#include "cuda/params.h"
#include "cuda/sm80/tangent_statistics_f64.cuh"
#include "cuda/sm80/tangent_tiles_f64.cuh"

namespace libflash::cuda::sm80 {

enum class DoubleTangentOutput : int { tdq, tdk, tdv, tdbias };

template <int kHeadDim, int kTileRows>
struct DoubleBackwardTangent : DoubleTangentTiles<BackwardTangentParams, kHeadDim, kTileRows, 6> {
    using Base = DoubleTangentTiles<BackwardTangentParams, kHeadDim, kTileRows, 6>;
    using Base::k_rows, Base::lane, Base::params, Base::q_rows, Base::thread, Base::warp, Base::work;
    using Base::kLanes, Base::kThreads, Base::kWarps, Base::kWide;

    static constexpr int kElements = (kTileRows + kLanes - 1) / kLanes;  // elements of a score tile per thread
    static_assert(kElements <= 2, "");

    const DoubleTangentOutput output;
    typename Base::Sums sums;                      // tdbias: the sums of the thread's elements, in the first block
    KeyTiles<kTileRows, kTileRows> key_tiles;      // for tdq and tdbias
    QueryTiles<kTileRows, kTileRows> query_tiles;  // for tdk and tdv
    int head, key_head;                            // of the current tiles
    int other_tile, cursor;                        // the current tile of the other side; the state of the list of tiles
    BiasRows<kTileRows> bias_rows;                 // for tdbias

    __device__ __forceinline__ DoubleBackwardTangent(const BackwardTangentParams& given, DoubleTangentOutput which, char* memory)
        : Base(given, memory), output(which) {}

    __device__ __forceinline__ bool computes_dbias() const { return output == DoubleTangentOutput::tdbias; }
    __device__ __forceinline__ bool of_queries() const { return output == DoubleTangentOutput::tdq || computes_dbias(); }

    // The tile of rows of this thread block, except for tdbias. batch < 0: the thread block has no work.
    __device__ __forceinline__ TileCoordinates find_rows() const {
        const LengthsParams& lengths = of_queries() ? params.q_lengths : params.k_lengths;
        const TileCoordinates next =
            tile_coordinates<kTileRows>(of_queries() ? params.query_schedule : params.key_schedule, lengths, params.batch);
        if (next.batch >= 0 && next.tile * kTileRows >= SequenceRows::of(lengths, next.batch).owned) return {-1, 0, 0};
        return next;
    }
    __device__ __forceinline__ void begin(const TileCoordinates& next) {
        Base::begin(next);
        if (of_queries()) {
            key_tiles.init(params.mask, params.block_rows, work, q_rows, k_rows);
            if (computes_dbias() && params.tdbias.extent[3] != 1) key_tiles.keep_tile(bias_rows.tile.col);
            head = work.head, key_head = work.head / params.group_size;
            other_tile = key_tiles.end, cursor = key_tiles.list_count;
        } else {
            query_tiles.init(params, work, q_rows.length, k_rows.length);
            head = work.head * params.group_size, key_head = work.head;
            other_tile = query_tiles.begin - 1, cursor = 0;
        }
    }

    // Goes to the next tile of the other side, if necessary of the next head that shares the keys. Returns false if there is
    // none.
    __device__ __forceinline__ bool advance() {
        if (of_queries()) {
            other_tile = key_tiles.previous(other_tile, cursor);
            return other_tile >= 0;
        }
        while ((other_tile = query_tiles.next(params.block_cols, head, other_tile, cursor)) < 0) {
            if (++head == (work.head + 1) * params.group_size) return false;
            other_tile = query_tiles.begin - 1, cursor = 0;
        }
        return true;
    }

    __device__ __forceinline__ bool has_tq() const { return params.tq.data; }
    __device__ __forceinline__ bool has_tk() const { return params.tk.data; }
    __device__ __forceinline__ bool has_tv() const { return params.tv.data; }
    __device__ __forceinline__ bool has_tdout() const { return params.tdout.data; }

    __device__ __forceinline__ DoubleTangentStatistics statistics_of(int row) const {
        const int64_t at = QueryUnits::first(params, work.batch, head, q_rows) * kUnitRows + row;
        return reinterpret_cast<const DoubleTangentStatistics*>(params.statistics)[at];
    }

    // Replaces score tiles 0 and 1 by the left operands of the last products: dz and tdz, or for tdv R p and R p (ts - mu). For
    // tdbias tile 1 becomes the tangents of dS, which are added to the tile of the bias.
    __device__ __forceinline__ void apply(int first_row, int first_key) const {
        const DoubleScore<BackwardTangentParams> score(params, {work.batch, head, 0}, k_rows.length - q_rows.length);
        const int local = thread / kLanes, row = first_row + local;
        const int2 keys = this->keys_of(row);
        const bool exists = row < q_rows.length;
        const DoubleTangentStatistics of_row = exists ? statistics_of(row) : DoubleTangentStatistics{INFINITY, 0.0, 0.0, 0.0};
#pragma unroll 1
        for (int col = thread % kLanes; col < kTileRows; col += kLanes) {
            const int key = first_key + col;
            double &a = this->scores(0).at(local, col), &b = this->scores(1).at(local, col);
            const double dot = a, tz = params.in_double.softmax_scale * this->tangent_at(0, has_tq(), has_tk(), local, col);
            a = b = 0.0;
            if (key < keys.x || key >= keys.y || of_row.lse == INFINITY || !score.keeps(row, key)) continue;
            double tanh_z;
            const double s = score.score(dot, row, key, &tanh_z), slope = fma(-tanh_z, tanh_z, 1.0);
            if (s == -INFINITY) continue;
            const double p = probability(s, of_row.lse);
            const double below = this->score_tangent(score, slope, tz, row, key) - of_row.mu;
            const double keep = this->keeps(head, row, key) ? params.in_double.keep_factor : 0.0;
            if (output == DoubleTangentOutput::tdv) {
                a = keep * p;
                b = keep * p * below;
                continue;
            }
            const double dp = keep == 0.0 ? 0.0 : keep * this->scores(3).at(local, col);
            const double tdp = keep == 0.0 ? 0.0 : keep * this->tangent_at(3, has_tdout(), has_tv(), local, col);
            const double bend = tanh_z == 0.0 || computes_dbias() ? 0.0 : -2.0 * tanh_z / params.in_double.softcap * tz;
            const double through =
                computes_dbias() ? 1.0 : slope;  // the bias is added after the softcap, so its gradient has no slope
            const double x = through * (dp - of_row.delta), y = fma(bend, x, through * (tdp - of_row.tdelta));
            a = p * x;
            b = p * fma(below, x, y);
        }
    }

    // Loads a tensor and its tangent of both sides (dO and V if `outer`, else Q and K) from a channel on, and waits for them.
    __device__ __forceinline__ void load_sides(bool outer, int first_row, int first_key, int channel = 0) const {
        __syncthreads();  // no warp reads the previous pairs
        this->load_pair(this->tile(0), outer ? params.dout : params.q, outer ? params.tdout : params.tq, q_rows, head, first_row,
                        outer ? params.head_dim_v : params.head_dim, channel);
        this->load_pair(this->tile(2), outer ? params.v : params.k, outer ? params.tv : params.tk, k_rows, key_head, first_key,
                        outer ? params.head_dim_v : params.head_dim, channel);
        cp_async_wait<0>();
        __syncthreads();
    }
    // The products of these pairs, with kWide after they are loaded.
    __device__ __forceinline__ void multiply_sides(bool outer, int first_row, int first_key) const {
        const int to = outer ? 3 : 0, channels = outer ? params.head_dim_v : params.head_dim;
        const bool has_x = outer ? has_tdout() : has_tq(), has_c = outer ? has_tv() : has_tk();
        if constexpr (kWide) {
            this->multiply_in_parts(to, has_x, has_c, channels,
                                    [&](int channel) { load_sides(outer, first_row, first_key, channel); });
        } else {
            this->multiply(to, has_x, has_c, channels);
        }
    }
    // With kWide: starts to load the right operands of the last products, a tensor of the other side and its tangent.
    __device__ __forceinline__ void load_other(int first_row, int first_key) const {
        if (of_queries()) {
            this->load_pair(this->whole(0), params.k, params.tk, k_rows, key_head, first_key, params.head_dim);
        } else {
            const bool of_values = output == DoubleTangentOutput::tdv;
            this->load_pair(this->whole(0), of_values ? params.dout : params.q, of_values ? params.tdout : params.tq, q_rows,
                            head, first_row, of_values ? params.head_dim_v : params.head_dim);
        }
    }

    // Adds the current tile of the other side.
    __device__ __forceinline__ void add_tile() {
        const int first_row = (of_queries() ? work.tile : other_tile) * kTileRows,
                  first_key = (of_queries() ? other_tile : work.tile) * kTileRows;
        const bool of_values = output == DoubleTangentOutput::tdv;
        // First dP, then the scores. For tdv first the scores; then only dO is loaded, for the last product.
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            const bool outer = (i == 0) != of_values;
            if constexpr (!kWide) load_sides(outer, first_row, first_key);
            if (outer && of_values) break;
            multiply_sides(outer, first_row, first_key);
            __syncthreads();
            if (outer) continue;
            if (kWide && !computes_dbias()) load_other(first_row, first_key);
            apply(first_row, first_key);
        }
        if (computes_dbias()) {
            for_own_elements([&](double& x, double& sum) { sum += x; });
            return;
        }
        if constexpr (kWide) cp_async_wait<0>();
        __syncthreads();
        add_products();
    }
    // Adds the products of score tiles 1 and 0 with a tensor of the other side and its tangent.
    __device__ __forceinline__ void add_products() {
        const bool of_values = output == DoubleTangentOutput::tdv;
        const bool has_second = of_queries() ? has_tk() : of_values ? has_tdout() : has_tq();
#pragma unroll 1
        for (int i = 0; i < (has_second ? 2 : 1); ++i) {
            const auto weights = this->scores(1 - i);
            const auto other = this->whole((!kWide && of_queries() ? 2 : 0) + i);
            const int channels = of_values ? params.head_dim_v : params.head_dim;
            if (of_queries()) {
                add_values<false, kTileRows, kWarps>(sums, weights, other, channels, warp, lane);
            } else {
                add_values<true, kTileRows, kWarps>(sums, weights, other, channels, warp, lane);
            }
        }
    }

    // Calls rule(x, sum) for the elements of score tile 1 that this thread computed, and their sums.
    template <class Rule>
    __device__ __forceinline__ void for_own_elements(const Rule& rule) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
            const int col = thread % kLanes + i * kLanes;
            if (col < kTileRows) rule(this->scores(1).at(thread / kLanes, col), sums[0][0][i]);
        }
    }

    __device__ __forceinline__ void store_bias() {
        for_own_elements([&](double& x, double& sum) { x = sum; });
        __syncthreads();
        const auto staged = this->scores(1);
        const ScoreGradientParams& to = params.tdbias;
        write_bias_tile<kTileRows, kTileRows, kThreads>(
            to, bias_rows.tile, thread, [&](int row, int col) { return staged.at(row, col); },
            [&](int64_t at, double sum) { store_number_at(to.data, at, to.is_float, sum); });
    }

    __device__ __forceinline__ void store() {
        const RowsParams& rows = of_queries() ? params.tdq : output == DoubleTangentOutput::tdk ? params.tdk : params.tdv;
        const SequenceRows sequence = of_queries() ? q_rows : k_rows;
        const int first = work.tile * kTileRows, existing = sequence.length - first;
        const bool of_values = output == DoubleTangentOutput::tdv;
        const double factor = of_values ? 1.0 : params.in_double.softmax_scale;
        double* const to = rows_of(rows, work.batch, work.head, sequence.start + first);
        for_elements<kThreads>(this->whole(0), sequence.owned - first, of_values ? params.head_dim_v : params.head_dim, thread,
                               [&](double x, int r, int col) { to[r * rows.row + col] = r < existing ? x * factor : 0.0; });
    }

    __device__ __forceinline__ void run() {
        TileCoordinates next;
        if (computes_dbias()) {
            bias_rows.start(params, params.tdbias, bias_tile_of<kTileRows, kTileRows>(params.tdbias, blockIdx.x));
        } else {
            next = find_rows();
            if (next.batch < 0) return;
        }
        clear(sums);
#pragma unroll 1
        do {
            if (computes_dbias()) {
                if (!bias_rows.next(params, params.tdbias)) break;
                next = bias_rows.at;
            }
            begin(next);
#pragma unroll 1
            while (advance()) add_tile();
        } while (computes_dbias());
        if (computes_dbias()) {
            store_bias();
            return;
        }
        __syncthreads();  // no warp reads the last pairs
        stage<kWarps>(sums, this->whole(0), warp, lane);
        __syncthreads();
        store();
    }
};

template <class Kernel>
using DoubleBackwardTangentOf = DoubleBackwardTangent<Kernel::config.head_dim, Kernel::config.tile_q>;

template <class Kernel>
__global__ void __launch_bounds__(DoubleTangentStatisticsUnit::kThreads)
    tangent_statistics_kernel(const __grid_constant__ BackwardTangentParams params, DoubleTangentOutput) {
    DoubleTangentStatisticsUnit unit{params, {}, {}};
    unit.run();
}

template <class Kernel>
__global__ void __launch_bounds__(kDoubleThreads, 2)
    backward_tangent_kernel(const __grid_constant__ BackwardTangentParams params, DoubleTangentOutput output) {
    extern __shared__ __align__(128) char shared[];
    DoubleBackwardTangentOf<Kernel> body(params, output, shared);
    body.run();
}

template <class Kernel>
__global__ void __launch_bounds__(DoubleTangentDsink::kThreads)
    tangent_dsink_kernel(const __grid_constant__ BackwardTangentParams params, DoubleTangentOutput) {
    DoubleTangentDsink::run(params);
}

inline int enqueue_double_tangent(void (*kernel)(BackwardTangentParams, DoubleTangentOutput), const LaunchShape& shape,
                                  const BackwardTangentParams& params, cudaStream_t stream,
                                  DoubleTangentOutput output = DoubleTangentOutput::tdq) {
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
    static_assert(Kernel::config.tile_q == Kernel::config.tile_k, "tiles of both sides have one size");
    switch (static_cast<BackwardTangentStep>(step)) {
        case BackwardTangentStep::statistics: return {sm80::DoubleTangentStatisticsUnit::kThreads, 0};
        case BackwardTangentStep::dsink: return {sm80::DoubleTangentDsink::kThreads, 0};
        default: return {sm80::kDoubleThreads, sm80::DoubleBackwardTangentOf<Kernel>::kSharedBytes};
    }
}

// Enqueues the work on `stream` and returns the CUDA error.
template <class Kernel>
int launch_backward_tangent(const BackwardTangentPlan& plan, const BackwardTangentParams& params, void* stream) {
    using sm80::DoubleTangentOutput, sm80::enqueue_double_tangent;
    const auto on = static_cast<cudaStream_t>(stream);
    const auto gradients = sm80::backward_tangent_kernel<Kernel>;
    int error = enqueue_double_tangent(sm80::tangent_statistics_kernel<Kernel>, plan.statistics, params, on);
    if (error == cudaSuccess) error = enqueue_double_tangent(gradients, plan.tdq, params, on, DoubleTangentOutput::tdq);
    if (error == cudaSuccess) error = enqueue_double_tangent(gradients, plan.tdk, params, on, DoubleTangentOutput::tdk);
    if (error == cudaSuccess) error = enqueue_double_tangent(gradients, plan.tdv, params, on, DoubleTangentOutput::tdv);
    if (error == cudaSuccess) error = enqueue_double_tangent(sm80::tangent_dsink_kernel<Kernel>, plan.dsink, params, on);
    if (error == cudaSuccess) error = enqueue_double_tangent(gradients, plan.dbias, params, on, DoubleTangentOutput::tdbias);
    return error;
}

}  // namespace libflash::cuda
