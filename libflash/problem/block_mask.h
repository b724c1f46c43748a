// Block masks: dense, or as lists of the kept blocks.
#pragma once

#include "problem/attention.h"
#include "problem/read.h"

namespace libflash {

// How many blocks each way. As with ScoreSizes, a packed side needs at least so many.
struct BlockSizes {
    int64_t batch = 0, heads = 0;
    int64_t rows = 0, cols = 0;
    bool rows_at_least = false, cols_at_least = false;
};

int64_t blocks_of(int64_t length);

// The pair of tensors that is one compressed form, as read. Not present if the caller left it zero.
struct BlockListPair {
    TensorView counts, indices;
};
struct BlockListViews {
    BlockListPair rows, cols;
};
BlockListViews read_block_lists(Reader& reader, const flash_block_lists_t& lists, unsigned role);

BlockMask build_block_mask(const TensorView& mask, const BlockSizes& sizes, const Device& device);
BlockMask build_block_lists(const BlockListViews& lists, const BlockSizes& sizes, const Device& device, bool needs_cols);

// Reads the lists: on the CPU, in a call.
void check_block_lists(const BlockListViews& lists);

// On the CPU, in a call, packed: do the blocks cover the largest lengths that occur?
void check_blocks_cover(const BlockMask& mask, const Argument& argument, int64_t rows, int64_t cols);

}  // namespace libflash
