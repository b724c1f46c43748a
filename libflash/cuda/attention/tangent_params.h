// The parameters of the tangent kernels. A leading t is a tangent. A tensor whose data is nullptr is zero or not wanted.
#pragma once

#include "cuda/attention/params.h"

namespace libflash::cuda {

struct ForwardTangentParams {
    RowsParams q, k, v, out, tq, tk, tv, tout;
    RowStatisticsParams lse, tlse;
    // If tdelta is wanted: tdelta = tdout . out + dout . tout - tdlse, and perhaps also delta = dout . out - dlse.
    RowsParams dout, tdout;
    RowStatisticsParams dlse, tdlse, delta, tdelta;
    LengthsParams q_lengths, k_lengths;
    int32_t batch, heads_q, group_size;
    int32_t head_dim, head_dim_v;
    float softmax_scale;
    float scale_log2;  // softmax_scale * log2(e)
    MaskParams mask;
    BlockMaskParams block_mask;
    HeadParams sink, tsink;
    RareParams rare;
    ScoreParams tbias;
    ScheduleParams schedule;
    bool vector_loads;  // rows of q, k, v and their tangents can be read 16 bytes at a time, and head dims are multiples of that
    bool vector_rows;   // the same for out, dout and tdout
    bool vector_out;    // the same for writing rows of tout
    DoubleParams in_double;
};

// The statistics of a query row that the backward_tangent kernels read; {+infinity, 0, 0, 0} for a row that is not in use or sees
// no key.
struct TangentStatistics {
    float lse_log2;  // LSE in base-2 units, minus exponent_shift()
    float delta;     // dout . out - dlse
    float mu;        // the tangent of LSE
    float tdelta;    // tdout . out + dout . tout - tdlse
};

// The statistics of the float64 kernels, with the natural LSE.
struct DoubleTangentStatistics {
    double lse, delta, mu, tdelta;
};

struct BackwardTangentParams {
    RowsParams q, k, v, out, dout, tq, tk, tv, tout, tdout, tdq, tdk, tdv;
    RowStatisticsParams lse, tlse, dlse, tdlse;
    RowStatisticsParams delta, tdelta;  // delta: in place of dlse; tdelta: in place of tout and tdlse
    LengthsParams q_lengths, k_lengths;
    int32_t batch, heads_q, heads_k, group_size;
    int32_t head_dim, head_dim_v;
    float softmax_scale;
    float scale_log2;  // softmax_scale * log2(e)
    MaskParams mask;
    BlockMaskParams block_rows, block_cols;  // the same blocks, listed by row and by column
    HeadParams sink, tsink;                  // for tdsink
    HeadGradientParams tdsink;
    RareParams rare;
    ScoreParams tbias;
    // In the workspace: kUnitRows for each unit of each query head, see QueryUnits. float64: DoubleTangentStatistics.
    TangentStatistics* statistics;
    int32_t units;
    int32_t* first_units;           // as in BackwardParams
    int32_t* next_tiles;            // the next work tile of queries, and of keys (sm90); the first kernel sets both to 0
    ScheduleParams unit_schedule;   // by unit of query rows and query head
    ScheduleParams query_schedule;  // by tile of query rows and query head
    ScheduleParams key_schedule;    // by key tile and key head
    BackwardPart part;              // all query rows
    bool vector_loads;              // rows of the inputs can be read 16 bytes at a time, and head dims are multiples of that
    bool vector_rows;               // the same for out, dout and their tangents
    bool vector_out;                // the same for writing rows of tdq, tdk and tdv
    DoubleParams in_double;
    ScoreGradientParams tdbias;  // of the launch for it alone
};

}  // namespace libflash::cuda
