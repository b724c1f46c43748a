// One forward and backward problem: its tensors, each in its own memory, and a call with them that can be made invalid.
#pragma once

#include <string>

#include "check.h"

namespace fuzz {

enum Role {
    kQ,
    kK,
    kV,
    kOut,
    kLse,
    kDout,
    kDq,
    kDk,
    kDv,
    kCuQ,
    kCuK,
    kUsedQ,
    kUsedK,
    kAlibi,
    kBias,
    kMask,
    kSink,
    kBlockMask,
    kRowCounts,
    kRowIndices,
    kColCounts,
    kColIndices,
    kDlse,
    kDbias,
    kDsink,
    kRngState,
    kRowPositions,
    kColumnPositions,
    kRoles
};

// The arguments of the C function: copies, which may be changed without changing the tensors.
struct AttentionCall {
    flash_tensor_t view[kRoles] = {};
    bool given[kRoles] = {};
    bool backward = false;
    bool null_options = false;
    flash_attention_options_t options = {};

    const flash_tensor_t* at(Role role) const { return given[role] ? &view[role] : nullptr; }
    void bind();  // sets the pointers of the options to the views
    flash_status_t workspace_size(size_t* bytes) const;
    flash_status_t run(void* workspace, size_t bytes) const;
    flash_status_t explain(char* text, size_t capacity, size_t* needed) const;

    flash_block_lists_t lists = {};
};

struct AttentionCase {
    Tensor tensor[kRoles];
    flash_attention_options_t options = {};
    Magnitudes magnitudes;
    int32_t dtype = FLASH_DTYPE_FLOAT32;
    int64_t batch = 1, heads_q = 1, heads_k = 1, head_dim = 1, head_dim_v = 1;
    int64_t seqlen_q = 1, seqlen_k = 1;  // of the longest sequence
    int64_t rows_q = 1, rows_k = 1;      // of a packed tensor
    bool packed_q = false, packed_k = false;

    explicit AttentionCase(Bytes& bytes);
    AttentionCall call(bool backward) const;

private:
    void choose_sizes(Bytes& bytes);
    void choose_options(Bytes& bytes);
    void allocate(Role role, const flash_tensor_t& shape, Bytes& bytes) { tensor[role].allocate(shape, bytes.below(4)); }
    void make_rows(Role role, Bytes& bytes, bool query, int64_t channels, bool input);
    void make_lse(Role role, Bytes& bytes);
    void make_lengths(Role cu, Role used, Bytes& bytes, int64_t rows, int64_t seqlen, bool packed);
    void make_score_terms(Bytes& bytes, Random& random);
    void make_block_mask(Bytes& bytes, Random& random);
    void make_rng_state(Bytes& bytes);  // instead of seed and offset
    void make_positions(Bytes& bytes);
    void make_positions_of_rows(Role role, Bytes& bytes, bool query);
};

// Makes the call invalid and returns what was changed; empty if nothing could be changed. `expected`: the status that must be
// returned.
std::string invalidate(AttentionCase& problem, AttentionCall& call, Bytes& bytes, flash_status_t* expected);

}  // namespace fuzz
