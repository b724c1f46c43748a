# Declarations of include/libflash.h, in its order. The header documents them. python/write_options writes the structs of options.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t


cdef extern from "libflash.h" nogil:
    # 2  Version
    enum:
        FLASH_VERSION
    int32_t flash_version()
    const char *flash_version_string()

    # 3  Status and error text
    ctypedef enum flash_status_t:
        FLASH_STATUS_OK
        FLASH_STATUS_INVALID
        FLASH_STATUS_UNSUPPORTED
        FLASH_STATUS_VERSION
        FLASH_STATUS_WORKSPACE
        FLASH_STATUS_NO_DEVICE
        FLASH_STATUS_CUDA
        FLASH_STATUS_OUT_OF_MEMORY
        FLASH_STATUS_INTERNAL
        FLASH_STATUS_CANCELLED
    const char *flash_status_name(flash_status_t status)
    const char *flash_last_error()

    # 4  Tensors and options
    enum:
        FLASH_DTYPE_NONE
        FLASH_DTYPE_FLOAT16
        FLASH_DTYPE_BFLOAT16
        FLASH_DTYPE_FLOAT32
        FLASH_DTYPE_FLOAT64
        FLASH_DTYPE_INT32
        FLASH_DTYPE_BOOL
        FLASH_DTYPE_INT64
        FLASH_DTYPE_FLOAT8_E4M3
        FLASH_DTYPE_FLOAT8_E5M2
        FLASH_DTYPE_INT8
        FLASH_DEVICE_CPU
        FLASH_DEVICE_CUDA
        FLASH_MAX_NDIM
        FLASH_MAX_THREADS
    ctypedef struct flash_tensor_t:
        void *data
        int32_t dtype
        int32_t device_type
        int32_t device_id
        int32_t ndim
        int64_t shape[4]
        int64_t stride[4]
    enum:
        FLASH_FLAG_CAUSAL
        FLASH_FLAG_TOP_LEFT
        FLASH_FLAG_WINDOW
        FLASH_FLAG_SCALE
        FLASH_FLAG_DETERMINISTIC
        FLASH_FLAG_ROTARY_INTERLEAVED
        FLASH_FLAG_FROM_LSE
        FLASH_FLAG_POSITIONS
        FLASH_FLAG_CONTINUE
        FLASH_FLAG_ADD
        FLASH_FLAG_INVARIANT_ROWS
        FLASH_BLOCK_SIZE
    ctypedef struct flash_block_lists_t:
        flash_tensor_t row_counts
        flash_tensor_t row_indices
        flash_tensor_t col_counts
        flash_tensor_t col_indices
    ctypedef struct flash_attention_options_t:
        uint32_t struct_size
        uint32_t flags
        double softmax_scale
        double softcap
        double dropout_p
        uint64_t seed
        uint64_t offset
        int64_t window_left
        int64_t window_right
        int64_t max_seqlen_q
        int64_t max_seqlen_k
        int64_t num_splits
        const flash_tensor_t *cu_seqlens_q
        const flash_tensor_t *cu_seqlens_k
        const flash_tensor_t *seqused_q
        const flash_tensor_t *seqused_k
        const flash_tensor_t *alibi_slopes
        const flash_tensor_t *bias
        const flash_tensor_t *mask
        const flash_tensor_t *learnable_sink
        const flash_tensor_t *block_mask
        const flash_block_lists_t *block_lists
        const flash_tensor_t *dlse
        const flash_tensor_t *dbias
        const flash_tensor_t *dsink
        const char *backend
        const char *kernel
        int32_t num_threads
        int32_t tile_q
        int32_t tile_k
        int32_t reserved
        const flash_tensor_t *rng_state
        int64_t row_begin
        int64_t row_step
        int64_t column_begin
        int64_t column_step
        const flash_tensor_t *row_begins
        const flash_tensor_t *column_begins
        const flash_tensor_t *row_positions
        const flash_tensor_t *column_positions
        const flash_tensor_t *sequence_numbers
        int64_t head_begin
        int64_t heads_total
        const flash_tensor_t *delta
        int32_t sm_margin
        int32_t reserved2
        const flash_tensor_t *max_logit
        const flash_tensor_t *entropy

    # 5  Forward
    flash_status_t flash_attention_forward(
        const flash_tensor_t *q, const flash_tensor_t *k, const flash_tensor_t *v, const flash_tensor_t *out,
        const flash_tensor_t *lse, const flash_attention_options_t *options, void *workspace, size_t workspace_bytes,
        void *stream)
    flash_status_t flash_attention_forward_workspace_size(
        const flash_tensor_t *q, const flash_tensor_t *k, const flash_tensor_t *v, const flash_tensor_t *out,
        const flash_tensor_t *lse, const flash_attention_options_t *options, size_t *bytes)

    # 6  Backward
    flash_status_t flash_attention_backward(
        const flash_tensor_t *dout, const flash_tensor_t *q, const flash_tensor_t *k, const flash_tensor_t *v,
        const flash_tensor_t *out, const flash_tensor_t *lse, const flash_tensor_t *dq, const flash_tensor_t *dk,
        const flash_tensor_t *dv, const flash_attention_options_t *options, void *workspace, size_t workspace_bytes,
        void *stream)
    flash_status_t flash_attention_backward_workspace_size(
        const flash_tensor_t *dout, const flash_tensor_t *q, const flash_tensor_t *k, const flash_tensor_t *v,
        const flash_tensor_t *out, const flash_tensor_t *lse, const flash_tensor_t *dq, const flash_tensor_t *dk,
        const flash_tensor_t *dv, const flash_attention_options_t *options, size_t *bytes)

    # 7  Decode
    ctypedef struct flash_decode_options_t:
        uint32_t struct_size
        uint32_t flags
        double softmax_scale
        double softcap
        int64_t window_left
        int64_t window_right
        int64_t num_splits
        int64_t split_size
        const flash_tensor_t *cache_seqlens
        const flash_tensor_t *block_table
        const flash_tensor_t *cache_batch_idx
        const flash_tensor_t *cache_leftpad
        const flash_tensor_t *k_new
        const flash_tensor_t *v_new
        const flash_tensor_t *rotary_cos
        const flash_tensor_t *rotary_sin
        const flash_tensor_t *alibi_slopes
        const flash_tensor_t *learnable_sink
        const char *backend
        const char *kernel
        int32_t num_threads
        int32_t reserved
        const flash_tensor_t *k_scale
        const flash_tensor_t *v_scale
        const flash_tensor_t *k_rope_cache
        const flash_tensor_t *k_rope_new
        const flash_tensor_t *cu_seqlens_q
        const flash_tensor_t *cu_seqlens_new
        const flash_tensor_t *q_positions
        const flash_tensor_t *tree_mask
        const flash_tensor_t *cu_seqlens_tree
        const flash_tensor_t *shared_groups
        const flash_tensor_t *shared_lens
        int64_t shard_count
        int64_t shard_index
        int64_t shard_keys
        const flash_tensor_t *schedule
    flash_status_t flash_attention_decode(
        const flash_tensor_t *q, const flash_tensor_t *k_cache, const flash_tensor_t *v_cache, const flash_tensor_t *out,
        const flash_tensor_t *lse, const flash_decode_options_t *options, void *workspace, size_t workspace_bytes,
        void *stream)
    flash_status_t flash_attention_decode_workspace_size(
        const flash_tensor_t *q, const flash_tensor_t *k_cache, const flash_tensor_t *v_cache, const flash_tensor_t *out,
        const flash_tensor_t *lse, const flash_decode_options_t *options, size_t *bytes)
    flash_status_t flash_attention_decode_schedule_size(
        const flash_tensor_t *q, const flash_tensor_t *k_cache, const flash_tensor_t *v_cache, const flash_tensor_t *out,
        const flash_tensor_t *lse, const flash_decode_options_t *options, size_t *bytes)
    flash_status_t flash_attention_decode_schedule(
        const flash_tensor_t *q, const flash_tensor_t *k_cache, const flash_tensor_t *v_cache, const flash_tensor_t *out,
        const flash_tensor_t *lse, const flash_decode_options_t *options, const flash_tensor_t *schedule, void *stream)

    # 8  Merge
    ctypedef struct flash_merge_options_t:
        uint32_t struct_size
        uint32_t flags
        const char *backend
        const char *kernel
        int32_t num_threads
        int32_t reserved
    flash_status_t flash_attention_merge(
        const flash_tensor_t *outs, const flash_tensor_t *lses, int32_t count, const flash_tensor_t *out,
        const flash_tensor_t *lse, const flash_merge_options_t *options, void *stream)

    ctypedef struct flash_cache_write_options_t:
        uint32_t struct_size
        uint32_t flags
        const flash_tensor_t *k_scale
        const flash_tensor_t *v_scale
        const flash_tensor_t *k_rope_cache
        const flash_tensor_t *k_rope_new
        const flash_tensor_t *rotary_cos
        const flash_tensor_t *rotary_sin
        const flash_tensor_t *positions
        const char *backend
        const char *kernel
        int32_t num_threads
        int32_t reserved
    flash_status_t flash_cache_write(
        const flash_tensor_t *k_new, const flash_tensor_t *v_new, const flash_tensor_t *k_cache, const flash_tensor_t *v_cache,
        const flash_tensor_t *slots, const flash_cache_write_options_t *options, void *stream)

    # 9  Block masks
    flash_status_t flash_block_mask_compress(
        const flash_tensor_t *block_mask, const flash_block_lists_t *lists, void *stream)

    # 10  What would run
    flash_status_t flash_attention_forward_explain(
        const flash_tensor_t *q, const flash_tensor_t *k, const flash_tensor_t *v,
        const flash_attention_options_t *options, char *text, size_t capacity, size_t *needed)
    flash_status_t flash_attention_backward_explain(
        const flash_tensor_t *q, const flash_tensor_t *k, const flash_tensor_t *v,
        const flash_attention_options_t *options, char *text, size_t capacity, size_t *needed)
    flash_status_t flash_attention_decode_explain(
        const flash_tensor_t *q, const flash_tensor_t *k_cache, const flash_tensor_t *v_cache,
        const flash_decode_options_t *options, char *text, size_t capacity, size_t *needed)

    # 11  Information
    ctypedef struct flash_kernel_info_t:
        uint32_t struct_size
        int32_t usable
        const char *name
        const char *operation
        const char *backend
        const char *dtype
        const char *why_not
        int32_t head_dim
        int32_t head_dim_v
        int32_t tile_q
        int32_t tile_k
        int32_t stages
        int32_t reserved
    int32_t flash_kernel_count()
    flash_status_t flash_kernel_info(int32_t index, flash_kernel_info_t *info)
    ctypedef struct flash_device_info_t:
        uint32_t struct_size
        int32_t arch
        int32_t multiprocessors
        int32_t shared_memory_bytes
        int64_t memory_bytes
        char name[256]
    int32_t flash_device_count()
    flash_status_t flash_device_info(int32_t index, flash_device_info_t *info)
    const char *flash_cuda_state()
    const char *flash_build_info()
    const char *flash_cpu_isa()
    int32_t flash_cpu_threads()

    # 12  Interrupting a CPU call
    void flash_set_interrupt(int32_t (*check)(void *context) noexcept nogil, void *context)

    # 14  Tangents
    ctypedef struct flash_tangents_t:
        uint32_t struct_size
        uint32_t flags
        const flash_tensor_t *q
        const flash_tensor_t *k
        const flash_tensor_t *v
        const flash_tensor_t *bias
        const flash_tensor_t *learnable_sink
        const flash_tensor_t *out
        const flash_tensor_t *lse
        const flash_tensor_t *dout
        const flash_tensor_t *dlse
        const flash_tensor_t *delta
        const flash_tensor_t *cotangent
        const flash_tensor_t *dq
        const flash_tensor_t *dk
        const flash_tensor_t *dv
        const flash_tensor_t *dbias
        const flash_tensor_t *dsink
    flash_status_t flash_attention_forward_tangent(
        const flash_tensor_t *q, const flash_tensor_t *k, const flash_tensor_t *v, const flash_tensor_t *out,
        const flash_tensor_t *lse, const flash_tangents_t *tangents, const flash_attention_options_t *options, void *workspace,
        size_t workspace_bytes, void *stream)
    flash_status_t flash_attention_forward_tangent_workspace_size(
        const flash_tensor_t *q, const flash_tensor_t *k, const flash_tensor_t *v, const flash_tensor_t *out,
        const flash_tensor_t *lse, const flash_tangents_t *tangents, const flash_attention_options_t *options, size_t *bytes)
    flash_status_t flash_attention_backward_tangent(
        const flash_tensor_t *dout, const flash_tensor_t *q, const flash_tensor_t *k, const flash_tensor_t *v,
        const flash_tensor_t *out, const flash_tensor_t *lse, const flash_tensor_t *dq, const flash_tensor_t *dk,
        const flash_tensor_t *dv, const flash_tangents_t *tangents, const flash_attention_options_t *options, void *workspace,
        size_t workspace_bytes, void *stream)
    flash_status_t flash_attention_backward_tangent_workspace_size(
        const flash_tensor_t *dout, const flash_tensor_t *q, const flash_tensor_t *k, const flash_tensor_t *v,
        const flash_tensor_t *out, const flash_tensor_t *lse, const flash_tensor_t *dq, const flash_tensor_t *dk,
        const flash_tensor_t *dv, const flash_tangents_t *tangents, const flash_attention_options_t *options, size_t *bytes)
    flash_status_t flash_attention_forward_tangent_explain(
        const flash_tensor_t *q, const flash_tensor_t *k, const flash_tensor_t *v, const flash_tangents_t *tangents,
        const flash_attention_options_t *options, char *text, size_t capacity, size_t *needed)
    flash_status_t flash_attention_backward_tangent_explain(
        const flash_tensor_t *q, const flash_tensor_t *k, const flash_tensor_t *v, const flash_tangents_t *tangents,
        const flash_attention_options_t *options, char *text, size_t capacity, size_t *needed)
