// Chooses the number of splits of a sequence for decode and the number of key heads per thread block. Host only, no CUDA header.
#pragma once

#include "cuda/attention/decode_params.h"
#include "cuda/config.h"
#include "cuda/device.h"
#include "cuda/host/problem_params.h"
#include "cuda/host/tile_schedule.h"
#include "problem/decode.h"

namespace libflash::cuda {

// The tiles of a decode kernel that supports sequences with different numbers of rows and has other thread blocks than sm80.
struct DecodeTiles {
    int64_t rows = 0;    // query rows of a thread block; 0: the kernel is one of sm80
    int64_t blocks = 0;  // thread blocks that a multiprocessor runs at once
};

// The sizes on which the choice depends.
class DecodeSizes {
public:
    // `fewest_rows`: the decode kernels compute only sequences with fewer query rows; 0: they compute all sequences.
    DecodeSizes(const KernelConfig& config, const DecodeProblem& problem, const DeviceProperties& device, int64_t fewest_rows,
                DecodeTiles tiles = {})
        : config(config), problem(problem), device(device), fewest_rows(fewest_rows), tiles(tiles) {}

    // Whether the instance is one for sequences with different numbers of rows, which only the device knows.
    bool ragged() const { return tiles.rows > 0 || is_wide_decode(config.head_dim) || is_ragged(problem); }
    // Query rows of a sequence that share a key head; packed: of all sequences together.
    int64_t group_rows() const { return problem.seqlen_q * problem.group_size(); }
    bool shares_keys() const { return !problem.invariant_rows && (ragged() || decode_shares_keys(group_rows())); }
    // Query rows per thread block.
    int64_t tile_q() const { return tiles.rows > 0 ? tiles.rows : shares_keys() ? config.tile_k : kDecodeSlab; }
    // Query tiles of a key head: of one sequence or, if ragged(), of all sequences together; packed: an upper bound.
    int64_t query_tiles() const;
    // With long chunks: the most tiles of a sequence that the decode kernels compute. 0: there are no long chunks, or all
    // sequences are long chunks.
    int64_t short_tiles() const {
        return fewest_rows > 0 && problem.q_rows.packed() ? ceil_div((fewest_rows - 1) * problem.group_size(), tile_q()) : 0;
    }
    // Thread blocks without splits. With long chunks: as if each sequence had one tile.
    int64_t unsplit_blocks() const {
        return (short_tiles() > 0 ? problem.batch : likely_tiles()) * problem.heads_k * (ragged() ? 1 : problem.batch);
    }
    // The same with the thread blocks that find no rows.
    int64_t launched_blocks() const { return query_tiles() * problem.heads_k * (ragged() ? 1 : problem.batch); }
    // Whether splits are chosen as for codes. A cache with scales has these splits whatever its type is, so that a cache of codes
    // and a cache of their values give the same bits.
    bool has_splits_of_codes() const;
    // Thread blocks that run at the same time on a multiprocessor and on the device (one wave).
    int64_t blocks_per_multiprocessor() const;
    int64_t blocks_at_once() const { return device.multiprocessors * blocks_per_multiprocessor(); }
    // Upper bound of the keys that the query rows of a sequence see, if their positions follow each other.
    int64_t visible_keys() const;

    // The most keys of a split for which the accumulators are accurate enough (attention/long_sums.h). Where each warp has keys
    // of its own, it adds up only a part of the keys of the split.
    int64_t longest_split(int key_heads) const;
    // Whether the instance for invariant rows runs: splits are segments (attention/invariant_segments.h).
    bool has_segments() const { return has_invariant_decode(config) && has_plain_invariant_rows(problem); }

    const KernelConfig& config;
    const DecodeProblem& problem;
    const DeviceProperties& device;
    const int64_t fewest_rows;
    const DecodeTiles tiles;

private:
    // The number of query tiles that find rows, if all packed sequences have equally many rows. sm80 without segments: an upper
    // bound.
    int64_t likely_tiles() const;
};

struct DecodeSplits {
    int64_t splits;
    int key_heads;
    int64_t split_size = 0;  // keys of each split; 0: equal ranges of the visible keys
    int64_t groups = 1;      // of segments: thread blocks that share the segments of a row
};

// The splits that the caller requests, else those of a cost model; but more and shorter splits where a split would have more keys
// than longest_split(). Refuses a request that exceeds the maximum grid size.
DecodeSplits choose_splits(const DecodeSizes& sizes);

}  // namespace libflash::cuda
