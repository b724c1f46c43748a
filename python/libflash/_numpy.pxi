# NumPy arrays, described through the buffer protocol: their __dlpack__ refuses bfloat16, and before NumPy 2.1 read-only arrays.

cdef class _NumpyDtype:
    """The DLPack description of a NumPy dtype."""

    cdef DLDataType described
    cdef bint bfloat16, float8  # of ml_dtypes; the buffer protocol has no format for them


cdef dict _numpy_dtypes = {}  # numpy.dtype -> _NumpyDtype
cdef dict FLOAT8_CODES = {"float8_e4m3fn": DL_FLOAT8_E4M3FN, "float8_e5m2": DL_FLOAT8_E5M2}
cdef dict NUMPY_CODES = {"i": DL_INT, "u": DL_UINT, "f": DL_FLOAT, "b": DL_BOOL}


cdef _NumpyDtype numpy_dtype(object dtype, str name):
    """Refuses other byte orders, and dtypes that are neither NumPy's own nor bfloat16, float8_e4m3fn or float8_e5m2."""
    cdef object found = _numpy_dtypes.get(dtype)
    if found is not None:
        return <_NumpyDtype>found
    cdef _NumpyDtype made = _NumpyDtype.__new__(_NumpyDtype)
    made.bfloat16 = dtype.name == "bfloat16"
    if not dtype.isnative:
        raise InvalidError(f"{name} has dtype {dtype.str}, which is not in this machine's byte order")
    made.float8 = dtype.name in FLOAT8_CODES
    if not made.bfloat16 and not made.float8 and (dtype.kind not in NUMPY_CODES or dtype.isbuiltin != 1):
        raise InvalidError(f"{name} has dtype {dtype.name}; {DTYPE_RULE}")
    made.described.code = (DL_BFLOAT if made.bfloat16 else FLOAT8_CODES[dtype.name] if made.float8 else
                           NUMPY_CODES[dtype.kind])
    made.described.bits = <uint8_t>(8 * dtype.itemsize)
    made.described.lanes = 1
    _numpy_dtypes[dtype] = made
    return made


cdef int borrow_numpy(Call *call, _Source source, object x, str name, flash_tensor_t *out, Role role) except -1:
    cdef _NumpyDtype dtype = numpy_dtype(x.dtype, name)
    cdef object memory = x.view(source.uint16) if dtype.bfloat16 else x.view(source.uint8) if dtype.float8 else x
    cdef Py_buffer view
    PyObject_GetBuffer(memory, &view, PyBUF_STRIDED_RO)
    Py_INCREF(memory)  # the memory lives as long as the array, so the buffer can be released below
    hold(call, HELD_OBJECT, <void *>memory)
    try:
        if role == WRITE and view.readonly:
            raise InvalidError(f"{name} is read-only and cannot be written to")
        describe_buffer(call, &view, dtype, name, out, role)
    finally:
        PyBuffer_Release(&view)
    return 0


cdef int describe_buffer(Call *call, Py_buffer *view, _NumpyDtype dtype, str name, flash_tensor_t *out, Role role) except -1:
    cdef DLTensor described
    cdef int64_t shape[FLASH_MAX_NDIM]
    cdef int64_t strides[FLASH_MAX_NDIM]
    cdef int i
    described.data = view.buf
    described.byte_offset = 0
    described.device.device_type = DL_CPU
    described.device.device_id = 0
    described.dtype = dtype.described
    described.ndim = view.ndim  # describe() refuses more than FLASH_MAX_NDIM before it reads a size
    described.shape = shape
    described.strides = strides
    for i in range(min(view.ndim, FLASH_MAX_NDIM)):
        shape[i] = view.shape[i]
        strides[i] = view.strides[i] // view.itemsize
        if view.shape[i] > 1 and strides[i] * view.itemsize != view.strides[i]:
            raise InvalidError(f"{name} has a stride of {view.strides[i]} bytes; it must be a multiple of its element's "
                               f"{view.itemsize}")
    return describe(call, &described, name, out, role)
