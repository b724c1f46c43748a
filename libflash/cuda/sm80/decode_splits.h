// Into how many ranges decode splits the keys of a sequence, and how many key heads a thread block takes of one. Host only, no
// CUDA header.
#pragma once

#include "cuda/attention/decode_params.h"
#include "cuda/config.h"
#include "cuda/device.h"
#include "cuda/host/tile_schedule.h"
#include "problem/decode.h"

namespace libflash::cuda::sm80 {

// The sizes that the choice goes by.
class DecodeSizes {
public:
    DecodeSizes(const KernelConfig& config, const DecodeProblem& problem, const DeviceProperties& device)
        : config(config), problem(problem), device(device) {}

    // Query rows that share a key head, those of a thread block, and the tiles of these.
    int64_t group_rows() const { return problem.seqlen_q * problem.group_size(); }
    bool shares_keys() const { return decode_shares_keys(group_rows()); }
    int64_t tile_q() const { return shares_keys() ? config.tile_k : kDecodeSlab; }
    int64_t query_tiles() const { return ceil_div(group_rows(), tile_q()); }
    // Thread blocks without splits.
    int64_t unsplit_blocks() const { return query_tiles() * problem.heads_k * problem.batch; }
    // Thread blocks that a multiprocessor, and that the device runs at the same time.
    int64_t blocks_per_multiprocessor() const;
    int64_t blocks_at_once() const { return device.multiprocessors * blocks_per_multiprocessor(); }
    // Keys that the rows of one tile can see at most.
    int64_t visible_keys() const;

    const KernelConfig& config;
    const DecodeProblem& problem;
    const DeviceProperties& device;
};

struct DecodeSplits {
    int64_t splits;
    int key_heads;
};

// As the caller asked, or by a model of what a call takes. Refuses more thread blocks than there can be.
DecodeSplits choose_splits(const DecodeSizes& sizes);

}  // namespace libflash::cuda::sm80
