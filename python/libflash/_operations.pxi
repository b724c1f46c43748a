# The other operations: backward, decode, merge, block masks.


cdef object _torch_adapter = None  # libflash/torch.py


cdef dict defaults_in_order(str operation, bint of_parts=False):
    """The defaults of the options that an operation passes to an adapter, or of those of parts of problems, which no adapter
    has."""
    literals = {"window_size": _no_window, "shard": _whole}
    return {option.name: literals.get(option.name, option.default) for option in options_of(operation)
            if (option.adapters == ()) == of_parts}


cdef dict _attention_passed = defaults_in_order("attention")
cdef dict _attention_of_parts = defaults_in_order("attention", of_parts=True)
cdef dict _decode_passed = defaults_in_order("decode")
cdef dict _merge_passed = defaults_in_order("merge")


cdef dict given_of(dict defaults, tuple values):
    """The options that are not at their defaults. `values` has one value for each of `defaults`, in this order. A tuple and this
    loop take less time than a dict of all options."""
    cdef dict given = {}
    cdef Py_ssize_t i = 0
    for name, default in defaults.items():
        value = values[i]
        i += 1
        if is_given(value, default):
            given[name] = value
    return given


cdef dict without_none(dict options):
    return {name: value for name, value in options.items() if value is not None}


cdef object by_xla(str name, tuple arrays, dict options):
    """Call libflash/jax.py with `options`, those that are not at their defaults."""
    for option in ("out", "lse", "stream"):
        if options.pop(option, None) is not None:
            raise InvalidError(f"{option} cannot be given for JAX arrays that are traced, sharded or on a GPU: "
                               "XLA owns memory and streams")
    if options.get("k") is not None:
        raise InvalidError("k and v would be written into caches that are JAX arrays, which are immutable: use "
                           "libflash.jax.decode, which returns the new caches")
    for option in ("max_logit", "entropy"):
        if options.pop(option, None) is not None:
            raise UnsupportedError(
                f"{option} cannot be given for JAX arrays that are traced, sharded or on a GPU: XLA owns memory; "
                f"use libflash.jax.attention(..., return_stats=({option!r},)), which returns it")
    if options.pop("schedule", None) is not None:
        raise UnsupportedError("schedule cannot be given for JAX arrays that are traced, sharded or on a GPU: each call "
                               "computes it")
    if name == "merge" and (options.pop("backend", None) is not None or options.pop("kernel", None) is not None):
        raise UnsupportedError("backend and kernel cannot be given for JAX arrays that are traced, sharded or on a GPU: "
                               "XLA compiles the merge")
    from . import jax as adapter
    return getattr(adapter, name)(*arrays, **options)


cdef object by_adapter(_Source source, str name, tuple arrays, dict given):
    """Call libflash/torch.py with `given`, the options that are not at their defaults. PyTorch's operators accept tensors only,
    so arrays of other libraries are converted to tensors. Calls with arrays of JAX go to libflash/jax.py."""
    global _torch_adapter
    if source.kind == KIND_JAX:
        return by_xla(name, arrays, given)
    if name == "attention":
        flag(given.get("causal", False), "causal")
        # attention() of the adapter would first try a direct call, which is not possible here
        name = "record_plain" if only_records(arrays, given) else "attention_with_pytorch"
    if _torch_adapter is None:
        from . import torch as adapter
        _torch_adapter = adapter
    if given.pop("stream", None) is not None:
        raise InvalidError("stream cannot be given where PyTorch records gradients, casts (autocast), transforms or traces; use "
                           "torch.cuda.stream()")
    return PyObject_Call(getattr(_torch_adapter, name), tuple([as_tensor(x) for x in arrays]),
                         {option: as_tensor(value, option) for option, value in given.items()})


cdef bint only_records(tuple arrays, dict given) except -1:
    """True if PyTorch only has to record a gradient of q, k and v, and no options but the flags causal and return_lse are given.
    Called where PyTorch has something to do."""
    for option, value in given.items():
        if type(value) is not bool or option != "causal" and option != "return_lse":
            return False
    return needs_no_operator(arrays) and not is_true(_torch.autocast_enabled)


cdef bint is_given(object value, object default) except -1:
    """True if an option is not at its default. Floats are compared by value, everything else by identity: 0.0 for a flag or an
    integer counts as given, and is refused later."""
    return value is not default and not (type(value) is float and type(default) is float and value == default)


cdef object as_tensor(object x, str name=None):
    # hasattr() of a number is slow: it raises and drops an AttributeError
    if type(x) in _torch.plain_types or type(x) in _plain_values or not hasattr(x, "__dlpack__"):
        return x
    if isinstance(x, _torch_adapter.Tensor):
        return x
    if is_traced(x):
        if name is not None and x.ndim == 0:
            refuse_traced(x, name)
        return x  # where an array is needed, the adapter refuses it by name
    return _torch_adapter.torch.from_dlpack(x)


def attention_backward(
        dout, q, k, v, out, lse, *, causal=False, causal_align="bottom_right", window_size=(-1, -1), softmax_scale=None,
        softcap=0.0, alibi_slopes=None, bias=None, mask=None, learnable_sink=None, block_mask=None, dropout_p=0.0, seed=0,
        offset=0, layout="bshd", cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None,
        seqused_k=None, num_splits=0, row_begin=None, row_step=1, column_begin=None, column_step=1, row_positions=None,
        column_positions=None, sequence_numbers=None, head_begin=0, heads_total=0, sm_margin=0, dlse=None, deterministic=False,
        delta=None, add=False, dq=None, dk=None, dv=None, dbias=None, dsink=None, stream=None, backend=None, kernel=None):
    """Gradients of attention() with respect to q, k and v, and on request bias and learnable_sink.

    The method is the backward of FlashAttention-2 (arXiv 2307.08691): the softmax is computed again, tile by tile, from lse.

    Parameters
    ----------
    dout : gradient of the loss with respect to out; shape and type of out
    q, k, v : as given to attention()
    out, lse : as attention(..., return_lse=True) returned them
    dlse : gradient with respect to lse, if the loss depends on it; shape and type of lse
    deterministic : bool
        The same bits in every run; UnsupportedError if no kernel can do that. The CPU is always deterministic.
    delta : shape and type of lse
        rowsum(dout * out) - dlse. Without add it is written. With add it is read in place of out, and dlse must be None.
    add : bool
        Add to dq, dk and dv, which must be given and be float32 (float64 for float64).
    dq, dk, dv : arrays with shape and type of q, k, v
        The outputs; allocated if not given. Each may be float32 with 16-bit inputs.
    dbias, dsink : arrays with shape and type of bias and learnable_sink
        If given, their gradients are written there, summed over repeated dimensions.
    The other options must be those of the forward call; see attention().

    k and v may be a part of the keys, if out, lse and dlse are results for all keys. Then dk and dv are the gradients of this
    part, and the sum of dq over all parts is the whole dq. Give learnable_sink and dsink to one of these calls only.

    Returns
    -------
    (dq, dk, dv). With grouped queries dk and dv are summed over the group in float32 (float64 for float64).

    Raises
    ------
    As attention().

    With a dout or dlse of PyTorch that requires a gradient or carries a tangent, and inside torch.func, the results are
    differentiable; dq, dk, dv, dbias, dsink, delta and add cannot be given then.
    """
    cdef Call call
    cdef Extras extras
    cdef flash_attention_options_t options
    cdef flash_tensor_t tdout, tq, tk, tv, tout, tlse, tdq, tdk, tdv
    cdef size_t size = 0
    cdef void *scratch
    cdef void *on
    cdef flash_status_t status
    cdef bint small
    cdef _Source source = source_of(q, "q")
    refuse_tracing(source, "attention_backward")
    if needs_operators(source, (dout, dlse)):
        refuse_shard_options(dict(
            row_begin=row_begin, row_step=row_step, column_begin=column_begin, column_step=column_step,
            row_positions=row_positions, column_positions=column_positions, sequence_numbers=sequence_numbers,
            head_begin=head_begin, heads_total=heads_total, sm_margin=sm_margin))
        from . import _torch_explicit
        return _torch_explicit.attention_backward(
            (dout, q, k, v, out, lse), dlse,
            dict(delta=delta, add=add, dq=dq, dk=dk, dv=dv, dbias=dbias, dsink=dsink, stream=stream),
            dict(causal=causal, causal_align=causal_align, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap,
                 alibi_slopes=alibi_slopes, bias=bias, mask=mask, learnable_sink=learnable_sink, block_mask=block_mask,
                 dropout_p=dropout_p, seed=seed, offset=offset, layout=layout, cu_seqlens_q=cu_seqlens_q,
                 cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seqused_q=seqused_q,
                 seqused_k=seqused_k, num_splits=num_splits, deterministic=deterministic, backend=backend, kernel=kernel))
    cdef Layout axes = layout_of(layout)
    cdef object dq_array = dq
    cdef object dk_array = dk
    cdef object dv_array = dv
    start(&call, stream)
    try:
        borrow(&call, q, "q", &tq)
        borrow(&call, k, "k", &tk)
        borrow(&call, v, "v", &tv)
        borrow(&call, dout, "dout", &tdout)
        borrow(&call, out, "out", &tout)
        borrow(&call, lse, "lse", &tlse)
        attention_options(&call, &extras, &options, causal, causal_align, window_size, softmax_scale, softcap, alibi_slopes, bias,
                          mask, learnable_sink, block_mask, dropout_p, seed, offset, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                          max_seqlen_k, seqused_q, seqused_k, num_splits, backend, kernel)
        shard_options(&call, &extras, &options, row_begin, row_step, column_begin, column_step, row_positions, column_positions,
                      sequence_numbers, head_begin, heads_total, sm_margin)
        if flag(deterministic, "deterministic"):
            options.flags |= FLASH_FLAG_DETERMINISTIC
        if flag(add, "add"):
            if dq is None or dk is None or dv is None:
                raise InvalidError("add needs dq, dk and dv, the sums so far; "
                                   f"{'dq' if dq is None else 'dk' if dk is None else 'dv'} is None")
            options.flags |= FLASH_FLAG_ADD
        options.delta = extra(&call, &extras, delta, "delta", READ if options.flags & FLASH_FLAG_ADD else WRITE)
        options.dlse = extra(&call, &extras, dlse, "dlse")
        options.dbias = extra(&call, &extras, dbias, "dbias", WRITE)
        options.dsink = extra(&call, &extras, dsink, "dsink", WRITE)
        check_rank(&tq, "q", cu_seqlens_q is not None)
        check_rank(&tk, "k", cu_seqlens_k is not None)
        check_rank(&tv, "v", cu_seqlens_k is not None)
        to_bshd(&tq, axes)
        to_bshd(&tk, axes)
        to_bshd(&tv, axes)
        to_bshd(&tdout, axes)
        to_bshd(&tout, axes)
        check_bounds(&options, &tq, &tk)
        dq_array = gradient(&call, source, q, dq, &tq, axes, "dq", &tdq)
        dk_array = gradient(&call, source, q, dk, &tk, axes, "dk", &tdk)
        dv_array = gradient(&call, source, q, dv, &tv, axes, "dv", &tdv)
        small = is_small(&tq, &tk, &tv)
        options.num_threads = num_threads_for(source, &tq, small)
        on = call.stream
        scratch = kept_workspace(&call, &size) if small else NULL
        status = FLASH_STATUS_WORKSPACE
        if scratch != NULL:
            with nogil:
                status = flash_attention_backward(&tdout, &tq, &tk, &tv, &tout, &tlse, &tdq, &tdk, &tdv, &options, scratch, size,
                                                  on)
        if status == FLASH_STATUS_WORKSPACE:
            check_shapes(flash_attention_backward_workspace_size(
                &tdout, &tq, &tk, &tv, &tout, &tlse, &tdq, &tdk, &tdv, &options, &size), &tq, &tk, &tv, axes)
            scratch = workspace(&call, source, &tq, size, small)
            allow_interrupt(&tq, small)
            with nogil:
                status = flash_attention_backward(&tdout, &tq, &tk, &tv, &tout, &tlse, &tdq, &tdk, &tdv, &options, scratch, size,
                                                  on)
            end_interrupt(&tq, small)
        check_shapes(status, &tq, &tk, &tv, axes)
        for array in (dq, dk, dv, dbias, dsink, None if options.flags & FLASH_FLAG_ADD else delta):
            count_write(array)
    finally:
        finish(&call)
    if source.kind == KIND_JAX:
        dq_array = deliver(source, q, dq_array) if dq is None else dq
        dk_array = deliver(source, q, dk_array) if dk is None else dk
        dv_array = deliver(source, q, dv_array) if dv is None else dv
    return dq_array, dk_array, dv_array


cdef object gradient(Call *call, _Source source, object q, object given, const flash_tensor_t *of, Layout axes, str name,
                     flash_tensor_t *made):
    """The given array, or a new one with the shape of `of`; `made` describes it."""
    if given is None:
        return new_out(call, source, q, of, of.shape[of.ndim - 1], axes, name, made)
    borrow(call, given, name, made, WRITE)
    to_bshd(made, axes)
    return given


def decode(q, k_cache, v_cache=None, *, cache_seqlens=None, block_table=None, cache_batch_idx=None, cache_leftpad=None, k=None,
           v=None, rotary_cos=None, rotary_sin=None, rotary_interleaved=True, causal=True, window_size=(-1, -1),
           softmax_scale=None, softcap=0.0, alibi_slopes=None, learnable_sink=None, num_splits=0, split_size=0, k_scale=None,
           v_scale=None, k_rope_cache=None, k_rope=None, head_dim_v=None, cache_dtype=None, cu_seqlens_q=None,
           cu_seqlens_new=None, q_positions=None, tree_mask=None, cu_seqlens_tree=None, shared_groups=None, shared_lens=None,
           schedule=None, shard=(1, 0, 1), invariant=False, return_lse=False, out=None, lse=None, stream=None, backend=None,
           kernel=None):
    """A few new query rows per sequence against a cache of keys and values, as when generating text. Forward only.

    With k and v, the new rows are first appended to the cache, in place, after the valid ones; the queries then see them too.
    Names and meanings are those of flash_attn_with_kvcache. The keys of a sequence may be split into ranges that are processed in
    parallel ("Flash-Decoding").

    Parameters
    ----------
    q : (batch, seqlen_q, heads_q, head_dim), or packed (total_q, heads_q, head_dim) with cu_seqlens_q
    k_cache : (batch_cache, capacity, heads_k, head_dim), or with block_table (num_pages, page_size, heads_k, head_dim)
        q's type, or of 8 bits: float8_e4m3fn, float8_e5m2, int8 (CUDA: with q of 16 bits).
    v_cache : the same with head_dim_v
        None: the values are the first head_dim_v channels of k_cache (MLA); v must then be None too.
    cache_seqlens : (batch,) int32 (int64 on the CPU: converted)
        Valid keys before this call; default the capacity, or 0 if k is given.
    block_table : (batch, columns) int32 (int64 on the CPU: converted, and every entry must fit int32; on CUDA: refused)
        Key j of sequence b is row j % page_size of page block_table[b, j // page_size].
    cache_batch_idx : (batch,) int32 (int64 on the CPU: converted)
        The cache entry of each sequence, default its own number; not together with block_table.
    cache_leftpad : (batch,) int32 (int64 on the CPU: converted)
        Number of cached keys at the start of a sequence that do not exist; positions count them. At most cache_seqlens: the CPU
        refuses others, CUDA clamps them to 0 and the number of keys with the new ones. With block_table, the entries of pages
        that hold only such keys may have any value.
    k, v : (batch, seqlen_new, heads_k, head_dim) and (..., head_dim_v), or packed (total_new, heads_k, head_dim) and (...)
        New keys and values to append. The rows of the cache that the call writes must not hold other keys that a sequence of the
        call reads; the CPU refuses that.
    rotary_cos, rotary_sin : (positions, rotary_dim / 2), float32 or q's type
        Rotate the first rotary_dim channels of q and of the new k by the angles of their position: cache_seqlens[b] + i, or
        q_positions. Without a causal rule, window, tree_mask or q_positions all query rows have position cache_seqlens[b].
        With k_rope_cache: the first rotary_dim channels of k_rope, and of the channels of q that belong to it.
    rotary_interleaved : bool
        Channels are paired (0, 1), (2, 3), ...; otherwise (0, r/2), (1, r/2 + 1), ...
    causal : bool, window_size : (left, right)
        Aligned bottom-right on (seqlen_q, valid keys with the new ones).
    softmax_scale, softcap, alibi_slopes, learnable_sink : as in attention()
    num_splits : int; 0: the library chooses, 1: none
    split_size : int, a multiple of 128
        Keys per split; the bits of a sequence's result then do not depend on the rest of the batch.
    k_scale, v_scale : float32; a cached value is its stored value times its scale; default 1, required for int8
        A number, one for all; or an array:
        (1,) or (heads_k,) or (batch, heads_k): an append divides new rows by them.
        (entries or pages, rows, heads_k) or (..., groups), for the rows of the cache: an append computes and writes them.
        Groups are of equally many neighbouring channels (CUDA: a multiple of 16). Any strides.
    k_rope_cache : shape of k_cache but for the channels, q's type
        The last channels of the keys; k_cache has the other channels. CUDA: k_cache must have a multiple of 16 channels, and with
        a cache of 8 bits k_rope_cache at most 144.
    k_rope : (batch, seqlen_new, heads_k, channels of k_rope_cache), or packed as k; with k and k_rope_cache
    head_dim_v : int, with v_cache=None
    cache_dtype : "e4m3" or "e5m2": the type of the elements of caches of uint8
    cu_seqlens_q : (batch + 1,) int32 (int64 on the CPU: converted)
        Each sequence has its own number of query rows: rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1 of q, out and lse. So one
        call can have sequences with many rows (prefill), with one row (decode) and without rows. The lengths are not needed on
        the host. k and v are then packed too.
    cu_seqlens_new : (batch + 1,) int32 (int64 on the CPU: converted)
        The same for k and v; default cu_seqlens_q.
    q_positions : (batch, seqlen_q) or packed (total_q,) int32 (int64 on the CPU: converted)
        The position of each query row, and of the last seqlen_q keys, for the rotary embedding, the window and ALiBi.
    tree_mask : (rows, words) int32 (int64 on the CPU: converted)
        Trees of speculative decoding: bit j % 32 of word j // 32 says whether the row sees the j-th of the last seqlen_q keys of
        its sequence; it sees all earlier keys, and its own key only if that bit is set. The mask replaces the causal rule. It has
        one row for each query row. With a window it needs q_positions.
    cu_seqlens_tree : (batch + 1,) int32 (int64 on the CPU: converted)
        The rows of tree_mask of each sequence: as many as its query rows; or none, then the sequence is causal.
    shared_groups : (groups + 1,) int32, shared_lens : (groups,) int32 (int64 on the CPU: converted)
        A hint that changes no bit: sequences shared_groups[i] to shared_groups[i + 1] - 1 have the same first shared_lens[i]
        cached keys in the same rows, in one cache entry or in the same pages. CUDA may read them once for several sequences
        (`explain`: shared keys); a hint that is not true gives wrong results there, and the CPU refuses it.
    schedule : (n,) int32, what decode_schedule() returns for this call, or None
        Calls with the same shapes, options and lengths share one, so that it is computed once for all layers of a step. It
        changes no bit.
    shard : (count, index, keys)
        The caches have a part of the keys: key t is on shard t // keys % count, and the keys of a shard are stored without gaps.
        Lengths, positions and masks count all keys. Each shard gets the same q, k and v, stores the new rows that belong to it,
        and computes its part of out and lse; merge() combines the parts. cache_seqlens is required without k. learnable_sink is
        used on shard 0 only.
    invariant : bool
        The bits of a row depend on its own sequence alone: not on the batch and its order, the other rows of the call, the pages
        or the number of threads. Rows of a prefill, in chunks of any lengths, have the bits of decoding one row after another.
        num_splits must be 0; split_size chooses the number of keys that are added up at a time.
    return_lse, out, lse, stream, backend, kernel : as in attention()

    Returns
    -------
    out : (batch, seqlen_q, heads_q, head_dim_v), and lse : (batch, heads_q, seqlen_q) if return_lse. Packed: (total_q, heads_q,
        head_dim_v) and (heads_q, total_q); rows past cu_seqlens_q[batch] are not written. With a shard and 16-bit q, out is
        float32, unless it is given.

    Raises
    ------
    As attention(); also UnsupportedError for PyTorch tensors that require a gradient while gradients are recorded.
    """
    cdef Call call
    cdef Extras extras
    cdef flash_decode_options_t options
    cdef flash_tensor_t tq, tk, tv, tout, tlse
    cdef flash_tensor_t *lse_or_null = NULL
    cdef size_t size = 0
    cdef void *scratch
    cdef void *on
    cdef flash_status_t status
    cdef bint small
    cdef _Source source = source_of(q, "q")
    cdef Role role = READ if k is None else WRITE
    cdef bint lse_wanted = flag(return_lse, "return_lse")
    if (source.torch and (dispatcher_needed(source) or records_gradients() and (
                requires_grad(q) or requires_grad(k_cache) or requires_grad(v_cache) or requires_grad(k) or requires_grad(v)
                or requires_grad(alibi_slopes) or requires_grad(learnable_sink) or requires_grad(k_scale)
                or requires_grad(v_scale) or requires_grad(k_rope_cache) or requires_grad(k_rope) or requires_grad(rotary_cos)
                or requires_grad(rotary_sin) or requires_grad(out) or requires_grad(lse)))
            or source.kind == KIND_JAX and needs_xla(q, (
                k_cache, v_cache, k_scale, v_scale, k_rope_cache, k_rope, cache_seqlens, block_table, cache_batch_idx,
                cache_leftpad, k, v, rotary_cos, rotary_sin, softmax_scale, alibi_slopes, learnable_sink, cu_seqlens_q,
                cu_seqlens_new, q_positions, tree_mask, cu_seqlens_tree, shared_groups, shared_lens))):
        return by_adapter(source, "decode", (q, k_cache, v_cache), given_of(_decode_passed, (
            cache_seqlens, block_table, cache_batch_idx, cache_leftpad, k, v, rotary_cos, rotary_sin, rotary_interleaved, causal,
            window_size, softmax_scale, softcap, alibi_slopes, learnable_sink, num_splits, split_size, k_scale, v_scale,
            k_rope_cache, k_rope, head_dim_v, cache_dtype, cu_seqlens_q, cu_seqlens_new, q_positions, tree_mask, cu_seqlens_tree,
            shared_groups, shared_lens, schedule, shard, invariant, return_lse, out, lse, stream, backend, kernel)))
    cdef object out_array = out
    cdef object lse_array = lse
    start(&call, stream)
    try:
        borrow(&call, q, "q", &tq)
        borrow_caches(&call, k_cache, v_cache, head_dim_v, cache_dtype, role, &tk, &tv)
        decode_options(&call, &extras, &options, cache_seqlens, block_table, cache_batch_idx, cache_leftpad, k, v, rotary_cos,
                       rotary_sin, rotary_interleaved, causal, window_size, softmax_scale, softcap, alibi_slopes, learnable_sink,
                       num_splits, split_size, k_scale, v_scale, k_rope_cache, k_rope, cu_seqlens_q, cu_seqlens_new, q_positions,
                       tree_mask, cu_seqlens_tree, shared_groups, shared_lens, schedule, shard, invariant, backend, kernel)
        check_new_rows(k, v, v_cache)
        check_decode_ranks(&tq, &tv, cu_seqlens_q, v_cache)
        if out is None:
            out_array = new_out(&call, source, q, &tq, tv.shape[3], BSHD, "out", &tout, options.shard_count > 1)
        else:
            borrow(&call, out, "out", &tout, WRITE)
        if lse is not None:
            borrow(&call, lse, "lse", &tlse, WRITE)
            lse_or_null = &tlse
        elif lse_wanted:
            lse_array = new_lse(&call, source, q, &tq, &tlse)
            lse_or_null = &tlse
        small = is_small(&tq, &tk, &tv, options.block_table.shape[1]
                         if options.block_table != NULL and options.block_table.ndim == 2 else 1)
        options.num_threads = num_threads_for(source, &tq, small)
        on = call.stream
        scratch = kept_workspace(&call, &size) if small else NULL
        status = FLASH_STATUS_WORKSPACE
        if scratch != NULL:
            with nogil:
                status = flash_attention_decode(&tq, &tk, &tv, &tout, lse_or_null, &options, scratch, size, on)
        if status == FLASH_STATUS_WORKSPACE:
            check(flash_attention_decode_workspace_size(&tq, &tk, &tv, &tout, lse_or_null, &options, &size))
            scratch = workspace(&call, source, &tq, size, small)
            allow_interrupt(&tq, small)
            with nogil:
                status = flash_attention_decode(&tq, &tk, &tv, &tout, lse_or_null, &options, scratch, size, on)
            end_interrupt(&tq, small)
        check(status)
        count_write(out)
        count_write(lse)
        if k is not None:
            count_write(k_cache)
            count_write(v_cache)
            count_write(k_rope_cache)
            for scale in (k_scale, v_scale):
                if scale is not None and rows_have_scales(scale):
                    count_write(scale)
    finally:
        finish(&call)
    if source.kind == KIND_JAX:
        out_array = deliver(source, q, out_array) if out is None else out
        lse_array = deliver(source, q, lse_array) if lse is None else lse
    if lse_wanted:
        return out_array, lse_array
    return out_array


cdef int check_decode_ranks(const flash_tensor_t *q, const flash_tensor_t *v, object cu_seqlens_q, object v_cache) except -1:
    """Check the ranks that the allocation of out depends on."""
    if q.ndim != (4 if cu_seqlens_q is None else 3) or v.ndim != 4:
        name = "k_cache" if v_cache is None else "v_cache"
        raise InvalidError(f"q and {name} have {q.ndim} and {v.ndim} dimensions; both need 4, (batch, seqlen, heads, "
                           "head_dim); q needs 3, (total, heads, head_dim), with cu_seqlens_q")
    return 0


cdef int check_new_rows(object k, object v, object v_cache) except -1:
    if v_cache is None and v is not None:
        raise InvalidError("v is given without v_cache: the values are channels of k_cache, to which k is appended")
    if v_cache is not None and (k is None) != (v is None):
        raise InvalidError(f"k and v must be given together ({'k' if k is None else 'v'} is None)")
    return 0


def merge(outs, lses, *, return_lse=True, layout="bshd", out=None, lse=None, stream=None, backend=None, kernel=None):
    """Merge the results that attention() returned for several disjoint ranges of keys into the result for all of them.

    lse = log(sum_n exp(lses[n])) and out = sum_n exp(lses[n] - lse) outs[n]. A part with lse = -inf contributes nothing,
    whatever its out holds. Used for ring attention, split caches and shared prefixes. PyTorch tensors that require a gradient
    are differentiable.

    Parameters
    ----------
    outs : sequence of 1 or more arrays (batch, seqlen, heads, head_dim_v), or packed (total, heads, head_dim_v)
    lses : sequence of as many arrays (batch, heads, seqlen), or packed (heads, total); float32 (float64 for float64)
    layout : the order of axes of the outs and of out, as in attention()
    out, lse : the outputs; allocated if not given, with the types of outs[0] and lses[0]
    stream, backend, kernel : as in attention()

    Returns
    -------
    (out, lse), or out alone if not return_lse

    Raises
    ------
    As attention().
    """
    cdef Call call
    cdef flash_merge_options_t options
    cdef flash_tensor_t *touts
    cdef flash_tensor_t *tlses
    cdef flash_tensor_t tout, tlse
    cdef flash_tensor_t *lse_or_null = NULL
    cdef flash_status_t status
    cdef void *on
    cdef int32_t count, i
    cdef bint lse_wanted = flag(return_lse, "return_lse")
    check_parts(outs, lses)
    count = <int32_t>len(outs)
    like = outs[0]
    cdef _Source source = source_of(like, "outs[0]")
    if (source.torch and (dispatcher_needed(source) or records_gradients() and one_requires_grad(
                (*outs, *lses, out, lse)))
            or source.kind == KIND_JAX and needs_xla(like, (*outs, *lses))):
        return by_adapter(source, "merge", (outs, lses), given_of(_merge_passed, (
            return_lse, layout, out, lse, stream, backend, kernel)))
    cdef Layout axes = layout_of(layout)
    cdef object out_array = out
    cdef object lse_array = lse
    start(&call, stream)
    try:
        touts = tensors(&call, count)
        tlses = tensors(&call, count)
        for i in range(count):
            borrow(&call, outs[i], f"outs[{i}]", &touts[i])
            borrow(&call, lses[i], f"lses[{i}]", &tlses[i])
            to_bshd(&touts[i], axes)
        if touts[0].ndim != 3 and touts[0].ndim != 4:
            raise InvalidError(f"outs[0] has {touts[0].ndim} dimensions; it needs 4, or 3 if packed")
        memset(&options, 0, sizeof(options))
        options.struct_size = sizeof(options)
        options.num_threads = num_threads_for(source, touts)
        options.backend = text(&call, backend, "backend")
        options.kernel = text(&call, kernel, "kernel")
        if out is None:
            out_array = new_out(&call, source, like, &touts[0], touts[0].shape[touts[0].ndim - 1], axes, "out", &tout)
        else:
            borrow(&call, out, "out", &tout, WRITE)
            to_bshd(&tout, axes)
        if lse is not None:
            borrow(&call, lse, "lse", &tlse, WRITE)
            lse_or_null = &tlse
        elif lse_wanted:
            lse_array = new_lse(&call, source, like, &touts[0], &tlse)
            lse_or_null = &tlse
        on = call.stream
        allow_interrupt(touts)
        with nogil:
            status = flash_attention_merge(touts, tlses, count, &tout, lse_or_null, &options, on)
        end_interrupt(touts)
        check(status)
        count_write(out)
        count_write(lse)
    finally:
        finish(&call)
    if source.kind == KIND_JAX:
        out_array = deliver(source, like, out_array) if out is None else out
        lse_array = deliver(source, like, lse_array) if lse is None else lse
    if lse_wanted:
        return out_array, lse_array
    return out_array


def compress_block_mask(block_mask, *, stream=None):
    """The lists of a dense block mask, for block_mask= of attention() and attention_backward().

    Parameters
    ----------
    block_mask : bool (batch or 1, heads_q or 1, ceil(seqlen_q / 128), ceil(seqlen_k / 128)), contiguous
        True keeps the block.
    stream : as in attention()

    Returns
    -------
    BlockMask, of arrays of block_mask's library on its device
    """
    cdef Call call
    cdef flash_tensor_t dense
    cdef flash_block_lists_t lists
    cdef int64_t shape[4]
    cdef flash_status_t status
    cdef void *on
    cdef _Source source = source_of(block_mask, "block_mask")
    refuse_tracing(source, "compress_block_mask")
    start(&call, stream)
    try:
        borrow(&call, block_mask, "block_mask", &dense)
        if dense.ndim != 4:
            raise InvalidError(f"block_mask has {dense.ndim} dimensions; it needs 4, (batch or 1, heads or 1, rows, columns)")
        shape[0], shape[1], shape[2], shape[3] = dense.shape[0], dense.shape[1], dense.shape[2], dense.shape[3]
        row_counts = new_array(&call, source, block_mask, &dense, FLASH_DTYPE_INT32, 3, shape, "row_counts", &lists.row_counts)
        row_indices = new_array(&call, source, block_mask, &dense, FLASH_DTYPE_INT32, 4, shape, "row_indices",
                                &lists.row_indices)
        shape[2], shape[3] = dense.shape[3], dense.shape[2]
        col_counts = new_array(&call, source, block_mask, &dense, FLASH_DTYPE_INT32, 3, shape, "col_counts", &lists.col_counts)
        col_indices = new_array(&call, source, block_mask, &dense, FLASH_DTYPE_INT32, 4, shape, "col_indices",
                                &lists.col_indices)
        on = call.stream
        with nogil:
            status = flash_block_mask_compress(&dense, &lists, on)
        check(status)
    finally:
        finish(&call)
    return BlockMask(deliver(source, block_mask, row_counts), deliver(source, block_mask, row_indices),
                     deliver(source, block_mask, col_counts), deliver(source, block_mask, col_indices))
