// What forward and backward have in common: the same tensors and options, read in the same order.
#pragma once

#include "problem/block_mask.h"
#include "problem/build.h"

namespace libflash {

// The options' tensors as views; those of a backward call are absent in a forward one.
struct OptionTensors {
    TensorView cu_q, cu_k, used_q, used_k;
    TensorView slopes, bias, mask, sink, block_mask;
    BlockListViews lists;
    TensorView dlse, dbias, dsink;
    TensorView rng_state;
};

constexpr uint32_t kAttentionFlags =
    FLASH_FLAG_CAUSAL | FLASH_FLAG_TOP_LEFT | FLASH_FLAG_WINDOW | FLASH_FLAG_SCALE | FLASH_FLAG_DETERMINISTIC;

// Step 1 of build.h: plain values, into `problem`.
flash_attention_options_t read_attention_options(AttentionProblem& problem, const flash_attention_options_t* options);

// Step 2: device, dtype, sizes of q, k, v, which are read already; batch, heads, lengths.
void build_attention_sizes(AttentionProblem& problem, const OptionTensors& tensors, const flash_attention_options_t& options);

// Shapes that follow from the problem: (batch, rows, heads, channels) or packed, and that of lse.
void check_like_rows(const AttentionProblem& problem, const TensorView& view, const Argument& argument);  // q but head_dim_v
void check_like_lse(const AttentionProblem& problem, const TensorView& view, const Argument& argument);
void check_same(const TensorView& view, const Argument& argument, const TensorView& model, const char* names);

OptionTensors read_option_tensors(Reader& reader, const flash_attention_options_t& options, bool backward);

// Step 3, then step 4.
void build_option_tensors(AttentionProblem& problem, const OptionTensors& tensors, const flash_attention_options_t& options);
void check_attention_contents(const AttentionProblem& problem, const OptionTensors& tensors,
                              const flash_attention_options_t& options);
void read_rng_state(AttentionProblem& problem, const TensorView& state);  // on the CPU

}  // namespace libflash
