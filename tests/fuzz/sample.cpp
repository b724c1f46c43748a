#include "sample.h"

namespace fuzz {
namespace {

void append(std::vector<char>* results, const Tensor& tensor) {
    if (!results) return;
    const std::vector<char> bytes = tensor.bytes();
    results->insert(results->end(), bytes.begin(), bytes.end());
}

Tensor make(const flash_tensor_t& shape) {
    Tensor tensor;
    tensor.allocate(shape);
    return tensor;
}

}  // namespace

Sample::Sample(Operation operation, int32_t dtype, uint64_t seed, bool large) : operation_(operation) {
    Random random(seed);
    batch_ = 1 + random.below(2), heads_k_ = 1 + random.below(2), heads_q_ = heads_k_ * (1 + random.below(3));
    seqlen_q_ = operation == Operation::decode ? 1 + random.below(4) : 20 + random.below(150);
    seqlen_k_ = 20 + random.below(250), head_dim_ = 16 + random.below(64);
    const bool decode = operation == Operation::decode;
    if (large) heads_q_ = 8, heads_k_ = 4, head_dim_ = 64, seqlen_k_ = decode ? 3000 : 700, seqlen_q_ = decode ? 4 : 250;
    q_.allocate(contiguous(dtype, {batch_, seqlen_q_, heads_q_, head_dim_}));
    k_.allocate(contiguous(dtype, {batch_, seqlen_k_, heads_k_, head_dim_}));
    v_.allocate(contiguous(dtype, {batch_, seqlen_k_, heads_k_, head_dim_}));
    dout_.allocate(q_.view), out_.allocate(q_.view);
    lse_.allocate(
        contiguous(dtype == FLASH_DTYPE_FLOAT64 ? FLASH_DTYPE_FLOAT64 : FLASH_DTYPE_FLOAT32, {batch_, heads_q_, seqlen_q_}));
    block_mask_.allocate(contiguous(FLASH_DTYPE_BOOL, {1, 1, (seqlen_q_ + 127) / 128, (seqlen_k_ + 127) / 128}));
    for (Tensor* tensor : {&q_, &k_, &v_, &dout_}) tensor->fill(random, 1);
    block_mask_.fill_bools(random, 6);
    if (operation == Operation::backward || operation == Operation::merge) {
        flash_attention_options_t options = {};
        options.struct_size = sizeof options, options.num_threads = 1;
        check_status(forward(options, out_, lse_), FLASH_STATUS_OK, "forward");
    }
}

flash_status_t Sample::forward(const flash_attention_options_t& options, Tensor& out, Tensor& lse) const {
    size_t bytes = 0;
    flash_status_t status =
        flash_attention_forward_workspace_size(&q_.view, &k_.view, &v_.view, &out.view, &lse.view, &options, &bytes);
    if (status != FLASH_STATUS_OK) return status;
    const Workspace workspace(bytes);
    return flash_attention_forward(&q_.view, &k_.view, &v_.view, &out.view, &lse.view, &options, workspace.data(), bytes,
                                   nullptr);
}

flash_status_t Sample::run(int32_t threads, std::vector<char>* results) const {
    flash_attention_options_t options = {};
    options.struct_size = sizeof options, options.num_threads = threads, options.block_mask = &block_mask_.view;
    options.tile_q = options.tile_k = 32;
    size_t bytes = 0;
    flash_status_t status = FLASH_STATUS_OK;
    switch (operation_) {
        case Operation::forward: {
            Tensor out = make(out_.view), lse = make(lse_.view);
            status = forward(options, out, lse);
            append(results, out), append(results, lse);
            break;
        }
        case Operation::backward: {
            options.block_mask = nullptr;  // as in the forward call
            const Tensor dq = make(q_.view), dk = make(k_.view), dv = make(v_.view);
            status = flash_attention_backward_workspace_size(&dout_.view, &q_.view, &k_.view, &v_.view, &out_.view, &lse_.view,
                                                             &dq.view, &dk.view, &dv.view, &options, &bytes);
            if (status != FLASH_STATUS_OK) return status;
            const Workspace workspace(bytes);
            status = flash_attention_backward(&dout_.view, &q_.view, &k_.view, &v_.view, &out_.view, &lse_.view, &dq.view,
                                              &dk.view, &dv.view, &options, workspace.data(), bytes, nullptr);
            append(results, dq), append(results, dk), append(results, dv);
            break;
        }
        case Operation::decode: {
            flash_decode_options_t decode = {};
            decode.struct_size = sizeof decode, decode.num_threads = threads, decode.num_splits = 3;
            const Tensor out = make(out_.view), lse = make(lse_.view);
            status = flash_attention_decode_workspace_size(&q_.view, &k_.view, &v_.view, &out.view, &lse.view, &decode, &bytes);
            if (status != FLASH_STATUS_OK) return status;
            const Workspace workspace(bytes);
            status = flash_attention_decode(&q_.view, &k_.view, &v_.view, &out.view, &lse.view, &decode, workspace.data(), bytes,
                                            nullptr);
            append(results, out), append(results, lse);
            break;
        }
        case Operation::merge: {
            flash_merge_options_t merge = {};
            merge.struct_size = sizeof merge, merge.num_threads = threads;
            const flash_tensor_t outs[] = {out_.view, q_.view}, lses[] = {lse_.view, lse_.view};
            const Tensor out = make(out_.view), lse = make(lse_.view);
            status = flash_attention_merge(outs, lses, 2, &out.view, &lse.view, &merge, nullptr);
            append(results, out), append(results, lse);
            break;
        }
        case Operation::compress: {
            const int64_t rows = block_mask_.view.shape[2], cols = block_mask_.view.shape[3];
            const Tensor lists[] = {
                make(contiguous(FLASH_DTYPE_INT32, {1, 1, rows})), make(contiguous(FLASH_DTYPE_INT32, {1, 1, rows, cols})),
                make(contiguous(FLASH_DTYPE_INT32, {1, 1, cols})), make(contiguous(FLASH_DTYPE_INT32, {1, 1, cols, rows}))};
            const flash_block_lists_t views = {lists[0].view, lists[1].view, lists[2].view, lists[3].view};
            status = flash_block_mask_compress(&block_mask_.view, &views, nullptr);
            for (const Tensor& list : lists) append(results, list);
            break;
        }
        case Operation::explain: {
            char text[4096] = {};
            status = flash_attention_forward_explain(&q_.view, &k_.view, &v_.view, &options, text, sizeof text, nullptr);
            break;
        }
    }
    return status;
}

}  // namespace fuzz
