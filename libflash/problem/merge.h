// MergeProblem: a merge call in checked form. It combines results of disjoint ranges of keys, weighted by their LSE.
#pragma once

#include <cstdint>
#include <vector>

#include "problem/attention.h"

namespace libflash {

struct MergeProblem {
    Device device;
    int count = 0;
    int64_t batch = 1, rows = 0, heads = 0, head_dim_v = 0;  // packed: batch = 1, rows = total
    std::vector<TensorView> outs, lses;                      // `count` of each
    TensorView out, lse;                                     // lse may be absent
    Request request;
};

}  // namespace libflash
