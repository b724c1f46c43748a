// The tiles of the float64 kernels on tangents: a tensor and its tangent of the queries, the same of the keys, and the products
// of these pairs. Several pairs (such as K and V with their tangents) are loaded one after the other into the same memory.
//
// With more than 256 channels the pairs of a product of scores are loaded in parts of 256 channels, so that the kernels fit every
// GPU. The pair by which scores are multiplied is loaded whole: it takes the memory of both sides.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/sm80/score_f64.cuh"
#include "cuda/tile/double_tile.cuh"

namespace libflash::cuda::sm80 {

// kScoreTiles: three for each product of two pairs (multiply()).
template <class Params, int kHeadDim, int kTileRows, int kScoreTiles>
struct DoubleTangentTiles {
    static constexpr int kThreads = kDoubleThreads, kWarps = kDoubleWarps;
    static constexpr int kLanes = kThreads / kTileRows;  // threads that share a query row of scores
    static constexpr int kBlocks = kTileRows / 8, kChannelBlocks = double_channel_blocks(kHeadDim);
    static constexpr bool kWide = kHeadDim > 256;
    static constexpr int kPartChannels = kWide ? 256 : kHeadDim;
    using Rows = DoubleTile<kTileRows, kPartChannels>;
    using WholeRows = DoubleTile<kTileRows, kHeadDim>;
    using Scores = DoubleTile<kTileRows, kTileRows>;
    using Sums = DoubleBlocks<kBlocks, kChannelBlocks>;
    static constexpr int kProductBytes = 3 * Scores::kBytes;  // of the score tiles of a product of two pairs
    static constexpr int kPartsAt = 4 * Rows::kBytes + kScoreTiles * Scores::kBytes;
    static constexpr int kNumbersAt = kPartsAt + (kWide ? (kWarps - 1) * kProductBytes : 0);
    static constexpr int kSharedBytes = kNumbersAt + 2 * kTileRows * 8;
    static_assert(!kWide || (kTileRows == 8 && kWarps == kScoreParts<kHeadDim> && kHeadDim == 2 * kPartChannels), "");

    const Params& params;
    double* shared;
    int thread, warp, lane;
    TileCoordinates work;
    SequenceRows q_rows, k_rows;

    __device__ __forceinline__ DoubleTangentTiles(const Params& given, char* memory) : params(given) {
        shared = reinterpret_cast<double*>(memory);
        thread = threadIdx.x;
        warp = thread / 32;
        lane = thread % 32;
    }

    // 0: the tensor of the queries, 1: its tangent, 2: the tensor of the keys, 3: its tangent.
    __device__ __forceinline__ Rows tile(int i) const { return {shared + i * (Rows::kBytes / 8)}; }
    __device__ __forceinline__ Scores scores(int i) const { return {shared + 4 * (Rows::kBytes / 8) + i * (Scores::kBytes / 8)}; }
    // All channels of a tensor (0) and of its tangent (1). With kWide they take the memory of all tiles, otherwise of tile `i`.
    __device__ __forceinline__ WholeRows whole(int i) const { return {shared + i * (WholeRows::kBytes / 8)}; }
    // Space for two numbers (`kind` 0 and 1) per row of the tile.
    __device__ __forceinline__ double* numbers(int kind) const { return shared + kNumbersAt / 8 + kind * kTileRows; }

    __device__ __forceinline__ void begin(const TileCoordinates& next) {
        work = next;
        q_rows = SequenceRows::of(params.q_lengths, work.batch);
        k_rows = SequenceRows::of(params.k_lengths, work.batch);
    }

    // The keys [x, y) that a query row sees.
    __device__ __forceinline__ int2 keys_of(int row) const {
        const int diagonal = row + (params.mask.top_left ? 0 : k_rows.length - q_rows.length);
        if (row >= q_rows.length) return make_int2(0, 0);
        return make_int2(diagonal - params.mask.left, min(k_rows.length, diagonal + params.mask.right + 1));
    }

    // Loads a tensor to tile `to` and its tangent, if there is one, to the next tile: the channels from `channel` on, as many
    // as a tile has.
    template <class Tile>
    __device__ __forceinline__ void load_pair(const Tile& to, const RowsParams& of_tensor, const RowsParams& of_tangent,
                                              const SequenceRows& sequence, int head, int first, int channels,
                                              int channel = 0) const {
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            const RowsParams& rows = i == 0 ? of_tensor : of_tangent;
            if (!rows.data) continue;
            const Tile tile{to.data + i * (Tile::kBytes / 8)};
            const double* const matrix = rows_of(rows, work.batch, head, sequence.start) + channel;
            if constexpr (kWide) {
                tile.template load_pairs_async<kThreads>(matrix, rows.row, first, sequence.length, channels - channel, thread);
            } else {
                tile.template load_async<kThreads>(matrix, rows.row, first, sequence.length, channels, thread);
            }
        }
        cp_async_commit();
    }

    // Score tiles `to` to `to` + 2 become X C^T, tX C^T and X tC^T. X: the tensor of the queries; C: the tensor of the keys.
    // Products with an absent tangent are skipped.
    __device__ __forceinline__ void multiply(int to, bool has_tangent_x, bool has_tangent_c, int channels) const {
#pragma unroll 1
        for (int job = warp; job < 3 * kBlocks * kBlocks; job += kWarps) {
            const int which = job / (kBlocks * kBlocks), row = job / kBlocks % kBlocks * 8, col = job % kBlocks * 8;
            if ((which == 1 && !has_tangent_x) || (which == 2 && !has_tangent_c)) continue;
            DoubleBlocks<1, 1> c;
            clear(c);
            add_scores(c, tile(which == 1), row, tile(2 + (which == 2)), col, channels, lane);
            stage_block(c[0][0], scores(to + which), row, col);
        }
    }
    __device__ __forceinline__ void stage_block(const double (&c)[2], const Scores& to, int row, int col) const {
#pragma unroll
        for (int e = 0; e < 2; ++e) to.at(row + lane / 4, col + lane % 4 * 2 + e) = c[e];
    }
    // With kWide: the same, where load(channel) loads both pairs from that channel on, between two barriers. Each warp multiplies
    // every fourth block of 16 channels, as in forward (kScoreParts). Afterwards no warp reads the tiles; the scores are complete
    // after a barrier.
    template <class Load>
    __device__ __forceinline__ void multiply_in_parts(int to, bool has_tangent_x, bool has_tangent_c, int channels,
                                                      const Load& load) const {
        const unsigned at = hide_from_compiler(lane), g = at / 4, t = at % 4;
        DoubleBlocks<1, 1> c[3];
#pragma unroll
        for (int i = 0; i < 3; ++i) clear(c[i]);
#pragma unroll 1
        for (int channel = 0; channel < channels; channel += kPartChannels) {
            load(channel);
            const int terms = min(channels - channel, kPartChannels);
#pragma unroll 1
            for (int term = warp * kTermStep; term < terms; term += kWarps * kTermStep) {
                add_terms(c[0], tile(0), 0, tile(2), 0, term, g, t);
                if (has_tangent_x) add_terms(c[1], tile(1), 0, tile(2), 0, term, g, t);
                if (has_tangent_c) add_terms(c[2], tile(0), 0, tile(3), 0, term, g, t);
            }
        }
        add_parts(c, scores(to).data);
    }
    // Adds the parts of all warps, in their order, and stores the sums from `sums` on.
    __device__ __forceinline__ void add_parts(const DoubleBlocks<1, 1> (&c)[3], double* sums) const {
        constexpr int kNumbers = kProductBytes / 8;
        double *const parts = shared + kPartsAt / 8, *const own = warp == 0 ? sums : parts + (warp - 1) * kNumbers;
#pragma unroll
        for (int i = 0; i < 3; ++i) stage_block(c[i][0][0], {own + i * (Scores::kBytes / 8)}, 0, 0);
        __syncthreads();
#pragma unroll 1
        for (int i = thread; i < kNumbers; i += kThreads)
            sums[i] = sums[i] + parts[i] + parts[i + kNumbers] + parts[i + 2 * kNumbers];
    }
    // An element of tX C^T + X tC^T.
    __device__ __forceinline__ double tangent_at(int from, bool has_tangent_x, bool has_tangent_c, int row, int col) const {
        return (has_tangent_x ? scores(from + 1).at(row, col) : 0.0) + (has_tangent_c ? scores(from + 2).at(row, col) : 0.0);
    }

    // The tangent of a score: `slope` times the tangent tz of the scaled dot product, plus the tangent of the bias.
    __device__ __forceinline__ double score_tangent(const DoubleScore<Params>& score, double slope, double tz, int row,
                                                    int key) const {
        double ts = slope * tz;
        if (params.tbias.data) ts += number_at(params.tbias.data, score.offset_of(params.tbias, row, key), params.tbias.is_float);
        return ts;
    }
    // Whether dropout keeps an element of a query head.
    __device__ __forceinline__ bool keeps(int head, int row, int key) const {
        return dropout_keeps(params.rare.dropout, static_cast<uint32_t>(work.batch) * params.heads_q + head, row, key);
    }
};

}  // namespace libflash::cuda::sm80
