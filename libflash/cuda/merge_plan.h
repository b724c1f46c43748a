// The plan of merge and the parameters of its kernel: plain values, in one struct for few parts and another one for many parts.
// Strides are in elements. No CUDA header.
#pragma once

#include <cstdint>
#include <memory>
#include <variant>

#include "cuda/plans.h"

namespace libflash::cuda {

enum class ElementType : int32_t { f16, bf16, f32 };

// A tensor of rows of contiguous channels, or of one number per row (lse).
struct RowTensor {
    void* data;
    int64_t batch, row, head;
    ElementType type;
    int32_t reserved;
};

struct MergeSizes {
    int64_t batch, rows, heads;
    int32_t head_dim_v;
    int32_t count;  // of parts
    RowTensor out;
    RowTensor lse;  // data is nullptr when it is not wanted
};

constexpr int kMergeFewParts = 64;

struct MergeFew : MergeSizes {
    RowTensor outs[kMergeFewParts];
    RowTensor lses[kMergeFewParts];
};

// The strides and the type of a part; usually all parts share one layout.
struct MergeLayout {
    int64_t out_batch, out_row, out_head, lse_batch, lse_row, lse_head;
    ElementType type;  // of out
    int32_t reserved;
};

constexpr int kMergeLayouts = 64, kMergeManyParts = 1680;

// Parts refer to a table of layouts, so that more parts fit into the kernel parameters.
struct MergeMany : MergeSizes {
    MergeLayout layouts[kMergeLayouts];
    void* outs[kMergeManyParts];
    void* lses[kMergeManyParts];
    uint8_t layout[kMergeManyParts];  // of each part: index in `layouts`
};
static_assert(sizeof(MergeFew) <= 32764 && sizeof(MergeMany) <= 32764, "kernel parameters are limited to 32764 bytes");

struct MergeParams {
    std::variant<MergeFew, MergeMany> parts;
};

struct MergePlan {
    int vector = 1;      // neighbouring channels that a thread loads at once
    bool mixed = false;  // parts of different types
    int group = 1;       // threads that compute one row together
    LaunchShape merge;
    std::unique_ptr<const MergeParams> params;  // made with the plan, so that parts that do not fit are refused before a launch
};

}  // namespace libflash::cuda
