// What is asked of forward and backward: the checked, normalised form of the C call. Host only, no CUDA header.
#pragma once

#include <cstdint>

#include "problem/mask.h"
#include "problem/sequence.h"
#include "problem/tensor.h"

namespace libflash {

// bias, mask and their like: element (b, h, i, j) is data[b*stride[0] + h*stride[1] + i*stride[2] + j*stride[3]], where the stride
// of a repeated dimension is 0. `shape` is what was given, aligned to the right with 1 in front.
struct ScoreTensor {
    bool present = false;
    void* data = nullptr;
    DType dtype = DType::none;
    int64_t shape[4] = {1, 1, 1, 1};
    int64_t stride[4] = {0, 0, 0, 0};
};

// alibi_slopes and learnable_sink: one number a head, possibly another one for each batch entry.
struct HeadTensor {
    bool present = false;
    void* data = nullptr;
    DType dtype = DType::none;
    int64_t batch_stride = 0;
    int64_t head_stride = 0;
};

// Blocks of FLASH_BLOCK_SIZE x FLASH_BLOCK_SIZE that take part. Dense (`mask`), or as lists, or neither: all of them.
// Repeated batch and head dimensions have stride 0.
struct BlockMask {
    bool present = false;
    int64_t rows = 0, cols = 0;  // blocks: ceil(seqlen / FLASH_BLOCK_SIZE)
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
    double p = 0;  // 0: off
    uint64_t seed = 0;
    uint64_t offset = 0;
    const uint64_t* state = nullptr;  // CUDA: {seed, offset} on the device, instead of the two above
    bool active() const { return p > 0; }
};

// What the caller asks of the choice itself.
struct Request {
    const char* backend = nullptr;
    const char* kernel = nullptr;
    int num_threads = 0;  // as given; 0: the default
    int tile_q = 0, tile_k = 0;
    int64_t num_splits = 0;
    int64_t split_size = 0;  // decode
    bool deterministic = false;
};

struct AttentionProblem {
    Device device;
    DType dtype = DType::none;
    int64_t batch = 0;
    int64_t heads_q = 0, heads_k = 0;
    int64_t head_dim = 0, head_dim_v = 0;
    Sequences q_rows, k_rows;

    TensorView q, k, v;
    TensorView out;  // forward: output; backward: input
    TensorView lse;  // forward: output or absent; backward: input

    double softmax_scale = 1;
    double softcap = 0;
    MaskRule mask_rule;
    Dropout dropout;
    HeadTensor alibi_slopes, sink;
    ScoreTensor bias, mask;
    BlockMask block_mask;

    // Backward only.
    bool backward = false;
    TensorView dout, dq, dk, dv, dlse;
    ScoreTensor dbias;  // shape of bias
    HeadTensor dsink;   // shape of sink

    Request request;

    int64_t group_size() const { return heads_k ? heads_q / heads_k : 0; }
};

}  // namespace libflash
