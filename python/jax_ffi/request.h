/* A request: an operation of the library, lists of its operands and results, and named attributes.
 *
 * It is built twice: from shapes alone while JAX traces, to check the call and to get the size of the workspace, and from XLA's
 * call frame when the program runs. libflash/_jax_calls.py decides what it contains. */
#ifndef LIBFLASH_JAX_FFI_REQUEST_H
#define LIBFLASH_JAX_FFI_REQUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "libflash.h"

typedef enum operation_t { FORWARD, BACKWARD, DECODE, OPERATIONS } operation_t;

/* Operands: the fixed ones of the operation, then one for each bit of `operands` in the order of the bits.
 *
 *     FORWARD    q k v                   results  out lse
 *     BACKWARD   dout q k v out lse               dq dk dv [dbias]
 *     DECODE     q k_cache v_cache                out lse [k_cache v_cache], the caches if there are new rows
 *
 * libflash/jax.py computes the gradient of learnable_sink from lse and out with operations of XLA.
 * With bit WITH_WORKSPACE there is one more result, the last: the bytes of the workspace. */
enum { /* bits of FORWARD and BACKWARD */
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
       DECODE_OPERANDS
};
enum {                /* bits of all */
       WITH_RNG = 32, /* one more operand, the last, U32[4]: seed and offset, low words first */
       WITH_WORKSPACE,
       WITH_DBIAS,
       WITH_FILLED /* for each result but caches one more operand that it aliases, before the random state: these are filled,
                   because rows of packed arrays that belong to no sequence are not written */
};

#define MAX_TENSORS 32

typedef struct tensors_t {
    int count;
    flash_tensor_t items[MAX_TENSORS];
} tensors_t;

enum { LAYOUT_BSHD, LAYOUT_BHSD, LAYOUT_SBHD };

typedef struct attributes_t {
    int64_t operands; /* the bits above */
    int64_t flags;    /* FLASH_FLAG_... */
    int64_t layout;   /* order of the axes of q, k, v, out and their gradients */
    int64_t window_left, window_right, max_seqlen_q, max_seqlen_k, num_splits, split_size, num_threads, seed, offset;
    double softmax_scale, softcap, dropout_p;
    char backend[32], kernel[96];
} attributes_t;

typedef enum kind_t { INTEGER, REAL, TEXT } kind_t;

typedef struct field_t {
    size_t offset, size; /* size 0: there is no such field */
} field_t;

/* The named attributes. Each is a field of attributes_t, and an option is a field of the option structs that have it. */
typedef struct attribute_t {
    const char* name;
    kind_t kind;
    field_t own, attention, decode; /* of attributes_t, flash_attention_options_t, flash_decode_options_t */
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
    char text[512]; /* why a function below failed, if the error is not from the library */
} request_t;

bool request_has(const request_t* request, int bit);

/* Sets the text of an error and returns FLASH_STATUS_INVALID. */
flash_status_t refuse(request_t* request, const char* format, ...);

/* Size of the workspace of the request; checks everything that can be checked without data. */
flash_status_t request_workspace_size(request_t* request, size_t* bytes);

/* Runs the request. On the CPU (`host`) it allocates the workspace. */
flash_status_t request_run(request_t* request, bool host, void* stream);

/* The text of the failure that the last of these functions reported. */
const char* request_error(const request_t* request);

#endif /* LIBFLASH_JAX_FFI_REQUEST_H */
