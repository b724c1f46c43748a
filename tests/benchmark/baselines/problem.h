// The arguments of the baselines: one self-attention problem, its tensors and the intermediate results of a method. Pointers that
// a method or a direction does not use may be null. _baselines.py has the same struct.
#pragma once

#include <cstdint>

namespace baselines {

struct Problem {
    // (batch, seqlen, heads, head_dim), contiguous, 16 bits an element
    const void *q, *k, *v, *dout;
    void *out, *dq, *dk, *dv;
    // standard attention: (batch, heads, seqlen, pitch) of the same type
    void *scores, *weights, *dweights, *dscores;
    // FlashAttention-1: (batch, heads, seqlen, head_dim) and (batch, heads, statistics_pitch), float
    float *out_sums, *dq_sums, *row_max, *row_sum, *delta;
    int32_t batch, seqlen, heads, head_dim;
    int32_t pitch;             // elements between rows of a seqlen x seqlen matrix: a multiple of 8
    int32_t statistics_pitch;  // floats between the softmax statistics of two heads: a multiple of 64
    int32_t causal;            // 0 or 1
    int32_t splits;            // FlashAttention-1: thread blocks that share a head; 1 in the paper
    float softmax_scale;

    int64_t row_stride() const { return int64_t{heads} * head_dim; }
    int heads_in_all() const { return batch * heads; }
};

}  // namespace baselines
