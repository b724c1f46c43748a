# Descriptions of arrays for the C library, which are valid during a call, and what the call must release at its end.

cdef enum Holding:
    HELD_VERSIONED = 0  # a DLManagedVersioned to delete
    HELD_MANAGED = 1    # a DLManaged to delete
    HELD_MEMORY = 2     # to free
    HELD_OBJECT = 3     # a Python reference to drop
    HELD_BLOCK = 4      # of _small_workspace.pxi, to give back

cdef struct Held:
    Holding kind
    void *pointer

cdef enum:
    HELD_IN_PLACE = 64  # enough for every call but a merge of many parts

cdef struct Call:
    int count
    bint shapes_only     # the arrays of the call are TensorShapes, which have no data
    bint stream_given    # by the caller's stream= argument
    bint stream_known    # given, or queried from the library of the first array on a GPU
    void *stream
    DLExchange *stream_api
    void *last_type      # type of the array that was described last; _sources keeps the type and its _Source alive
    void *last_source    # the _Source of this type
    bint of_tensors      # the first array is a tensor of PyTorch
    int32_t byte_dtype   # dtype of the elements of uint8 arrays; FLASH_DTYPE_NONE: such arrays are refused
    int operator_depth   # the value in _torch_state.pxi before the call, which is restored at the end
    Held held[HELD_IN_PLACE]
    Held *more           # those that do not fit `held`; allocated
    int more_capacity


# How a call uses an array.
cdef enum Role:
    READ = 0
    WRITE = 1
    LENGTHS = 2  # int32, or int64 that fits
    RANDOM = 3   # seed and offset: int64 or uint64, whose bits count
    SLOTS = 4    # int32 or int64


cdef int start(Call *call, object stream) except -1:
    """Initialise `call`. operator_depth becomes 0 until finish(call), because Python code that runs during the call, such as a
    signal handler or __dlpack__, is not part of PyTorch's operator: calls that it makes record gradients and follow autocast."""
    global operator_depth
    call.count = 0
    call.shapes_only = False
    call.byte_dtype = FLASH_DTYPE_NONE
    call.stream_given = call.stream_known = False
    call.stream = NULL
    call.stream_api = NULL
    call.last_type = NULL
    call.more = NULL
    call.more_capacity = 0
    if stream is not None:
        take_stream(call, stream)
    call.operator_depth, operator_depth = operator_depth, 0
    return 0


cdef int hold(Call *call, Holding kind, void *pointer) except -1:
    cdef Held *grown
    cdef int past = call.count - HELD_IN_PLACE
    if past >= 0 and past == call.more_capacity:
        grown = <Held *>realloc(call.more, <size_t>(2 * past + HELD_IN_PLACE) * sizeof(Held))
        if grown == NULL:
            release(kind, pointer)
            raise OutOfMemoryError(f"no memory to hold {call.count + 1} arrays")
        call.more, call.more_capacity = grown, 2 * past + HELD_IN_PLACE
    cdef Held *held = held_at(call, call.count)
    held.kind = kind
    held.pointer = pointer
    call.count += 1
    return 0


cdef inline Held *held_at(Call *call, int i) noexcept:
    return &call.held[i] if i < HELD_IN_PLACE else &call.more[i - HELD_IN_PLACE]


cdef flash_tensor_t *tensors(Call *call, int32_t count) except NULL:
    """Memory for `count` descriptions until finish(call)."""
    cdef flash_tensor_t *made = <flash_tensor_t *>malloc(<size_t>count * sizeof(flash_tensor_t))
    if made == NULL:
        raise OutOfMemoryError(f"no memory to describe {count} arrays")
    hold(call, HELD_MEMORY, made)
    return made


cdef int release(Holding kind, void *pointer) except -1:
    cdef DLManagedVersioned *versioned
    cdef DLManaged *managed
    if kind == HELD_VERSIONED:
        versioned = <DLManagedVersioned *>pointer
        if versioned.deleter != NULL:
            versioned.deleter(versioned)
    elif kind == HELD_MANAGED:
        managed = <DLManaged *>pointer
        if managed.deleter != NULL:
            managed.deleter(managed)
    elif kind == HELD_MEMORY:
        free(pointer)
    elif kind == HELD_BLOCK:
        give_block(<char *>pointer)
    else:
        Py_DECREF(<object>pointer)
    return 0


cdef int finish(Call *call) except -1:
    """Release everything that the call holds."""
    global operator_depth
    cdef Held *held
    cdef int i
    for i in range(call.count):
        held = held_at(call, i)
        release(held.kind, held.pointer)
    free(call.more)
    call.count = 0
    operator_depth = call.operator_depth
    return 0


cdef extern from *:
    """
    static int libflash_raise_pending(void) { return -1; }
    """
    int raise_pending "libflash_raise_pending"() except -1


cdef str first_line(object error):
    """The first line of an error text. In PyTorch's texts a C++ stack trace follows."""
    return str(error).partition("\n")[0]


cdef int32_t dtype_of(DLDataType dtype) noexcept:
    """The C library's number of a DLPack dtype; FLASH_DTYPE_NONE if it has none."""
    if dtype.lanes != 1:
        return FLASH_DTYPE_NONE
    if dtype.code == DL_FLOAT:
        return (FLASH_DTYPE_FLOAT16 if dtype.bits == 16 else FLASH_DTYPE_FLOAT32 if dtype.bits == 32
                else FLASH_DTYPE_FLOAT64 if dtype.bits == 64 else FLASH_DTYPE_NONE)
    if dtype.code == DL_BFLOAT and dtype.bits == 16:
        return FLASH_DTYPE_BFLOAT16
    if dtype.code == DL_INT and dtype.bits == 32:
        return FLASH_DTYPE_INT32
    if dtype.bits != 8:
        return FLASH_DTYPE_NONE
    if dtype.code == DL_BOOL:
        return FLASH_DTYPE_BOOL
    if dtype.code == DL_INT:
        return FLASH_DTYPE_INT8
    if dtype.code == DL_FLOAT8_E4M3FN:
        return FLASH_DTYPE_FLOAT8_E4M3
    if dtype.code == DL_FLOAT8_E5M2:
        return FLASH_DTYPE_FLOAT8_E5M2
    return FLASH_DTYPE_NONE


cdef inline bint is_int64(DLDataType dtype) noexcept:
    return dtype.code == DL_INT and dtype.bits == 64 and dtype.lanes == 1


cdef inline bint is_uint64(DLDataType dtype) noexcept:
    return dtype.code == DL_UINT and dtype.bits == 64 and dtype.lanes == 1


cdef str dtype_rule(Role role):
    if role == LENGTHS:
        return "int32 (or int64 on the CPU) is needed"
    if role == SLOTS:
        return "int32 or int64 is needed"
    return "int64 or uint64 is needed" if role == RANDOM else DTYPE_RULE


cdef str dtype_text(DLDataType dtype):
    cdef str name = SMALL_DTYPE_NAMES.get(dtype.code)
    if name is None:
        name = DTYPE_NAMES.get(dtype.code, f"DLPack code {dtype.code}, bits ") + str(dtype.bits)
    return name + (f" x {dtype.lanes} lanes" if dtype.lanes != 1 else "")


cdef int describe(Call *call, DLTensor *x, str name, flash_tensor_t *out, Role role) except -1:
    """Fill the C library's description."""
    cdef int i
    cdef int64_t step = 1
    if x.device.device_type == DL_CPU or x.device.device_type == DL_CUDA_HOST:
        out.device_type = FLASH_DEVICE_CPU
        out.device_id = 0
    elif x.device.device_type == DL_CUDA or x.device.device_type == DL_CUDA_MANAGED:
        out.device_type = FLASH_DEVICE_CUDA
        out.device_id = x.device.device_id
    else:
        raise UnsupportedError(f"{name} is on a device of DLPack type {x.device.device_type}; only the CPU (1) and CUDA (2) "
                               "are supported")
    if x.ndim < 0 or x.ndim > FLASH_MAX_NDIM:
        raise InvalidError(f"{name} has {x.ndim} dimensions; at most {FLASH_MAX_NDIM} are allowed")
    out.ndim = x.ndim
    for i in range(x.ndim - 1, -1, -1):
        out.shape[i] = x.shape[i]
        out.stride[i] = x.strides[i] if x.strides != NULL else step
        step *= x.shape[i]
    out.data = <char *>x.data + x.byte_offset if x.data != NULL else NULL
    if out.data == NULL and step != 0:
        raise TypeError(f"{name} has no data; a fake or meta tensor cannot be computed with")
    out.dtype = dtype_of(x.dtype)
    if x.dtype.code == DL_UINT and x.dtype.bits == 8 and x.dtype.lanes == 1:
        out.dtype = call.byte_dtype
    if role == RANDOM:
        out.dtype = FLASH_DTYPE_INT64 if is_int64(x.dtype) or is_uint64(x.dtype) else FLASH_DTYPE_NONE
    if role == SLOTS and is_int64(x.dtype):
        out.dtype = FLASH_DTYPE_INT64
    if out.dtype == FLASH_DTYPE_NONE:
        if role == LENGTHS and is_int64(x.dtype):
            narrow(call, name, out)
        else:
            raise InvalidError(f"{name} has dtype {dtype_text(x.dtype)}; {dtype_rule(role)}")
    return 0


cdef int narrow(Call *call, str name, flash_tensor_t *x) except -1:
    """Replace the int64 lengths in `x` by an int32 copy that lives as long as the call."""
    cdef int64_t rows, columns, i, j, value
    cdef int32_t *copy
    if x.device_type != FLASH_DEVICE_CPU:
        raise InvalidError(f"{name} is int64 on a CUDA device, where nothing is converted; pass int32")
    if x.ndim != 1 and x.ndim != 2:
        raise InvalidError(f"{name} has {x.ndim} dimensions; it needs 1 (2 for block_table)")
    rows = x.shape[0] if x.ndim == 2 else 1
    columns = x.shape[x.ndim - 1]
    copy = <int32_t *>malloc(<size_t>(rows * columns + 1) * sizeof(int32_t))
    if copy == NULL:
        raise OutOfMemoryError(f"no memory for {rows * columns} int32 values of {name}")
    hold(call, HELD_MEMORY, copy)
    for i in range(rows):
        for j in range(columns):
            value = (<int64_t *>x.data)[(i * x.stride[0] if x.ndim == 2 else 0) + j * x.stride[x.ndim - 1]]
            if value < INT32_MIN or value > INT32_MAX:
                raise InvalidError(f"{name} holds {value}, which does not fit int32")
            copy[i * columns + j] = <int32_t>value
    x.data = copy
    x.dtype = FLASH_DTYPE_INT32
    x.stride[x.ndim - 1] = 1
    if x.ndim == 2:
        x.stride[0] = columns
    return 0


cdef int borrow(Call *call, object x, str name, flash_tensor_t *out, Role role=READ) except -1:
    """Describe the array `x` in `out` and hold what keeps the description valid until finish(call)."""
    if call.shapes_only:
        return describe_shape(call, x, name, out, role)
    cdef _Source source
    cdef object cls = type(x)
    if <void *>cls == call.last_type:
        source = <_Source>call.last_source
    else:
        source = source_of(x, name)
        if call.last_type == NULL:
            call.of_tensors = source.torch
        call.last_type, call.last_source = <void *>cls, <void *>source
    if source.subclass:
        refuse_subclass(x, name)
    if source.torch:
        if not call.of_tensors:
            refuse_gradient(call, x, name)
        x = without_negative_bit(call, x, name, role)
    if source.kind == KIND_EXCHANGE:
        return borrow_by_table(call, source, x, name, out, role)
    if source.kind == KIND_NUMPY:
        return borrow_numpy(call, source, x, name, out, role)
    if source.kind == KIND_JAX:
        refuse_jax(source, x, name, role)
    return borrow_by_capsule(call, source, x, name, out, role)


cdef int refuse_gradient(Call *call, object x, str name) except -1:
    """Refuse a tensor whose gradient would not be recorded, because the first array of the call is none of PyTorch's."""
    if call.operator_depth == 0 and requires_grad(x) and is_true(_torch.grad_enabled):
        raise InvalidError(f"{name} is a torch.Tensor that requires a gradient, and the first array of the call is not a tensor, "
                           f"so that no gradient would be recorded; pass tensors alone, or {name}.detach()")
    return 0


cdef int refuse_jax(_Source source, object x, str name, Role role) except -1:
    if source.traced:
        raise TypeError(f"{name} is a JAX tracer ({type(x).__name__}), a shape without data: inside jit, grad and vmap give all "
                        "arrays to libflash.jax.attention, decode or merge, and take gradients with jax.grad")
    if role == WRITE:
        raise TypeError(f"{name} is a JAX array; those are immutable and cannot be written to")
    if x.is_deleted():
        raise InvalidError(f"{name} is a JAX array without data: it was deleted, or donated to a jitted function")
    devices = len(x.devices())
    if devices != 1:
        raise UnsupportedError(f"{name} is a JAX array on {devices} devices, for which XLA divides the work: give all arrays to "
                               "libflash.jax.attention, decode or merge, and take gradients with jax.grad")
    return 0


def refuse_nested(x, str name):
    if getattr(x, "is_nested", False):
        raise TypeError(f"{name} is a nested tensor; pass packed sequences: its values, with the bounds of the sequences as "
                        "cu_seqlens_q and cu_seqlens_k")


cdef int refuse_export(object x, str name) except -1:
    """Raise the exception that a function of an exchange table has set, with the array's name."""
    try:
        raise_pending()
    except Exception as error:
        refuse_nested(x, name)
        raise TypeError(f"{name} cannot be exported through DLPack: {first_line(error)}") from error
    return 0


cdef int check_flags(const DLManagedVersioned *x, str name, Role role) except -1:
    """Refuse an output whose memory the call must not write, or whose export is a copy, in which the result would be lost."""
    if role == WRITE and x.flags & DL_READ_ONLY:
        raise InvalidError(f"{name} is read-only and cannot be written to")
    if role == WRITE and x.flags & DL_COPIED:
        raise InvalidError(f"{name} is exported through DLPack as a copy, so that its own memory cannot be written to")
    return 0


cdef int borrow_by_table(Call *call, _Source source, object x, str name, flash_tensor_t *out, Role role) except -1:
    cdef DLTensor view
    cdef DLManagedVersioned *owned = NULL
    if source.api.dltensor_from_py_object_no_sync != NULL:
        if source.api.dltensor_from_py_object_no_sync(<void *>x, &view) != 0:
            refuse_export(x, name)
    else:
        if source.api.managed_tensor_from_py_object_no_sync(<void *>x, &owned) != 0:
            refuse_export(x, name)
        hold(call, HELD_VERSIONED, owned)
        check_flags(owned, name, role)
        view = owned.dl_tensor
    describe(call, &view, name, out, role)
    if out.device_type == FLASH_DEVICE_CUDA and not shares_stream(call, source, out.device_id):
        return borrow_by_capsule(call, source, x, name, out, role)
    return 0


cdef int borrow_by_capsule(Call *call, _Source source, object x, str name, flash_tensor_t *out, Role role) except -1:
    cdef object capsule = export(call, source, x, name)
    cdef DLManagedVersioned *versioned
    cdef DLManaged *managed
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        versioned = <DLManagedVersioned *>PyCapsule_GetPointer(capsule, "dltensor_versioned")
        PyCapsule_SetName(capsule, "used_dltensor_versioned")
        hold(call, HELD_VERSIONED, versioned)
        if versioned.version.major != DL_MAJOR:
            raise UnsupportedError(f"{name} is exported as DLPack {versioned.version.major}.{versioned.version.minor}; "
                                   "libflash reads version 1 and older ones")
        check_flags(versioned, name, role)
        return describe(call, &versioned.dl_tensor, name, out, role)
    if PyCapsule_IsValid(capsule, "dltensor"):
        managed = <DLManaged *>PyCapsule_GetPointer(capsule, "dltensor")
        PyCapsule_SetName(capsule, "used_dltensor")
        hold(call, HELD_MANAGED, managed)
        return describe(call, &managed.dl_tensor, name, out, role)
    raise InvalidError(f"{name}.__dlpack__() gave {capsule!r}, not a fresh DLPack capsule; one capsule serves once")


cdef object export(Call *call, _Source source, object x, str name):
    """A capsule from __dlpack__. On a GPU the array's library makes the stream of the call wait for pending writes to `x`."""
    cdef dict arguments = _versioned
    cdef int device_type
    device_type, device_id = x.__dlpack_device__()
    if device_type == DL_CUDA or device_type == DL_CUDA_MANAGED:
        if source.kind == KIND_JAX:
            raise UnsupportedError(f"{name} is a JAX array on a GPU, where XLA orders all work: give all arrays to "
                                   "libflash.jax.attention, decode or merge, and take gradients with jax.grad")
        find_stream(call, source, device_id)
        arguments = {"max_version": (1, 3), "stream": stream_number(call)}
    try:
        if not source.no_max_version:
            try:
                return PyObject_Call(x.__dlpack__, _no_arguments, arguments)
            except TypeError as error:
                if "max_version" not in str(error):
                    raise
                source.no_max_version = True
        arguments = {key: value for key, value in arguments.items() if key != "max_version"}
        return PyObject_Call(x.__dlpack__, _no_arguments, arguments)
    except Exception as error:
        raise TypeError(f"{name} cannot be exported through DLPack: {first_line(error)}") from error
