# cython: language_level=3, binding=False, embedsignature=True, embedsignature.format=clinic
# cython: freethreading_compatible=True, boundscheck=False, wraparound=False, cdivision=True
"""The compiled module of libflash: it describes arrays to the C library, calls it without the GIL and turns a status into an
exception. It decides nothing itself.

Functions are plain C functions (binding=False), because JAX takes weak references to the functions that it compiles. Defaults are
literals, because the text from which inspect reads the signature cannot name a variable.

The parts, in the order of a call: _sources.pxi (the library of an array), _torch_state.pxi (autograd, transforms and modes),
_borrow.pxi and _numpy.pxi (the C library's description of an array), _outputs.pxi (streams, outputs, workspace) and
_small_workspace.pxi, _options.pxi (keywords to structs), _cpu_calls.pxi (threads, signals), the operations below and in
_operations.pxi, _cache_write.pxi, _decode_schedule.pxi and _tangents.pxi, and _shapes.pxi (checks without data).
"""
import functools
import os
import sys
import threading

from ._arguments import (
    check_parts, described, integer as integer_of, is_traced, layout_hint, one_of, plainly, real as real_of, refuse_key,
    refuse_subclass, refuse_traced, short_bound, shortened
)
from ._block_mask import BlockMask
from ._errors import InvalidError, OutOfMemoryError, UnsupportedError, VersionError, from_status, python_names
from ._option_list import defaults_of, options_of
from ._scalar import is_scalar

from cpython.buffer cimport PyBUF_STRIDED_RO, PyBuffer_Release, PyObject_GetBuffer
from cpython.object cimport PyObject_Call
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.math cimport isfinite
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memset, strcmp

from libflash._capi cimport *
from libflash._dlpack cimport *


cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object x, int *overflow) except? -1
    void PyErr_SetString(object kind, const char *message)


cdef extern from "stdlib.h" nogil:
    int posix_memalign(void **memory, size_t alignment, size_t size)


cdef object _no_window = (-1, -1)
NO_WINDOW = _no_window
cdef object _whole = (1, 0, 1)
NO_SHARD = _whole
DTYPE_RULE = ("float16, bfloat16, float32, float64 (and bool for masks, int32 for lengths, float8_e4m3fn, float8_e5m2 and int8 "
              "for caches of decode) are supported")
DTYPE_NAMES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}  # the bits follow
SMALL_DTYPE_NAMES = {  # less than 16 bits: the name says all
    7: "float8_e3m4", 8: "float8_e4m3", 9: "float8_e4m3b11fnuz", 10: "float8_e4m3fn", 11: "float8_e4m3fnuz", 12: "float8_e5m2",
    13: "float8_e5m2fnuz", 14: "float8_e8m0fnu", 15: "float6_e2m3fn", 16: "float6_e3m2fn", 17: "float4_e2m1fn"}
DTYPE_OBJECTS = {1: "float16", 2: "bfloat16", 3: "float32", 4: "float64", 5: "int32"}

include "_sources.pxi"
include "_torch_state.pxi"
include "_borrow.pxi"
include "_numpy.pxi"
include "_small_workspace.pxi"
include "_outputs.pxi"
include "_options.pxi"
include "_cpu_calls.pxi"


cdef int check(flash_status_t status) except -1:
    if status != FLASH_STATUS_OK:
        raise from_status(status, with_hint(flash_last_error().decode("utf-8", "replace")))
    return 0


cdef int check_shapes(flash_status_t status, const flash_tensor_t *q, const flash_tensor_t *k, const flash_tensor_t *v,
                      Layout layout) except -1:
    """As check(). If q, k and v do not agree, and would in another layout, the text says so."""
    if status == FLASH_STATUS_OK:
        return 0
    cdef str text = with_hint(flash_last_error().decode("utf-8", "replace"))
    raise from_status(status, text + layout_hint(text, layout_name(layout), shape_in(q, layout), shape_in(k, layout),
                                                 shape_in(v, layout)))


cdef str layout_name(Layout layout):
    return "bshd" if layout == BSHD else "bhsd" if layout == BHSD else "sbhd"


cdef tuple shape_in(const flash_tensor_t *x, Layout layout):
    """The caller's shape of an array that to_bshd() has described in the C library's layout."""
    cdef flash_tensor_t given = x[0]
    to_bshd(&given, layout)  # it exchanges two axes: its own inverse
    return tuple([given.shape[i] for i in range(given.ndim)])


cdef int check_bounds(const flash_attention_options_t *made, const flash_tensor_t *q, const flash_tensor_t *k) except -1:
    """Refuse upper bounds below the lengths that the shapes say. Only packed sequences need bounds, and there the C library
    checks them."""
    if made.max_seqlen_q > 0 and made.cu_seqlens_q == NULL and made.seqused_q == NULL and q.shape[1] > made.max_seqlen_q:
        raise short_bound("max_seqlen_q", made.max_seqlen_q, "q", q.shape[1])
    if made.max_seqlen_k > 0 and made.cu_seqlens_k == NULL and made.seqused_k == NULL and k.shape[1] > made.max_seqlen_k:
        raise short_bound("max_seqlen_k", made.max_seqlen_k, "k", k.shape[1])
    return 0


cdef str with_hint(str text):
    """The C library's text. If it requires contiguous memory, also how to get that."""
    if "must be contiguous" not in text:
        return text
    cdef str name = text.partition(":")[0]
    return f"{text}; numpy.ascontiguousarray({name}) and {name}.contiguous() of PyTorch copy into such memory"


cdef int check_rank(const flash_tensor_t *x, str name, bint packed) except -1:
    """Check the rank, which the allocation of outputs depends on. The C library checks the rest."""
    if x.ndim != (3 if packed else 4):
        lengths = "cu_seqlens_q" if name == "q" else "cu_seqlens_k"
        raise InvalidError(f"{name} has {x.ndim} dimensions; it needs "
                           + (f"3, (total, heads, head_dim), with {lengths}" if packed else
                              f"4, (batch, seqlen, heads, head_dim) in the order that layout says, without {lengths}; "
                              f"packed, with 3, {lengths} must be given"))
    return 0


cdef int32_t lse_dtype(int32_t dtype) noexcept:
    return FLASH_DTYPE_FLOAT64 if dtype == FLASH_DTYPE_FLOAT64 else FLASH_DTYPE_FLOAT32


cdef object new_out(Call *call, _Source source, object like, const flash_tensor_t *q, int64_t head_dim_v, Layout layout,
                    str name, flash_tensor_t *out, bint part=False):
    """A new array with the shape of q, but head_dim_v channels, in the caller's layout; `out` describes it in the C library's
    layout. With `part`, for a result that is merged later, it has the type of lse."""
    cdef int64_t shape[4]
    cdef int i
    for i in range(q.ndim):
        shape[i] = q.shape[i]
    shape[q.ndim - 1] = head_dim_v
    if q.ndim == 4 and layout == BHSD:
        shape[1], shape[2] = shape[2], shape[1]
    elif q.ndim == 4 and layout == SBHD:
        shape[0], shape[1] = shape[1], shape[0]
    array = new_array(call, source, like, q, lse_dtype(q.dtype) if part else q.dtype, q.ndim, shape, name, out)
    to_bshd(out, layout)
    return array


cdef object new_lse(Call *call, _Source source, object like, const flash_tensor_t *q, flash_tensor_t *lse):
    """A new array for the LSE: (batch, heads_q, seqlen_q), or (heads_q, total_q) if packed."""
    cdef int64_t shape[3]
    if q.ndim == 4:
        shape[0], shape[1], shape[2] = q.shape[0], q.shape[2], q.shape[1]
    else:
        shape[0], shape[1] = q.shape[1], q.shape[0]
    return new_array(call, source, like, q, lse_dtype(q.dtype), q.ndim - 1, shape, "lse", lse)


def attention(q, k, v, *, causal=False, causal_align="bottom_right", window_size=(-1, -1), softmax_scale=None, softcap=0.0,
              alibi_slopes=None, bias=None, mask=None, learnable_sink=None, block_mask=None, dropout_p=0.0, seed=0, offset=0,
              layout="bshd", cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None,
              seqused_k=None, num_splits=0, row_begin=None, row_step=1, column_begin=None, column_step=1, row_positions=None,
              column_positions=None, sequence_numbers=None, head_begin=0, heads_total=0, sm_margin=0, resume=False,
              return_lse=False, out=None, lse=None, max_logit=None, entropy=None, stream=None, backend=None, kernel=None):
    """Exact attention: softmax(softmax_scale * q k^T) v, without storing the matrix of scores.

    The method is FlashAttention (Dao et al., arXiv 2205.14135) and FlashAttention-2 (arXiv 2307.08691); names and meanings are
    those of the flash-attn package. Sums and softmax are in float32 (float64 for float64).

    Arrays of any library with DLPack (NumPy, PyTorch, CuPy, JAX on the CPU, ...), used in place, never copied; results are arrays
    of q's library on q's device. On a GPU the work is put on the library's current stream and the call returns at once. PyTorch
    tensors that require a gradient are differentiable.

    Parameters
    ----------
    q : (batch, seqlen_q, heads_q, head_dim), or packed (total_q, heads_q, head_dim) with cu_seqlens_q
        float16, bfloat16 (NumPy: ml_dtypes), float32 or float64. head_dim up to 512.
        Any strides that are not negative, the last one 1.
    k : (batch, seqlen_k, heads_k, head_dim), or packed (total_k, heads_k, head_dim) with cu_seqlens_k
        heads_q must be a multiple of heads_k (grouped queries): query head h reads key head h // (heads_q // heads_k).
    v : (batch, seqlen_k, heads_k, head_dim_v), or packed
    causal : bool
        Query i sees key j only if j <= i + seqlen_k - seqlen_q (bottom-right aligned).
    causal_align : "bottom_right" or "top_left"
        "top_left": causal and window_size count from j <= i instead, as in PyTorch's scaled_dot_product_attention and in JAX.
    window_size : (left, right)
        Keys that a query sees to either side of its diagonal, inclusive; -1 or None: all.
    softmax_scale : float, default 1 / sqrt(head_dim)
    softcap : float
        If positive, scores become softcap * tanh(score / softcap), before bias and masks.
    alibi_slopes : (heads_q,) or (batch, heads_q), float32 or q's type
        Adds -slope * abs(i + seqlen_k - seqlen_q - j) to the scores.
    bias : up to 4 dimensions, aligned to the right with (batch, heads_q, seqlen_q, seqlen_k), each full or 1; float32 or q's type
        Added to the scores.
        Backward computes the softmax again from lse. Where all scores of a row are near -1e6 or below (a bias of finfo.min), lse
        cannot hold the sum of their exponentials, and the gradients of that row are wrong: mask with -inf or `mask`.
    mask : bool, shape as bias
        True keeps the key.
    learnable_sink : (heads_q,), float32 or q's type
        One more score in each row's softmax, without a value.
    block_mask : bool (batch or 1, heads_q or 1, ceil(seqlen_q / 128), ceil(seqlen_k / 128)), or a BlockMask
        True keeps the block of 128 x 128 scores.
    dropout_p : float
        Probability of dropping an entry of the softmax, at least 0 and below 1; rounded to a multiple of 2**-16, at most
        1 - 2**-16. Kept entries are multiplied by 1 / (1 - that probability). The mask depends on (seed, offset, batch, head,
        row, column) alone; the definition (Philox4x32-7) is in libflash.h.
    seed, offset : int from 0 to 2**64 - 1, also an integer array without dimensions
        Or seed alone: an array of two int64 or uint64 numbers on q's device, seed and offset, read as 64 bits each. On a GPU the
        kernels read it when they run, so a captured CUDA graph uses the numbers that it holds at each replay.
        A PRNG key of JAX is refused; libflash.jax.attention takes one as seed.
    layout : "bshd", "bhsd" or "sbhd"
        The order of the axes of q, k, v and out: b batch, s seqlen, h heads, d head_dim. Packed arrays, lse, bias and masks
        always have the order given here.
    cu_seqlens_q, cu_seqlens_k : (batch + 1,) int32 (int64 on the CPU: converted)
        Sequence b is rows cu_seqlens[b] to cu_seqlens[b + 1] - 1 of the packed array. Either side may be packed.
    max_seqlen_q, max_seqlen_k : int
        Upper bounds of the lengths, if known. Never needed. On the CPU, and where the shape says the length, one below a length
        is refused; on CUDA results are then undefined.
    seqused_q, seqused_k : (batch,) int32 (int64 on the CPU: converted)
        Used lengths: only the first seqused[b] rows of sequence b exist. Out is 0 and lse -inf in rows past seqused_q.
    num_splits : int, 0 to 1024
        No effect: attention() does not split the keys. decode() does.
    row_begin, column_begin : int, or (batch,) int32;  row_step, column_step : int
        For a call on a part of the rows or keys of longer sequences (a shard): row i has the position row_begin + i * row_step,
        key j the position column_begin + j * column_step. If a begin, row_positions or column_positions is given, causal,
        window_size, alibi_slopes and dropout use the positions; bias, mask and block_mask still use the row and column numbers in
        the arrays. On a GPU positions must be below 2**29, and alibi_slopes need steps of 1 and neither row_positions nor
        column_positions.
    row_positions, column_positions : (batch, seqlen) or packed (total,) int32 (int64 on the CPU: converted)
        The position of each row or key; strictly increasing within a sequence.
    sequence_numbers : (batch,) int32 (int64 on the CPU: converted);  head_begin, heads_total : int
        The numbers that dropout uses for batch entries and heads, for a call on some sequences or heads of a batch: head h has
        the number head_begin + h of heads_total.
    sm_margin : int
        On a GPU: number of multiprocessors to leave free for kernels that run at the same time. No effect on the CPU.
    resume : bool
        Start from out and lse, which hold the result for other keys of the same rows, and replace them by the result for both
        sets of keys. Give learnable_sink to the first call only.
    return_lse : bool
        Also return lse.
    out : array like q with head_dim_v channels
        The output; allocated if not given. It may not overlap the inputs. It may be float32 with 16-bit inputs.
    lse : (batch, heads_q, seqlen_q) or packed (heads_q, total_q), float32 (float64 for float64)
        The output for the LSE.
    max_logit : shape and type of lse, or (heads_q,)
        An output: the largest score of each row (-inf in rows that see no key), or of each head over all rows and sequences, as
        QK-clip needs it, which scales the weights of q and k of a head down when its scores grow too large. With scale, softcap,
        ALiBi and bias; the sink is no score.
    entropy : shape and type of lse
        An output: the entropy of each row's softmax in nats, sink included, dropout ignored.
        These two have no gradients. Packed rows that belong to no sequence are not written.
    stream : int or object with __cuda_stream__
        CUDA stream instead of the current one. The caller must then keep the arrays alive until the work is done, and order the
        work of the call with the work on other streams.
    backend : "cpu", "sm80" or "sm90";  kernel : a name from info()["kernels"]
        Use this backend or kernel, or raise UnsupportedError.

    Returns
    -------
    out : shape of q with head_dim_v channels, type of q. Zero in rows that see no key.
    lse : if return_lse. Natural logarithm of the sum of exp(scores) of each row; -inf in rows that see no key and have no sink.

    Raises
    ------
    InvalidError (a ValueError) for a wrong shape, stride or value, UnsupportedError (a NotImplementedError) if no kernel supports
    the call, TypeError for an object of a wrong kind, NoDeviceError, CudaError, OutOfMemoryError. Outputs are then untouched.
    """
    cdef Call call
    cdef Extras extras
    cdef flash_attention_options_t options
    cdef flash_tensor_t tq, tk, tv, tout, tlse
    cdef flash_tensor_t *lse_or_null = NULL
    cdef size_t size = 0
    cdef void *scratch
    cdef void *on
    cdef flash_status_t status
    cdef bint small
    cdef _Source source = source_of(q, "q")
    cdef bint lse_wanted = flag(return_lse, "return_lse")
    if (source.torch and (dispatcher_needed(source) or records_gradients() and (
                requires_grad(q) or requires_grad(k) or requires_grad(v) or requires_grad(alibi_slopes) or requires_grad(bias)
                or requires_grad(learnable_sink) or requires_grad(out) or requires_grad(lse)))
            or source.kind == KIND_JAX and needs_xla(q, (
                k, v, alibi_slopes, bias, mask, learnable_sink, block_mask, seed, offset, softmax_scale, cu_seqlens_q,
                cu_seqlens_k, seqused_q, seqused_k))):
        refuse_shard_options(given_of(_attention_of_parts, (
            row_begin, row_step, column_begin, column_step, row_positions, column_positions, sequence_numbers, head_begin,
            heads_total, sm_margin, resume)))
        return by_adapter(source, "attention", (q, k, v), given_of(_attention_passed, (
            causal, causal_align, window_size, softmax_scale, softcap, alibi_slopes, bias, mask, learnable_sink, block_mask,
            dropout_p, seed, offset, layout, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
            num_splits, return_lse, out, lse, max_logit, entropy, stream, backend, kernel)))
    cdef Layout axes = layout_of(layout)
    cdef object out_array = out
    cdef object lse_array = lse
    start(&call, stream)
    try:
        borrow(&call, q, "q", &tq)
        borrow(&call, k, "k", &tk)
        borrow(&call, v, "v", &tv)
        attention_options(&call, &extras, &options, causal, causal_align, window_size, softmax_scale, softcap, alibi_slopes, bias,
                          mask, learnable_sink, block_mask, dropout_p, seed, offset, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                          max_seqlen_k, seqused_q, seqused_k, num_splits, backend, kernel)
        shard_options(&call, &extras, &options, row_begin, row_step, column_begin, column_step, row_positions, column_positions,
                      sequence_numbers, head_begin, heads_total, sm_margin)
        if flag(resume, "resume"):
            if out is None or lse is None:
                raise InvalidError(f"resume needs out and lse, the result so far; {'out' if out is None else 'lse'} is None")
            options.flags |= FLASH_FLAG_CONTINUE
        options.max_logit = extra(&call, &extras, max_logit, "max_logit", WRITE)
        options.entropy = extra(&call, &extras, entropy, "entropy", WRITE)
        check_rank(&tq, "q", cu_seqlens_q is not None)
        check_rank(&tk, "k", cu_seqlens_k is not None)
        check_rank(&tv, "v", cu_seqlens_k is not None)
        to_bshd(&tq, axes)
        to_bshd(&tk, axes)
        to_bshd(&tv, axes)
        check_bounds(&options, &tq, &tk)
        if out is None:
            out_array = new_out(&call, source, q, &tq, tv.shape[tv.ndim - 1], axes, "out", &tout)
        else:
            borrow(&call, out, "out", &tout, WRITE)
            to_bshd(&tout, axes)
        if lse is not None:
            borrow(&call, lse, "lse", &tlse, WRITE)
            lse_or_null = &tlse
        elif lse_wanted:
            lse_array = new_lse(&call, source, q, &tq, &tlse)
            lse_or_null = &tlse
        small = is_small(&tq, &tk, &tv)
        options.num_threads = num_threads_for(source, &tq, small)
        on = call.stream
        scratch = kept_workspace(&call, &size) if small else NULL
        status = FLASH_STATUS_WORKSPACE
        if scratch != NULL:
            with nogil:
                status = flash_attention_forward(&tq, &tk, &tv, &tout, lse_or_null, &options, scratch, size, on)
        if status == FLASH_STATUS_WORKSPACE:
            check_shapes(flash_attention_forward_workspace_size(&tq, &tk, &tv, &tout, lse_or_null, &options, &size), &tq, &tk,
                         &tv, axes)
            scratch = workspace(&call, source, &tq, size, small)
            allow_interrupt(&tq, small)
            with nogil:
                status = flash_attention_forward(&tq, &tk, &tv, &tout, lse_or_null, &options, scratch, size, on)
            end_interrupt(&tq, small)
        check_shapes(status, &tq, &tk, &tv, axes)
        count_write(out)
        count_write(lse)
        count_write(max_logit)
        count_write(entropy)
    finally:
        finish(&call)
    if source.kind == KIND_JAX:
        out_array = deliver(source, q, out_array) if out is None else out
        lse_array = deliver(source, q, lse_array) if lse is None else lse
    if lse_wanted:
        return out_array, lse_array
    return out_array


include "_operations.pxi"
include "_cache_write.pxi"
include "_shapes.pxi"
include "_information.pxi"
include "_decode_schedule.pxi"
include "_tangents.pxi"
