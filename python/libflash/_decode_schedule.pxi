# decode_schedule: what decode() computes from lengths alone, once for all layers of a step.

cdef dict _scheduled = dict(DECODE_DEFAULTS, out=None, lse=None)


def decode_schedule(q, k_cache, v_cache=None, *, stream=None, **options):
    """The order of the work of long chunks in a call of decode() on a GPU. It depends on lengths alone, so that one schedule
    serves all layers of a step.

    Parameters
    ----------
    q, k_cache, v_cache : as in decode(), of any layer
    options : those of decode(). Only the contents of cache_seqlens, cu_seqlens_q and cu_seqlens_new are read; return_lse, lse and
        schedule have no effect.
    stream : as in decode()

    Returns
    -------
    schedule : (n,) int32, of q's library and on its device, for schedule= of decode(). None: there is nothing to compute
        beforehand, as on the CPU and without long chunks (`explain`).

    Calls may share a schedule if they differ in nothing but softmax_scale, strides, and the contents of other arrays than those
    three. They only read it, so they may run on several streams. With other shapes, options or lengths results are undefined, and
    nothing outside of the arrays is touched.

    Raises
    ------
    As decode(); UnsupportedError where PyTorch traces, and for JAX arrays that are traced, sharded or on a GPU.
    """
    cdef Call call
    cdef Extras extras
    cdef flash_decode_options_t made
    cdef flash_tensor_t tq, tk, tv, tout, tschedule
    cdef size_t size = 0
    cdef int64_t count
    cdef flash_status_t status
    cdef _Source source = source_of(q, "q")
    cdef dict o = with_defaults(options, _scheduled, "decode_schedule()")
    cdef object schedule = None
    o["schedule"] = None
    refuse_tracing(source, "decode_schedule")
    if source.kind == KIND_JAX and needs_xla(q, (k_cache, v_cache)):
        raise UnsupportedError("q is an array for XLA, where decode computes the schedule itself")
    start(&call, stream)
    try:
        borrow(&call, q, "q", &tq)
        borrow_caches(&call, k_cache, v_cache, o["head_dim_v"], o["cache_dtype"], READ if o["k"] is None else WRITE, &tk, &tv)
        decode_options_from(&call, &extras, &made, o)
        check_new_rows(o["k"], o["v"], v_cache)
        check_decode_ranks(&tq, &tv, o["cu_seqlens_q"], v_cache)
        if o["out"] is None:  # as decode() allocates it
            tout = tq
            tout.data = NULL
            tout.shape[tq.ndim - 1] = tv.shape[3]
            dense(&tout)
            if made.shard_count > 1:
                tout.dtype = lse_dtype(tq.dtype)
        else:
            borrow(&call, o["out"], "out", &tout, WRITE)
        check(flash_attention_decode_schedule_size(&tq, &tk, &tv, &tout, NULL, &made, &size))
        if size > 0:
            count = <int64_t>(size // sizeof(int32_t))
            schedule = new_array(&call, source, q, &tq, FLASH_DTYPE_INT32, 1, &count, "schedule", &tschedule)
            with nogil:
                status = flash_attention_decode_schedule(&tq, &tk, &tv, &tout, NULL, &made, &tschedule, call.stream)
            check(status)
    finally:
        finish(&call)
    return schedule
