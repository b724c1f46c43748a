// A work tile of the sm_90a backward kernel: one key tile of one key head, and the query tiles that see it, or a split: some of
// these query tiles.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/query_units.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/sm90/backward_traits.cuh"
#include "cuda/sm90/query_tile_range.cuh"

#include <type_traits>

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardWorkTile {
    static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
    using UnorderedRange = QueryTileRange<kBlockM, kBlockN>;
    using Range = std::conditional_t<Traits::kTilesInOrder, FixedOrderRange<kBlockM, kBlockN>, UnorderedRange>;
    // Where only the device knows a length: from these rows on, the loaded rows of the key tile and of the sequence's queries may
    // hold data of other sequences. If the host knows the length, no row does.
    struct LoadedRows {
        int keys, queries;
    };

    LoadedRows loaded;
    TileCoordinates work;  // head: a key head; batch < 0: there are no more work tiles
    // The query rows of the sequence in their tensor and in the workspace (QueryUnits).
    struct {
        int32_t start, units_before, length;
    } queries;
    SequenceRows k_rows;
    QueryTiles<kBlockM, kBlockN> tiles;
    Range range;
    int number;  // of the work tile in the launch
    // In instances that support block masks `tile` is the one before the first, and `left` the number of query heads.
    QueryTilePosition first_position;

    __device__ __forceinline__ bool exists() const { return work.batch >= 0; }
    // `work` must be set before.
    __device__ __forceinline__ void init(const BackwardParams& params, int number_in_launch) {
        number = number_in_launch;
        const SequenceRows q_rows = SequenceRows::of(params.q_lengths, work.batch);
        queries = {q_rows.start, QueryUnits::before(params, work.batch, q_rows.owned), q_rows.length};
        const SequenceRows keys_of_sequence = SequenceRows::of(params.k_lengths, work.batch);
        tiles.init(params, work, q_rows.length, keys_of_sequence.length);
        if constexpr (Traits::kTilesInOrder) {
            init_order(params);
        } else {
            range = UnorderedRange::of(tiles);
            init_position(params);
        }
        if constexpr (Traits::kRagged) {
            k_rows = keys_of_sequence;
            const auto on_device = [](const LengthsParams& lengths) { return lengths.cu || lengths.used; };
            loaded.keys = on_device(params.k_lengths) ? max(k_rows.length - tiles.first_col, 0) : kBlockN;
            loaded.queries = on_device(params.q_lengths) ? q_rows.length : INT32_MAX;
        }
    }

    __device__ __forceinline__ int64_t first_unit(const BackwardParams& params, const QueryTilePosition& at) const {
        return QueryUnits::first(params, at.head, queries.units_before);
    }
    // The first row of the key tile in K and V, and the first row of a query tile in Q and dO.
    __device__ __forceinline__ int key_row() const { return (Traits::kRagged ? k_rows.start : 0) + tiles.first_col; }
    __device__ __forceinline__ int query_row(int tile) const { return (Traits::kRagged ? queries.start : 0) + tile * kBlockM; }

private:
    // The splits of a key tile divide its query tiles or, in instances that support block masks, its query heads.
    __device__ __forceinline__ void init_position(const BackwardParams& params) {
        const int first_head = work.head * params.group_size + params.part.first_head, heads = params.part.heads;
        if constexpr (Traits::kBlockMask) {
            first_position = {first_head, tiles.begin - 1, heads};
        } else {
            first_position = range.first(first_head, heads);
        }
        const SplitTilesParams& split_tiles = params.split_tiles;
        if (!Traits::kSplits || number < split_tiles.first) return;
        const int all = first_position.left, split = split_number(split_tiles), first = divide(all * split, split_tiles.splits);
        first_position.left = divide(all * split + all, split_tiles.splits) - first;
        if constexpr (Traits::kBlockMask) {
            first_position.head += first;
        } else {
            range.skip(first_position, first);
        }
    }
    // Splits divide the query heads, so that all have the same query tiles, or the query tiles of the only head.
    __device__ __forceinline__ void init_order(const BackwardParams& params) {
        const int first_head = work.head * params.group_size + params.part.first_head, heads = params.part.heads;
        const UnorderedRange unordered = UnorderedRange::of(tiles);
        const bool upwards = params.key_schedule.reversed;
        first_position = range.init(unordered, first_head, heads, upwards);
        const SplitTilesParams& split_tiles = params.split_tiles;
        if (number < split_tiles.first) return;
        const int all = heads > 1 ? heads : max(0, unordered.end - unordered.begin), split = split_number(split_tiles),
                  first = divide(all * split, split_tiles.splits), count = divide(all * split + all, split_tiles.splits) - first;
        if (heads > 1) {
            first_position = range.init(unordered, first_head + first, count, upwards);
        } else {
            range.skip(first_position, first, count);
        }
    }
    __device__ __forceinline__ int split_number(const SplitTilesParams& split_tiles) const {
        const int slot = number - split_tiles.first;
        return slot - divide(slot, split_tiles.splits) * static_cast<int>(split_tiles.splits.divisor);
    }
};

}  // namespace libflash::cuda::sm90
