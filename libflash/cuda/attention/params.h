// What the attention kernels receive: small plain structs, filled by a launcher from the problem and the plan.
#pragma once

#include <cstdint>

namespace libflash::cuda {

// Where the rows of q, k, v, out or a gradient lie; strides in elements. Packed: batch is 0. Channels are contiguous.
struct RowsParams {
    void* data;
    int64_t batch, row, head;
};

// lse, dlse: one number a row.
struct RowStatisticsParams {
    float* data;  // may be nullptr
    int64_t batch, row, head;
};

// Lengths of the sequences of one side; everything stays on the device.
struct LengthsParams {
    const int32_t* cu;    // packed: batch + 1 prefix sums, else nullptr
    const int32_t* used;  // or nullptr
    int32_t capacity;     // dense: rows of each batch entry; packed: rows of the tensor
};

// Lengths are below 2^29, so that sums of a length, a window and a tile stay in 32 bits.
constexpr int32_t kUnboundedWindow = 1 << 29;

struct MaskParams {
    int32_t left, right;  // kUnboundedWindow: no bound
    bool top_left;
};

// Tensors over scores, (batch, head, row, column) by stride; a repeated dimension has stride 0.
struct ScoreParams {
    const void* data;  // nullptr: absent
    int64_t stride[4];
    bool is_float;  // else the kernel's own type (bias)
};

struct HeadParams {
    const void* data;  // nullptr: absent
    int64_t batch_stride, head_stride;
    bool is_float;
};

// Blocks of 128 x 128 that take part, by dense mask or by lists; both nullptr: all.
struct BlockMaskParams {
    const uint8_t* mask;
    int64_t mask_stride[4];
    const int32_t* counts;
    const int32_t* indices;
    int64_t counts_stride[3];
    int64_t indices_stride[4];
};

struct DropoutParams {
    uint32_t threshold;  // an entry is kept if its word is not below this
    uint32_t seed_low, seed_high, offset_mix;
    const uint64_t* state;  // {seed, offset} in device memory instead of these; or nullptr
    float keep_factor;      // 1 / (1 - p)
    bool active;
};

// Options that only the general instance of a kernel knows.
struct RareParams {
    float softcap;  // 0: off
    HeadParams alibi_slopes;
    ScoreParams bias, mask;
    DropoutParams dropout;
};

// Division by a number that is known before the launch: the instruction for it takes as long as forty others.
struct Divisor {
    uint32_t divisor, multiplier, shift;  // n / divisor = n * multiplier >> 32 + shift, for n below 2^31
};

// Which thread block works on which rows: heads in groups whose keys and values fit the L2 cache together, all tiles of a group before the
// next group, the longest first.
struct ScheduleParams {
    int32_t tiles;            // query tiles of a head (dense), or an upper bound of all sequences' tiles (packed)
    int32_t heads_per_group;  // of the batch * heads_q (dense) or heads_q (packed) heads
    int32_t heads;
    Divisor group_tiles;  // heads_per_group * tiles
    Divisor group;        // heads_per_group
    Divisor sequence;     // dense: heads of a batch entry
    bool reversed;        // later rows see more keys (causal): start with the last tile
    bool paired;          // `tiles` are pairs, a tile from the end with one from the beginning: each is as much work as any other
};

struct ForwardParams {
    RowsParams q, k, v, out;
    RowStatisticsParams lse;
    LengthsParams q_lengths, k_lengths;
    int32_t batch, heads_q, group_size;
    int32_t head_dim, head_dim_v;
    float softmax_scale;
    float scale_log2;  // softmax_scale * log2(e)
    MaskParams mask;
    BlockMaskParams block_mask;
    HeadParams sink;
    RareParams rare;
    ScheduleParams schedule;
    int32_t* sequence_order;  // in the workspace (sm90/sequence_order.cuh); nullptr: it is known before the launch who does what
    bool vector_loads;        // rows of q, k and v may be read 16 bytes at a time, and head dims are whole multiples of that
    bool vector_out;          // rows of out may be written so
};

// What the backward kernels know of a query row besides its tensors; +infinity and 0 for rows that take no part.
struct SoftmaxStatistics {
    float lse_log2;  // logsumexp in base-2 units, less the exponent of exponent_shift(); +infinity: the row sees no key
    float delta;     // dout . out - dlse
};

// Rows of workspace tensors come in units of this many, and every sequence begins with a new unit; tiles divide it.
constexpr int32_t kUnitRows = 128;

// Gradient of a sink, one number a head for all batch entries.
struct HeadGradientParams {
    void* data;  // nullptr: not asked for
    int64_t stride;
    bool is_float;
};

// Gradient of a bias; an extent of 1 stands for a dimension that the bias repeats.
struct ScoreGradientParams {
    void* data;  // nullptr: not asked for
    int64_t stride[4];
    int32_t extent[4];  // (batch, head, row, column)
    bool is_float;
};

struct BackwardParams {
    RowsParams q, k, v, out, dout, dq, dk, dv;
    RowStatisticsParams lse, dlse;
    LengthsParams q_lengths, k_lengths;
    int32_t batch, heads_q, heads_k, group_size;
    int32_t head_dim, head_dim_v;
    float softmax_scale;
    float scale_log2;  // softmax_scale * log2(e)
    MaskParams mask;
    BlockMaskParams block_rows, block_cols;  // the same blocks, listed by row of blocks and by column
    HeadParams sink;
    HeadGradientParams dsink;
    RareParams rare;
    ScoreGradientParams dbias;
    // Workspace; one entry for each unit of each query head, see QueryUnits.
    SoftmaxStatistics* softmax_statistics;  // kUnitRows each
    float*
        dq_accumulator;  // kUnitRows * kHeadDim each, in the order of the kernel's registers; nullptr: deterministic, not needed
    int32_t units;       // of a head: of a batch entry (dense), or an upper bound for all sequences together (packed)
    ScheduleParams key_schedule;         // thread blocks by key tile and key head
    ScheduleParams query_schedule;       // by unit of query rows and query head
    ScheduleParams query_tile_schedule;  // deterministic: by tile of query rows
    bool vector_loads;  // rows of q, k, v, out and dout may be read 16 bytes at a time, and head dims are whole multiples of that
    bool vector_out;    // rows of dq, dk and dv may be written so
};

}  // namespace libflash::cuda
