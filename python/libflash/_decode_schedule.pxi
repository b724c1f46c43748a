# decode_schedule: what decode() computes from lengths alone, once for all layers of a step.


def decode_schedule(q, k_cache, v_cache=None, *, stream=None, **options):
    """The schedule of a call of decode() on a GPU: the order of the work of its long chunks, which depends on lengths alone. The
    layers of a model call decode() with the same lengths, so one schedule serves all of them, and each call is faster.

    Parameters
    ----------
    q, k_cache, v_cache : as in decode(), of any layer; their contents are not read
    options : those of decode(). The contents of cache_seqlens, cu_seqlens_q and cu_seqlens_new are read; of the other arrays only
        shapes and types count. return_lse and schedule have no effect.
    stream : as in decode()

    Returns
    -------
    schedule : (n,) int32, an array of q's library on q's device, for schedule= of decode(); None if the call has nothing to
        compute beforehand: on the CPU, without long chunks (explain: "long chunks"), and where no kernel has them.

    Calls may share a schedule if they differ in nothing but softmax_scale, strides, and the contents of arrays other than the
    three above. They only read it, so they may run on several streams, after the call that writes it. No bit of a result changes.
    A schedule for other shapes, options or lengths gives undefined results; nothing outside of the arrays is touched.

    Raises
    ------
    As decode(); UnsupportedError where PyTorch compiles or traces, for tensors that it transforms, and for arrays of JAX that are
    traced or on a GPU.
    """
    cdef Call call
    cdef Extras extras
    cdef flash_decode_options_t made
    cdef flash_tensor_t tq, tk, tv, tout, tlse, tschedule
    cdef flash_tensor_t *lse_or_null = NULL
    cdef size_t size = 0
    cdef int64_t count
    cdef flash_status_t status
    cdef void *on
    cdef _Source source = source_of(q, "q")
    cdef dict o
    for name in options:
        if name not in DECODE_DEFAULTS and name not in ("out", "lse"):
            raise TypeError(f"decode_schedule() got an unexpected keyword argument {name!r}")
    o = {**DECODE_DEFAULTS, "out": None, "lse": None, **options, "schedule": None}
    flag(o["return_lse"], "return_lse")
    refuse_tracing(source, "decode_schedule")
    if source.kind == KIND_JAX and needs_xla(q, (k_cache, v_cache)):
        raise UnsupportedError("q is an array of JAX that is traced, sharded or on a GPU: decode computes the schedule itself")
    start(&call, stream)
    try:
        borrow(&call, q, "q", &tq)
        borrow_caches(&call, k_cache, v_cache, o["head_dim_v"], o["cache_dtype"], READ if o["k"] is None else WRITE, &tk, &tv)
        decode_options_from(&call, &extras, &made, o)
        check_new_rows(o["k"], o["v"], v_cache)
        check_decode_ranks(&tq, &tv, o["cu_seqlens_q"], v_cache)
        if o["out"] is not None:
            borrow(&call, o["out"], "out", &tout, WRITE)
        else:  # as decode() allocates it
            tout = tq
            tout.data = NULL
            tout.shape[tq.ndim - 1] = tv.shape[3]
            dense(&tout)
            if made.shard_count > 1:
                tout.dtype = lse_dtype(tq.dtype)
        if o["lse"] is not None:
            borrow(&call, o["lse"], "lse", &tlse, WRITE)
            lse_or_null = &tlse
        check(flash_attention_decode_schedule_size(&tq, &tk, &tv, &tout, lse_or_null, &made, &size))
        if size == 0:
            return None
        count = <int64_t>(size // sizeof(int32_t))
        schedule = new_array(&call, source, q, &tq, FLASH_DTYPE_INT32, 1, &count, "schedule", &tschedule)
        on = call.stream
        with nogil:
            status = flash_attention_decode_schedule(&tq, &tk, &tv, &tout, lse_or_null, &made, &tschedule, on)
        check(status)
    finally:
        finish(&call)
    return schedule
