// AttentionProblem: a forward or backward call in checked, normalised form. Host code; includes no CUDA header.
#pragma once

#include <algorithm>
#include <cstdint>

#include "problem/positions.h"
#include "problem/score_options.h"
#include "problem/sequence.h"
#include "problem/tensor.h"

namespace libflash {

// bias, mask, dbias: element (b, h, i, j) is data[b*stride[0] + h*stride[1] + i*stride[2] + j*stride[3]]. A dimension of size 1
// is broadcast and has stride 0. `shape` is the caller's shape, with leading dimensions of size 1 added.
struct ScoreTensor {
    bool present = false;
    void* data = nullptr;
    DType dtype = DType::none;
    int64_t shape[4] = {1, 1, 1, 1};
    int64_t stride[4] = {0, 0, 0, 0};
};

// The blocks of FLASH_BLOCK_SIZE x FLASH_BLOCK_SIZE scores that are kept: dense (`mask`) or as lists; not present: all blocks.
// Broadcast batch and head dimensions have stride 0.
struct BlockMask {
    bool present = false;
    int64_t rows = 0, cols = 0;  // in blocks: ceil(seqlen / FLASH_BLOCK_SIZE), or more if packed
    const uint8_t* mask = nullptr;
    int64_t mask_stride[4] = {0, 0, 0, 0};
    bool has_lists = false;
    const int32_t* row_counts = nullptr;   // [batch, head, row]
    const int32_t* row_indices = nullptr;  // [batch, head, row, n]
    const int32_t* col_counts = nullptr;   // [batch, head, col]
    const int32_t* col_indices = nullptr;  // [batch, head, col, n]
    int64_t row_counts_stride[3] = {0, 0, 0};
    int64_t row_indices_stride[4] = {0, 0, 0, 0};
    int64_t col_counts_stride[3] = {0, 0, 0};
    int64_t col_indices_stride[4] = {0, 0, 0, 0};
};

struct Dropout {
    double p = 0;
    uint64_t seed = 0;
    uint64_t offset = 0;
    const uint64_t* state = nullptr;  // CUDA with rng_state: {seed, offset} on the device; replaces the two above
    bool active() const { return threshold() > 0; }
    // Random numbers of 16 bits below it drop an entry of P: threshold() / 2^16 is the probability of dropping.
    uint32_t threshold() const { return static_cast<uint32_t>(std::min(p * 65536 + 0.5, 65535.0)); }
    // The factor of kept entries: 1 / (1 - the probability of dropping).
    double keep_factor() const { return 65536.0 / (65536 - threshold()); }
};

// Options that decide which kernel runs and how.
struct Request {
    const char* backend = nullptr;
    const char* kernel = nullptr;
    int num_threads = 0;  // the caller's number; 0: the default
    int tile_q = 0, tile_k = 0;
    int64_t num_splits = 0;  // decode; forward and backward check it and do not use it
    int64_t split_size = 0;  // decode
    bool deterministic = false;
    int sm_margin = 0;  // CUDA: multiprocessors to leave free for other kernels
};

struct AttentionProblem : ScoreOptions {
    Device device;
    DType dtype = DType::none;
    int64_t batch = 0;
    int64_t heads_q = 0, heads_k = 0;
    int64_t head_dim = 0, head_dim_v = 0;
    Sequences q_rows, k_rows;

    TensorView q, k, v;
    TensorView out;          // forward: output; backward: input
    TensorView lse;          // forward: output or absent; backward: input
    TensorView max_logit;    // forward: output, shaped like lse or (heads_q), or absent
    TensorView entropy;      // forward: output or absent
    bool continues = false;  // forward: out and lse hold the result for other keys, to which this call adds its keys

    bool has_positions = false;
    Positions row_positions, column_positions;

    Dropout dropout;
    DropoutNumbers dropout_numbers;
    ScoreTensor bias, mask;
    BlockMask block_mask;

    // Backward only.
    bool backward = false;
    TensorView dout, dq, dk, dv, dlse;
    ScoreTensor dbias;         // shape of bias
    HeadTensor dsink;          // shape of sink
    bool adds = false;         // the call adds to dq, dk and dv instead of overwriting them
    bool reads_delta = false;  // delta is an input, not an output
    TensorView delta;          // or absent

    Request request;

    int64_t group_size() const { return heads_k ? heads_q / heads_k : 0; }
};

}  // namespace libflash
