// The parameters of the attention kernels: small plain structs that the launch code fills from the problem and the plan.
#pragma once

#include <cstdint>

namespace libflash::cuda {

// A tensor of rows: q, k, v, out or a gradient; strides in elements, channels contiguous. Packed: the batch stride is 0.
struct RowsParams {
    void* data;
    int64_t batch, row, head;
};

// lse, dlse: one number per row.
struct RowStatisticsParams {
    float* data;  // may be nullptr; float64: doubles
    int64_t batch, row, head;
};

// Lengths of the sequences of one side. They are read on the device only.
struct LengthsParams {
    const int32_t* cu;    // packed: batch + 1 prefix sums, else nullptr
    const int32_t* used;  // or nullptr
    int32_t capacity;     // dense: rows of each batch entry; packed: rows of the tensor
};

// Lengths are below 2^29, so that the sum of a length, a window and a tile fits 32 bits.
constexpr int32_t kUnboundedWindow = 1 << 29;

struct MaskParams {
    int32_t left, right;  // kUnboundedWindow: no bound
    bool top_left;
};

// A tensor with the shape of the scores; strides of (batch, head, row, column), 0 for a broadcast dimension.
struct ScoreParams {
    const void* data;  // nullptr: absent
    int64_t stride[4];
    bool is_float;  // bias: float, else the kernel's type
};

struct HeadParams {
    const void* data;  // nullptr: absent
    int64_t batch_stride, head_stride;
    bool is_float;
};

// Visible blocks of 128 x 128 scores, by dense mask or by lists; both nullptr: all blocks.
struct BlockMaskParams {
    const uint8_t* mask;
    int64_t mask_stride[4];
    const int32_t* counts;
    const int32_t* indices;
    int64_t counts_stride[3];
    int64_t indices_stride[4];
};

struct DropoutParams {
    uint32_t threshold;  // a probability is kept if its random number, shifted left by 16, is not below this
    uint32_t seed_low, seed_high, offset_mix;
    const uint64_t* state;  // {seed, offset} in device memory, in place of the members; or nullptr
    float keep_factor;      // of kept entries: Dropout::keep_factor()
    bool active;
};

// The rare options, which the plain instances of kernels do not support.
struct RareParams {
    float softcap;  // 0: off
    HeadParams alibi_slopes;
    ScoreParams bias, mask;
    DropoutParams dropout;
};

// softmax_scale, RareParams::softcap and DropoutParams::keep_factor in double, for the float64 kernels.
struct DoubleParams {
    double softmax_scale, softcap, keep_factor;
};

// Division by a number that is known at launch, as a multiplication, because integer division takes about forty instructions.
struct Divisor {
    uint32_t divisor, multiplier, shift;  // n / divisor = n * multiplier >> 32 + shift, for n below 2^31
};

// The static schedule of persistent thread blocks (sm90/static_schedule.cuh); all but the first two only if
// ScheduleParams::paired.
struct StaticScheduleParams {
    int32_t most_tiles;   // of a thread block
    int32_t units;        // tiles, or pairs of tiles, that thread blocks take in rounds; the last round may be incomplete
    int32_t pair_rounds;  // the number of these rounds
    int32_t tiles_of_head;
    // The tail: the tiles of the heads from tail_head on, which are not paired.
    int32_t tail_head, tail_heads;
    int32_t tail_tiles;  // of all these heads
    int32_t tail_begin;  // how many of these thread blocks without a pair take in the last round of pairs
    int32_t tail_round;  // how many are in each later round
    Divisor tail_group;  // heads whose tiles are in one order, the longest first
    Divisor tail_group_tiles;
};

// The order of the work tiles. Heads form groups; all tiles of a group come before the next group, the longest first. What the
// tiles of a group read fits the L2 cache together, or, with key tiles under a causal mask, groups divide the work equally
// (host/tile_schedule.h).
struct ScheduleParams {
    int32_t tiles;            // tiles of a head (dense), or an upper bound of the tiles of all sequences (packed)
    int32_t heads_per_group;  // of the batch * heads_q (dense) or heads_q (packed) heads
    int32_t heads;
    Divisor group_tiles;  // heads_per_group * tiles
    Divisor group;        // heads_per_group
    Divisor sequence;     // dense: heads of a batch entry
    bool reversed;        // later rows see more keys (causal): start with the last tile
    bool paired;          // `tiles` counts pairs of a late and an early tile, which all take the same time (causal)
    StaticScheduleParams fixed;
};

// The positions of the rows of one side in the whole sequence: begin + i * step, or an array. All positions are below
// kUnboundedWindow.
struct PositionsParams {
    const int32_t* begins;   // [batch], in place of begin; or nullptr
    const int32_t* of_rows;  // one position per row, in place of begin and begins: [row] (packed) or [batch, row]; or nullptr
    int64_t batch_stride;    // of of_rows
    int32_t begin, step;
};

// A shard: the call has some of the rows, keys, sequences or heads of a problem. Only the general instances of sm80 support it.
struct ShardParams {
    PositionsParams rows, columns;
    const int32_t* sequences;  // the batch numbers that dropout uses: [batch]; nullptr: 0, 1, ...
    int32_t head_begin, heads_total;
    bool has_positions;
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
    int32_t* sequence_order;  // in the workspace (sm90/sequence_order.cuh); nullptr: static schedule
    bool vector_loads;        // rows of q, k and v can be read 16 bytes at a time, and head dims are multiples of 16 bytes
    bool vector_out;          // the same for writing rows of out
    int32_t first_work_tile;  // of a launch (ForwardPlan::blocks_at_once)
    float* long_sums;         // in the workspace (attention/long_sums.h); nullptr: all sums stay in the accumulators
    ShardParams shard;
    bool continues;  // FLASH_FLAG_CONTINUE: out and lse hold the result for other keys
    bool wide_out;   // out is float, the inputs have 16 bits
    DoubleParams in_double;
};

// Forward with statistics of rows. float64: pointers to doubles.
struct ForwardStatisticsParams : ForwardParams {
    RowStatisticsParams max_logit, entropy;  // as lse
    float* head_maxima;                      // the largest score of each head, or nullptr
    int64_t head_maxima_stride;
};

// The softmax statistics of a query row that the backward kernels read; {+infinity, 0} for a row that is not in use or sees no
// key.
struct SoftmaxStatistics {
    float lse_log2;  // LSE in base-2 units, minus exponent_shift(); +infinity: the row sees no key
    float delta;     // dout . out - dlse
};

// The softmax statistics of the float64 kernels.
struct DoubleStatistics {
    double lse;  // natural
    double delta;
};

// Query rows of the workspace are allocated in units of this many, and every sequence begins with a new unit. The tile sizes
// divide it.
constexpr int32_t kUnitRows = 128;

// The gradient of the sink: one number per head, summed over the batch.
struct HeadGradientParams {
    void* data;  // nullptr: not wanted
    int64_t stride;
    bool is_float;
};

// The gradient of the bias; an extent of 1 is a broadcast dimension.
struct ScoreGradientParams {
    void* data;  // nullptr: not wanted
    int64_t stride[4];
    int32_t extent[4];  // (batch, head, row, column)
    bool is_float;
};

// A launch of the dK/dV kernel. Long sums need several launches (attention/long_sums.h).
struct BackwardPart {
    int32_t first_work_tile;
    int32_t first_head, heads;   // query heads, among those that share a key head
    int32_t first_row, end_row;  // query rows of each sequence: multiples of kUnitRows, or the largest integer
    float* sums;                 // in the workspace (attention/gradient_sums.cuh); nullptr: a key tile has one launch only
    bool first, last;            // of the launches of a key tile
    int32_t work_tiles;          // of the launch
    int32_t taken_before;        // what earlier launches added to *BackwardParams::next_work_tile
};

// Key tiles whose dK and dV several thread blocks compute, each from some of the query tiles (sm90/backward_split_sums.cuh).
// The work tiles from `first` on are splits of the last key tiles of the schedule; those of a key tile follow each other.
struct SplitTilesParams {
    int32_t first = INT32_MAX;
    Divisor splits = {1, 0, 0};   // of a key tile
    int32_t count = 0;            // of `counters`
    int32_t* counters = nullptr;  // workspace; the first kernel sets them to 0
    float* sums = nullptr;        // workspace
};

struct BackwardParams {
    // What the first and the last step read comes first, so that it is in few cache lines: short calls wait for these.
    LengthsParams q_lengths;
    int32_t batch, heads_q, head_dim, head_dim_v;
    RowsParams out, dout, dq;
    RowStatisticsParams lse, dlse;
    // Workspace: one entry for each unit of each query head, see QueryUnits.
    SoftmaxStatistics* softmax_statistics;  // kUnitRows per unit; float64: DoubleStatistics
    float*
        dq_accumulator;    // kUnitRows * kHeadDim per unit, in the order of the kernel's registers; nullptr: a kernel computes dq
    int32_t units;         // units of a head: of a batch entry (dense), or an upper bound for all sequences together (packed)
    int32_t* first_units;  // packed: the first unit of each sequence; the first kernel writes it
    float softmax_scale;
    bool vector_loads;  // rows of q, k, v, out and dout can be read 16 bytes at a time, and head dims are multiples of 16 bytes
    bool vector_out;    // the same for writing rows of dq, dk and dv
    int32_t* next_work_tile;  // workspace, or nullptr: of the tile scheduler (sm90/backward_tile_scheduler.cuh); the first kernel
                              // sets it to 0
    SplitTilesParams split_tiles;
    ScheduleParams query_schedule;  // by unit of query rows and query head

    RowsParams q, k, v, dk, dv;
    LengthsParams k_lengths;
    int32_t heads_k, group_size;
    float scale_log2;  // softmax_scale * log2(e)
    MaskParams mask;
    BlockMaskParams block_rows, block_cols;  // the same blocks, listed by row and by column
    HeadParams sink;
    HeadGradientParams dsink;
    RareParams rare;
    ScoreGradientParams dbias;
    ScheduleParams key_schedule;         // by key tile and key head
    ScheduleParams query_tile_schedule;  // where a kernel computes dq: by tile of query rows
    int32_t* dq_counters;  // workspace: one per query tile; nullptr: additions to dq in any order (sm90/backward_fixed_order.cuh)
    BackwardPart part;     // set for each launch of the dK/dV kernel
    ShardParams shard;
    RowStatisticsParams delta;       // the caller's delta: read if `adds`, else written
    bool adds;                       // the kernels add to dq, dk and dv
    bool wide_dq, wide_dk, wide_dv;  // float, the inputs have 16 bits
    DoubleParams in_double;
};

}  // namespace libflash::cuda
