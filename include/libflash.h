/* libflash: exact attention on the CPU and on NVIDIA GPUs, behind a plain C interface.
 *
 * This header is the manual. It is the only header that is installed, it is C99 (and C++11 and later), and it includes
 * nothing but <stddef.h> and <stdint.h>.
 *
 * CONTENTS
 *   1  Introduction             5  Forward                9  Block masks
 *   2  Version                  6  Backward              10  What would run: explain
 *   3  Status and error text    7  Decode (KV cache)     11  Information: kernels, devices, build
 *   4  Tensors and options      8  Merge                 12  Interrupting a CPU call
 *                                                        13  Not stable: switches for tests
 *
 * ---------------------------------------------------------------------------------------------------------------------
 * 1  INTRODUCTION
 *
 * Attention of a query row i over the keys j it may see, for one head:
 *
 *     s_ij = softmax_scale * dot(q_i, k_j)                    default softmax_scale: 1 / sqrt(head_dim)
 *     s_ij = softcap * tanh(s_ij / softcap)                   if softcap > 0
 *     s_ij = s_ij - alibi_slope * |i + Lk - Lq - j|           if alibi_slopes is given
 *     s_ij = s_ij + bias_ij                                   if bias is given
 *     p_ij = exp(s_ij - lse_i),  lse_i = log(sum_j exp(s_ij) [+ exp(learnable_sink)])
 *     o_i  = sum_j dropout(p_ij) v_j
 *
 * where Lq and Lk are the lengths of that batch entry's queries and keys, and the sums run over the visible keys only: those
 * that the causal rule, the window, `mask` and `block_mask` all let through. The result is exact: no key is approximated or
 * left out. Memory is linear in the sequence length: the matrix of scores is never stored. Method: Dao et al.,
 * "FlashAttention" (arXiv 2205.14135) and "FlashAttention-2" (arXiv 2307.08691).
 *
 * A row that sees no key gives o = 0, lse = -infinity (or the sink), and zero gradients.
 *
 * NaN and infinities in q reach their own row only; in k and v they reach the rows that see them. What lies outside the sequences (past a
 * length, in a page's tail, in free pages) reaches nothing. One exception: on CUDA and in decode, a NaN or infinity in v at a key that a
 * row does not see may still reach that row, if the row sees another key within the same tile (at most 128 keys); never further.
 * In backward on CUDA the same holds for one in q, k, v or dout: beyond what depends on it, it may reach gradients of the rows and keys
 * that a tile of at most 128 rows and 128 keys has in common with it.
 * With BFLOAT16 on processors with AVX-512-BF16, subnormal numbers count as zero in the products.
 *
 * Rules that hold for every function:
 *   - The caller owns all memory and the stream. The library allocates no device memory, never synchronises with the device, and
 *     prints nothing. Any function may be called from any number of threads at once.
 *   - Between calls the library keeps properties of the devices that it read once, the last error text and the interrupt check of
 *     each thread, and a pool of threads for the CPU. The pool starts with the first CPU call that uses more than one thread. Its
 *     threads sleep between calls and block all signals; during a call they have the affinity and the floating-point environment of
 *     the calling thread. All calls share them: together they have no more than there are processors, or than one call asks for.
 *     After fork() the child has a pool of its own. dlclose() leaves the library loaded once there is a pool.
 *   - Where the tensors are decides the backend: host tensors run on the CPU, before the function returns; CUDA tensors run on
 *     `stream` and the function returns as soon as the work is enqueued.
 *   - Everything is checked before the first byte is written. A refused call leaves the outputs untouched, returns a status
 *     other than FLASH_STATUS_OK, and flash_last_error() then names the argument, the rule and the value.
 *   - Scratch memory comes from the caller: ask the `..._workspace_size` function, pass a block of at least that many bytes,
 *     aligned to 256. Its contents mean nothing before or after the call. One block must not serve two calls at once.
 *
 * A first call, all defaults (q, k, v and out are (batch, seqlen, heads, head_dim)):
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
 * Semantic versioning. While the major version is 0, a new minor version may change the interface, so the shared object's name
 * has both numbers: its SONAME is libflash.so.0.1. Later it has the major version alone. Option and info structs grow at their
 * end; `struct_size` tells the library which fields a caller knows. */
#define FLASH_VERSION_MAJOR 0
#define FLASH_VERSION_MINOR 1
#define FLASH_VERSION_PATCH 0
#define FLASH_VERSION (FLASH_VERSION_MAJOR * 10000 + FLASH_VERSION_MINOR * 100 + FLASH_VERSION_PATCH)

/* The version of the library that is loaded, as FLASH_VERSION is composed. Compare with FLASH_VERSION of this header. */
FLASH_API int32_t flash_version(void);

/* The same as text, "0.1.0". Valid as long as the library is loaded. */
FLASH_API const char *flash_version_string(void);

/* ---------------------------------------------------------------------------------------------------------------------
 * 3  STATUS AND ERROR TEXT */
typedef enum flash_status_t {
    FLASH_STATUS_OK = 0,
    FLASH_STATUS_INVALID = 1,       /* the call is wrong whatever the machine: a shape, a stride, a value, a missing tensor */
    FLASH_STATUS_UNSUPPORTED = 2,   /* the call is right, but no kernel in this build serves it here */
    FLASH_STATUS_VERSION = 3,       /* `struct_size` is of no known version, or a field this library does not know is set */
    FLASH_STATUS_WORKSPACE = 4,     /* the workspace is missing, too small or misaligned; the text gives the size needed */
    FLASH_STATUS_NO_DEVICE = 5,     /* CUDA tensors, but no usable GPU, no driver, or a driver that is too old */
    FLASH_STATUS_CUDA = 6,          /* the CUDA runtime reported an error, also one left over from earlier work */
    FLASH_STATUS_OUT_OF_MEMORY = 7, /* host memory or a thread could not be had */
    FLASH_STATUS_INTERNAL = 8,      /* a defect of the library */
    FLASH_STATUS_CANCELLED = 9      /* the interrupt check ended the call (section 12); what it was to write is undefined */
} flash_status_t;

/* "INVALID" for FLASH_STATUS_INVALID, and so on; "UNKNOWN" for a value that is no status. Never NULL. */
FLASH_API const char *flash_status_name(flash_status_t status);

/* What the last failing call of this thread had to say; "" if its last call succeeded. Never NULL; valid until the next call
 * of a libflash function on this thread. */
FLASH_API const char *flash_last_error(void);

/* ---------------------------------------------------------------------------------------------------------------------
 * 4  TENSORS AND OPTIONS
 *
 * A tensor is a borrowed view. Strides count elements, not bytes, and may be anything that is not negative, as long as the
 * last dimension is contiguous (stride 1) for q, k, v, out, dout, dq, dk, dv, the caches, what is appended to them, and the
 * rotary tables; inputs may repeat (stride 0). So (batch, heads, seqlen, head_dim) memory is passed by naming the axes in the
 * order this header asks for, with its strides. Vectors of lengths are contiguous. Each size is below 2^40. Strides of dimensions
 * of size 0 or 1 are not looked at. Data must be aligned to its element size. `data` may be NULL when the tensor has no elements.
 * Outputs must not overlap inputs, each other or themselves; slices of one buffer (dq, dk, dv in a packed tensor) do not. */
typedef enum flash_dtype_t {
    FLASH_DTYPE_NONE = 0,
    FLASH_DTYPE_FLOAT16 = 1,
    FLASH_DTYPE_BFLOAT16 = 2,
    FLASH_DTYPE_FLOAT32 = 3,
    FLASH_DTYPE_FLOAT64 = 4, /* CPU only */
    FLASH_DTYPE_INT32 = 5,
    FLASH_DTYPE_BOOL = 6, /* one byte, 0 is false, anything else true */
    FLASH_DTYPE_INT64 = 7 /* rng_state only */
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

/* Shapes, with B = batch, Sq and Sk = seqlen, Hq and Hk = heads, D = head_dim, Dv = head_dim_v:
 *
 *              dense               packed (`cu_seqlens_q` / `cu_seqlens_k` given)
 *     q        (B, Sq, Hq, D)      (total_q, Hq, D)
 *     k        (B, Sk, Hk, D)      (total_k, Hk, D)
 *     v        (B, Sk, Hk, Dv)     (total_k, Hk, Dv)
 *     out      (B, Sq, Hq, Dv)     (total_q, Hq, Dv)
 *     lse      (B, Hq, Sq)         (Hq, total_q)
 *
 * Hq must be a multiple of Hk; query head h reads key head h / (Hq / Hk). q, k, v, out and the gradients share one of the types
 * FLOAT16, BFLOAT16, FLOAT32 and FLOAT64. D and Dv are 1 to 512 on the CPU and 1 to 256 on CUDA. lse and dlse are FLOAT32 (FLOAT64
 * with FLOAT64 tensors), natural logarithm. Sums and the softmax are computed in FLOAT32 (FLOAT64 with FLOAT64 tensors).
 * The query and the key side are dense or packed independently of each other.
 *
 * Flags. An unknown bit is refused. */
#define FLASH_FLAG_CAUSAL 0x1u        /* query i sees key j only if j <= i + shift; shift = Lk - Lq (bottom-right aligned) */
#define FLASH_FLAG_TOP_LEFT 0x2u      /* align the causal rule and the window top-left instead: shift = 0 */
#define FLASH_FLAG_WINDOW 0x4u        /* use window_left and window_right: i + shift - left <= j <= i + shift + right */
#define FLASH_FLAG_SCALE 0x8u         /* use softmax_scale; without it the default 1 / sqrt(D) */
#define FLASH_FLAG_DETERMINISTIC 0x10u /* backward: the same bits in every run. On CUDA dq is else a sum in any order; with the flag it takes
                                        * less workspace and some 1.4 times as long. UNSUPPORTED where it cannot be had */
#define FLASH_FLAG_ROTARY_INTERLEAVED 0x20u /* decode: rotary pairs are (0,1), (2,3), ...; without it (0, r/2), (1, r/2+1), ... */

/* The two compressed forms of a block mask, as flash_block_mask_compress writes them: for each row of blocks which columns are
 * kept (the forward and the query gradient read this one), and for each column which rows (the key and value gradients).
 * B1 is B or 1, H1 is Hq or 1, nq = ceil(Sq / 128), nk = ceil(Sk / 128). All INT32. Entries past a count are not read. A forward
 * call needs the row lists alone: the others may be left zero, there and in flash_block_mask_compress. */
#define FLASH_BLOCK_SIZE 128
typedef struct flash_block_lists_t {
    flash_tensor_t row_counts;  /* (B1, H1, nq) */
    flash_tensor_t row_indices; /* (B1, H1, nq, nk), each row ascending */
    flash_tensor_t col_counts;  /* (B1, H1, nk) */
    flash_tensor_t col_indices; /* (B1, H1, nk, nq), each row ascending */
} flash_block_lists_t;

/* What the FLASH_..._INIT below expand to: a struct of zeros with its struct_size set, without a warning in either language. */
#ifdef __cplusplus
#define FLASH_INIT_(type) [] { type flash_init_ = {}; flash_init_.struct_size = sizeof(type); return flash_init_; }()
#else
#define FLASH_INIT_(type) {.struct_size = sizeof(type)}
#endif

/* The largest num_threads of any options. */
#define FLASH_MAX_THREADS 4096

/* Options of forward and backward. Set everything to zero, then struct_size; zero or NULL means "not used" everywhere.
 * FLASH_ATTENTION_OPTIONS_INIT does both. Passing NULL for the options means all defaults. */
typedef struct flash_attention_options_t {
    uint32_t struct_size;   /* sizeof(flash_attention_options_t) */
    uint32_t flags;         /* FLASH_FLAG_... */
    double softmax_scale;   /* with FLASH_FLAG_SCALE, else 0; any finite value, negative and zero included */
    double softcap;         /* 0: off; otherwise positive and finite */
    double dropout_p;       /* probability of dropping an entry of P; 0 <= p < 1 */
    uint64_t seed;          /* of the dropout mask, which depends on (seed, offset, batch, head, row, column) alone: */
    uint64_t offset;        /*   the same in forward and backward, on every backend, in any tiling; see below. Or rng_state */
    int64_t window_left;    /* with FLASH_FLAG_WINDOW: keys to the left that are visible; -1: all. Inclusive of the diagonal. */
                            /*   Without the flag 0 or -1 */
    int64_t window_right;   /* the same to the right; FLASH_FLAG_CAUSAL makes it 0 */
    int64_t max_seqlen_q;   /* packed: an upper bound of the lengths, if known; 0: not known. Never needed */
    int64_t max_seqlen_k;
    int64_t num_splits;     /* forward: into how many ranges the keys of a row are split, up to 1024; 0: the library chooses, */
                            /*   1: none */

    const flash_tensor_t *cu_seqlens_q; /* INT32 (B + 1): sequence b is rows cu[b] to cu[b + 1] - 1 of the packed tensor */
    const flash_tensor_t *cu_seqlens_k;
    const flash_tensor_t *seqused_q;    /* INT32 (B): only the first so many rows of each sequence exist; out is 0 past them */
    const flash_tensor_t *seqused_k;

    const flash_tensor_t *alibi_slopes;   /* (Hq) or (B, Hq); FLOAT32, or the type of q */
    const flash_tensor_t *bias;           /* up to 4 dimensions, aligned to the right with (B, Hq, Sq, Sk); each of them full */
                                          /*   size or 1 (repeated); FLOAT32, or the type of q. Packed: Sq, Sk are the      */
                                          /*   largest lengths, or more; row and column count inside the sequence           */
    const flash_tensor_t *mask;           /* BOOL, shapes as bias; true keeps the key */
    const flash_tensor_t *learnable_sink; /* (Hq): one more logit in each row's softmax, without a value; FLOAT32 or q's type */
    const flash_tensor_t *block_mask;     /* BOOL (B or 1, Hq or 1, ceil(Sq / 128), ceil(Sk / 128)): true keeps the block */
    const flash_block_lists_t *block_lists; /* the same, compressed; give one of the two */

    /* Backward only; must be NULL in a forward call. */
    const flash_tensor_t *dlse;  /* gradient with respect to lse, shape and type of lse */
    const flash_tensor_t *dbias; /* output, shape and type of bias: summed over the repeated dimensions */
    const flash_tensor_t *dsink; /* output, shape and type of learnable_sink */

    const char *backend;  /* NULL, "cpu", "sm80" or "sm90": refuse every kernel of another backend */
    const char *kernel;   /* NULL, or the name of a kernel (flash_kernel_info): run this one or refuse, never another */
    int32_t num_threads;  /* CPU, up to FLASH_MAX_THREADS; 0: what flash_cpu_threads() says. Results do not depend on it */
    int32_t tile_q;       /* see section 13; 0 */
    int32_t tile_k;       /* see section 13; 0 */
    int32_t reserved;     /* 0 */

    /* INT64 (2,), contiguous, on the device of q: seed and offset of the dropout mask, each the 64 bits of an unsigned number; `seed` and
     * `offset` must then be 0. On CUDA the kernels read it when they run, so that a captured graph takes what it holds at each replay;
     * on the CPU the call reads it. */
    const flash_tensor_t *rng_state;
} flash_attention_options_t;

#define FLASH_ATTENTION_OPTIONS_INIT FLASH_INIT_(flash_attention_options_t)

/* The dropout mask. Philox4x32-10 (Salmon et al., SC 2011) with key (seed mod 2^32, seed / 2^32) and counter
 * (column / 4, row, (batch * Hq + head) mod 2^32, offset mod 2^32 xor (offset / 2^32 * 0x9E3779B9 mod 2^32)) gives four words; word
 * column mod 4 belongs to that column. An entry is kept if its word >= floor(dropout_p * 2^32), and kept entries are multiplied by
 * 1 / (1 - dropout_p). Row and column count inside the sequence; in packed tensors `batch` is the number of the sequence. lse is that
 * of the undropped row. */

/* ---------------------------------------------------------------------------------------------------------------------
 * 5  FORWARD
 *
 * Writes out and, if not NULL, lse. Rows of a packed tensor that belong to no sequence are not written; rows of a sequence past
 * seqused_q get out = 0 and lse = -infinity.
 * Deterministic: the same inputs, options, device and build give the same bits. Every status but CUDA, OUT_OF_MEMORY, INTERNAL and
 * CANCELLED comes before the first write. */
FLASH_API flash_status_t flash_attention_forward(const flash_tensor_t *q, const flash_tensor_t *k, const flash_tensor_t *v,
                                                 const flash_tensor_t *out, const flash_tensor_t *lse,
                                                 const flash_attention_options_t *options, void *workspace,
                                                 size_t workspace_bytes, void *stream);

/* Bytes of workspace for that very call. Reads no tensor data; `data` pointers may be NULL. */
FLASH_API flash_status_t flash_attention_forward_workspace_size(const flash_tensor_t *q, const flash_tensor_t *k,
                                                                const flash_tensor_t *v, const flash_tensor_t *out,
                                                                const flash_tensor_t *lse,
                                                                const flash_attention_options_t *options, size_t *bytes);

/* ---------------------------------------------------------------------------------------------------------------------
 * 6  BACKWARD
 *
 * From dout = d loss / d out (and options->dlse = d loss / d lse, if given) writes dq, dk, dv, with the shapes of q, k, v, and
 * options->dbias and options->dsink if given. q, k, v, out, lse and the options must be those of the forward call; lse is
 * required. With GQA, dk and dv are the sums over the query heads of a group, added in FLOAT32. Rows of packed tensors that belong to
 * no sequence are not written; gradients of rows past seqused_q / seqused_k are 0. */
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
 * A few new query rows per sequence against a cache of keys and values; forward only ("Flash-Decoding"). With k_new and v_new
 * the new rows are first written into the cache behind the valid ones, in place, and then take part.
 *
 *     q         (B, Sq, Hq, D)
 *     k_cache   (B_cache, capacity, Hk, D), or with block_table (num_pages, page_size, Hk, D)
 *     v_cache   (B_cache, capacity, Hk, Dv), or with block_table (num_pages, page_size, Hk, Dv)
 *     out       (B, Sq, Hq, Dv)
 *     lse       (B, Hq, Sq), or NULL
 *
 * Sequence b uses cache entry cache_batch_idx[b] (default b). Its keys are those before cache_seqlens[b] (default: the capacity,
 * or without it and with k_new: 0), then the appended ones; Lk counts both. The causal rule and the window are aligned bottom-right on
 * (Sq, Lk). Paged: key j of sequence b is row j mod page_size of page block_table[b][j / page_size]; entries past the last key are
 * not read. Pages and cache entries may be shared for reading, but a row that one sequence appends to must not be a key of another in
 * the same call, old or new.
 * On the CPU a bad length or page number is refused (INVALID); on CUDA, where lengths stay on the device, a page number out of range
 * is treated as absent, cache_seqlens is clamped to 0 .. capacity, a position behind the rotary tables takes their last row, and nothing
 * is written outside the cache.
 * On CUDA a new row that does not fit, because cache_seqlens[b] + i >= capacity, is absent: it is not written and no query sees it, while
 * Lk and so the positions of queries still count it. The valid keys of that sequence and of all others stay as they are. The call does
 * not report it; a sequence has lost rows exactly if cache_seqlens[b] + S_new > capacity, which the caller can compare beforehand.
 *
 * Rotary embedding (with rotary_cos and rotary_sin) turns the first r = 2 * rotary_cos.shape[1] channels of q and k_new: pair (x, y) at
 * position t becomes (x cos_t - y sin_t, x sin_t + y cos_t). The new key number i stands at position cache_seqlens[b] + i; so does
 * query row i when the call is causal or has a window; otherwise all query rows stand at cache_seqlens[b]. The cache holds turned keys.
 * Turned rows are rounded to the type of q. */
typedef struct flash_decode_options_t {
    uint32_t struct_size; /* sizeof(flash_decode_options_t) */
    uint32_t flags;       /* CAUSAL, WINDOW, SCALE, ROTARY_INTERLEAVED */
    double softmax_scale;
    double softcap;
    int64_t window_left;
    int64_t window_right;
    int64_t num_splits; /* into how many ranges the keys are split, up to 1024; 0: the library chooses, 1: none */
    int64_t split_size; /* instead: keys per range, a multiple of 128; the bits of a sequence then do not depend on its batch */
    const flash_tensor_t *cache_seqlens;   /* INT32 (B): valid keys before this call */
    const flash_tensor_t *block_table;     /* INT32 (B, columns) */
    const flash_tensor_t *cache_batch_idx; /* INT32 (B); not together with block_table */
    const flash_tensor_t *cache_leftpad;   /* INT32 (B): the first so many cached keys do not exist, nor need their pages */
    const flash_tensor_t *k_new;           /* (B, S_new, Hk, D) */
    const flash_tensor_t *v_new;           /* (B, S_new, Hk, Dv) */
    const flash_tensor_t *rotary_cos;      /* (positions, r / 2), contiguous rows; FLOAT32 or the type of q */
    const flash_tensor_t *rotary_sin;
    const flash_tensor_t *alibi_slopes;
    const flash_tensor_t *learnable_sink;
    const char *backend;
    const char *kernel;
    int32_t num_threads;
    int32_t reserved;
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

/* ---------------------------------------------------------------------------------------------------------------------
 * 8  MERGE
 *
 * Attention over several disjoint ranges of keys, put together: from outs[n] and lses[n], each what forward gave for one range,
 * lse = log(sum_n exp(lses[n])) and out = sum_n exp(lses[n] - lse) outs[n]. A part with lse = -infinity contributes nothing,
 * whatever its out holds. `outs` and `lses` are arrays of `count` tensors, 1 or more, of one shape: (B, S, H, Dv) with
 * (B, H, S), or (total, H, Dv) with (H, total). Parts and result may have different types. lse may be NULL. No workspace. */
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
 * From a dense block mask (section 4) to the lists that the kernels walk. Do this once for a mask that serves many calls; a call that
 * is given the dense form compresses it itself, in its workspace. All tensors contiguous, on one device. */
FLASH_API flash_status_t flash_block_mask_compress(const flash_tensor_t *block_mask, const flash_block_lists_t *lists,
                                                   void *stream);

/* ---------------------------------------------------------------------------------------------------------------------
 * 10  WHAT WOULD RUN
 *
 * Text a person can read: which kernel, tile, splits, workspace the call would take, and why not the others. Reads no tensor data.
 * Writes at most `capacity` bytes including the final 0 and, if `needed` is not NULL, the bytes the whole text takes. An unsupported
 * call is explained too (status OK); an invalid one is refused like the call itself. Outputs are not needed. */
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
    const char *name;       /* "forward_cpu_avx512": what `kernel` in the options takes */
    const char *operation;  /* "forward", "backward", "decode", "merge", "compress" */
    const char *backend;    /* "cpu", "sm80", "sm90"; "any": every CUDA device, whichever backend is asked for */
    const char *dtype;      /* "bf16", or "any" */
    const char *why_not;    /* if not usable: the reason; else "" */
    int32_t head_dim;       /* largest; 0: any that the backend takes */
    int32_t head_dim_v;
    int32_t tile_q;         /* rows and keys of a tile; 0: chosen at run time */
    int32_t tile_k;
    int32_t stages;         /* tiles of K and V in flight; 0: none */
    int32_t reserved;
} flash_kernel_info_t;

#define FLASH_KERNEL_INFO_INIT FLASH_INIT_(flash_kernel_info_t)

FLASH_API int32_t flash_kernel_count(void);

/* Fills in `info` for 0 <= index < flash_kernel_count(). Of a struct of a later version, what this library does not know becomes 0.
 * INVALID for an index out of range or no `info`; VERSION for a struct_size below that of version 0.1 (72) or above 4096. `info` is then
 * not written. flash_device_info likewise, with 280 bytes. */
FLASH_API flash_status_t flash_kernel_info(int32_t index, flash_kernel_info_t *info);

/* CUDA devices, as this process sees them. No driver or no GPU is 0 devices, not an error; flash_cuda_state says why. */
typedef struct flash_device_info_t {
    uint32_t struct_size;          /* sizeof(flash_device_info_t): FLASH_DEVICE_INFO_INIT sets it */
    int32_t arch;                  /* 90 for compute capability 9.0 */
    int32_t multiprocessors;
    int32_t shared_memory_bytes;   /* that one thread block may use */
    int64_t memory_bytes;
    char name[256];
} flash_device_info_t;

#define FLASH_DEVICE_INFO_INIT FLASH_INIT_(flash_device_info_t)

FLASH_API int32_t flash_device_count(void);
FLASH_API flash_status_t flash_device_info(int32_t index, flash_device_info_t *info);

/* One line: "ready: 1 device", "no NVIDIA driver", "built without CUDA: no compiler found", ... */
FLASH_API const char *flash_cuda_state(void);

/* How this library was built: lines of "key: value" (version, compiler, cuda, architectures). */
FLASH_API const char *flash_build_info(void);

/* What the CPU backend found: "avx512bf16", "avx512", "avx2", "generic". */
FLASH_API const char *flash_cpu_isa(void);

/* How many threads a CPU call of this thread takes if its options do not say. LIBFLASH_NUM_THREADS from the environment, 1 to 4096;
 * else OMP_NUM_THREADS; else the processors that this thread may run on (its affinity mask), but no more than the CPU quota of the
 * process's control group allows, rounded up. The environment is read at the first use; a variable that is empty counts as not
 * set. 0 if LIBFLASH_NUM_THREADS is no such number: flash_last_error() then says so, and CPU calls that do not give num_threads are
 * INVALID. */
FLASH_API int32_t flash_cpu_threads(void);

/* ---------------------------------------------------------------------------------------------------------------------
 * 12  INTERRUPTING A CPU CALL
 *
 * From then on CPU calls made on this thread ask check(context) from time to time, on this thread, at most some twenty times a second.
 * The first answer other than 0 ends the call with FLASH_STATUS_CANCELLED: its outputs, and rows appended to a cache, are then
 * undefined. The check may call the library. NULL: ask nobody, as at the start. Calls on CUDA tensors return at once and never ask. */
FLASH_API void flash_set_interrupt(int32_t (*check)(void *context), void *context);

/* ---------------------------------------------------------------------------------------------------------------------
 * 13  NOT STABLE: SWITCHES FOR TESTS
 *
 * tile_q and tile_k in flash_attention_options_t, if positive, are the CPU backend's rows and keys per tile (1 to 512): tiny problems
 * then cross tile edges. They may disappear in any version. */

#ifdef __cplusplus
}
#endif

#endif /* LIBFLASH_H */
