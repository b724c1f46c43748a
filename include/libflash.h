/* libflash: exact attention on the CPU and on NVIDIA GPUs, with a plain C interface.
 *
 * This header is the manual. It is the only header that is installed. It is valid C99 and C++11 (and later), and it includes
 * only <stddef.h> and <stdint.h>.
 *
 * CONTENTS
 *   1  Introduction             6  Backward                             11  Information: kernels, devices, build
 *   2  Version                  7  Decode; writing to a KV cache        12  Interrupting a CPU call
 *   3  Status and error text    8  Merge                                13  Not stable: options for tests
 *   4  Tensors and options      9  Block masks                          14  Tangents: forward mode, second derivatives
 *   5  Forward                 10  Explain: what a call would run
 *
 * ---------------------------------------------------------------------------------------------------------------------
 * 1  INTRODUCTION
 *
 * For one head, attention of query row i over the keys j that it sees is:
 *
 *     s_ij = softmax_scale * dot(q_i, k_j)                    default softmax_scale: 1 / sqrt(head_dim)
 *     s_ij = softcap * tanh(s_ij / softcap)                   if softcap > 0
 *     s_ij = s_ij - alibi_slope * |i + Lk - Lq - j|           if alibi_slopes is given
 *     s_ij = s_ij + bias_ij                                   if bias is given
 *     p_ij = exp(s_ij - lse_i),  lse_i = log(sum_j exp(s_ij) [+ exp(learnable_sink)])
 *     o_i  = sum_j dropout(p_ij) v_j
 *
 * Lq and Lk are the numbers of queries and keys of the sequence (one entry of the batch). A row sees a key if the causal rule,
 * the window, `mask` and `block_mask` all allow it; the sums run over these keys only. The result is exact: no key that a row
 * sees is approximated or skipped. The matrix of scores is never stored, so memory is linear in the sequence length. Method:
 * Dao et al., "FlashAttention" (arXiv 2205.14135) and "FlashAttention-2" (arXiv 2307.08691).
 *
 * A row that sees no key has o = 0, lse = -infinity (with a sink: lse = the sink), and zero gradients.
 *
 * NaN and infinity. In q they affect only the results of their own row; in k and v, only those of the rows that see the key.
 * Memory outside the sequences (rows past a length, the unused rest of a page, free pages) never affects a result. Exceptions:
 *   - On CUDA, and in decode on the CPU too, a NaN or infinity in v at a key that a row does not see can reach that row if the
 *     row sees another key of the same tile (at most 128 keys), or if only `mask` or a bias of -infinity hides the key. Other
 *     rows are not affected.
 *   - In backward on CUDA, a NaN or infinity in q, k, v or dout can reach, besides the gradients that depend on it, those of the
 *     rows and keys that share a tile of at most 128 rows and 128 keys with it.
 *   - On CUDA, a row whose scores overflow can change the last bits of the other rows of its tile.
 *   - In backward on CUDA with BFLOAT16, a sum of dq, dk or dv beyond 2^95, before the softmax scale, can overflow.
 * With BFLOAT16 on processors with AVX-512-BF16, the matrix products treat subnormal numbers as zero.
 *
 * Scores of large magnitude. Backward and the tangents compute the softmax again, as exp(s - lse), with a relative error of about
 * |s| 2^-24 (FLOAT64: |s| 2^-53): about 1e-3 if all scores of a row are near 1e4. In a row masked by a bias of -1e9 or of the
 * smallest finite number, lse cannot hold the sum of the exponentials, and gradients are up to Sk times too large. Mask with
 * `mask` or with -infinity.
 *
 * Rules for every function:
 *   - Memory. The caller owns all memory. The library allocates no device memory and prints nothing.
 *   - Lifetime. Structs and strings that arguments point to are read before the function returns and may then be freed. Device
 *     memory (tensors, workspace) must stay valid until the enqueued work has finished.
 *   - Device. The tensors decide where a call runs. With host tensors it runs on the CPU and is complete when the function
 *     returns. With CUDA tensors it runs on `stream`, a cudaStream_t of the device of the tensors (NULL: its legacy default
 *     stream), and the function returns when the work is enqueued. The current device of the thread does not change. The library
 *     never synchronises with the device, so calls may be captured in a CUDA graph.
 *   - Checks. Shapes, types and values are checked before the first byte is written, on the CPU also the contents of lengths and
 *     tables. A refused call leaves the outputs untouched and returns a status other than FLASH_STATUS_OK. flash_last_error()
 *     then names the argument, the rule and the value. After the first write only CUDA, OUT_OF_MEMORY, INTERNAL and CANCELLED can
 *     be returned.
 *   - Workspace. Scratch memory comes from the caller, on the device of the tensors. The `..._workspace_size` functions return
 *     how many bytes a call needs. Pass at least that many, aligned to 256 bytes; if the size is 0, the workspace may be NULL.
 *     Its contents have no meaning before or after the call. Two calls that run at the same time need two workspaces.
 *   - Threads. Any function may be called from any number of threads at once.
 *   - State. Between calls the library keeps: device properties, the thread counts of the environment and the CPU quota, each
 *     read once; for each thread the last error text and the interrupt check; and a pool of threads for CPU calls. The first CPU
 *     call that uses more than one thread starts the pool. All CPU calls share it. It has at most as many threads as the machine
 *     has processors, or as the largest num_threads of a call. Its threads sleep between calls and block all signals. During a
 *     call they have the affinity and the floating-point environment of the calling thread. After fork() the child starts its own
 *     pool. Once the pool exists, dlclose() does not unload the library.
 *
 * A first call with all defaults; q, k, v and out are (batch, seqlen, heads, head_dim) in host memory:
 *
 *     flash_tensor_t q = ..., k = ..., v = ..., out = ...;
 *     size_t bytes = 0;
 *     flash_attention_forward_workspace_size(&q, &k, &v, &out, NULL, NULL, &bytes);
 *     char *block = malloc(bytes + 255);
 *     void *workspace = (void *)(((uintptr_t)block + 255) / 256 * 256);
 *     if (flash_attention_forward(&q, &k, &v, &out, NULL, NULL, workspace, bytes, NULL) != FLASH_STATUS_OK)
 *         fprintf(stderr, "%s\n", flash_last_error());
 *     free(block);
 */
#ifndef LIBFLASH_H
#define LIBFLASH_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__) || defined(__clang__)
#define FLASH_API __attribute__((visibility("default")))
#else
#define FLASH_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------------------------------------
 * 2  VERSION
 *
 * Semantic versioning. While the major version is 0, a minor version may change the interface, so the SONAME contains both
 * numbers: libflash.so.0.2. From version 1 on it contains the major version only. New versions add fields at the end of option
 * and info structs; `struct_size` tells the library which fields the caller has. */
#define FLASH_VERSION_MAJOR 0
#define FLASH_VERSION_MINOR 2
#define FLASH_VERSION_PATCH 0
#define FLASH_VERSION (FLASH_VERSION_MAJOR * 10000 + FLASH_VERSION_MINOR * 100 + FLASH_VERSION_PATCH)

/* The version of the loaded library, encoded like FLASH_VERSION, which is the version of this header. */
FLASH_API int32_t flash_version(void);

/* The version of the loaded library as text, "0.2.0". Valid as long as the library is loaded. */
FLASH_API const char *flash_version_string(void);

/* ---------------------------------------------------------------------------------------------------------------------
 * 3  STATUS AND ERROR TEXT */
typedef enum flash_status_t {
    FLASH_STATUS_OK = 0,
    FLASH_STATUS_INVALID = 1,       /* an argument is wrong: a shape, a stride, a value, a missing tensor, a device_id that */
                                    /*   does not exist; or LIBFLASH_NUM_THREADS is not a valid number */
    FLASH_STATUS_UNSUPPORTED = 2,   /* the call is correct, but no kernel of this build supports it on this machine */
    FLASH_STATUS_VERSION = 3,       /* `struct_size` fits no version, or a field is set that this library does not know */
    FLASH_STATUS_WORKSPACE = 4,     /* the workspace is missing, too small or misaligned; the error text has the size needed */
    FLASH_STATUS_NO_DEVICE = 5,     /* CUDA tensors, but no usable GPU, no driver, or a driver that is too old */
    FLASH_STATUS_CUDA = 6,          /* the CUDA runtime reported an error, possibly one of earlier work */
    FLASH_STATUS_OUT_OF_MEMORY = 7, /* host memory could not be allocated */
    FLASH_STATUS_INTERNAL = 8,      /* a defect of the library */
    FLASH_STATUS_CANCELLED = 9      /* the interrupt check ended the call (section 12); its outputs are undefined */
} flash_status_t;

/* "INVALID" for FLASH_STATUS_INVALID, and so on; "UNKNOWN" for any other value. Never NULL. */
FLASH_API const char *flash_status_name(flash_status_t status);

/* The error text of the last call on this thread that returned a flash_status_t, or of flash_cpu_threads if that was later; "" if
 * it succeeded. At most 2047 characters. Never NULL. Valid until the next call of a libflash function on this thread. */
FLASH_API const char *flash_last_error(void);

/* ---------------------------------------------------------------------------------------------------------------------
 * 4  TENSORS AND OPTIONS
 *
 * A flash_tensor_t is a view; the caller owns the data.
 *   - Strides count elements, not bytes. They may have any value that is not negative. Inputs may repeat (stride 0). Strides of
 *     dimensions of size 0 or 1 are ignored. (batch, heads, seqlen, head_dim) memory is therefore passed by giving shape and
 *     strides in the order that this header states.
 *   - The last dimension must be contiguous (stride 1) in q, k, v, out, dout, dq, dk, dv and their tangents, the caches, k_new,
 *     v_new, k_rope_new, the rotary tables, and outs and out of a merge. Vectors of INT32 and INT64 and arrays of positions must
 *     be contiguous; block_table, tree_mask and block lists may have strides.
 *   - Each size is less than 2^40. On CUDA the batch is less than 2^31, and the rows of a tensor or sequence and the capacity are
 *     less than 2^29 (else UNSUPPORTED). Data must be aligned to the size of its elements. `data` may be NULL if the tensor has
 *     no elements.
 *   - An output must not overlap an input, another output or itself. Slices of one buffer (dq, dk and dv in one tensor) do not
 *     overlap. Some interleaved strides are refused although no byte is shared. Exception: the caches of section 7, "Views
 *     and parts". */
typedef enum flash_dtype_t {
    FLASH_DTYPE_NONE = 0,
    FLASH_DTYPE_FLOAT16 = 1,
    FLASH_DTYPE_BFLOAT16 = 2,
    FLASH_DTYPE_FLOAT32 = 3,
    FLASH_DTYPE_FLOAT64 = 4, /* on CUDA: forward, backward and their tangents only */
    FLASH_DTYPE_INT32 = 5,
    FLASH_DTYPE_BOOL = 6, /* one byte; 0 is false, any other value is true */
    FLASH_DTYPE_INT64 = 7,       /* rng_state and slots only */
    FLASH_DTYPE_FLOAT8_E4M3 = 8, /* these three: caches of decode only. E4M3 without infinities (OCP "E4M3FN": largest 448, */
    FLASH_DTYPE_FLOAT8_E5M2 = 9, /*   NaN 0x7f and 0xff); E5M2: largest finite 57344 */
    FLASH_DTYPE_INT8 = 10
} flash_dtype_t;

typedef enum flash_device_type_t {
    FLASH_DEVICE_CPU = 0,
    FLASH_DEVICE_CUDA = 1
} flash_device_type_t;

#define FLASH_MAX_NDIM 4

typedef struct flash_tensor_t {
    void *data;
    int32_t dtype;       /* flash_dtype_t */
    int32_t device_type; /* flash_device_type_t */
    int32_t device_id;   /* CUDA ordinal; 0 on the CPU */
    int32_t ndim;        /* 0 to FLASH_MAX_NDIM */
    int64_t shape[FLASH_MAX_NDIM];
    int64_t stride[FLASH_MAX_NDIM]; /* in elements */
} flash_tensor_t;

/* Shapes. B = batch, Sq and Sk = seqlen of queries and keys, Hq and Hk = heads of queries and keys, D = head_dim,
 * Dv = head_dim_v:
 *
 *              dense               packed (`cu_seqlens_q` / `cu_seqlens_k` given)
 *     q        (B, Sq, Hq, D)      (total_q, Hq, D)
 *     k        (B, Sk, Hk, D)      (total_k, Hk, D)
 *     v        (B, Sk, Hk, Dv)     (total_k, Hk, Dv)
 *     out      (B, Sq, Hq, Dv)     (total_q, Hq, Dv)
 *     lse      (B, Hq, Sq)         (Hq, total_q)
 *
 * The query side and the key side may be dense or packed independently. Hq must be a multiple of Hk; query head h uses key head
 * h / (Hq / Hk). D and Dv are 1 to 512 (decode on the CPU: 576). In decode on CUDA D is 1 to 576 and Dv 1 to 512.
 * Types: q, k, v, out, dout and the gradients have one type: FLOAT16, BFLOAT16, FLOAT32 or FLOAT64. With 16-bit q, these outputs
 * may be FLOAT32 instead, for partial results that are added later: out of forward and decode; dq, dk and dv of backward. lse,
 * dlse and delta are FLOAT32 (FLOAT64 with FLOAT64 tensors); lse is a natural logarithm. Sums and the softmax are computed in
 * FLOAT32 (FLOAT64 with FLOAT64 tensors).
 *
 * Flags. An unknown bit is refused, and so is a bit that the operation does not have. Forward: all but ROTARY_INTERLEAVED,
 * FROM_LSE, ADD and INVARIANT_ROWS. Backward: all but ROTARY_INTERLEAVED, FROM_LSE, CONTINUE and INVARIANT_ROWS. Decode: CAUSAL,
 * WINDOW, SCALE, ROTARY_INTERLEAVED, INVARIANT_ROWS. Tangents: CAUSAL, TOP_LEFT, WINDOW, SCALE, DETERMINISTIC. */
#define FLASH_FLAG_CAUSAL 0x1u        /* query i sees key j only if j <= i + shift; shift = Lk - Lq (bottom-right aligned) */
#define FLASH_FLAG_TOP_LEFT 0x2u      /* the causal rule and the window are aligned top-left: shift = 0. ALiBi is not changed */
#define FLASH_FLAG_WINDOW 0x4u        /* use window_left and window_right: i + shift - left <= j <= i + shift + right */
#define FLASH_FLAG_SCALE 0x8u         /* use softmax_scale; without the flag the scale is 1 / sqrt(D) */
#define FLASH_FLAG_DETERMINISTIC 0x10u /* backward: the same bits in every run. On CUDA, dq is otherwise summed in an order that
                                        * varies. With the flag backward is slower (Hopper: 1.07 times on average, 1.2 at most).
                                        * UNSUPPORTED where no kernel can do it */
#define FLASH_FLAG_ROTARY_INTERLEAVED 0x20u /* decode: rotary pairs are (0,1), (2,3), ...; without it (0, r/2), (1, r/2+1), ... */
#define FLASH_FLAG_FROM_LSE 0x40u /* in flash_tangents_t: flash_attention_forward_tangent reads out and lse (section 14) */
#define FLASH_FLAG_POSITIONS 0x80u    /* use row_begin and the fields after it: see "Positions" below */
#define FLASH_FLAG_CONTINUE 0x100u    /* forward: go on from the out and lse of other keys: see section 5 */
#define FLASH_FLAG_ADD 0x200u         /* backward: dq, dk and dv are added to: see section 6 */
#define FLASH_FLAG_INVARIANT_ROWS 0x400u /* decode: the bits of a row depend on its own sequence alone: see section 7 */

/* A block mask in compressed form; flash_block_mask_compress writes it. A block is 128 queries by 128 keys. The row lists give,
 * for each row of blocks, the columns of the blocks that are kept: forward and dq use them. The column lists give, for each
 * column, the rows: dk and dv use them. All tensors are INT32. B1 is B or 1, H1 is Hq or 1, nq = ceil(Sq / 128) and
 * nk = ceil(Sk / 128). Each list is in ascending order; entries past its count are not read. A forward call needs the row lists
 * only: the column lists may then be all zero, also in flash_block_mask_compress. */
#define FLASH_BLOCK_SIZE 128
typedef struct flash_block_lists_t {
    flash_tensor_t row_counts;  /* (B1, H1, nq) */
    flash_tensor_t row_indices; /* (B1, H1, nq, nk) */
    flash_tensor_t col_counts;  /* (B1, H1, nk) */
    flash_tensor_t col_indices; /* (B1, H1, nk, nq) */
} flash_block_lists_t;

/* Initialises a struct to zeros with struct_size set, in C and in C++. Use the macros FLASH_..._INIT below, not this one. */
#ifdef __cplusplus
#define FLASH_INIT_(type) [] { type flash_init_ = {}; flash_init_.struct_size = sizeof(type); return flash_init_; }()
#else
#define FLASH_INIT_(type) {.struct_size = sizeof(type)}
#endif

/* The largest value of num_threads. */
#define FLASH_MAX_THREADS 4096

/* Options of forward and backward. NULL for the options means all defaults. Otherwise start from FLASH_ATTENTION_OPTIONS_INIT, or
 * set all bytes to 0 and then struct_size. A field that is 0 or NULL is not used or has its default. */
typedef struct flash_attention_options_t {
    uint32_t struct_size;   /* sizeof(flash_attention_options_t) */
    uint32_t flags;         /* FLASH_FLAG_... */
    double softmax_scale;   /* with FLASH_FLAG_SCALE, else 0; any finite value, negative and zero included */
    double softcap;         /* 0: off; otherwise positive and finite */
    double dropout_p;       /* probability of dropping an entry of P, rounded to a multiple of 2^-16; 0 <= p < 1. See below */
    uint64_t seed;          /* seed and offset of the dropout mask, which depends only on (seed, offset, batch, head, row, */
    uint64_t offset;        /*   column) and is the same in forward and backward and on every backend. See below, and rng_state */
    int64_t window_left;    /* with FLASH_FLAG_WINDOW: how many keys before the diagonal are visible; -1: all. */
                            /*   Without the flag: 0 or -1 */
    int64_t window_right;   /* the same after the diagonal; with FLASH_FLAG_CAUSAL it counts as 0 */
    int64_t max_seqlen_q;   /* packed: upper bound of the sequence lengths; 0: not known. Optional */
    int64_t max_seqlen_k;
    int64_t num_splits;     /* 0 to 1024; no effect: forward and backward do not split the keys, decode does (section 7) */

    const flash_tensor_t *cu_seqlens_q; /* INT32 (B + 1): sequence b is rows cu[b] to cu[b + 1] - 1 of the packed tensor; cu[0] */
                                        /*   is 0, entries do not decrease, the last one is at most the rows of the tensor */
    const flash_tensor_t *cu_seqlens_k;
    const flash_tensor_t *seqused_q;    /* INT32 (B): only the first seqused_q[b] rows of sequence b exist; out is 0 past them */
    const flash_tensor_t *seqused_k;

    const flash_tensor_t *alibi_slopes;   /* (Hq) or (B, Hq); FLOAT32 or the type of q */
    const flash_tensor_t *bias;           /* (B, Hq, Sq, Sk); a size may be 1 (repeated), leading dimensions may be missing; */
                                          /*   FLOAT32 or the type of q. Packed: Sq and Sk are at least max_seqlen_q and */
                                          /*   max_seqlen_k (if given) and the largest lengths; row and column count from */
                                          /*   the start of each sequence */
    const flash_tensor_t *mask;           /* BOOL, shaped like bias; a query sees a key only where it is true */
    const flash_tensor_t *learnable_sink; /* (Hq): one more score in each row's softmax, without a value; type as alibi_slopes */
    const flash_tensor_t *block_mask;     /* BOOL (B or 1, Hq or 1, ceil(Sq / 128), ceil(Sk / 128)): true keeps the block; */
                                          /*   packed: as for bias */
    const flash_block_lists_t *block_lists; /* a block mask in compressed form; not together with block_mask */

    /* Backward only; must be NULL in a forward call (dlse: see section 14 too). */
    const flash_tensor_t *dlse;  /* input: d loss / d lse; shape and type of lse */
    const flash_tensor_t *dbias; /* output: shape and type of bias; summed over the repeated dimensions */
    const flash_tensor_t *dsink; /* output: shape and type of learnable_sink */

    const char *backend;  /* NULL, "cpu", "sm80" or "sm90": use only kernels of this backend, and of "any" on CUDA */
    const char *kernel;   /* NULL, or the name of a kernel (flash_kernel_info): use this kernel or refuse the call */
    int32_t num_threads;  /* CPU: 1 to FLASH_MAX_THREADS; 0: flash_cpu_threads(). Results do not depend on it */
    int32_t tile_q;       /* 0; see section 13 */
    int32_t tile_k;       /* 0; see section 13 */
    int32_t reserved;     /* 0 */

    /* INT64 (2,), contiguous, on the device of q: {seed, offset} of the dropout mask, the bits of two unsigned 64-bit numbers.
     * The fields `seed` and `offset` must then be 0. On CUDA the kernels read it when they run, so each replay of a captured
     * CUDA graph uses its current contents; on the CPU the call reads it. */
    const flash_tensor_t *rng_state;

    /* With FLASH_FLAG_POSITIONS: the positions of rows and keys. See "Positions" below. */
    int64_t row_begin;    /* row i has position row_begin + i * row_step; at least 0 */
    int64_t row_step;     /* at least 1; 0 counts as 1 */
    int64_t column_begin; /* the same of key j */
    int64_t column_step;
    const flash_tensor_t *row_begins;       /* INT32 (B): instead of row_begin, one number per sequence */
    const flash_tensor_t *column_begins;    /* INT32 (B) */
    const flash_tensor_t *row_positions;    /* INT32 (B, Sq) or packed (total_q), contiguous: instead of the above, one */
                                            /*   number per row, not negative, strictly increasing in a sequence */
    const flash_tensor_t *column_positions; /* INT32 (B, Sk) or packed (total_k) */

    /* What dropout counts as batch and head, for a call with some of the sequences or heads. */
    const flash_tensor_t *sequence_numbers; /* INT32 (B): the number of each sequence; NULL: 0, 1, ... */
    int64_t head_begin;                     /* number of query head 0 among heads_total */
    int64_t heads_total;                    /* below 2^40; 0: Hq, and head_begin is 0 */

    /* FLOAT32 like lse (FLOAT64 with FLOAT64 tensors): rowsum(dout * out) - dlse. For backward and for tangents; see sections 6
     * and 14. */
    const flash_tensor_t *delta;
    int32_t sm_margin; /* CUDA: multiprocessors to leave free for other kernels; not negative. It affects forward, */
                       /*   backward and their tangents on sm90, where a persistent thread block runs on each */
                       /*   multiprocessor; forward then has a dynamic tile scheduler */
    int32_t reserved2; /* 0 */

    /* Forward only; outputs, written if given: statistics of the rows. See section 5. */
    const flash_tensor_t *max_logit; /* the largest score of each row: shape and type of lse; or of each head: (Hq) */
    const flash_tensor_t *entropy;   /* of each row's probabilities: shape and type of lse */
} flash_attention_options_t;

#define FLASH_ATTENTION_OPTIONS_INIT FLASH_INIT_(flash_attention_options_t)

/* The dropout mask. Philox4x32-7 (Salmon et al., SC 2011) with key (seed mod 2^32, seed / 2^32) and counter (column / 8, row,
 * (batch * Hq + head) mod 2^32, offset mod 2^32 xor (offset / 2^32 * 0x9E3779B9 mod 2^32)) gives four words, each of them two
 * numbers of 16 bits, the low half first. Number (column mod 8) belongs to the column. An entry of P is kept if its number >=
 * threshold = min(floor(dropout_p * 2^16 + 1/2), 2^16 - 1). So the probability of dropping is threshold / 2^16: dropout_p rounded
 * to a multiple of 2^-16; 0 below 2^-17, at most 1 - 2^-16. Kept entries are multiplied by 1 / (1 - that probability), so the
 * mean of an entry stays. `row` and `column` count from the start of the sequence; in packed tensors `batch` is the number of the
 * sequence. Dropout does not change lse. With FLASH_FLAG_POSITIONS, row and column are positions; with sequence_numbers and
 * heads_total, `batch` is the number of the sequence, and heads_total and head_begin + head take the place of Hq and head. So
 * calls on parts of a problem (some of its rows, keys, sequences, heads) have the mask of the whole problem.
 *
 * Positions. A call may have a part of the rows and keys of a longer sequence: a shard of it, on one of several devices. With
 * FLASH_FLAG_POSITIONS the causal rule, the window, ALiBi and dropout use the positions of rows and keys in the whole sequence
 * instead of their numbers in the tensors. A row at position r sees a key at position c if c <= r (causal) and
 * r - window_left <= c <= r + window_right (window); ALiBi adds -slope * |r - c|. There is no alignment, so TOP_LEFT is refused.
 * bias, mask, block_mask and lengths still count rows and keys of the tensors. The positions of each side come from one of three
 * sources: begin and step; *_begins and step (begin 0); *_positions (begin 0, step 0 or 1). Without the flag all these fields
 * must be 0 or NULL, steps 0 or 1.
 * Differences of positions are exact up to 2^24 in FLOAT32 calls with ALiBi. On CUDA all positions must be below 2^29 (those of
 * the numbers are checked, those of arrays are not), and alibi_slopes needs steps of 1 and no *_positions.
 *
 * Bad contents. The CPU checks the contents of lengths, positions, sequence_numbers and block_lists before it computes (INVALID).
 * On CUDA only the kernels read them. In forward, backward and the tangents of both:
 *   - Entries of cu_seqlens are clamped to 0 .. rows of the tensor; a sequence whose end is before its begin is empty.
 *   - seqused[b] is clamped to 0 .. rows of the sequence.
 *   - If a sequence has more rows than max_seqlen, or all sequences together have more rows than the tensor, all results are
 *     undefined. In forward and its tangents the sequences of keys may together have more rows than the tensor.
 *   - If sequences overlap, their results are undefined; those of the other sequences are right. In forward and its tangents
 *     the sequences of keys may overlap.
 *   - The counts and indices of block_lists must be right: kernels do not clamp them, and read outside of the lists.
 * With wrong lengths the call still ends and writes nothing outside of the tensors. It also reads nothing outside of them if
 * bias, mask and block masks cover the lengths. */

/* ---------------------------------------------------------------------------------------------------------------------
 * 5  FORWARD
 *
 * Writes out and, if not NULL, lse. Rows of a packed tensor that belong to no sequence are not written; rows of a sequence past
 * seqused_q get out = 0 and lse = -infinity.
 * The result is deterministic: the same inputs, options, device and build give the same bits.
 *
 * Continuation. With FLASH_FLAG_CONTINUE, out and lse (then required) hold the result for other keys of the same rows, and the
 * call replaces them by the result for both sets of keys: the earlier result counts as one more key of score lse and value out.
 * Nothing has to be merged. Where lse is -infinity, out may hold anything. out should be FLOAT32 until the last call. A sink
 * belongs to one of the calls, the first: learnable_sink is refused with the flag.
 *
 * Statistics, if asked for:
 *
 *     max_logit_i = max_j s_ij                                                   over the keys that row i sees
 *     entropy_i   = -sum_j p_ij log(p_ij) [- p_sink log(p_sink)]                 natural logarithm; p_sink = exp(sink - lse_i)
 *
 * The scores s are those of section 1, with scale, softcap, ALiBi and bias. Dropout does not change the statistics, and the sink
 * is no logit. With shape (Hq), max_logit is the largest over all rows of all sequences. A row that sees no key has max_logit
 * -infinity and entropy 0; where lse is NaN, so are both. Not written: rows of a packed tensor that belong to no sequence. The
 * statistics have no gradients, and are refused with FLASH_FLAG_CONTINUE. (max_logit over several disjoint sets of keys is the
 * maximum of their max_logit.) */
FLASH_API flash_status_t flash_attention_forward(const flash_tensor_t *q, const flash_tensor_t *k, const flash_tensor_t *v,
                                                 const flash_tensor_t *out, const flash_tensor_t *lse,
                                                 const flash_attention_options_t *options, void *workspace,
                                                 size_t workspace_bytes, void *stream);

/* Writes to `bytes` the size of the workspace that the call with these arguments needs. Reads no tensor data: `data` may be NULL,
 * and then counts as aligned. On CUDA the kernel, and so the size, depends on whether addresses and strides are multiples of 16
 * bytes: if an address is not, pass the real pointers. The same holds for the other ..._size functions. */
FLASH_API flash_status_t flash_attention_forward_workspace_size(const flash_tensor_t *q, const flash_tensor_t *k,
                                                                const flash_tensor_t *v, const flash_tensor_t *out,
                                                                const flash_tensor_t *lse,
                                                                const flash_attention_options_t *options, size_t *bytes);

/* ---------------------------------------------------------------------------------------------------------------------
 * 6  BACKWARD
 *
 * Reads dout = d loss / d out and, if given, options->dlse = d loss / d lse. Writes dq, dk and dv, with the shapes of q, k and v,
 * and, if given, options->dbias and options->dsink. q, k, v, out, lse (required) and the options must be those of the forward
 * call, without FLASH_FLAG_CONTINUE, max_logit and entropy, which are refused. dout and out have the type of q: a FLOAT32 out
 * must be converted. With grouped query heads (Hq > Hk), dk and dv are sums over the query heads of the group, added in FLOAT32
 * (FLOAT64 with FLOAT64 tensors). Rows of packed tensors that belong to no sequence are not written; gradients of rows past
 * seqused_q and seqused_k are 0.
 *
 * A part of the keys. If k and v are a part of the keys of the rows, and out, lse and dlse are those of the whole rows (over all
 * their keys), dk and dv are the gradients of these keys, and dq is their share: the sum over all parts is the whole dq. Give
 * learnable_sink and dsink to one of the calls only, and no FLASH_FLAG_CONTINUE to any.
 *
 * Sums over calls. With FLASH_FLAG_ADD, dq, dk and dv are added to, not replaced; rows without a gradient stay as they are. They
 * must be FLOAT32 (FLOAT64 with FLOAT64 tensors). dbias and dsink are replaced as always.
 * Delta. rowsum(dout * out) - dlse is the same for all parts of the keys. If given, options->delta is written by a call without
 * FLASH_FLAG_ADD, and read by a call with it; the latter does not read the data of out, and dlse, which delta contains, must
 * be NULL.
 *
 * Long sums. UNSUPPORTED on CUDA with D or Dv above 256 and 16-bit types: rows that can see more than 65536 keys, or keys that
 * more than 65536 query rows can see, counted over the heads that share the key head. With BFLOAT16 both limits are 262144. On
 * Hopper they are twice as large, and the sm90 kernel has no limit on query rows. */
FLASH_API flash_status_t flash_attention_backward(const flash_tensor_t *dout, const flash_tensor_t *q, const flash_tensor_t *k,
                                                  const flash_tensor_t *v, const flash_tensor_t *out,
                                                  const flash_tensor_t *lse, const flash_tensor_t *dq,
                                                  const flash_tensor_t *dk, const flash_tensor_t *dv,
                                                  const flash_attention_options_t *options, void *workspace,
                                                  size_t workspace_bytes, void *stream);

FLASH_API flash_status_t flash_attention_backward_workspace_size(const flash_tensor_t *dout, const flash_tensor_t *q,
                                                                 const flash_tensor_t *k, const flash_tensor_t *v,
                                                                 const flash_tensor_t *out, const flash_tensor_t *lse,
                                                                 const flash_tensor_t *dq, const flash_tensor_t *dk,
                                                                 const flash_tensor_t *dv,
                                                                 const flash_attention_options_t *options, size_t *bytes);

/* ---------------------------------------------------------------------------------------------------------------------
 * 7  DECODE
 *
 * Attention of a few query rows per sequence over a cache of keys and values ("Flash-Decoding"); forward only. If k_new and v_new
 * are given, the call first appends their rows to the cache, in place; the queries then see them too.
 *
 *     q         (B, Sq, Hq, D), or with cu_seqlens_q (total_q, Hq, D)
 *     k_cache   (B_cache, capacity, Hk, D), or with block_table (num_pages, page_size, Hk, D); with k_rope_cache D - Dr channels
 *     v_cache   (B_cache, capacity, Hk, Dv), or with block_table (num_pages, page_size, Hk, Dv)
 *     out       (B, Sq, Hq, Dv), or with cu_seqlens_q (total_q, Hq, Dv)
 *     lse       (B, Hq, Sq), or with cu_seqlens_q (Hq, total_q), or NULL
 *
 * Keys. Sequence b uses cache entry cache_batch_idx[b] (default: b). Its keys are the first cache_seqlens[b] keys of the entry,
 * then the S_new appended ones; Lk = cache_seqlens[b] + S_new. Without cache_seqlens the cache counts as full, or as empty if
 * k_new is given. The causal rule and the window are aligned bottom-right, with lengths Sq and Lk.
 *
 * Packed rows. With cu_seqlens_q, each sequence has its own number of query rows: sequence b has rows cu_seqlens_q[b] to
 * cu_seqlens_q[b + 1] - 1, and Sq is their number. So one call takes chunks of prefill of any length, rows of decode, and
 * sequences without a row: their new rows, if they have any, are appended, and otherwise their table entries are not read. Rows
 * of q, out and lse after cu_seqlens_q[B] are not touched. k_new and v_new are then packed too, (total_new, Hk, D) and
 * (total_new, Hk, Dv), by cu_seqlens_new; cu_seqlens_new alone packs only them. The lengths are never needed on the host.
 *
 * Trees (speculative decoding). The last Sq keys of a sequence are those of its query rows. With tree_mask, which replaces the
 * causal rule, a row sees those of them whose bit is set, and all earlier keys: bit j % 32 of word j / 32 is for the j-th of the
 * last Sq keys. A row sees its own key only if that bit is set. A sequence needs 32 * words >= Sq. The rows of tree_mask are the
 * query rows, or with cu_seqlens_tree for each sequence all of its query rows or none: a sequence without rows of tree_mask is
 * causal. q_positions are the positions of the query rows, and of the last Sq keys, for the rotary embedding, the window and
 * ALiBi: the position of a node of a tree is the number of keys before the tree plus its depth. NULL: row i has position Lk - Sq
 * + i. They do not change the causal rule. With q_positions the window compares positions, and CAUSAL does not set window_right
 * to 0. A window with tree_mask but without q_positions is UNSUPPORTED.
 *
 * Shards. With shard_count > 1 the cache has a part of the keys: key t of a sequence is on shard (t / shard_keys) mod
 * shard_count, and the keys of a shard follow each other in its cache without gaps, so that block_table, page_size and the
 * capacity count only these. Everything else is as if the cache were whole: cache_seqlens, cache_leftpad, q_positions,
 * tree_mask, shared_lens, the causal rule, the window, ALiBi and rotary positions count all keys. Each shard gets the same q,
 * k_new and v_new, at least as many new rows as query rows (else UNSUPPORTED; packed: INVALID on the CPU, not checked on CUDA),
 * and stores the new rows whose keys are its own. learnable_sink counts on shard 0 alone and is ignored on the others.
 * cache_seqlens is required without k_new. out and lse are those of the part of the keys; flash_attention_merge makes the whole
 * of them. A row without a key on the shard has out 0 and lse -infinity.
 *
 * Shared keys. shared_groups and shared_lens say that sequences shared_groups[i] to shared_groups[i + 1] - 1 have the same first
 * shared_lens[i] keys in the same memory: the same cache entry, or the same pages in the columns of the table that they read. It
 * is a hint that changes no bit of a result. Groups ascend and may be empty; sequences outside of them share nothing. shared_lens
 * counts keys that were valid before the call. The CPU computes as without the hint, and refuses one that is not true (INVALID).
 * On CUDA a hint that is not true gives wrong results for the sequences of its groups; nothing outside of the tensors is touched.
 * There the shared keys are read once for several sequences (explain: "shared keys") if q and the caches have the same type of 16
 * bits, D and Dv are at most 128, the capacity is at least 256, rows are not packed and at most 16 share a key head, there are
 * four sequences or more for each group, and enough of them to fill the GPU; without scales, k_rope_cache, q_positions,
 * tree_mask, cache_leftpad, alibi_slopes, window_left, shards, FLOAT32 out and FLASH_FLAG_INVARIANT_ROWS. Else the hint is
 * ignored.
 *
 * Schedule. On Hopper GPUs sequences with many query rows (at least 64 or 96, with FLASH_FLAG_INVARIANT_ROWS 32; "long chunks" in
 * explain) have a kernel of their own, which computes them in an order that depends on lengths alone: those in cache_seqlens,
 * cu_seqlens_q and cu_seqlens_new. Every call computes the order, unless it is given as `schedule`:
 * flash_attention_decode_schedule computes it once for all layers of a step. Calls may share a schedule if they differ in nothing
 * but softmax_scale, the addresses and strides of their tensors, and the contents of tensors other than these three. They only
 * read it, so they may run on several streams, after the call that writes it. No bit of a result changes. A schedule for other
 * shapes, options or lengths, or with any numbers, gives undefined results, but nothing outside of the tensors is touched. One
 * that is too small is refused. A call that has no use for a schedule (size 0: on the CPU, without long chunks, or where no
 * kernel has them) accepts one of any size and does not read it.
 *
 * Pages. With block_table, key j of sequence b is row j mod page_size of page block_table[b][j / page_size], and the capacity is
 * columns * page_size. Table entries past the last key, and those before the first key that a row sees (window,
 * cache_leftpad), are not read. Sequences may share pages or cache entries that they only read. But a row to which a sequence
 * appends must not hold another key that a sequence of the call reads or appends, also of its own: a page that comes twice in its
 * table may be reused only where no row sees its old keys. The CPU refuses it (INVALID).
 *
 * Bad contents. On the CPU these are refused (INVALID): a length, cache entry or page number out of range, cache_leftpad[b] above
 * cache_seqlens[b], a negative position, and a position past the end of the rotary tables. On CUDA the host does not read the
 * lengths and tables: a page or cache entry whose number is out of range counts as absent; cache_seqlens is clamped to 0 ..
 * capacity and cache_leftpad to 0 .. Lk; a position past the end of the rotary tables uses their last row; nothing is written
 * outside the cache. Entries of cu_seqlens_q and the other prefix sums are clamped to the rows of their tensor, and a sequence
 * whose end is before its begin is empty; where sequences overlap, results are undefined. q_positions are clamped to 0 .. 2^29 -
 * 1; bits that tree_mask does not have count as 0.
 *
 * Full cache. On CUDA, new row i of sequence b does not fit if cache_seqlens[b] + i >= capacity. It is then not written and no
 * query sees it, but Lk, and so the positions of the queries, still count it. The valid keys of this and all other sequences do
 * not change. The call does not report it: the caller can check beforehand that cache_seqlens[b] + S_new <= capacity. On the CPU
 * such a call is refused.
 *
 * Rotary embedding. With rotary_cos and rotary_sin, the call rotates the first r = 2 * rotary_cos.shape[1] channels of q and
 * k_new (with k_rope_cache: of k_rope_new and of the last Dr channels of q, see "Views and parts"): pair (x, y) at position t
 * becomes (x cos_t - y sin_t, x sin_t + y cos_t). New key i has position cache_seqlens[b] + i. Query row i has the same position
 * if the call is causal or has a window or tree_mask; otherwise all query rows have position cache_seqlens[b]. With q_positions
 * they and the new keys among the last Sq have those positions. Rotated rows are rounded to the type of q. The cache holds keys
 * after rotation.
 *
 * Types of the caches. The type of q, or, unless that is FLOAT64 (CUDA: or FLOAT32), one of 8 bits: FLOAT8_E4M3, FLOAT8_E5M2,
 * INT8. k_cache and v_cache have the same type. q of 8 bits is UNSUPPORTED. Elements of 8 bits are codes. A cache of codes gives
 * bit for bit what a cache of q's type with the values of the codes gives with the same scales. Exception: on Hopper GPUs,
 * without scales and without FLASH_FLAG_INVARIANT_ROWS, the kernels, and so the bits, may differ with 17 or more query rows of a
 * key head, and in calls with long chunks (without num_splits and split_size). explain names the kernels.
 *
 * Scales. A cached value is its element times a scale: k_scale for k_cache, v_scale for v_cache, FLOAT32, any
 * strides. Without a scale the value is the element; INT8 needs both scales. By the number of dimensions:
 *     1  (1) or (Hk)                            for all sequences
 *     2  (B, Hk)                                for each sequence
 *     3  (entries or pages, rows, Hk)           for each row of the cache
 *     4  (entries or pages, rows, Hk, groups)   for each row and group of channels; groups divides the channels of the cache
 * An append divides new rows, which have the type of q, by the scale, in FLOAT32 (FLOAT64 with FLOAT64 tensors), rounds to
 * nearest, ties to even, and saturates, infinities too: to 448 (E4M3), 57344 (E5M2), 127 (INT8). Zero stays zero whatever the
 * scale is. Scales of 1 or 2 dimensions are read. Those of 3 or 4 dimensions are computed, the largest magnitude of the row
 * or group divided by the largest code, and written; that needs a cache of 8 bits. A NaN becomes the NaN of E4M3 and E5M2 and
 * does not count for their scale. INT8 has no NaN: it becomes 0, and a computed scale becomes NaN. On CUDA groups have a
 * multiple of 16 channels in decode (else UNSUPPORTED); with FLOAT16 q a probability times the scale of a value has an error of
 * up to 2^-25 of the largest probability of the row times the largest scale of the head and sequence. So cached rows whose scale
 * is much smaller than the largest one lose accuracy: use scales like those that an append computes.
 *
 * Invariant rows. With FLASH_FLAG_INVARIANT_ROWS the bits of a row of out and lse depend on the row itself, the keys that it sees
 * and their numbers in the sequence alone. They do not depend on the rest of the batch and its order, on how many rows of the
 * sequence the call has (prefill in chunks of any sizes gives the bits of one row after another), on whether the cache is
 * contiguous or paged and its page size, on the number of threads, or on a tree_mask that lets a row see the keys that it would
 * see without. On the CPU a NaN or infinity at a key that a row does not see never reaches the row; on CUDA one in v can (section
 * 1). Keys are added in segments of split_size keys, or of a number that the library chooses (explain prints it); num_splits must
 * be 0. The bits are those of one kernel on one kind of processor: the instruction sets of the CPU differ, and so do
 * flash_attention_forward and decode without the flag. On CUDA the workspace grows with the rows of the call times the capacity;
 * split_size makes it smaller.
 *
 * Views and parts, as in multi-head latent attention. v_cache may be a view of the first Dv channels of k_cache: the same
 * address, strides and type; with these, Dv above D is refused (INVALID). An append then has no v_new, and the scales of k_cache
 * hold for v_cache too, unless v_scale is given. Without v_scale Dv is a multiple of the channels that share a scale of k_cache.
 * An append writes no v_scale: if it computes k_scale, v_scale must be NULL, else v_scale may have 1 or 2 dimensions. With
 * k_rope_cache, k_cache has only the first channels of the keys; k_rope_cache (entries or pages, rows, Hk, Dr) has the last Dr of
 * the D channels, in the type of q and without scales, and k_rope_new (B, S_new, Hk, Dr), packed (total_new, Hk, Dr), is appended
 * to it. The rotary embedding then rotates the first r channels of k_rope_new and of the last Dr channels of q, r at most Dr, and
 * no others. All tensors of a cache may be views of one buffer. On CUDA, with k_rope_cache, the channels of k_cache are a
 * multiple of 16, and with a cache of codes there are at most 144 channels in k_rope_cache (else UNSUPPORTED). */
typedef struct flash_decode_options_t {
    uint32_t struct_size; /* sizeof(flash_decode_options_t) */
    uint32_t flags;       /* CAUSAL, WINDOW, SCALE, ROTARY_INTERLEAVED, INVARIANT_ROWS */
    double softmax_scale;
    double softcap;
    int64_t window_left;
    int64_t window_right;
    int64_t num_splits; /* the number of ranges into which the keys are split, 1 to 1024; 1: no split; 0: the library chooses */
    int64_t split_size; /* instead of num_splits: keys per range, a multiple of 128; 0: not used. The bits of a sequence's */
                        /*   result then do not depend on the rest of the batch. On CUDA ranges with more keys than */
                        /*   are added without loss of precision (32768 or more) are divided further, those of */
                        /*   num_splits too */
    const flash_tensor_t *cache_seqlens;   /* INT32 (B): number of valid keys before this call */
    const flash_tensor_t *block_table;     /* INT32 (B, columns) */
    const flash_tensor_t *cache_batch_idx; /* INT32 (B); not together with block_table */
    const flash_tensor_t *cache_leftpad;   /* INT32 (B): the first cache_leftpad[b] keys do not exist, at most */
                                           /*   cache_seqlens[b] (see "Bad contents"); pages that hold no other keys are */
                                           /*   not read, and their table entries may have any value */
    const flash_tensor_t *k_new;           /* (B, S_new, Hk, D), or packed (total_new, Hk, D); with k_rope_cache D - Dr */
                                           /*   channels */
    const flash_tensor_t *v_new;           /* (B, S_new, Hk, Dv), or packed (total_new, Hk, Dv) */
    const flash_tensor_t *rotary_cos;      /* (positions, r / 2), contiguous rows; FLOAT32 or the type of q */
    const flash_tensor_t *rotary_sin;
    const flash_tensor_t *alibi_slopes;    /* these and the fields not explained here: as in flash_attention_options_t */
    const flash_tensor_t *learnable_sink;
    const char *backend;
    const char *kernel;
    int32_t num_threads;
    int32_t reserved;
    const flash_tensor_t *k_scale;         /* FLOAT32; see "Scales" */
    const flash_tensor_t *v_scale;
    const flash_tensor_t *k_rope_cache;    /* the last channels of the keys; see "Views and parts" */
    const flash_tensor_t *k_rope_new;
    const flash_tensor_t *cu_seqlens_q;    /* INT32 (B + 1): packed query rows, see above */
    const flash_tensor_t *cu_seqlens_new;  /* INT32 (B + 1): packed new rows; NULL: cu_seqlens_q */
    const flash_tensor_t *q_positions;     /* INT32 (B, Sq) or (total_q): the position of each query row, see above */
    const flash_tensor_t *tree_mask;       /* INT32 (rows, words): which of the last Sq keys a row sees, see above */
    const flash_tensor_t *cu_seqlens_tree; /* INT32 (B + 1): the rows of tree_mask of each sequence */
    const flash_tensor_t *shared_groups;   /* INT32 (n + 1): sequences whose first keys are the same; see "Shared keys" */
    const flash_tensor_t *shared_lens;     /* INT32 (n): the number of these keys; both are given or none */
    int64_t shard_count;                   /* the number of shards of the keys; 0 or 1: the cache has all. See "Shards" */
    int64_t shard_index;                   /* which of them this cache is, from 0 */
    int64_t shard_keys;                    /* consecutive keys that are on the same shard; 0 counts as 1 */
    const flash_tensor_t *schedule;        /* INT32 (n), what flash_attention_decode_schedule has written; see "Schedule" */
} flash_decode_options_t;

#define FLASH_DECODE_OPTIONS_INIT FLASH_INIT_(flash_decode_options_t)

FLASH_API flash_status_t flash_attention_decode(const flash_tensor_t *q, const flash_tensor_t *k_cache,
                                                const flash_tensor_t *v_cache, const flash_tensor_t *out,
                                                const flash_tensor_t *lse, const flash_decode_options_t *options,
                                                void *workspace, size_t workspace_bytes, void *stream);

FLASH_API flash_status_t flash_attention_decode_workspace_size(const flash_tensor_t *q, const flash_tensor_t *k_cache,
                                                               const flash_tensor_t *v_cache, const flash_tensor_t *out,
                                                               const flash_tensor_t *lse,
                                                               const flash_decode_options_t *options, size_t *bytes);

/* The size of a schedule for flash_attention_decode with these arguments, in bytes; 0: the call needs none. Reads no tensor
 * data, as the ..._workspace_size functions. options->schedule has no effect. */
FLASH_API flash_status_t flash_attention_decode_schedule_size(const flash_tensor_t *q, const flash_tensor_t *k_cache,
                                                              const flash_tensor_t *v_cache, const flash_tensor_t *out,
                                                              const flash_tensor_t *lse,
                                                              const flash_decode_options_t *options, size_t *bytes);

/* Writes the schedule for flash_attention_decode with these arguments: see "Schedule" above. The call reads cache_seqlens,
 * cu_seqlens_q and cu_seqlens_new; data of the other tensors may be NULL, and options->schedule is ignored. If the size is 0,
 * nothing is written.
 *
 *     schedule  INT32 (n), contiguous, on the device of q; 4 n is at least the size, the address a multiple of 16 bytes */
FLASH_API flash_status_t flash_attention_decode_schedule(const flash_tensor_t *q, const flash_tensor_t *k_cache,
                                                         const flash_tensor_t *v_cache, const flash_tensor_t *out,
                                                         const flash_tensor_t *lse, const flash_decode_options_t *options,
                                                         const flash_tensor_t *schedule, void *stream);

/* Writes new rows of keys and values to slots of a cache, as inference engines do before they compute attention: rows of any
 * sequences in any order, without lengths and tables. Row i goes to row slots[i] mod rows of entry or page slots[i] / rows, where
 * rows is k_cache.shape[1]; a slot outside of the cache (-1) means that the row is not written. No other row changes. No
 * workspace. Afterwards flash_attention_decode without k_new attends to the rows.
 *
 *     k_new     (total, Hk, D)                       v_new     (total, Hk, Dv)
 *     k_cache   (entries or pages, rows, Hk, D)      v_cache   (entries or pages, rows, Hk, Dv)
 *     slots     INT32 or INT64 (total)
 *
 * v_new and v_cache are both NULL where the values are channels of the keys. Types, scales and their computation, parts of keys
 * and the rotary embedding are those of an append in flash_attention_decode, with the same bits; but a scale has 1, 3 or 4
 * dimensions, because a slot does not say to which sequence a row belongs, and the rotary embedding needs the position of each
 * row. Refused (INVALID): positions without rotary tables, which would have no effect; on the CPU also two rows with the same
 * slot, and a position outside of the rotary tables. On CUDA the host does not read slots and positions: with two rows in a slot,
 * each element is that of one of them; a position outside of the rotary tables uses their first or last row. */
typedef struct flash_cache_write_options_t {
    uint32_t struct_size; /* sizeof(flash_cache_write_options_t) */
    uint32_t flags;       /* ROTARY_INTERLEAVED */
    const flash_tensor_t *k_scale;      /* these: as in flash_decode_options_t */
    const flash_tensor_t *v_scale;
    const flash_tensor_t *k_rope_cache; /* (entries or pages, rows, Hk, Dr) */
    const flash_tensor_t *k_rope_new;   /* (total, Hk, Dr) */
    const flash_tensor_t *rotary_cos;
    const flash_tensor_t *rotary_sin;
    const flash_tensor_t *positions;    /* INT32 (total): the position of each row; with rotary_cos required, else NULL */
    const char *backend;
    const char *kernel;
    int32_t num_threads;
    int32_t reserved;
} flash_cache_write_options_t;

#define FLASH_CACHE_WRITE_OPTIONS_INIT FLASH_INIT_(flash_cache_write_options_t)

FLASH_API flash_status_t flash_cache_write(const flash_tensor_t *k_new, const flash_tensor_t *v_new,
                                           const flash_tensor_t *k_cache, const flash_tensor_t *v_cache,
                                           const flash_tensor_t *slots, const flash_cache_write_options_t *options,
                                           void *stream);

/* Checks a call of flash_cache_write by shapes and types alone, as the other ..._workspace_size functions do. The size is 0. */
FLASH_API flash_status_t flash_cache_write_workspace_size(const flash_tensor_t *k_new, const flash_tensor_t *v_new,
                                                          const flash_tensor_t *k_cache, const flash_tensor_t *v_cache,
                                                          const flash_tensor_t *slots,
                                                          const flash_cache_write_options_t *options, size_t *bytes);

/* ---------------------------------------------------------------------------------------------------------------------
 * 8  MERGE
 *
 * Combines results of attention over disjoint ranges of keys. From outs[n] and lses[n], the results of forward for range n, it
 * computes lse = log(sum_n exp(lses[n])) and out = sum_n exp(lses[n] - lse) outs[n]. Where lses[n] = -infinity, outs[n] is
 * ignored, whatever it holds; where all are, out = 0 and lse = -infinity. `outs` and `lses` are arrays of `count` >= 1 tensors of
 * one shape: (B, S, H, Dv) with (B, H, S), or (total, H, Dv) with (H, total). On CUDA `count` is at most 1680, and with more than
 * 64 parts these have at most 64 different combinations of type and strides (else UNSUPPORTED). The outs and out may have
 * different types; each lse is FLOAT32, or FLOAT64 if its out is FLOAT64. `lse` may be NULL. No workspace. */
typedef struct flash_merge_options_t {
    uint32_t struct_size; /* sizeof(flash_merge_options_t) */
    uint32_t flags;       /* 0 */
    const char *backend;
    const char *kernel;
    int32_t num_threads;
    int32_t reserved;
} flash_merge_options_t;

#define FLASH_MERGE_OPTIONS_INIT FLASH_INIT_(flash_merge_options_t)

FLASH_API flash_status_t flash_attention_merge(const flash_tensor_t *outs, const flash_tensor_t *lses, int32_t count,
                                               const flash_tensor_t *out, const flash_tensor_t *lse,
                                               const flash_merge_options_t *options, void *stream);

/* ---------------------------------------------------------------------------------------------------------------------
 * 9  BLOCK MASKS
 *
 * Writes the lists (section 4) of a dense block mask. Forward and backward take both forms; the kernels read a dense mask as it
 * is. The row lists or the column lists may be all zero, not both. All tensors are contiguous and on one device. No workspace. */
FLASH_API flash_status_t flash_block_mask_compress(const flash_tensor_t *block_mask, const flash_block_lists_t *lists,
                                                   void *stream);

/* ---------------------------------------------------------------------------------------------------------------------
 * 10  EXPLAIN
 *
 * Text for people: which kernel, tile, splits and workspace the call would use, and why it would not use the other kernels. Reads
 * no tensor data and needs no outputs: out, dq, dk and dv have the types of q, k and v (with FLASH_FLAG_ADD the gradients are
 * FLOAT32, or FLOAT64 with FLOAT64 tensors). Writes at most `capacity` bytes to `text`, including the final 0; `text` may be NULL
 * if `capacity` is 0. If `needed` is not NULL, it gets the number of bytes of the whole text, including the final 0. An
 * unsupported call is explained too (status OK); an invalid one is refused like the call itself, and so is decode with q of 8
 * bits. */
FLASH_API flash_status_t flash_attention_forward_explain(const flash_tensor_t *q, const flash_tensor_t *k,
                                                         const flash_tensor_t *v, const flash_attention_options_t *options,
                                                         char *text, size_t capacity, size_t *needed);
FLASH_API flash_status_t flash_attention_backward_explain(const flash_tensor_t *q, const flash_tensor_t *k,
                                                          const flash_tensor_t *v, const flash_attention_options_t *options,
                                                          char *text, size_t capacity, size_t *needed);
FLASH_API flash_status_t flash_attention_decode_explain(const flash_tensor_t *q, const flash_tensor_t *k_cache,
                                                        const flash_tensor_t *v_cache,
                                                        const flash_decode_options_t *options, char *text,
                                                        size_t capacity, size_t *needed);

/* ---------------------------------------------------------------------------------------------------------------------
 * 11  INFORMATION */

/* One kernel of this build. Texts are valid as long as the library is loaded. */
typedef struct flash_kernel_info_t {
    uint32_t struct_size;   /* sizeof(flash_kernel_info_t): FLASH_KERNEL_INFO_INIT sets it */
    int32_t usable;         /* 1 if this machine can run it */
    const char *name;       /* "forward_cpu_avx512"; the option `kernel` takes this name */
    const char *operation;  /* "forward", "backward", "decode", "merge", "compress", "cache_write", "forward_tangent", ...;
                               "prefill", "decode_prefix": calls of decode choose them for long chunks, for shared keys */
    const char *backend;    /* "cpu", "sm80", "sm90"; "any": runs on every CUDA device, whichever CUDA backend is requested */
    const char *dtype;      /* "bf16", "f16", "f32", "f64"; "any": several types */
    const char *why_not;    /* if not usable: the reason; otherwise "" */
    int32_t head_dim;       /* the largest that it supports; 0: no limit but that of the backend */
    int32_t head_dim_v;
    int32_t tile_q;         /* query rows per tile; 0: chosen at run time */
    int32_t tile_k;         /* keys per tile; 0: chosen at run time */
    int32_t stages;         /* stages of the pipeline that loads K and V; 0: no pipeline */
    int32_t reserved;
} flash_kernel_info_t;

#define FLASH_KERNEL_INFO_INIT FLASH_INIT_(flash_kernel_info_t)

FLASH_API int32_t flash_kernel_count(void);

/* Writes `info` for 0 <= index < flash_kernel_count(). The caller sets info->struct_size. If the caller's struct is of a later
 * version, fields that this library does not know become 0. INVALID for an index out of range or if `info` is NULL; VERSION for a
 * struct_size below that of version 0.1 (72 bytes) or above 4096. `info` is then not written. The same holds for
 * flash_device_info, whose struct has 280 bytes in version 0.1. */
FLASH_API flash_status_t flash_kernel_info(int32_t index, flash_kernel_info_t *info);

/* The CUDA devices that this process sees. Without a driver or a GPU there are 0 devices; that is no error, and flash_cuda_state
 * gives the reason. */
typedef struct flash_device_info_t {
    uint32_t struct_size;          /* sizeof(flash_device_info_t): FLASH_DEVICE_INFO_INIT sets it */
    int32_t arch;                  /* 90 for compute capability 9.0 */
    int32_t multiprocessors;
    int32_t shared_memory_bytes;   /* the most that one thread block may use */
    int64_t memory_bytes;
    char name[256];
} flash_device_info_t;

#define FLASH_DEVICE_INFO_INIT FLASH_INIT_(flash_device_info_t)

FLASH_API int32_t flash_device_count(void);
FLASH_API flash_status_t flash_device_info(int32_t index, flash_device_info_t *info);

/* One line of text: "ready: 1 device", "no NVIDIA driver", "built without CUDA: no compiler found", ... */
FLASH_API const char *flash_cuda_state(void);

/* How this library was built: lines of "key: value" (version, compiler, cuda, architectures). */
FLASH_API const char *flash_build_info(void);

/* The instruction set that the CPU backend uses: "avx512bf16", "avx512", "avx2", "neonbf16", "neon" or "generic". */
FLASH_API const char *flash_cpu_isa(void);

/* The number of threads that a CPU call on this thread uses if num_threads is 0. It is, in this order:
 *   - the environment variable LIBFLASH_NUM_THREADS, 1 to 4096;
 *   - the environment variable OMP_NUM_THREADS (of a list, the first number), if it is a valid number;
 *   - the number of processors that this thread may run on (its affinity mask), at most the CPU quota of the process's control
 *     group, rounded up.
 * The environment is read at the first use; an empty variable counts as not set. Returns 0 if LIBFLASH_NUM_THREADS is not such a
 * number: flash_last_error() then says so, and CPU calls with num_threads = 0 are refused (INVALID). */
FLASH_API int32_t flash_cpu_threads(void);

/* ---------------------------------------------------------------------------------------------------------------------
 * 12  INTERRUPTING A CPU CALL
 *
 * Sets the interrupt check of this thread; NULL, as at the start, removes it. Each later CPU call on this thread calls
 * check(context) repeatedly while it runs, on this thread, at most about twenty times a second. When the check returns a value
 * other than 0, the call ends with FLASH_STATUS_CANCELLED; its outputs, and rows that it was appending to a cache, are then
 * undefined. The check may call libflash. Calls with CUDA tensors return when the work is enqueued and never call the check. */
FLASH_API void flash_set_interrupt(int32_t (*check)(void *context), void *context);

/* ---------------------------------------------------------------------------------------------------------------------
 * 13  NOT STABLE: OPTIONS FOR TESTS
 *
 * If positive, tile_q and tile_k in flash_attention_options_t set the query rows and keys per tile of the CPU backend (1 to 512;
 * a tile has at most 64 query rows), so that small problems have several tiles. Any version may remove them. */

/* ---------------------------------------------------------------------------------------------------------------------
 * 14  TANGENTS: FORWARD MODE AND SECOND DERIVATIVES
 *
 * A tangent is the derivative along one direction: if each input x moves along its tangent tx, out moves along tangents.out.
 * flash_attention_forward_tangent is the tangent of forward (a Jacobian-vector product), flash_attention_backward_tangent that
 * of backward. In the notation of section 1, with a leading t for a tangent, R the factor of dropout (see section 4),
 * z = softmax_scale * dot(q_i, k_j) and g = 1 - tanh(z / softcap)^2 (1 without softcap):
 *
 *     ts   = g * softmax_scale * (dot(tq_i, k_j) + dot(q_i, tk_j)) + tbias_ij
 *     tlse = sum_j p_ij ts_ij [+ exp(learnable_sink - lse_i) tsink]
 *     to_i = sum_j R p_ij ((ts_ij - tlse_i) v_j + tv_j)
 *
 *     dp = R dot(dout_i, v_j)                               tdp = R (dot(tdout_i, v_j) + dot(dout_i, tv_j))
 *     delta_i = dot(dout_i, o_i) - dlse_i                   tdelta_i = dot(tdout_i, o_i) + dot(dout_i, to_i) - tdlse_i
 *     ds = p (dp - delta_i)                                 tds = p (ts - tlse_i) (dp - delta_i) + p (tdp - tdelta_i)
 *
 * and the tangents of dq, dk, dv, dbias and dsink follow by the product rule. They give all second derivatives:
 *   - Double backward. Let u_dq, u_dk, u_dv, u_dbias and u_dsink be the gradients of a function of dq, dk, dv, dbias and dsink.
 *     Give them as tangents->q, k, v, bias and learnable_sink. Then tangents->out and lse of forward_tangent are its gradients
 *     with respect to dout and dlse. With tangents->dout = dlse = NULL, tangents->dq, dk, dv, dbias and dsink of backward_tangent
 *     are those with respect to q, k, v, bias and the sink (the Hessian is symmetric).
 *   - Gradients of a function of out, lse and their tangents: backward_tangent with the gradients of the tangents as dout and
 *     dlse, and those of out and lse as their tangents. dq, dk, dv are then the gradients of the tangents of q, k and v, and the
 *     tangents of dq, dk and dv those of q, k and v.
 *
 * Nothing has the size of the matrix of scores. Masks, windows, lengths, the dropout mask, softmax_scale, softcap and
 * alibi_slopes are constants. A row that sees no key has tangents 0 (with a sink: tlse = tsink) and adds nothing to a gradient;
 * its dout, dlse and their tangents do not matter. A hidden pair adds nothing, whatever its tangents are. Refused (INVALID): the
 * flags POSITIONS, CONTINUE and ADD, sequence_numbers, heads_total, max_logit, entropy. Not available: tangents of tangents.
 * UNSUPPORTED on CUDA: rows that can see more than 32768 keys (BFLOAT16: 131072; FLOAT64: any number); in
 * backward_tangent also keys that more than so many rows can see, those of all heads that share the key head together.
 *
 * Each tensor has the shape, type and device of what it is the tangent of. A NULL input is zero; a NULL output is not written. */
typedef struct flash_tangents_t {
    uint32_t struct_size; /* sizeof(flash_tangents_t) */
    uint32_t flags;       /* FLASH_FLAG_FROM_LSE or 0 */
    const flash_tensor_t *q; /* inputs of both functions */
    const flash_tensor_t *k;
    const flash_tensor_t *v;
    const flash_tensor_t *bias;           /* needs bias */
    const flash_tensor_t *learnable_sink; /* needs learnable_sink */
    const flash_tensor_t *out;       /* forward_tangent: output. backward_tangent: input, as forward_tangent wrote it */
    const flash_tensor_t *lse;       /* the same; backward_tangent requires it */
    const flash_tensor_t *dout;      /* backward_tangent: input. forward_tangent: with delta only */
    const flash_tensor_t *dlse;      /* the same */
    const flash_tensor_t *delta;     /* shape and type of lse: tdelta above. forward_tangent: output; it needs `cotangent`. */
                                     /*   backward_tangent: input instead of out and dlse, which must then be NULL; more */
                                     /*   accurate where out has 16 bits (options->delta likewise: see the functions) */
    const flash_tensor_t *cotangent; /* forward_tangent: the dout of backward, not a tangent; with delta only */
    const flash_tensor_t *dq;        /* outputs of backward_tangent; dq, dk and dv are required */
    const flash_tensor_t *dk;
    const flash_tensor_t *dv;
    const flash_tensor_t *dbias; /* needs bias */
    const flash_tensor_t *dsink; /* needs learnable_sink */
} flash_tangents_t;

#define FLASH_TANGENTS_INIT FLASH_INIT_(flash_tangents_t)

/* Writes out and, if not NULL, lse as flash_attention_forward does, and the outputs tangents->out, lse and delta, of which at
 * least one is required. With FLASH_FLAG_FROM_LSE in tangents->flags, out and lse (then required) are inputs instead, as forward
 * wrote them with the same options; this costs less than a call that computes them too. If given, options->delta is an output
 * too: delta above, of the dout in `cotangent` and options->dlse. It needs tangents->delta, and dlse needs it. Without
 * FLASH_FLAG_FROM_LSE both deltas come from sums that are not rounded, if one kernel computes out and its tangent; else from out
 * as it is stored. */
FLASH_API flash_status_t flash_attention_forward_tangent(const flash_tensor_t *q, const flash_tensor_t *k,
                                                         const flash_tensor_t *v, const flash_tensor_t *out,
                                                         const flash_tensor_t *lse, const flash_tangents_t *tangents,
                                                         const flash_attention_options_t *options, void *workspace,
                                                         size_t workspace_bytes, void *stream);

FLASH_API flash_status_t flash_attention_forward_tangent_workspace_size(const flash_tensor_t *q, const flash_tensor_t *k,
                                                                        const flash_tensor_t *v, const flash_tensor_t *out,
                                                                        const flash_tensor_t *lse,
                                                                        const flash_tangents_t *tangents,
                                                                        const flash_attention_options_t *options,
                                                                        size_t *bytes);

/* Writes dq, dk, dv and, if given, dbias and dsink of `tangents`. If dq, dk and dv are given (all or none), it also writes them
 * and, if given, options->dbias and options->dsink, as flash_attention_backward does. The other arguments are those of the calls
 * of backward and of forward_tangent.
 * If given, options->delta is an input, as forward_tangent wrote it for the same dout and dlse: then delta is not computed from
 * out, and dlse, which it contains, must be NULL. Not together with dq, dk and dv. */
FLASH_API flash_status_t flash_attention_backward_tangent(const flash_tensor_t *dout, const flash_tensor_t *q,
                                                          const flash_tensor_t *k, const flash_tensor_t *v,
                                                          const flash_tensor_t *out, const flash_tensor_t *lse,
                                                          const flash_tensor_t *dq, const flash_tensor_t *dk,
                                                          const flash_tensor_t *dv, const flash_tangents_t *tangents,
                                                          const flash_attention_options_t *options, void *workspace,
                                                          size_t workspace_bytes, void *stream);

FLASH_API flash_status_t flash_attention_backward_tangent_workspace_size(const flash_tensor_t *dout, const flash_tensor_t *q,
                                                                         const flash_tensor_t *k, const flash_tensor_t *v,
                                                                         const flash_tensor_t *out, const flash_tensor_t *lse,
                                                                         const flash_tensor_t *dq, const flash_tensor_t *dk,
                                                                         const flash_tensor_t *dv,
                                                                         const flash_tangents_t *tangents,
                                                                         const flash_attention_options_t *options,
                                                                         size_t *bytes);

/* As section 10. `tangents` gives the inputs; NULL: tangents of q, k and v. */
FLASH_API flash_status_t flash_attention_forward_tangent_explain(const flash_tensor_t *q, const flash_tensor_t *k,
                                                                 const flash_tensor_t *v, const flash_tangents_t *tangents,
                                                                 const flash_attention_options_t *options, char *text,
                                                                 size_t capacity, size_t *needed);
FLASH_API flash_status_t flash_attention_backward_tangent_explain(const flash_tensor_t *q, const flash_tensor_t *k,
                                                                  const flash_tensor_t *v, const flash_tangents_t *tangents,
                                                                  const flash_attention_options_t *options, char *text,
                                                                  size_t capacity, size_t *needed);

#ifdef __cplusplus
}
#endif

#endif /* LIBFLASH_H */
