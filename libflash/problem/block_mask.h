// Checks of block masks, dense or as lists of the kept blocks.
#pragma once

#include "problem/attention.h"
#include "problem/read.h"

namespace libflash {

// The size that a block mask must have, in blocks. With *_at_least, for a packed side, it may be larger, as in ScoreSizes.
struct BlockSizes {
    int64_t batch = 0, heads = 0;
    int64_t rows = 0, cols = 0;
    bool rows_at_least = false, cols_at_least = false;
};

int64_t blocks_of(int64_t length);

// The row lists or the column lists. Neither tensor is present if the caller left both zero.
struct BlockListPair {
    TensorView counts, indices;
};
struct BlockListViews {
    BlockListPair rows, cols;
};
BlockListViews read_block_lists(Reader& reader, const flash_block_lists_t& lists, unsigned role);

BlockMask build_block_mask(const TensorView& mask, const BlockSizes& sizes, const Device& device);
BlockMask build_block_lists(const BlockListViews& lists, const BlockSizes& sizes, const Device& device, bool needs_cols);

// Checks the contents of the lists, which must be in host memory.
void check_block_lists(const BlockListViews& lists);

// For packed calls on the CPU: checks that the blocks cover `rows` and `cols`, the largest lengths.
void check_blocks_cover(const BlockMask& mask, const Argument& argument, int64_t rows, int64_t cols);

}  // namespace libflash
