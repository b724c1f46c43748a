/* A request: one operation of the library with a list of operands, a list of results, and named attributes.
 *
 * It is built twice: while JAX traces, from shapes alone, to check the call and to get the size of its workspace; and while XLA
 * runs, from the call frame. libflash/_jax_calls.py determines its contents. */
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
 * The gradient of learnable_sink is a sum over lse and out, which libflash/jax.py leaves to XLA.
 * With bit WITH_WORKSPACE the last result is one more: the bytes of the workspace. */
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
       DECODE_OPERANDS
};
enum {                /* bits of all */
       WITH_RNG = 16, /* one more operand, the last, U32[4]: seed and offset, low words first */
       WITH_WORKSPACE,
       WITH_DBIAS,
       WITH_FILLED /* at the end of the operands, before the random state, one for each result: the memory that the results take
                   over, filled, since rows of packed arrays that belong to no sequence are not written */
};

#define MAX_TENSORS 20

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

/* The table of named attributes, by which both sources fill attributes_t. */
typedef struct attribute_row_t {
    const char* name;
    kind_t kind;
    size_t at;   /* in attributes_t */
    size_t size; /* of a text */
} attribute_row_t;
extern const attribute_row_t attribute_rows[];
const attribute_row_t* find_attribute(const char* name, size_t length); /* NULL if there is none */

typedef struct request_t {
    operation_t operation;
    attributes_t attributes;
    tensors_t operands;
    tensors_t results;
    void* rng;       /* of the operand for it; NULL while JAX traces */
    void* workspace; /* of the result for it; NULL: none was given */
    size_t workspace_bytes;
    char text[512]; /* why a function below failed, if the error is not from the library */
} request_t;

bool request_has(const request_t* request, int bit);

/* Sets the text of an error and returns FLASH_STATUS_INVALID. */
flash_status_t refuse(request_t* request, const char* format, ...);

/* Size of the workspace of the request; checks everything that can be checked without data. */
flash_status_t request_workspace_size(request_t* request, size_t* bytes);

/* Runs the request. On the CPU the workspace is allocated for the call unless it was given. */
flash_status_t request_run(request_t* request, bool host, void* stream);

/* The text of the failure that the last of these functions reported. */
const char* request_error(const request_t* request);

#endif /* LIBFLASH_JAX_FFI_REQUEST_H */
