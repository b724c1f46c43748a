// Forward in float64: products by m16n8k16 (before sm_90 by m8n8k4), one instance with all options. A thread block computes a
// tile of query rows, each warp 16 of them (forward_rows_f64.cuh). K of the next tile is loaded during the softmax and the
// product with V, V during the product with K. With more than 256 channels K and V are loaded one after the other into the same
// tile, so that the kernel fits every GPU.
#pragma once

#include "cuda/attention/key_tiles.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/shard.cuh"
#include "cuda/params.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/sm80/forward_rows_f64.cuh"
#include "cuda/sm80/score_f64.cuh"
#include "cuda/tile/double_tile.cuh"

namespace libflash::cuda::sm80 {

// Values that are the same for all threads. They are in shared memory because registers are scarce.
template <int kTileQ, int kTileK>
struct DoubleForwardTile {
    TileCoordinates work;
    SequenceRows q_rows, k_rows;
    KeyTiles<kTileQ, kTileK> tiles;
};

template <int kHeadDim, int kTileQ, int kTileK>
struct DoubleForward {
    using Rows = DoubleRows<kHeadDim, kTileK>;
    using Queries = DoubleTile<kTileQ, kHeadDim>;
    using Keys = DoubleTile<kTileK, kHeadDim>;
    static constexpr int kWarps = kTileQ / kRowsOfWarp * Rows::kSharers, kThreads = kWarps * 32;
    static constexpr bool kOneTile = kHeadDim > 256;  // K, V and the slots use the same tile
    static constexpr int kSlotsAt = Queries::kBytes + (kOneTile ? 0 : 2 * Keys::kBytes),
                         kSlotBytes = kWarps * Rows::kSlotNumbers * 8;
    static_assert(!kOneTile || (kTileQ == kRowsOfWarp && kSlotBytes <= Keys::kBytes), "all warps have the same rows");
    using Present = DoubleForwardTile<kTileQ, kTileK>;
    static constexpr int kPresentAt = kSlotsAt + (kOneTile ? Keys::kBytes : kSlotBytes);
    static constexpr int kSharedBytes = kPresentAt + (sizeof(Present) + 15) / 16 * 16;
    static_assert(2 * kTileQ <= kWarps * Rows::kSlotNumbers, "");

    const ForwardParams& params;
    Queries q;
    Keys k, v;
    // `slots`: space through which the warps exchange scores (DoubleRows). Before the first tile it holds the keys that each row
    // sees. After the last tile it holds for each row the factor of O (`factors`) and the weight of an earlier result (`shares`).
    double* slots;
    double *factors, *shares;
    Present& present;
    int thread;
    Rows rows;

    __device__ __forceinline__ DoubleForward(const ForwardParams& p, char* shared)
        : params(p), present(*reinterpret_cast<Present*>(shared + kPresentAt)) {
        q.data = reinterpret_cast<double*>(shared);
        k.data = q.data + Queries::kBytes / 8;
        v.data = kOneTile ? k.data : k.data + Keys::kBytes / 8;
        slots = factors = kOneTile ? k.data : v.data + Keys::kBytes / 8;
        shares = factors + kTileQ;
        thread = threadIdx.x;
    }

    // Returns false if the thread block has no work.
    __device__ __forceinline__ bool prepare() {
        const TileCoordinates work = tile_coordinates<kTileQ>(params.schedule, params.q_lengths, params.batch);
        if (work.batch < 0) return false;
        const SequenceRows q_rows = SequenceRows::of(params.q_lengths, work.batch);
        if (work.tile * kTileQ >= q_rows.owned) return false;
        if (thread == 0) {
            present.work = work;
            present.q_rows = q_rows;
            present.k_rows = SequenceRows::of(params.k_lengths, work.batch);
            present.tiles.init(params.mask, params.block_mask, work, q_rows, present.k_rows);
        }
        __syncthreads();
        rows.init(slots, thread / 32, thread % 32);
        const ShardRows all = shard_rows();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = present.tiles.first_row + rows.row(h);
            rows.seen[h] = row < q_rows.length ? all.keys_of(row) : make_int2(0, 0);
        }
        if (all.has_positions) find_tiles();
        return true;
    }
    // Computed at each use, because registers are scarce.
    __device__ __forceinline__ ShardRows shard_rows() const {
        ShardRows all;
        all.init(params.shard, params.mask, present.q_rows, present.k_rows, present.work.batch);
        return all;
    }
    // Whether this thread writes the values of its rows: one of the threads that have these rows does.
    __device__ __forceinline__ bool writes() const { return rows.t == 0 && rows.sharer == 0; }

    // With positions: finds the key tiles from the keys that the first and the last row see.
    __device__ __forceinline__ void find_tiles() {
        int2* const ranges = reinterpret_cast<int2*>(slots);
        if (writes())
            for (int h = 0; h < 2; ++h) ranges[rows.row(h)] = rows.seen[h];
        __syncthreads();
        const int last = min(kTileQ, present.q_rows.length - present.tiles.first_row) - 1;
        if (thread == 0 && last >= 0) {
            present.tiles.set_ranges(ranges[0], ranges[last]);
            present.tiles.set_blocks(params.block_mask, present.work);
        }
        __syncthreads();
    }

    __device__ __forceinline__ void load(const Keys& to, const RowsParams& from, int channels, int tile) const {
        const double* const first =
            rows_of(from, present.work.batch, present.work.head / params.group_size, present.k_rows.start);
        to.template load_pairs_async<kThreads>(first, from.row, tile * kTileK, present.k_rows.length, channels, thread);
    }
    __device__ __forceinline__ void load_k(int tile) const {
        if (tile >= 0) load(k, params.k, params.head_dim, tile);
        cp_async_commit();
    }

    // Whether an option changes scores or probabilities, so that a score is not just the scaled dot product.
    __device__ __forceinline__ bool has_options() const {
        const RareParams& rare = params.rare;
        return params.in_double.softcap > 0.0 || rare.alibi_slopes.data || rare.bias.data || rare.mask.data ||
               rare.dropout.active;
    }
    __device__ __forceinline__ uint32_t make_scores(typename Rows::Scores& s, int tile) const {
        if (!has_options()) {
            rows.scale(s, params.in_double.softmax_scale, tile * kTileK);
            return 0;
        }
        const ShardRows all = shard_rows();
        const DoubleScore<ForwardParams> score(params, present.work, all.alibi_shift);
        const uint32_t head = dropout_head(params.shard, present.work.batch, present.work.head);
        const int first = present.tiles.first_row;
        return rows.score(
            s, tile * kTileK,
            [&](double dot, int row, int key) {
                double tanh_z;
                return score.keeps(first + row, key) ? score.score(dot, first + row, key, &tanh_z) : -INFINITY;
            },
            [&](int row, int key) {
                return !dropout_keeps(params.rare.dropout, head, all.has_positions ? all.rows.at(first + row) : first + row,
                                      all.has_positions ? all.columns.at(key) : key);
            });
    }

    __device__ __forceinline__ void load_q() {
        q.template load_pairs_async<kThreads>(rows_of(params.q, present.work.batch, present.work.head, present.q_rows.start),
                                              params.q.row, present.tiles.first_row, present.q_rows.length, params.head_dim,
                                              thread);
    }

    // The main loop where K and V use the same tile.
    __device__ __forceinline__ void loop_in_turn() {
        int cursor = present.tiles.list_count, tile = present.tiles.previous(present.tiles.end, cursor);
        load_q();
        load_k(tile);
#pragma unroll 1
        while (tile >= 0) {
            cp_async_wait<0>();
            __syncthreads();  // Q and K have arrived
            typename Rows::Scores s;
            uint32_t dropped = 0;
            const bool used = rows.sees_any(tile * kTileK);  // the same in all warps
            if (used) {
                rows.multiply_qk(s, q, k, params.head_dim);
                dropped = make_scores(s, tile);
            }
            __syncthreads();  // no warp reads K or the slots
            load(v, params.v, params.head_dim_v, tile);
            cp_async_commit();
            cp_async_wait<0>();
            __syncthreads();
            if (used) {
                rows.apply_softmax(s, dropped);
                rows.multiply_pv(s, v, params.head_dim_v);
            }
            __syncthreads();  // no warp reads V
            load_k(tile = present.tiles.previous(tile, cursor));
        }
        cp_async_wait<0>();
    }

    __device__ __forceinline__ void loop_over_keys() {
        int cursor = present.tiles.list_count, tile = present.tiles.previous(present.tiles.end, cursor);
        load_q();
        load_k(tile);
#pragma unroll 1
        while (tile >= 0) {
            cp_async_wait<0>();
            __syncthreads();  // Q and K have arrived; no warp reads V of the previous tile
            load(v, params.v, params.head_dim_v, tile);
            cp_async_commit();
            typename Rows::Scores s;
            const bool used = rows.sees_any(tile * kTileK);
            if (used) rows.multiply_qk(s, q, k, params.head_dim);
            cp_async_wait<0>();
            __syncthreads();  // V has arrived; no warp reads K
            const int current = tile;
            load_k(tile = present.tiles.previous(tile, cursor));
            if (!used) continue;
            rows.apply_softmax(s, make_scores(s, current));
            rows.multiply_pv(s, v, params.head_dim_v);
        }
        cp_async_wait<0>();
    }

    // Computes the factors of the rows and writes the LSE. The sink, or the earlier result of a continuation, counts as one more
    // score.
    __device__ __forceinline__ void normalize() {
        double* const lse =
            params.lse.data ? row_numbers(params.lse, present.work.batch, present.work.head, present.q_rows.start) : nullptr;
#pragma unroll 1
        for (int h = 0; h < 2; ++h) {
            const double sum = sum_of_lanes<4>(h == 0 ? rows.sum[0] : rows.sum[1]);
            if (!writes()) continue;
            const int local = rows.row(h), row = present.tiles.first_row + local;
            const bool exists = row < present.q_rows.length;
            const double maximum = h == 0 ? rows.maximum[0] : rows.maximum[1];
            double other = params.sink.data ? head_number_at(params.sink, present.work.batch, present.work.head) : -INFINITY;
            if (params.continues) other = exists ? lse[row * params.lse.row] : -INFINITY;
            const double largest = fmax(maximum, other);
            const double base = largest == -INFINITY ? 0.0 : largest;
            const double factor = exp(maximum - base), share = exp(other - base);
            const double total = sum * factor + share;
            // NaN in total propagates: the comparison with 0 is true.
            const bool any = exists && total != 0.0;
            factors[local] = any ? factor / total * params.in_double.keep_factor : 0.0;
            shares[local] = params.continues && any && other != -INFINITY ? share / total : 0.0;
            if (lse && row < present.q_rows.owned) lse[row * params.lse.row] = any ? base + log(total) : -INFINITY;
        }
    }

    // Writes O, which is staged in the tile of Q. A factor of 0 means that the row sees no key or is past the end. A row past the
    // end may hold NaN, so it is not multiplied but replaced by 0.
    __device__ __forceinline__ void store() {
        double* const out =
            rows_of(params.out, present.work.batch, present.work.head, present.q_rows.start + present.tiles.first_row);
        for_elements<kThreads>(q, present.q_rows.owned - present.tiles.first_row, params.head_dim_v, thread,
                               [&](double x, int r, int col) {
                                   double& at = out[r * params.out.row + col];
                                   const double here = factors[r] == 0.0 ? 0.0 : x * factors[r];
                                   at = shares[r] == 0.0 ? here : fma(shares[r], at, here);
                               });
    }

    __device__ __forceinline__ void run() {
        if (!prepare()) return;
        if constexpr (kOneTile) {
            loop_in_turn();
        } else {
            loop_over_keys();
        }
        __syncthreads();  // no warp reads Q or the slots of the last tile
        rows.stage(q);
        normalize();
        __syncthreads();
        store();
    }
};

template <class Kernel>
using DoubleForwardOf = DoubleForward<Kernel::config.head_dim, Kernel::config.tile_q, Kernel::config.tile_k>;

template <class Kernel>
__global__ void __launch_bounds__(DoubleForwardOf<Kernel>::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params) {
    extern __shared__ __align__(128) char shared[];
    DoubleForwardOf<Kernel> body(params, shared);
    body.run();
}

template <class Kernel>
int launch_double_forward(const LaunchShape& shape, const ForwardParams& params, cudaStream_t stream) {
    const auto kernel = forward_kernel<Kernel>;
    // Set at every launch, because the attribute belongs to the current device.
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
    kernel<<<static_cast<unsigned>(shape.blocks), shape.threads, shape.shared_bytes, stream>>>(params);
    return cudaGetLastError();
}

}  // namespace libflash::cuda::sm80

namespace libflash::cuda {

template <class Kernel>
KernelResources resources_of_forward(int, int) {
    return {sm80::DoubleForwardOf<Kernel>::kThreads, sm80::DoubleForwardOf<Kernel>::kSharedBytes};
}

// Enqueues the work on `stream` and returns the CUDA error.
template <class Kernel>
int launch_forward(const ForwardPlan& plan, const ForwardParams& params, void* stream) {
    return sm80::launch_double_forward<Kernel>(plan.attention, params, static_cast<cudaStream_t>(stream));
}

}  // namespace libflash::cuda
