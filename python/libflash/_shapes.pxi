# The checks of a call for tensors without data: PyTorch's fake and meta tensors.

cdef dict DTYPE_NUMBERS = {name: number for number, name in DTYPE_OBJECTS.items()} | {
    "bool": FLASH_DTYPE_BOOL, "float8_e4m3fn": FLASH_DTYPE_FLOAT8_E4M3, "float8_e5m2": FLASH_DTYPE_FLOAT8_E5M2,
    "int8": FLASH_DTYPE_INT8}


class TensorShape:
    """A tensor without data: shape and strides (tuples of int), dtype ("float16", ...), device ("cpu" or "cuda")."""

    def __init__(self, shape, strides, dtype, device):
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.device = device


cdef int describe_shape(Call *call, object x, str name, flash_tensor_t *out, Role role) except -1:
    cdef int i
    cdef str dtype = x.dtype
    if len(x.shape) > FLASH_MAX_NDIM:
        raise InvalidError(f"{name} has {len(x.shape)} dimensions; at most {FLASH_MAX_NDIM} are allowed")
    if dtype == "int64" and role == LENGTHS and x.device == "cpu":
        dtype = "int32"  # the call itself converts
    if dtype == "uint8" and call.byte_dtype != FLASH_DTYPE_NONE:
        dtype = "float8_e4m3fn" if call.byte_dtype == FLASH_DTYPE_FLOAT8_E4M3 else "float8_e5m2"
    if dtype not in DTYPE_NUMBERS:
        raise InvalidError(f"{name} has dtype {dtype}; "
                           f"{'int32 (or int64 on the CPU) is needed' if role == LENGTHS else DTYPE_RULE}")
    out.data = NULL
    out.dtype = DTYPE_NUMBERS[dtype]
    out.ndim = <int32_t>len(x.shape)
    out.device_type = FLASH_DEVICE_CUDA if x.device == "cuda" else FLASH_DEVICE_CPU
    out.device_id = 0
    for i in range(out.ndim):
        out.shape[i] = x.shape[i]
        out.stride[i] = x.strides[i]
    return 0


def check_attention(q, k, v, out, lse, gradients, **options):
    """Raise what attention() would raise for tensors of these shapes, or attention_backward() if `gradients`, (dout, dbias,
    dsink), is not None. dq, dk and dv are taken to be as q, k and v."""
    cdef Call call
    cdef Extras extras
    cdef flash_attention_options_t made
    cdef flash_tensor_t tq, tk, tv, tout, tdout, tdq, tdk, tdv, tlse
    cdef flash_tensor_t *lse_or_null = NULL
    cdef size_t size
    cdef dict o = {**BACKWARD_DEFAULTS, **options}
    cdef Layout axes = layout_of(o["layout"])
    start(&call, None)
    call.shapes_only = True
    try:
        for name, x in (("q", q), ("k", k), ("v", v)):
            borrow(&call, x, name, &tq if name == "q" else &tk if name == "k" else &tv)
        borrow(&call, out, "out", &tout)
        if lse is not None:
            borrow(&call, lse, "lse", &tlse)
            lse_or_null = &tlse
        attention_options_from(&call, &extras, &made, o)
        check_rank(&tq, "q", o["cu_seqlens_q"] is not None)
        check_rank(&tk, "k", o["cu_seqlens_k"] is not None)
        check_rank(&tv, "v", o["cu_seqlens_k"] is not None)
        for i in range(4):
            to_bshd(&tq if i == 0 else &tk if i == 1 else &tv if i == 2 else &tout, axes)
        check_bounds(&made, &tq, &tk)
        if gradients is None:
            check_shapes(flash_attention_forward_workspace_size(&tq, &tk, &tv, &tout, lse_or_null, &made, &size), &tq, &tk, &tv,
                         axes)
            return
        options_of_backward(&call, &extras, &made, o | dict(zip(("dbias", "dsink"), gradients[1:])))
        borrow(&call, gradients[0], "dout", &tdout)
        to_bshd(&tdout, axes)
        tdq, tdk, tdv = tq, tk, tv
        dense(&tdq)
        dense(&tdk)
        dense(&tdv)
        check_shapes(flash_attention_backward_workspace_size(
            &tdout, &tq, &tk, &tv, &tout, lse_or_null, &tdq, &tdk, &tdv, &made, &size), &tq, &tk, &tv, axes)
    finally:
        finish(&call)


cdef void dense(flash_tensor_t *x) noexcept:
    cdef int64_t step = 1
    cdef int i
    for i in range(x.ndim - 1, -1, -1):
        x.stride[i] = step
        step *= x.shape[i]


def check_decode(q, k_cache, v_cache, out, lse, **options):
    """Raise what decode() would raise for tensors of these shapes."""
    cdef Call call
    cdef Extras extras
    cdef flash_decode_options_t made
    cdef flash_tensor_t tq, tk, tv, tout, tlse
    cdef size_t size
    cdef dict o = {**DECODE_DEFAULTS, **options}
    start(&call, None)
    call.shapes_only = True
    try:
        borrow(&call, q, "q", &tq)
        borrow_caches(&call, k_cache, v_cache, o["head_dim_v"], o["cache_dtype"], READ, &tk, &tv)
        check_new_rows(o["k"], o["v"], v_cache)
        borrow(&call, out, "out", &tout)
        borrow(&call, lse, "lse", &tlse)
        decode_options_from(&call, &extras, &made, o)
        check(flash_attention_decode_workspace_size(&tq, &tk, &tv, &tout, &tlse, &made, &size))
    finally:
        finish(&call)
