// The tangent of forward in float64, from saved out and LSE: the algorithm of forward_tangent.cuh with the tiles of
// tangent_tiles_f64.cuh. One instance with all options.
#pragma once

#include "cuda/attention/key_tiles.cuh"
#include "cuda/attention/tangent_params.h"
#include "cuda/params.h"
#include "cuda/sm80/tangent_tiles_f64.cuh"

namespace libflash::cuda::sm80 {

template <int kHeadDim, int kTileRows>
struct DoubleForwardTangent : DoubleTangentTiles<ForwardTangentParams, kHeadDim, kTileRows, 3> {
    using Base = DoubleTangentTiles<ForwardTangentParams, kHeadDim, kTileRows, 3>;
    using Base::Base, Base::k_rows, Base::lane, Base::params, Base::q_rows, Base::thread, Base::warp, Base::work;
    using Base::kLanes, Base::kThreads, Base::kWarps, Base::kWide;

    KeyTiles<kTileRows, kTileRows> tiles;
    typename Base::Sums tout;
    // The query row that this thread processes: its number in the sequence, the keys [x, y) that it sees, and its statistics.
    int row;
    int2 keys;
    double lse;  // +infinity: the row does not exist or sees no key
    double pivot, sum;
    bool has_pivot;

    // Returns false if the thread block has no work.
    __device__ __forceinline__ bool prepare() {
        const TileCoordinates next = tile_coordinates<kTileRows>(params.schedule, params.q_lengths, params.batch);
        if (next.batch < 0) return false;
        this->begin(next);
        tiles.init(params.mask, params.block_mask, work, q_rows, k_rows);
        if (tiles.first_row >= q_rows.owned) return false;
        row = tiles.first_row + thread / kLanes;
        keys = this->keys_of(row);
        lse =
            row < q_rows.length ? row_numbers(params.lse, work.batch, work.head, q_rows.start)[row * params.lse.row] : -INFINITY;
        if (lse == -INFINITY) lse = INFINITY;
        pivot = sum = 0.0;
        has_pivot = false;
        return true;
    }

    __device__ __forceinline__ bool has_tq() const { return params.tq.data; }
    __device__ __forceinline__ bool has_tk() const { return params.tk.data; }

    // Replaces score tiles 0 and 1 by P and P (ts - pivot), with dropout.
    __device__ __forceinline__ void apply(const DoubleScore<ForwardTangentParams>& score, int tile) {
        const int local = thread / kLanes, first_key = tile * kTileRows;
        const auto s = this->scores(0), w = this->scores(1);
        double seen = 0.0, mean = 0.0;
#pragma unroll 1
        for (int col = thread % kLanes; col < kTileRows; col += kLanes) {
            const int key = first_key + col;
            const double dot = s.at(local, col),
                         tz = params.in_double.softmax_scale * this->tangent_at(0, has_tq(), has_tk(), local, col);
            s.at(local, col) = -INFINITY;
            if (key < keys.x || key >= keys.y || !score.keeps(row, key)) continue;
            double tanh_z;
            s.at(local, col) = score.score(dot, row, key, &tanh_z);
            const double ts = this->score_tangent(score, fma(-tanh_z, tanh_z, 1.0), tz, row, key);
            w.at(local, col) = ts;
            if (s.at(local, col) != -INFINITY) seen += 1.0, mean += ts;
        }
        choose_pivot(sum_of_lanes<kLanes>(seen), sum_of_lanes<kLanes>(mean));
#pragma unroll 1
        for (int col = thread % kLanes; col < kTileRows; col += kLanes) {
            double &p = s.at(local, col), &tp = w.at(local, col);
            const bool hidden = p == -INFINITY;
            p = hidden ? 0.0 : probability(p, lse);
            tp = hidden ? 0.0 : p * (tp - pivot);
            sum += tp;
            if (!this->keeps(work.head, row, first_key + col)) p = tp = 0.0;
        }
    }
    // The mean of the tangents over the first tile whose keys the row sees.
    __device__ __forceinline__ void choose_pivot(double seen, double total) {
        if (has_pivot || seen == 0.0) return;
        pivot = total / seen;
        has_pivot = true;
    }

    __device__ __forceinline__ void load_queries(int channel) const {
        this->load_pair(this->tile(0), params.q, params.tq, q_rows, work.head, tiles.first_row, params.head_dim, channel);
    }
    // Loads K, with kWide also Q, from a channel on, and waits for them.
    __device__ __forceinline__ void load_keys(int key_head, int first, int channel) const {
        __syncthreads();  // no warp reads V and P of the previous tile, with kWide also the previous channels
        if constexpr (kWide) load_queries(channel);
        this->load_pair(this->tile(2), params.k, params.tk, k_rows, key_head, first, params.head_dim, channel);
        cp_async_wait<0>();
        __syncthreads();
    }

    __device__ __forceinline__ void loop_over_keys() {
        constexpr int kValues = kWide ? 0 : 2;  // V takes the memory of K, with kWide also that of Q
        const DoubleScore<ForwardTangentParams> score(params, work, k_rows.length - q_rows.length);
        const int key_head = work.head / params.group_size;
        clear(tout);
        if constexpr (!kWide) load_queries(0);
        int cursor = tiles.list_count;
#pragma unroll 1
        for (int tile = tiles.end; (tile = tiles.previous(tile, cursor)) >= 0;) {
            const int first = tile * kTileRows;
            if constexpr (kWide) {
                this->multiply_in_parts(0, has_tq(), has_tk(), params.head_dim,
                                        [&](int channel) { load_keys(key_head, first, channel); });
            } else {
                load_keys(key_head, first, 0);
                this->multiply(0, has_tq(), has_tk(), params.head_dim);
            }
            __syncthreads();  // the scores are complete; no warp reads K
            this->load_pair(this->whole(kValues), params.v, params.tv, k_rows, key_head, first, params.head_dim_v);
            apply(score, tile);
            cp_async_wait<0>();
            __syncthreads();
#pragma unroll 1
            for (int i = 0; i < (params.tv.data ? 2 : 1); ++i)
                add_values<false, kTileRows, kWarps>(tout, this->scores(1 - i), this->whole(kValues + i), params.head_dim_v, warp,
                                                     lane);
        }
        cp_async_wait<0>();
    }

    // Stores for each row mu - pivot and whether the row exists and sees a key. Writes the tangent of the LSE.
    __device__ __forceinline__ void finish_rows() {
        double below = sum_of_lanes<kLanes>(sum);
        const double sink = params.sink.data ? head_number_at(params.sink, work.batch, work.head) : -INFINITY;
        const double tsink = params.tsink.data ? head_number_at(params.tsink, work.batch, work.head) : 0.0;
        const double of_sink = sink == -INFINITY ? 0.0 : probability(sink, lse);
        if (of_sink > 0.0) below = fma(of_sink, tsink - pivot, below);
        const bool sees_keys = lse != INFINITY;
        if (thread % kLanes != 0) return;
        this->numbers(0)[thread / kLanes] = below;
        this->numbers(1)[thread / kLanes] = sees_keys ? 1.0 : 0.0;
        if (params.tlse.data && row < q_rows.owned)
            row_numbers(params.tlse, work.batch, work.head, q_rows.start)[row * params.tlse.row] =
                sees_keys ? pivot + below : 0.0;
    }

    // Writes tout = sum R p (ts - pivot) v + sum R p tv - (mu - pivot) out, delta and tdelta. Each warp processes one row at a
    // time.
    __device__ __forceinline__ void store() {
        const auto sums = this->whole(0);
        const auto first_of = [&](const RowsParams& rows) {
            return rows.data ? rows_of(rows, work.batch, work.head, q_rows.start + tiles.first_row) : nullptr;
        };
        const double *out = first_of(params.out), *dout = first_of(params.dout), *tdout = first_of(params.tdout);
        double* const to = first_of(params.tout);
#pragma unroll 1
        for (int r = warp; r < min(kTileRows, q_rows.owned - tiles.first_row); r += kWarps) {
            const bool sees_keys = this->numbers(1)[r] != 0.0;
            const double below = this->numbers(0)[r];
            double delta = 0.0, tdelta = 0.0;
#pragma unroll 1
            for (int c = lane; c < params.head_dim_v; c += 32) {
                const double o = sees_keys ? out[r * params.out.row + c] : 0.0;
                const double x = sees_keys ? fma(-below, o, sums.at(r, c) * params.in_double.keep_factor) : 0.0;
                if (to) to[r * params.tout.row + c] = x;
                if (dout && sees_keys) {
                    const double d = dout[r * params.dout.row + c];
                    delta = fma(d, o, delta), tdelta = fma(d, x, tdelta);
                }
                if (tdout && sees_keys) tdelta = fma(tdout[r * params.tdout.row + c], o, tdelta);
            }
            const int row = tiles.first_row + r;
            if (params.delta.data) store_number(params.delta, params.dlse, row, sees_keys, sum_of_lanes<32>(delta));
            if (params.tdelta.data) store_number(params.tdelta, params.tdlse, row, sees_keys, sum_of_lanes<32>(tdelta));
        }
    }
    // Writes `number`, minus the row's number in `less` if that tensor is given; 0 if not `sees_keys`.
    __device__ __forceinline__ void store_number(const RowStatisticsParams& to, const RowStatisticsParams& less, int at,
                                                 bool sees_keys, double number) {
        if (lane != 0) return;
        if (sees_keys && less.data) number -= row_numbers(less, work.batch, work.head, q_rows.start)[at * less.row];
        row_numbers(to, work.batch, work.head, q_rows.start)[at * to.row] = sees_keys ? number : 0.0;
    }

    __device__ __forceinline__ void run() {
        if (!prepare()) return;
        loop_over_keys();
        __syncthreads();  // no warp reads Q
        stage<kWarps>(tout, this->whole(0), warp, lane);
        finish_rows();
        __syncthreads();
        store();
    }
};

template <class Kernel>
using DoubleForwardTangentOf = DoubleForwardTangent<Kernel::config.head_dim, Kernel::config.tile_q>;

template <class Kernel>
__global__ void __launch_bounds__(kDoubleThreads, 2) forward_tangent_kernel(const __grid_constant__ ForwardTangentParams params) {
    extern __shared__ __align__(128) char shared[];
    DoubleForwardTangentOf<Kernel> body(params, shared);
    body.run();
}

template <class Kernel>
int launch_double_tangent(const LaunchShape& shape, const ForwardTangentParams& params, cudaStream_t stream) {
    const auto kernel = forward_tangent_kernel<Kernel>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, shape.shared_bytes, stream>>>(params);
    return cudaGetLastError();
}

}  // namespace libflash::cuda::sm80

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_forward_tangent(int, int) {
    static_assert(Kernel::config.tile_q == Kernel::config.tile_k, "tiles of queries and keys have one size");
    return {sm80::kDoubleThreads, sm80::DoubleForwardTangentOf<Kernel>::kSharedBytes};
}

// Enqueues the work on `stream` and returns the CUDA error.
template <class Kernel>
int launch_forward_tangent(const ForwardTangentPlan& plan, const ForwardTangentParams& params, void* stream) {
    return sm80::launch_double_tangent<Kernel>(plan.attention, params, static_cast<cudaStream_t>(stream));
}

}  // namespace libflash::cuda
