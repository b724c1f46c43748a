# Tangents: attention_tangent and attention_backward_tangent.

# Options of a call on a part of a problem.
cdef tuple _of_parts = ("row_begin", "row_step", "column_begin", "column_step", "row_positions", "column_positions",
                        "sequence_numbers", "head_begin", "heads_total", "sm_margin", "resume")
TANGENT_DEFAULTS = {name: value for name, value in ATTENTION_DEFAULTS.items()
                    if name not in ("return_lse", "stream", *_of_parts)}


cdef dict tangent_options(dict options, str function):
    for name, value in options.items():
        if name in _of_parts and is_given(value, ATTENTION_DEFAULTS[name]):
            raise UnsupportedError(f"{name} cannot be given to {function}, which takes whole problems")
        if name not in TANGENT_DEFAULTS and name not in _of_parts:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return {**TANGENT_DEFAULTS, **{name: value for name, value in options.items() if name not in _of_parts}}


cdef flash_tensor_t *tangent(Call *call, object x, str name, flash_tensor_t *made, Layout axes, Role role=READ) except? NULL:
    """An optional tensor; NULL for None. A tensor of four dimensions has the layout `axes`."""
    if x is None:
        return NULL
    borrow(call, x, name, made, role)
    to_bshd(made, axes)
    return made


cdef int check_tangents(flash_status_t status) except -1:
    """As check(), with Python's names: tq for tangents.q."""
    if status != FLASH_STATUS_OK:
        given = flash_last_error().decode("utf-8", "replace")
        given = given.replace("tangents.learnable_sink", "tsink").replace("tangents.cotangent", "dout")
        raise from_status(status, with_hint(given.replace("tangents.", "t")))
    return 0


cdef bint needs_operators(_Source source, tuple arrays) except -1:
    """True if PyTorch records a gradient of an array, or one carries a tangent or may belong to a transform of torch.func."""
    if not source.torch or operator_depth != 0:
        return False
    if is_true(_torch.in_transform) or records_gradients() and one_requires_grad(arrays):
        return True
    if _torch.forward_ad["_current_level"] != _outside:
        for x in arrays:
            if x is not None and _torch.forward_ad["unpack_dual"](x).tangent is not None:
                return True
    return False


def attention_tangent(q, k, v, tq=None, tk=None, tv=None, *, tbias=None, tsink=None, out=None, lse=None, dout=None, tdout=None,
                      tdlse=None, tdelta=None, dlse=None, delta=None, **options):
    """attention() and its derivative along a direction (forward mode, a Jacobian-vector product).

    Parameters
    ----------
    q, k, v : as given to attention()
    tq, tk, tv, tbias, tsink : arrays with shape and type of q, k, v, bias and learnable_sink, or None for zero
        The direction.
    out, lse : as attention(..., return_lse=True) returned them with the same options; both or none
        If given, they are not computed again.
    tdelta : array with shape and type of lse
        If given, rowsum(tdout * out + dout * tout) - tdlse is written there, for attention_backward_tangent(). It is computed
        from tout before rounding, and from out before rounding if out is not given.
    delta : array with shape and type of lse; only with tdelta
        If given, rowsum(dout * out) - dlse is written there, also for attention_backward_tangent(). It is computed from out
        before rounding if out is not given.
    dout, tdout, tdlse : as given to attention_backward_tangent(); only with tdelta, dout always
    dlse : as given to attention_backward_tangent(); only with delta
    options : those of attention() but return_lse, stream, and those of parts of problems (row_begin to resume)

    Returns
    -------
    (out, lse, tout, tlse): if q moves along tq, k along tk, ..., then out moves along tout and lse along tlse.

    Masks, lengths, the dropout mask, softmax_scale, softcap and alibi_slopes are constants. A row without a visible key has
    tangents 0.

    Raises
    ------
    As attention(). UnsupportedError on CUDA for more keys or rows than its kernels add up.

    With PyTorch tensors the results are differentiable in reverse mode; out and lse, if given, count as functions of q, k and v.
    """
    cdef Call call
    cdef Extras extras
    cdef flash_attention_options_t made
    cdef flash_tangents_t tangents
    cdef flash_tensor_t dq, dk, dv, of_out, of_lse
    cdef flash_tensor_t tangent_q, tangent_k, tangent_v, tangent_bias, tangent_sink, tangent_out, tangent_lse
    cdef flash_tensor_t cotangent, tangent_dout, tangent_dlse, tangent_delta, of_dlse, of_delta
    cdef size_t size = 0
    cdef void *scratch
    cdef void *on
    cdef flash_status_t status
    cdef dict o = tangent_options(options, "attention_tangent")
    cdef _Source source = source_of(q, "q")
    cdef Layout axes = layout_of(o["layout"])
    cdef object out_array = out
    cdef object lse_array = lse
    refuse_tracing(source, "attention_tangent")
    if (out is None) != (lse is None):
        raise InvalidError(f"out and lse must be given together ({'out' if out is None else 'lse'} is None)")
    if (dout is None) != (tdelta is None):
        raise InvalidError(f"dout and tdelta must be given together ({'dout' if dout is None else 'tdelta'} is None)")
    if dlse is not None and delta is None:
        raise InvalidError("dlse needs delta")
    if needs_operators(source, (q, k, v, tq, tk, tv, tbias, tsink, o["bias"], o["learnable_sink"], o["alibi_slopes"])):
        from . import _torch_explicit
        return _torch_explicit.attention_tangent(
            q, k, v, out, lse, dict(tq=tq, tk=tk, tv=tv, tbias=tbias, tsink=tsink), dict(tdelta=tdelta, delta=delta), o)
    start(&call, None)
    try:
        borrow(&call, q, "q", &dq)
        borrow(&call, k, "k", &dk)
        borrow(&call, v, "v", &dv)
        attention_options_from(&call, &extras, &made, o)
        check_rank(&dq, "q", o["cu_seqlens_q"] is not None)
        check_rank(&dk, "k", o["cu_seqlens_k"] is not None)
        check_rank(&dv, "v", o["cu_seqlens_k"] is not None)
        to_bshd(&dq, axes)
        to_bshd(&dk, axes)
        to_bshd(&dv, axes)
        check_bounds(&made, &dq, &dk)
        memset(&tangents, 0, sizeof(tangents))
        tangents.struct_size = sizeof(tangents)
        tangents.q = tangent(&call, tq, "tq", &tangent_q, axes)
        tangents.k = tangent(&call, tk, "tk", &tangent_k, axes)
        tangents.v = tangent(&call, tv, "tv", &tangent_v, axes)
        tangents.bias = tangent(&call, tbias, "tbias", &tangent_bias, BSHD)
        tangents.learnable_sink = tangent(&call, tsink, "tsink", &tangent_sink, BSHD)
        if out is None:
            out_array = new_out(&call, source, q, &dq, dv.shape[dv.ndim - 1], axes, "out", &of_out)
            lse_array = new_lse(&call, source, q, &dq, &of_lse)
        else:
            tangent(&call, out, "out", &of_out, axes)
            borrow(&call, lse, "lse", &of_lse)
            tangents.flags = FLASH_FLAG_FROM_LSE
        tout_array = new_out(&call, source, q, &dq, dv.shape[dv.ndim - 1], axes, "tout", &tangent_out)
        tlse_array = new_lse(&call, source, q, &dq, &tangent_lse)
        tangents.out = &tangent_out
        tangents.lse = &tangent_lse
        tangents.cotangent = tangent(&call, dout, "dout", &cotangent, axes)
        tangents.dout = tangent(&call, tdout, "tdout", &tangent_dout, axes)
        tangents.dlse = tangent(&call, tdlse, "tdlse", &tangent_dlse, BSHD)
        tangents.delta = tangent(&call, tdelta, "tdelta", &tangent_delta, BSHD, WRITE)
        made.dlse = tangent(&call, dlse, "dlse", &of_dlse, BSHD)
        made.delta = tangent(&call, delta, "delta", &of_delta, BSHD, WRITE)
        made.num_threads = num_threads_for(source, &dq)
        on = call.stream
        check_tangents(flash_attention_forward_tangent_workspace_size(&dq, &dk, &dv, &of_out, &of_lse, &tangents, &made, &size))
        scratch = workspace(&call, source, &dq, size, False)
        allow_interrupt(&dq)
        with nogil:
            status = flash_attention_forward_tangent(&dq, &dk, &dv, &of_out, &of_lse, &tangents, &made, scratch, size, on)
        end_interrupt(&dq)
        check_tangents(status)
        count_write(tdelta)
        count_write(delta)
    finally:
        finish(&call)
    if source.kind == KIND_JAX:
        out_array = deliver(source, q, out_array) if out is None else out
        lse_array = deliver(source, q, lse_array) if lse is None else lse
        tout_array, tlse_array = deliver(source, q, tout_array), deliver(source, q, tlse_array)
    return out_array, lse_array, tout_array, tlse_array


def attention_backward_tangent(dout, q, k, v, out, lse, tout, tlse, tq=None, tk=None, tv=None, *, tbias=None, tsink=None,
                               tdout=None, tdlse=None, tdelta=None, dlse=None, delta=None, tdbias=None, tdsink=None, dq=None,
                               dk=None, dv=None, dbias=None, dsink=None, **options):
    """The derivative of attention_backward() along a direction; with it all second derivatives.

    The Hessian is symmetric: gradients of a function of dq, dk, dv with respect to q, k, v are the tangents of dq, dk, dv in the
    direction of that function's gradients, with tdout = tdlse = None; those with respect to dout and dlse are tout and tlse.

    Parameters
    ----------
    dout, q, k, v, out, lse, dlse : as given to attention_backward()
    tout, tlse : as attention_tangent() returned them for the same direction
    tdelta : array with shape and type of lse, as attention_tangent() wrote it for the same direction, dout, tdout and tdlse
        If given, it is read instead of tout, which may be None, and tdlse. More accurate in 16 bits if the mean of the keys is
        not close to zero.
    delta : array with shape and type of lse, as attention_tangent() wrote it for the same dout and dlse
        If given, it is read instead of dlse and rowsum(dout * out), for the same reason. Not with dq, dk and dv.
    tq, tk, tv, tbias, tsink, tdout, tdlse : arrays with shape and type of q, k, v, bias, learnable_sink, dout and dlse, or None
        for zero: the direction
    tdbias, tdsink : arrays with shape and type of bias and learnable_sink
        If given, the tangents of their gradients are written there.
    dq, dk, dv, dbias, dsink : as in attention_backward()
        If dq, dk and dv are given (all or none), the gradients are written too.
    options : those of attention() but return_lse, stream, and those of parts of problems (row_begin to resume)

    Returns
    -------
    (tdq, tdk, tdv): if q moves along tq, ..., then dq moves along tdq, dk along tdk and dv along tdv.

    Raises
    ------
    As attention_tangent().

    With PyTorch tensors the results are differentiable in reverse mode with respect to the direction.
    """
    cdef Call call
    cdef Extras extras
    cdef flash_attention_options_t made
    cdef flash_tangents_t t
    cdef flash_tensor_t x[23]
    cdef int i
    cdef size_t size = 0
    cdef void *scratch
    cdef void *on
    cdef const flash_tensor_t *pdq
    cdef const flash_tensor_t *pdk
    cdef const flash_tensor_t *pdv
    cdef flash_status_t status
    cdef dict o = tangent_options(options, "attention_backward_tangent")
    cdef _Source source = source_of(q, "q")
    cdef Layout axes = layout_of(o["layout"])
    refuse_tracing(source, "attention_backward_tangent")
    if needs_operators(source, (dout, q, k, v, out, lse, tout, tlse, tq, tk, tv, tbias, tsink, tdout, tdlse, dlse, o["bias"],
                                o["learnable_sink"], o["alibi_slopes"])):
        from . import _torch_explicit
        return _torch_explicit.attention_backward_tangent(
            (dout, q, k, v, out, lse, out if tout is None else tout, tlse),
            dict(tq=tq, tk=tk, tv=tv, tbias=tbias, tsink=tsink, tdout=tdout, tdlse=tdlse, tdelta=tdelta, dlse=dlse, delta=delta),
            dict(tdbias=tdbias, tdsink=tdsink, dq=dq, dk=dk, dv=dv, dbias=dbias, dsink=dsink), o)
    start(&call, None)
    try:
        borrow(&call, q, "q", &x[0])
        borrow(&call, k, "k", &x[1])
        borrow(&call, v, "v", &x[2])
        attention_options_from(&call, &extras, &made, o)
        if delta is None:
            made.dlse = extra(&call, &extras, dlse, "dlse")
        else:
            made.delta = extra(&call, &extras, delta, "delta")
        made.dbias = extra(&call, &extras, dbias, "dbias", WRITE)
        made.dsink = extra(&call, &extras, dsink, "dsink", WRITE)
        check_rank(&x[0], "q", o["cu_seqlens_q"] is not None)
        check_rank(&x[1], "k", o["cu_seqlens_k"] is not None)
        check_rank(&x[2], "v", o["cu_seqlens_k"] is not None)
        for i in range(3):
            to_bshd(&x[i], axes)
        check_bounds(&made, &x[0], &x[1])
        tangent(&call, dout, "dout", &x[3], axes)
        tangent(&call, out, "out", &x[4], axes)
        borrow(&call, lse, "lse", &x[5])
        memset(&t, 0, sizeof(t))
        t.struct_size = sizeof(t)
        if tdelta is None:
            t.out = tangent(&call, tout, "tout", &x[6], axes)
            t.dlse = tangent(&call, tdlse, "tdlse", &x[14], BSHD)
        else:
            t.delta = tangent(&call, tdelta, "tdelta", &x[6], BSHD)
        t.lse = tangent(&call, tlse, "tlse", &x[7], BSHD)
        t.q = tangent(&call, tq, "tq", &x[8], axes)
        t.k = tangent(&call, tk, "tk", &x[9], axes)
        t.v = tangent(&call, tv, "tv", &x[10], axes)
        t.bias = tangent(&call, tbias, "tbias", &x[11], BSHD)
        t.learnable_sink = tangent(&call, tsink, "tsink", &x[12], BSHD)
        t.dout = tangent(&call, tdout, "tdout", &x[13], axes)
        t.dbias = tangent(&call, tdbias, "tdbias", &x[15], BSHD, WRITE)
        t.dsink = tangent(&call, tdsink, "tdsink", &x[16], BSHD, WRITE)
        pdq = tangent(&call, dq, "dq", &x[17], axes, WRITE)
        pdk = tangent(&call, dk, "dk", &x[18], axes, WRITE)
        pdv = tangent(&call, dv, "dv", &x[19], axes, WRITE)
        tdq = gradient(&call, source, q, None, &x[0], axes, "tdq", &x[20])
        tdk = gradient(&call, source, q, None, &x[1], axes, "tdk", &x[21])
        tdv = gradient(&call, source, q, None, &x[2], axes, "tdv", &x[22])
        t.dq = &x[20]
        t.dk = &x[21]
        t.dv = &x[22]
        made.num_threads = num_threads_for(source, &x[0])
        on = call.stream
        check_tangents(flash_attention_backward_tangent_workspace_size(
            &x[3], &x[0], &x[1], &x[2], &x[4], &x[5], pdq, pdk, pdv, &t, &made, &size))
        scratch = workspace(&call, source, &x[0], size, False)
        allow_interrupt(&x[0])
        with nogil:
            status = flash_attention_backward_tangent(&x[3], &x[0], &x[1], &x[2], &x[4], &x[5], pdq, pdk, pdv, &t, &made, scratch,
                                                      size, on)
        end_interrupt(&x[0])
        check_tangents(status)
        for array in (dq, dk, dv, dbias, dsink, tdbias, tdsink):
            count_write(array)
    finally:
        finish(&call)
    if source.kind == KIND_JAX:
        tdq, tdk, tdv = deliver(source, q, tdq), deliver(source, q, tdk), deliver(source, q, tdv)
    return tdq, tdk, tdv
