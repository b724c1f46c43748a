// Chooses the number of splits of a sequence for decode and the number of key heads per thread block. Host only, no CUDA header.
#pragma once

#include "cuda/attention/decode_params.h"
#include "cuda/config.h"
#include "cuda/device.h"
#include "cuda/host/problem_params.h"
#include "cuda/host/tile_schedule.h"
#include "problem/decode.h"

namespace libflash::cuda {

// The tiles of a kernel that takes rows of any lengths and whose thread blocks are not those of sm80.
struct DecodeTiles {
    int64_t rows = 0;    // query rows of a thread block; 0: the kernel is one of sm80
    int64_t blocks = 0;  // thread blocks of a multiprocessor at once
};

// The sizes on which the choice depends.
class DecodeSizes {
public:
    // `fewest_rows`: sequences with so many query rows or more are not those of the decode kernels; 0: all are.
    DecodeSizes(const KernelConfig& config, const DecodeProblem& problem, const DeviceProperties& device, int64_t fewest_rows,
                DecodeTiles tiles = {})
        : config(config), problem(problem), device(device), fewest_rows(fewest_rows), tiles(tiles) {}

    // Rows of any lengths: only the device knows which sequences have few rows.
    bool ragged() const { return tiles.rows > 0 || is_wide_decode(config.head_dim) || is_ragged(problem); }
    // Query rows of a sequence that share a key head, query rows per thread block, and query tiles per key head: of a sequence
    // or, with rows of any lengths, of all sequences together; packed, an upper bound.
    int64_t group_rows() const { return problem.seqlen_q * problem.group_size(); }
    bool shares_keys() const { return !problem.invariant_rows && (ragged() || decode_shares_keys(group_rows())); }
    int64_t tile_q() const { return tiles.rows > 0 ? tiles.rows : shares_keys() ? config.tile_k : kDecodeSlab; }
    int64_t query_tiles() const;
    // Beside long chunks: the most tiles of a sequence of the decode kernels; 0: there are no long chunks, or nothing else.
    int64_t short_tiles() const {
        return fewest_rows > 0 && problem.q_rows.packed() ? ceil_div((fewest_rows - 1) * problem.group_size(), tile_q()) : 0;
    }
    // Thread blocks without splits. Beside long chunks: those of rows of decode, one tile for each sequence.
    int64_t unsplit_blocks() const {
        return (short_tiles() > 0 ? problem.batch : likely_tiles()) * problem.heads_k * (ragged() ? 1 : problem.batch);
    }
    // Without splits: also thread blocks that find no rows.
    int64_t launched_blocks() const { return query_tiles() * problem.heads_k * (ragged() ? 1 : problem.batch); }
    // A cache with scales has the splits of codes whatever its type, so that the bits are the same.
    bool has_splits_of_codes() const;
    // Thread blocks that run at the same time on a multiprocessor and on the device (one wave).
    int64_t blocks_per_multiprocessor() const;
    int64_t blocks_at_once() const { return device.multiprocessors * blocks_per_multiprocessor(); }
    // Upper bound of the keys that the query rows of a sequence see.
    int64_t visible_keys() const;

    // The most keys of a split whose sums in the accumulators are short enough: with keys of its own, a warp adds up a part of
    // them.
    int64_t longest_split(int key_heads) const;
    // Whether the instance for invariant rows runs: splits are segments (attention/invariant_segments.h).
    bool has_segments() const { return has_invariant_decode(config) && has_plain_invariant_rows(problem); }

    const KernelConfig& config;
    const DecodeProblem& problem;
    const DeviceProperties& device;
    const int64_t fewest_rows;
    const DecodeTiles tiles;

private:
    // The query tiles that find rows, if packed sequences have equally many. sm80: no fewer than there may be.
    int64_t likely_tiles() const;
};

struct DecodeSplits {
    int64_t splits;
    int key_heads;
    int64_t split_size = 0;  // keys of each split; 0: equal ranges of the visible keys
};

// As requested by the caller, else by a cost model; but there are more and shorter splits where the sums of one would
// be too long (attention/long_sums.h). Refuses a request that exceeds the maximum grid size.
DecodeSplits choose_splits(const DecodeSizes& sizes);

}  // namespace libflash::cuda
