// Forward in float64 with statistics of the rows, one instance with all options. A thread block computes a tile of query rows.
// Its warps share the scores of a tile of keys through shared memory: each warp computes some blocks of S = Q K^T; then all
// threads convert the scores to probabilities, several threads for a row; then each warp multiplies all of P by its channels of
// V. Unlike the kernel without statistics (forward_f64.cuh) it is not optimised for speed.
//
// With more than 256 channels a tile has one block of scores, so that the kernel fits every GPU. Each warp multiplies a part of
// the channels of Q and K, and the threads that process the scores add these parts.
#pragma once

#include "cuda/attention/key_tiles.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/shard.cuh"
#include "cuda/params.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/sm80/row_statistics_f64.cuh"
#include "cuda/sm80/score_f64.cuh"
#include "cuda/tile/double_tile.cuh"

namespace libflash::cuda::sm80 {

template <int kHeadDim, int kTileQ, int kTileK>
struct DoubleStatisticsForward {
    using Params = ForwardStatisticsParams;
    static constexpr bool kWide = kHeadDim > 256;
    static constexpr int kThreads = kDoubleThreads, kWarps = kDoubleWarps;
    static constexpr int kLanes = kThreads / kTileQ;  // threads that share a row of scores
    static constexpr int kChannelBlocks = double_channel_blocks(kHeadDim);
    using Queries = DoubleTile<kTileQ, kHeadDim>;
    using Keys = DoubleTile<kTileK, kHeadDim>;
    using Scores = DoubleTile<kTileQ, kTileK>;
    static constexpr int kScoreTiles = kWide ? kWarps : 1;  // parts of the scores
    static constexpr int kNumbersAt = Queries::kBytes + 2 * Keys::kBytes + kScoreTiles * Scores::kBytes;
    static constexpr int kSharedBytes = kNumbersAt + 2 * kTileQ * 8;
    // Which blocks of scores (8 x 8) a warp computes: a column of blocks if there are as many columns as warps, else a part of a
    // column.
    static constexpr int kColumns = kTileK / 8 < kWarps ? kTileK / 8 : kWarps;
    static constexpr int kScoreRows = kTileQ / 8 * kColumns / kWarps;
    static_assert(kWide ? kTileQ == 8 && kTileK == 8 : kTileK <= 8 * kWarps && kScoreRows > 0 && kLanes <= 32, "");

    const Params& params;
    Queries q;
    Keys k, v;
    Scores s;
    double *factors, *shares;  // of each row: the factor of O, and at the end the weight of an earlier result
    int thread, warp, lane;
    int key_head;
    TileCoordinates work;
    SequenceRows q_rows, k_rows;
    KeyTiles<kTileQ, kTileK> tiles;
    ShardRows all;
    DoubleBlocks<kTileQ / 8, kChannelBlocks> o;
    // The row of scores that this thread processes: its number in the sequence, the keys [x, y) that it sees, and its sums.
    int row;
    int2 seen;
    double maximum, sum;
    DoubleRowStatistics statistics;

    __device__ __forceinline__ DoubleStatisticsForward(const Params& p, char* shared) : params(p) {
        q.data = reinterpret_cast<double*>(shared);
        k.data = q.data + Queries::kBytes / 8;
        v.data = k.data + Keys::kBytes / 8;
        s.data = v.data + Keys::kBytes / 8;
        factors = reinterpret_cast<double*>(shared + kNumbersAt);
        shares = factors + kTileQ;
        thread = threadIdx.x;
        warp = thread / 32;
        lane = thread % 32;
    }

    // Returns false if the thread block has no work.
    __device__ __forceinline__ bool prepare() {
        work = tile_coordinates<kTileQ>(params.schedule, params.q_lengths, params.batch);
        if (work.batch < 0) return false;
        q_rows = SequenceRows::of(params.q_lengths, work.batch);
        k_rows = SequenceRows::of(params.k_lengths, work.batch);
        tiles.init(params.mask, params.block_mask, work, q_rows, k_rows);
        if (tiles.first_row >= q_rows.owned) return false;
        key_head = work.head / params.group_size;
        row = tiles.first_row + thread / kLanes;
        all.init(params.shard, params.mask, q_rows, k_rows, work.batch);
        seen = row < q_rows.length ? all.keys_of(row) : make_int2(0, 0);
        if (all.has_positions) find_tiles();
        maximum = -INFINITY;
        sum = 0.0;
        return true;
    }

    // With positions: finds the key tiles from the keys that the first and the last row see.
    __device__ __forceinline__ void find_tiles() {
        int2* const ranges = reinterpret_cast<int2*>(factors);
        if (thread % kLanes == 0) ranges[thread / kLanes] = seen;
        __syncthreads();
        const int last = min(kTileQ, q_rows.length - tiles.first_row) - 1;
        if (last < 0) return;
        tiles.set_ranges(ranges[0], ranges[last]);
        tiles.set_blocks(params.block_mask, work);
    }

    // Loads K and V of a tile, in two cp.async groups.
    __device__ __forceinline__ void load_keys(int tile) const {
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            const RowsParams& rows = i == 0 ? params.k : params.v;
            const Keys to{i == 0 ? k.data : v.data};
            to.template load_async<kThreads>(rows_of(rows, work.batch, key_head, k_rows.start), rows.row, tile * kTileK,
                                             k_rows.length, i == 0 ? params.head_dim : params.head_dim_v, thread);
            cp_async_commit();
        }
    }

    // With kWide: the scores over the channels of a warp. The first part is in the place of the probabilities.
    __device__ __forceinline__ Scores part_of(int of_warp) const { return {s.data + of_warp * (Scores::kBytes / 8)}; }
    __device__ __forceinline__ void multiply_part_of_qk() const {
        static_assert(kWarps == kScoreParts<kHeadDim>, "the order of additions is that of the kernel without statistics");
        const unsigned at = hide_from_compiler(lane), g = at / 4, t = at % 4;
        DoubleBlocks<1, 1> c;
        clear(c);
#pragma unroll 1
        for (int term = warp * kTermStep; term < params.head_dim; term += kWarps * kTermStep)
            add_terms(c, q, 0, k, 0, term, g, t);
        const Scores part = part_of(warp);
        part.at(g, 2 * t) = c[0][0][0];
        part.at(g, 2 * t + 1) = c[0][0][1];
    }
    __device__ __forceinline__ double dot_product(int local, int col) const {
        double sum = s.at(local, col);
#pragma unroll
        for (int i = 1; i < kScoreTiles; ++i) sum += part_of(i).at(local, col);
        return sum;
    }

    __device__ __forceinline__ void multiply_qk() {
        if constexpr (kWide) {
            multiply_part_of_qk();
        } else {
            multiply_blocks_of_qk();
        }
    }
    __device__ __forceinline__ void multiply_blocks_of_qk() {
        DoubleBlocks<kScoreRows, 1> c;
        clear(c);
        const int first_row = warp / kColumns * kScoreRows * 8, col = warp % kColumns * 8;
        add_scores(c, q, first_row, k, col, params.head_dim, lane);
#pragma unroll
        for (int r = 0; r < kScoreRows; ++r)
#pragma unroll
            for (int e = 0; e < 2; ++e) s.at(first_row + r * 8 + lane / 4, col + lane % 4 * 2 + e) = c[r][0][e];
    }

    // Converts dot products to exp(score - maximum). `factors` gets the factors by which earlier sums must be multiplied.
    __device__ __forceinline__ void apply_softmax(const DoubleScore<Params>& score, int tile) {
        const int local = thread / kLanes, first_key = tile * kTileK;
        double largest = -INFINITY, tanh_z;
#pragma unroll 1
        for (int col = thread % kLanes; col < kTileK; col += kLanes) {
            const int key = first_key + col;
            const bool visible = key >= seen.x && key < seen.y && score.keeps(row, key);
            const double x = visible ? score.score(dot_product(local, col), row, key, &tanh_z) : -INFINITY;
            s.at(local, col) = x;
            largest = fmax(largest, x);
        }
        const double raised = fmax(maximum, largest_of_lanes<kLanes>(largest));
        const double base = raised == -INFINITY ? 0.0 : raised;
        double more = 0.0, more_weighted = 0.0;
#pragma unroll 1
        for (int col = thread % kLanes; col < kTileK; col += kLanes) {
            const double p = exp(s.at(local, col) - base);
            more += p;
            more_weighted += weighted_exponent(p, s.at(local, col) - base);
            s.at(local, col) = keeps(first_key + col) ? p : 0.0;
        }
        const double factor = exp(maximum - base);
        statistics.add(sum, maximum - base, factor, sum_of_lanes<kLanes>(more_weighted));
        sum = sum * factor + sum_of_lanes<kLanes>(more);
        maximum = raised;
        if (thread % kLanes == 0) factors[local] = factor;
    }
    __device__ __forceinline__ bool keeps(int key) const {
        if (!params.rare.dropout.active) return true;
        return dropout_keeps(params.rare.dropout, dropout_head(params.shard, work.batch, work.head),
                             all.has_positions ? all.rows.at(row) : row, all.has_positions ? all.columns.at(key) : key);
    }

    __device__ __forceinline__ void multiply_pv() {
#pragma unroll
        for (int r = 0; r < kTileQ / 8; ++r) {
            const double factor = factors[r * 8 + lane / 4];
#pragma unroll
            for (int i = 0; i < kChannelBlocks * 2; ++i) o[r][i / 2][i % 2] *= factor;
        }
        add_values<false, kTileK, kWarps>(o, s, v, params.head_dim_v, warp, lane);
    }

    __device__ __forceinline__ void loop_over_keys() {
        const DoubleScore<Params> score(params, work, all.alibi_shift);
        clear(o);
        q.template load_async<kThreads>(rows_of(params.q, work.batch, work.head, q_rows.start), params.q.row, tiles.first_row,
                                        q_rows.length, params.head_dim, thread);
        cp_async_commit();  // a separate group; the last wait below covers it, even if there is no key tile
        int cursor = tiles.list_count;
#pragma unroll 1
        for (int tile = tiles.end; (tile = tiles.previous(tile, cursor)) >= 0;) {
            __syncthreads();  // no warp reads V and P of the previous tile
            load_keys(tile);
            cp_async_wait<1>();
            __syncthreads();  // Q and K have arrived
            multiply_qk();
            __syncthreads();  // S is complete
            apply_softmax(score, tile);
            cp_async_wait<0>();
            __syncthreads();  // V and P are complete
            multiply_pv();
        }
        cp_async_wait<0>();
    }

    // Computes the factors of the rows; writes the LSE and the statistics. The sink, or the earlier result of a continuation,
    // counts as one more score.
    __device__ __forceinline__ void normalize() {
        const bool exists = row < q_rows.length, writes = thread % kLanes == 0;
        double* const lse = params.lse.data ? row_numbers(params.lse, work.batch, work.head, q_rows.start) : nullptr;
        double other = params.sink.data ? head_number_at(params.sink, work.batch, work.head) : -INFINITY;
        if (params.continues) other = exists ? lse[row * params.lse.row] : -INFINITY;
        __syncwarp();  // the threads of a row have read its LSE
        const double largest = fmax(maximum, other);
        const double base = largest == -INFINITY ? 0.0 : largest;
        const double factor = exp(maximum - base), share = exp(other - base);
        const double total = sum * factor + share;
        // NaN in total propagates: the comparison with 0 is true.
        const bool any = exists && total != 0.0;
        if (writes) {
            factors[thread / kLanes] = any ? factor / total * params.in_double.keep_factor : 0.0;
            shares[thread / kLanes] = params.continues && any && other != -INFINITY ? share / total : 0.0;
            if (lse && row < q_rows.owned) lse[row * params.lse.row] = any ? base + log(total) : -INFINITY;
            const double keys = weighted_share(factor, statistics.weighted + weighted_exponent(sum, maximum - base));
            const double entropy = log(total) - (keys + weighted_exponent(share, other - base)) / total;
            if (row < q_rows.owned)
                store_statistics(params, work, q_rows.start + row, exists ? (total == total ? maximum : total) : -INFINITY,
                                 any ? entropy : 0.0);
        }
    }

    // Writes O, which is staged in the tile of Q. A factor of 0 means that the row sees no key or is past the end. A row past the
    // end may hold NaN, so it is not multiplied but replaced by 0.
    __device__ __forceinline__ void store() {
        double* const out = rows_of(params.out, work.batch, work.head, q_rows.start + tiles.first_row);
        for_elements<kThreads>(q, q_rows.owned - tiles.first_row, params.head_dim_v, thread, [&](double x, int r, int col) {
            double& at = out[r * params.out.row + col];
            const double here = factors[r] == 0.0 ? 0.0 : x * factors[r];
            at = shares[r] == 0.0 ? here : fma(shares[r], at, here);
        });
    }

    __device__ __forceinline__ void run() {
        if (!prepare()) return;
        loop_over_keys();
        __syncthreads();  // no warp reads Q and the factors of the last tile
        stage<kWarps>(o, q, warp, lane);
        normalize();
        __syncthreads();
        store();
    }
};

}  // namespace libflash::cuda::sm80
