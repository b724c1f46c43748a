// Which keys a query row sees, and which rows see a key, as ranges of numbers. The causal rule and the window apply to positions
// in the whole sequence if the call has a shard of it. Positions increase strictly, so the visible keys are one range, and both
// ends of the range grow with the row. The general kernels of sm80 store the ranges of a tile in shared memory.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"

namespace libflash::cuda {

// The positions of `count` rows of a sequence.
struct RowPositions {
    const int32_t* of_rows;  // or nullptr
    int begin, step, count;

    __device__ static __forceinline__ RowPositions of(const PositionsParams& params, const SequenceRows& rows, int batch) {
        RowPositions positions;
        positions.of_rows = params.of_rows ? params.of_rows + batch * params.batch_stride + rows.start : nullptr;
        positions.begin = params.begins ? params.begins[batch] : params.begin;
        positions.step = params.step;
        positions.count = rows.length;
        return positions;
    }

    // The position of row i; past the last row, the position of the last row.
    __device__ __forceinline__ int at(int i) const { return of_rows ? of_rows[min(i, count - 1)] : begin + i * step; }

    // The first row at `position` or later; `count` if there is none.
    __device__ __forceinline__ int first_from(int position) const {
        if (!of_rows) {
            const int distance = position - begin;
            return distance <= 0 ? 0 : min(count, (distance + step - 1) / step);
        }
        int low = 0, high = count;
        while (low < high) {
            const int middle = low + (high - low) / 2;
            if (of_rows[middle] < position) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        return low;
    }
};

// Both sides of one sequence.
struct ShardRows {
    RowPositions rows, columns;
    int shift;        // without positions: column of the diagonal in row 0
    int alibi_shift;  // the key at ALiBi distance 0 of row 0: independent of the alignment of the mask
    int left, right;
    bool has_positions;

    __device__ __forceinline__ void init(const ShardParams& shard, const MaskParams& mask, const SequenceRows& q,
                                         const SequenceRows& k, int batch) {
        has_positions = shard.has_positions;
        rows = RowPositions::of(shard.rows, q, batch);
        columns = RowPositions::of(shard.columns, k, batch);
        alibi_shift = has_positions ? rows.begin - columns.begin : k.length - q.length;
        shift = mask.top_left ? 0 : k.length - q.length;
        left = mask.left;
        right = mask.right;
    }

    // The keys [x, y) that a row sees.
    __device__ __forceinline__ int2 keys_of(int row) const {
        if (!has_positions) return make_int2(row + shift - left, min(columns.count, row + shift + right + 1));
        if (row >= rows.count) return make_int2(0, 0);
        const int at = rows.at(row);
        return make_int2(left >= kUnboundedWindow ? 0 : columns.first_from(at - left),
                         right >= kUnboundedWindow ? columns.count : columns.first_from(at + right + 1));
    }
    // The rows [x, y) that see a key.
    __device__ __forceinline__ int2 rows_of(int key) const {
        if (key >= columns.count) return make_int2(0, 0);
        if (!has_positions) return make_int2(key - shift - right, min(rows.count, key - shift + left + 1));
        const int at = columns.at(key);
        return make_int2(right >= kUnboundedWindow ? 0 : rows.first_from(at - right),
                         left >= kUnboundedWindow ? rows.count : rows.first_from(at + left + 1));
    }
};

// The number of the sequence and head that dropout uses.
__device__ __forceinline__ uint32_t dropout_head(const ShardParams& shard, int batch, int head) {
    const int sequence = shard.sequences ? shard.sequences[batch] : batch;
    return static_cast<uint32_t>(sequence) * shard.heads_total + shard.head_begin + head;
}

// In shared memory, for a tile of a shard: the ranges of its kTileRows rows (or keys) and the positions.
template <int kTileRows>
struct ShardTile {
    int2 seen[kTileRows];  // ranges of keys for a tile of rows, ranges of rows for a tile of keys
    ShardRows all;
    uint32_t batch_head;  // for dropout

    __device__ __forceinline__ void set(const ShardRows& rows, const ShardParams& shard, const TileCoordinates& work) {
        all = rows;
        batch_head = dropout_head(shard, work.batch, work.head);
    }
};

}  // namespace libflash::cuda
