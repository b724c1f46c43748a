// The options that change scores and that forward, backward and decode have in common.
#pragma once

#include <cstdint>

#include "problem/mask.h"
#include "problem/tensor.h"

namespace libflash {

// alibi_slopes, learnable_sink, dsink: one number per head; alibi_slopes may have one per batch entry and head.
struct HeadTensor {
    bool present = false;
    void* data = nullptr;
    DType dtype = DType::none;
    int64_t batch_stride = 0;
    int64_t head_stride = 0;
};

struct ScoreOptions {
    double softmax_scale = 1;
    double softcap = 0;  // 0: off
    MaskRule mask_rule;
    HeadTensor alibi_slopes, sink;
};

double read_softmax_scale(double given, uint32_t flags);  // returns 0 without FLASH_FLAG_SCALE
double read_softcap(double softcap);
MaskRule read_mask_rule(uint32_t flags, int64_t window_left, int64_t window_right);

// The factor of the dot products: the given scale with FLASH_FLAG_SCALE, else 1 / sqrt(head_dim).
double score_scale(const ScoreOptions& given, uint32_t flags, int64_t head_dim);

// Checks and copies the plain values from the options of forward, backward or decode, except the mask rule.
template <class Options>
void read_score_options(ScoreOptions& score, const Options& given) {
    score.softmax_scale = read_softmax_scale(given.softmax_scale, given.flags);
    score.softcap = read_softcap(given.softcap);
}

}  // namespace libflash
