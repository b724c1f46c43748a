// The steps that forward.cpp and backward.cpp share: they read the same options and tensors in the same order (build.h).
#pragma once

#include "problem/block_mask.h"
#include "problem/build.h"
#include "problem/shard.h"

namespace libflash {

// The tensors of the options as views. dlse, dbias, dsink and delta are absent in a forward call, max_logit and entropy in a
// backward call.
struct OptionTensors {
    TensorView cu_q, cu_k, used_q, used_k;
    TensorView slopes, bias, mask, sink, block_mask;
    BlockListViews lists;
    TensorView dlse, dbias, dsink, delta;
    TensorView max_logit, entropy;
    TensorView rng_state;
    ShardTensors shard;
};

constexpr uint32_t kAttentionFlags =
    FLASH_FLAG_CAUSAL | FLASH_FLAG_TOP_LEFT | FLASH_FLAG_WINDOW | FLASH_FLAG_SCALE | FLASH_FLAG_DETERMINISTIC;

// Step 1 of build.h: copies the plain values into `problem`. `own_flags`: the flags of the operation besides kAttentionFlags.
flash_attention_options_t read_attention_options(AttentionProblem& problem, const flash_attention_options_t* options,
                                                 uint32_t own_flags);

// Step 2: checks device, dtype and sizes of q, k and v, which the reader has already read; sets batch, heads and head dimensions.
void build_attention_sizes(AttentionProblem& problem, const OptionTensors& tensors, const flash_attention_options_t& options);

// Check that a tensor has the device, type and shape of out (the shape of q with head_dim_v channels), of lse, or of `model`,
// whose shape the error text calls `names`. With `partial`, and for every gradient, FLOAT32 is allowed with 16-bit inputs.
void check_like_out(const AttentionProblem& problem, const TensorView& view, const Argument& argument, bool partial = false);
void check_like_lse(const AttentionProblem& problem, const TensorView& view, const Argument& argument);
void check_same(const TensorView& view, const Argument& argument, const TensorView& model, const char* names);
void check_gradient(const AttentionProblem& problem, const TensorView& view, const Argument& argument, const TensorView& model,
                    const char* names);

// `problem` says whether the call is a backward call, and whether delta is an input.
OptionTensors read_option_tensors(Reader& reader, const flash_attention_options_t& options, const AttentionProblem& problem);

// Step 3.
void build_option_tensors(AttentionProblem& problem, const OptionTensors& tensors, const flash_attention_options_t& options);

// Steps 4 and 5. On the CPU it also reads rng_state.
void check_contents(AttentionProblem& problem, const OptionTensors& tensors, const flash_attention_options_t& options,
                    const Reader& reader);

}  // namespace libflash
