// What is asked of merge: the outputs of several disjoint ranges of keys, to be put together by their logsumexp.
#pragma once

#include <cstdint>
#include <vector>

#include "problem/attention.h"

namespace libflash {

struct MergeProblem {
    Device device;
    int count = 0;
    int64_t batch = 1, rows = 0, heads = 0, head_dim_v = 0;  // packed: batch is 1, rows are all rows
    std::vector<TensorView> outs, lses;                      // `count` of each
    TensorView out, lse;                                     // lse may be absent
    Request request;
};

}  // namespace libflash
