#include "problem/score_options.h"

#include <algorithm>
#include <cmath>

#include "problem/check.h"

namespace libflash {

double read_softmax_scale(double given, uint32_t flags) {
    if (!(flags & FLASH_FLAG_SCALE)) {
        if (given != 0) invalid("softmax_scale", "needs FLASH_FLAG_SCALE", given);
        return 0;
    }
    if (!std::isfinite(given)) invalid("softmax_scale", "must be finite", given);
    return given;
}

double score_scale(const ScoreOptions& given, uint32_t flags, int64_t head_dim) {
    return (flags & FLASH_FLAG_SCALE) ? given.softmax_scale : 1 / std::sqrt(static_cast<double>(head_dim));
}

double read_softcap(double softcap) {
    if (!(softcap >= 0) || !std::isfinite(softcap)) invalid("softcap", "must be 0 (off), or positive and finite", softcap);
    return softcap;
}

MaskRule read_mask_rule(uint32_t flags, int64_t window_left, int64_t window_right) {
    MaskRule rule;
    rule.top_left = (flags & FLASH_FLAG_TOP_LEFT) != 0;
    if (flags & FLASH_FLAG_WINDOW) {
        if (window_left < -1) invalid("window_left", "must be -1 (unbounded) or more", window_left);
        if (window_right < -1) invalid("window_right", "must be -1 (unbounded) or more", window_right);
        if (window_left >= 0) rule.left = std::min(window_left, MaskRule::kUnbounded);
        if (window_right >= 0) rule.right = std::min(window_right, MaskRule::kUnbounded);
    } else {
        if (window_left != 0 && window_left != -1) invalid("window_left", "needs FLASH_FLAG_WINDOW", window_left);
        if (window_right != 0 && window_right != -1) invalid("window_right", "needs FLASH_FLAG_WINDOW", window_right);
    }
    if (flags & FLASH_FLAG_CAUSAL) rule.right = 0;
    return rule;
}

}  // namespace libflash
