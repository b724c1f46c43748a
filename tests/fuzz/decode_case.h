// One decode problem: a cache, contiguous or paged, possibly new keys, and a call with them that can be made invalid.
#pragma once

#include <string>
#include <vector>

#include "check.h"

namespace fuzz {

enum DecodeRole {
    kQuery,
    kKCache,
    kVCache,
    kDecodeOut,
    kDecodeLse,
    kSeqlens,
    kTable,
    kBatchIdx,
    kLeftpad,
    kKNew,
    kVNew,
    kCos,
    kSin,
    kSlopes,
    kDecodeSink,
    kCuQ,
    kCuNew,
    kPositions,
    kTree,
    kCuTree,
    kGroups,
    kShared,
    kKScale,
    kVScale,
    kRopeCache,
    kRopeNew,
    kSchedule,
    kDecodeRoles
};

struct DecodeCall {
    flash_tensor_t view[kDecodeRoles] = {};
    bool given[kDecodeRoles] = {};
    flash_decode_options_t options = {};

    const flash_tensor_t* at(DecodeRole role) const { return given[role] ? &view[role] : nullptr; }
    void bind();
    flash_status_t workspace_size(size_t* bytes) const;
    flash_status_t schedule_size(size_t* bytes) const;
    flash_status_t write_schedule(const flash_tensor_t* schedule) const;
    flash_status_t run(void* workspace, size_t bytes) const;
};

struct DecodeCase {
    Tensor tensor[kDecodeRoles];
    flash_decode_options_t options = {};
    Magnitudes magnitudes;
    int32_t dtype = FLASH_DTYPE_FLOAT32, cache_dtype = FLASH_DTYPE_FLOAT32;
    int64_t batch = 1, heads_q = 1, heads_k = 1, head_dim = 1, head_dim_v = 1, seqlen_q = 1, seqlen_new = 0;
    int64_t capacity = 1, page_size = 0, pages = 0, entries = 1;
    int64_t rope_dim = 0;    // the last channels of the keys, which are in kRopeCache; 0: kKCache has all
    bool rope_in_k = false;  // both parts of the keys in the buffer of kKCache
    bool v_in_k = false;     // the values are the first channels of kKCache, so there is no tensor kVCache
    bool append = false;
    bool packed = false;                  // each sequence has its own number of rows, at most seqlen_q and seqlen_new
    std::vector<int64_t> rows, new_rows;  // of each sequence

    explicit DecodeCase(Bytes& bytes);
    DecodeCall call() const;
    // Makes the views of parts of k_cache follow it.
    void place_parts(DecodeCall& call) const;
    int64_t cached(int64_t b) const;
    int64_t leftpad(int64_t b) const;
    int64_t cache_block(int64_t b, int64_t j) const;  // the entry or page of key j
    int64_t row_in_block(int64_t j) const { return page_size > 0 ? j % page_size : j; }
    bool codes() const { return cache_dtype != dtype; }
    int64_t channels_k() const { return head_dim - rope_dim; }
    bool scale_of_rows(DecodeRole role) const { return tensor[role].present() && tensor[role].view.ndim > 2; }

private:
    void choose_sizes(Bytes& bytes);
    void choose_parts(Bytes& bytes);
    void choose_options(Bytes& bytes);
    void make_lengths(Bytes& bytes);
    void choose_rows(Bytes& bytes);
    void make_packing(Bytes& bytes);
    void make_prefix_sums(DecodeRole role, const std::vector<int64_t>& counts, Bytes& bytes);
    void make_positions(Bytes& bytes, Random& random);
    void make_tree(Bytes& bytes, Random& random);
    int64_t all_rows() const;
    void make_shared_keys(Bytes& bytes);
    void make_shard(Bytes& bytes);
    void make_block_table(Bytes& bytes, Random& random);
    void forget_spare_pages();
    flash_tensor_t rows_shape(bool of_queries, int64_t heads, int64_t channels, bool repeats, Bytes& bytes) const;
    void make_caches(Bytes& bytes);
    void make_scales(Bytes& bytes);
    void make_scale(DecodeRole role, int64_t channels, Bytes& bytes);
    void make_new_rows(Bytes& bytes);
    void fill_cached(DecodeRole cache, Random& random);
    void fill_scale(DecodeRole scale, Random& random);
    void make_schedule(Bytes& bytes, Random& random);
    void find_magnitudes();
    void make_rotary(Bytes& bytes, Random& random);
    void make_head_terms(Bytes& bytes, Random& random);
    void allocate(DecodeRole role, const flash_tensor_t& shape, Bytes& bytes) { tensor[role].allocate(shape, bytes.below(4)); }
};

// As in attention_case.h.
std::string invalidate(DecodeCase& problem, DecodeCall& call, Bytes& bytes, flash_status_t* expected);

}  // namespace fuzz
