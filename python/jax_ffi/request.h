/* A request: an operation of the library, lists of its operands and results, and named attributes.
 *
 * A request is built twice: from shapes alone while JAX traces, to check the call and to get the size of the workspace; and from
 * XLA's call frame when the program runs. libflash/_jax_calls.py decides what a request contains. */
#ifndef LIBFLASH_JAX_FFI_REQUEST_H
#define LIBFLASH_JAX_FFI_REQUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "libflash.h"

typedef enum operation_t { FORWARD, BACKWARD, DECODE, FORWARD_TANGENT, BACKWARD_TANGENT, CACHE_WRITE, OPERATIONS } operation_t;

/* Operands: first the fixed operands of the operation, then one for each bit that is set in attributes_t.operands, in the order
 * of the bits.
 *
 *     FORWARD           q k v               results  out lse [max_logit] [entropy]
 *     BACKWARD          dout q k v out lse           dq dk dv [dbias]
 *     DECODE            q k_cache [v_cache]          out lse [k_cache [v_cache] ...], what is written if there are new rows
 *     FORWARD_TANGENT   q k v out lse                tangents of out lse
 *     BACKWARD_TANGENT  dout q k v out lse           tangents of dq dk dv [dbias] [out lse]
 *     CACHE_WRITE       k k_cache slots              k_cache [v_cache] ...
 *
 * With the attribute head_dim_v there is no operand v_cache, because the values are channels of k_cache. The results "..." are,
 * in this order and if they are operands, k_scale and v_scale with more than 2 dimensions, and k_rope_cache. Results that the
 * call writes in place alias their operands.
 *
 * BACKWARD_TANGENT itself computes the tangents of out and lse, which it needs. With bit WITH_OUT_ANEW it also computes out
 * again, because the operand out was rounded (libflash/_second_order.py). libflash/_jax_derivatives.py computes the derivatives
 * with respect to learnable_sink from lse and out with operations of XLA.
 * With bit WITH_WORKSPACE there is one more result, the last one: the workspace. */
enum { /* bits of all operations but DECODE and CACHE_WRITE; from WITH_TQ on the tangents, for the operations on tangents */
       WITH_CU_SEQLENS_Q,
       WITH_CU_SEQLENS_K,
       WITH_SEQUSED_Q,
       WITH_SEQUSED_K,
       WITH_ALIBI_SLOPES,
       WITH_BIAS,
       WITH_MASK,
       WITH_LEARNABLE_SINK,
       WITH_BLOCK_MASK,
       WITH_DLSE,
       WITH_ROW_POSITIONS,
       WITH_COLUMN_POSITIONS,
       OPTION_OPERANDS,
       WITH_TQ = OPTION_OPERANDS,
       WITH_TK,
       WITH_TV,
       WITH_TBIAS,
       WITH_TDOUT,
       WITH_TDLSE,
       ATTENTION_OPERANDS
};
enum { /* bits of DECODE */
       WITH_CACHE_SEQLENS,
       WITH_BLOCK_TABLE,
       WITH_CACHE_BATCH_IDX,
       WITH_CACHE_LEFTPAD,
       WITH_K_NEW,
       WITH_V_NEW,
       WITH_ROTARY_COS,
       WITH_ROTARY_SIN,
       WITH_DECODE_ALIBI_SLOPES,
       WITH_DECODE_SINK,
       WITH_DECODE_CU_SEQLENS_Q,
       WITH_CU_SEQLENS_NEW,
       WITH_Q_POSITIONS,
       WITH_TREE_MASK,
       WITH_CU_SEQLENS_TREE,
       WITH_SHARED_GROUPS,
       WITH_SHARED_LENS,
       WITH_K_SCALE,
       WITH_V_SCALE,
       WITH_K_ROPE_CACHE,
       WITH_K_ROPE_NEW,
       DECODE_OPERANDS
};
enum { /* bits of CACHE_WRITE */
       WITH_WRITTEN_V,
       WITH_WRITTEN_V_CACHE,
       WITH_WRITTEN_K_SCALE,
       WITH_WRITTEN_V_SCALE,
       WITH_WRITTEN_K_ROPE_CACHE,
       WITH_WRITTEN_K_ROPE_NEW,
       WITH_WRITTEN_ROTARY_COS,
       WITH_WRITTEN_ROTARY_SIN,
       WITH_POSITIONS,
       CACHE_WRITE_OPERANDS
};
enum {                /* bits of all */
       WITH_RNG = 32, /* one more operand, the last, U32[4]: seed and offset, low words first */
       WITH_WORKSPACE,
       WITH_DBIAS,
       WITH_FILLED,    /* before the random state, each result but the caches has one more operand, which the result aliases.
                    It contains the values of rows of packed arrays that belong to no sequence: such rows are not written */
       WITH_TANGENTS,  /* BACKWARD_TANGENT: the tangents of out and lse are results too */
       WITH_MAX_LOGIT, /* FORWARD: statistics, shaped like lse, are results too */
       WITH_ENTROPY,
       WITH_OUT_ANEW /* BACKWARD_TANGENT */
};

#define MAX_TENSORS 32

typedef struct tensors_t {
    int count;
    flash_tensor_t items[MAX_TENSORS];
} tensors_t;

enum { LAYOUT_BSHD, LAYOUT_BHSD, LAYOUT_SBHD };

/* python/write_options writes the numbers of the list of options, and their rows in the table of attributes.c. */
typedef struct attributes_t {
    int64_t operands; /* the bits above */
    int64_t flags;    /* FLASH_FLAG_... */
    int64_t layout;   /* order of the axes of q, k, v, out and their gradients */
    int64_t num_threads, window_left, window_right, seed, offset, max_seqlen_q, max_seqlen_k, num_splits, split_size, head_begin,
        heads_total, shard_count, shard_index, shard_keys;
    int64_t head_dim_v; /* DECODE: if not 0, the values are the first head_dim_v channels of k_cache */
    double softmax_scale, softcap, dropout_p;
    char backend[32], kernel[96];
} attributes_t;

typedef enum kind_t { INTEGER, REAL, TEXT } kind_t;

typedef struct field_t {
    size_t offset, size; /* size 0: there is no such field */
} field_t;

/* An attribute: a field of attributes_t. If it is an option, it is also a field of the option structs that have this option. */
typedef struct attribute_t {
    const char* name;
    kind_t kind;
    field_t own, attention, decode, write; /* of attributes_t and of the three structs of options */
} attribute_t;
extern const attribute_t attribute_table[];                         /* ends with an entry without a name */
const attribute_t* find_attribute(const char* name, size_t length); /* NULL if there is none */

typedef struct request_t {
    operation_t operation;
    attributes_t attributes;
    tensors_t operands;
    tensors_t results;
    void* rng;       /* memory of the random state; NULL while JAX traces */
    void* workspace; /* memory of the last result; NULL without WITH_WORKSPACE */
    size_t workspace_bytes;
    char text[512]; /* why one of the functions below failed, if the error did not come from the library; else empty */
} request_t;

bool request_has(const request_t* request, int bit);

/* Sets the text of an error and returns FLASH_STATUS_INVALID. */
flash_status_t refuse(request_t* request, const char* format, ...);

/* Gets the bytes of workspace that the request needs. Checks everything that can be checked without data. */
flash_status_t request_workspace_size(request_t* request, size_t* bytes);

/* Runs the request. On the CPU (`host`) this function allocates the workspace. */
flash_status_t request_run(request_t* request, bool host, void* stream);

/* The error text of the last of these functions that failed. */
const char* request_error(const request_t* request);

#endif /* LIBFLASH_JAX_FFI_REQUEST_H */
