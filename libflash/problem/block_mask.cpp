#include "problem/block_mask.h"

#include "problem/build.h"

namespace libflash {

namespace {

constexpr const char* kBlockRule = "shape must be (batch or 1, heads_q or 1, ceil(seqlen_q / 128), ceil(seqlen_k / 128))";

bool fits(int64_t size, int64_t full, bool at_least) { return at_least ? size >= full : size == full; }

void check_blocks(const Argument& argument, const TensorView& view, const BlockSizes& sizes, int64_t rows, int64_t cols) {
    const bool batch = view.shape[0] == 1 || view.shape[0] == sizes.batch;
    const bool heads = view.shape[1] == 1 || view.shape[1] == sizes.heads;
    if (!batch || !heads || !fits(rows, sizes.rows, sizes.rows_at_least) || !fits(cols, sizes.cols, sizes.cols_at_least)) {
        const int64_t full[4] = {sizes.batch, sizes.heads, sizes.rows, sizes.cols};
        invalid(argument, kBlockRule, "full size ", Sizes{full, 4}, ", given ", view.shape[0], " x ", view.shape[1], " of ", rows,
                " x ", cols, " blocks");
    }
}

void check_pair(const BlockListPair& pair, const char* counts, const char* indices, const Device& device) {
    check_device(pair.counts, counts, device);
    check_device(pair.indices, indices, device);
    check_dtype(pair.counts, counts, DType::i32);
    check_dtype(pair.indices, indices, DType::i32);
    check_ndim(pair.counts, counts, 3, "(batch or 1, heads_q or 1, blocks)");
    check_ndim(pair.indices, indices, 4, "(batch or 1, heads_q or 1, blocks, blocks of the other side)");
    const int64_t* shape = pair.counts.shape;
    check_shape(pair.indices, indices, {shape[0], shape[1], shape[2], pair.indices.shape[3]},
                "that of the counts with one more dimension");
}

void copy_strides(int64_t* to, const TensorView& view) {
    for (int i = 0; i < view.ndim; ++i) to[i] = view.shape[i] > 1 ? view.stride[i] : 0;
}

void check_list_contents(const BlockListPair& pair, const char* counts_name, const char* indices_name) {
    const auto* counts = static_cast<const int32_t*>(pair.counts.data);
    const auto* indices = static_cast<const int32_t*>(pair.indices.data);
    const int64_t* cs = pair.counts.stride;
    const int64_t* is = pair.indices.stride;
    const int64_t limit = pair.indices.shape[3];
    for (int64_t b = 0; b < pair.counts.shape[0]; ++b) {
        for (int64_t h = 0; h < pair.counts.shape[1]; ++h) {
            for (int64_t i = 0; i < pair.counts.shape[2]; ++i) {
                const int32_t count = counts[b * cs[0] + h * cs[1] + i * cs[2]];
                if (count < 0 || count > limit) {
                    invalid(counts_name, "a count must be at least 0 and at most the number of blocks", "entry (", b, ", ", h,
                            ", ", i, ") is ", count, " of ", limit);
                }
                const int32_t* list = indices + b * is[0] + h * is[1] + i * is[2];
                int64_t last = -1;
                for (int64_t n = 0; n < count; ++n) {
                    const int32_t index = list[n * is[3]];
                    if (index < 0 || index >= limit) {
                        invalid(indices_name, "a block must be at least 0 and below the number of blocks", "entry (", b, ", ", h,
                                ", ", i, ", ", n, ") is ", index, " of ", limit);
                    }
                    if (index <= last) {
                        invalid(indices_name, "each list must be in ascending order", "entry (", b, ", ", h, ", ", i, ", ", n,
                                ") is ", index, " after ", last);
                    }
                    last = index;
                }
            }
        }
    }
}

// The caller left the tensor zero: not given.
const flash_tensor_t* null_if_unset(const flash_tensor_t& tensor) {
    return tensor.data == nullptr && tensor.dtype == FLASH_DTYPE_NONE && tensor.ndim == 0 ? nullptr : &tensor;
}

BlockListPair read_pair(Reader& reader, const flash_tensor_t& counts, const char* counts_name, const flash_tensor_t& indices,
                        const char* indices_name, unsigned role) {
    if (!null_if_unset(counts) && !null_if_unset(indices)) return {};
    return {reader.required(null_if_unset(counts), counts_name, role),
            reader.required(null_if_unset(indices), indices_name, role)};
}

}  // namespace

int64_t blocks_of(int64_t length) { return (length + FLASH_BLOCK_SIZE - 1) / FLASH_BLOCK_SIZE; }

BlockListViews read_block_lists(Reader& reader, const flash_block_lists_t& lists, unsigned role) {
    BlockListViews views;
    views.rows =
        read_pair(reader, lists.row_counts, "block_lists.row_counts", lists.row_indices, "block_lists.row_indices", role);
    views.cols =
        read_pair(reader, lists.col_counts, "block_lists.col_counts", lists.col_indices, "block_lists.col_indices", role);
    return views;
}

BlockMask build_block_mask(const TensorView& mask, const BlockSizes& sizes, const Device& device) {
    check_device(mask, "block_mask", device);
    check_dtype(mask, "block_mask", DType::boolean);
    check_ndim(mask, "block_mask", 4, "(batch or 1, heads_q or 1, ceil(seqlen_q / 128), ceil(seqlen_k / 128))");
    check_blocks("block_mask", mask, sizes, mask.shape[2], mask.shape[3]);
    BlockMask result;
    result.present = true;
    result.rows = mask.shape[2];
    result.cols = mask.shape[3];
    result.mask = static_cast<const uint8_t*>(mask.data);
    copy_strides(result.mask_stride, mask);
    return result;
}

BlockMask build_block_lists(const BlockListViews& lists, const BlockSizes& sizes, const Device& device, bool needs_cols) {
    if (!lists.rows.counts.present) invalid("block_lists.row_counts", "is required, with row_indices", "zero");
    if (needs_cols && !lists.cols.counts.present) {
        invalid("block_lists.col_counts", "is required in backward, with col_indices", "zero");
    }
    BlockMask result;
    result.present = true;
    result.has_lists = true;
    check_pair(lists.rows, "block_lists.row_counts", "block_lists.row_indices", device);
    result.rows = lists.rows.counts.shape[2];
    result.cols = lists.rows.indices.shape[3];
    check_blocks("block_lists.row_indices", lists.rows.indices, sizes, result.rows, result.cols);
    result.row_counts = static_cast<const int32_t*>(lists.rows.counts.data);
    result.row_indices = static_cast<const int32_t*>(lists.rows.indices.data);
    copy_strides(result.row_counts_stride, lists.rows.counts);
    copy_strides(result.row_indices_stride, lists.rows.indices);
    if (lists.cols.counts.present) {
        check_pair(lists.cols, "block_lists.col_counts", "block_lists.col_indices", device);
        const int64_t* shape = lists.rows.counts.shape;
        check_shape(lists.cols.indices, "block_lists.col_indices", {shape[0], shape[1], result.cols, result.rows},
                    "that of row_indices with the last two dimensions exchanged");
        result.col_counts = static_cast<const int32_t*>(lists.cols.counts.data);
        result.col_indices = static_cast<const int32_t*>(lists.cols.indices.data);
        copy_strides(result.col_counts_stride, lists.cols.counts);
        copy_strides(result.col_indices_stride, lists.cols.indices);
    }
    return result;
}

void check_block_lists(const BlockListViews& lists) {
    check_list_contents(lists.rows, "block_lists.row_counts", "block_lists.row_indices");
    if (lists.cols.counts.present) check_list_contents(lists.cols, "block_lists.col_counts", "block_lists.col_indices");
}

void check_blocks_cover(const BlockMask& mask, const Argument& argument, int64_t rows, int64_t cols) {
    if (mask.present && (mask.rows < blocks_of(rows) || mask.cols < blocks_of(cols))) {
        invalid(argument, "must cover the largest lengths of the packed sequences", "largest ", rows, " x ", cols, ", given ",
                mask.rows, " x ", mask.cols, " blocks");
    }
}

CompressProblem make_compress_problem(const flash_tensor_t* block_mask, const flash_block_lists_t* lists) {
    Reader reader(Reading::call);
    const TensorView mask = reader.required(block_mask, "block_mask");
    if (!lists) invalid("lists", "is required", "NULL");
    const BlockListViews views = read_block_lists(reader, *lists, kWritten);
    check_dtype(mask, "block_mask", DType::boolean);
    check_ndim(mask, "block_mask", 4, "(batch or 1, heads_q or 1, ceil(seqlen_q / 128), ceil(seqlen_k / 128))");
    check_contiguous(mask, "block_mask");
    if (!views.rows.counts.present && !views.cols.counts.present)
        invalid("lists", "must have the row lists, the column lists or both", "none");

    CompressProblem problem;
    problem.device = mask.device;
    problem.matrices = mask.shape[0] * mask.shape[1];
    problem.rows = mask.shape[2];
    problem.cols = mask.shape[3];
    problem.mask = static_cast<const uint8_t*>(mask.data);
    const int64_t* shape = mask.shape;
    if (views.rows.counts.present) {
        check_pair(views.rows, "block_lists.row_counts", "block_lists.row_indices", mask.device);
        check_shape(views.rows.indices, "block_lists.row_indices", {shape[0], shape[1], shape[2], shape[3]},
                    "that of block_mask");
        check_contiguous(views.rows.counts, "block_lists.row_counts");
        check_contiguous(views.rows.indices, "block_lists.row_indices");
        problem.row_counts = static_cast<int32_t*>(views.rows.counts.data);
        problem.row_indices = static_cast<int32_t*>(views.rows.indices.data);
    }
    if (views.cols.counts.present) {
        check_pair(views.cols, "block_lists.col_counts", "block_lists.col_indices", mask.device);
        check_shape(views.cols.indices, "block_lists.col_indices", {shape[0], shape[1], shape[3], shape[2]},
                    "that of block_mask with the last two dimensions exchanged");
        check_contiguous(views.cols.counts, "block_lists.col_counts");
        check_contiguous(views.cols.indices, "block_lists.col_indices");
        problem.col_counts = static_cast<int32_t*>(views.cols.counts.data);
        problem.col_indices = static_cast<int32_t*>(views.cols.indices.data);
    }
    reader.check_overlap();
    return problem;
}

}  // namespace libflash
