# The stream of a call, and the memory of its outputs and workspace. All of them come from the caller's array library.


cdef int take_stream(Call *call, object stream) except -1:
    """The stream= argument: a handle, or an object that has one."""
    cdef object handle = stream
    if hasattr(stream, "__cuda_stream__"):
        handle = stream.__cuda_stream__()[1]
    elif hasattr(stream, "cuda_stream"):  # PyTorch before 2.10
        handle = stream.cuda_stream
    elif hasattr(stream, "ptr"):          # CuPy before 14
        handle = stream.ptr
    if not isinstance(handle, int) or isinstance(handle, bool):
        raise TypeError("stream must be a CUDA stream handle (int) or an object with __cuda_stream__, "
                        f"not {described(stream)}")
    call.stream = <void *><uintptr_t>unsigned(handle, "stream")
    call.stream_given = call.stream_known = True
    return 0


cdef int find_stream(Call *call, _Source source, int32_t device_id) except -1:
    """Set the stream of the call: the given stream, else the current stream of the library whose array comes first."""
    if call.stream_known:
        return 0
    if source.kind == KIND_EXCHANGE:
        source.api.current_work_stream(DL_CUDA, device_id, &call.stream)
        call.stream_api = source.api
    elif source.kind == KIND_CUPY:
        call.stream = <void *><uintptr_t>source.module.cuda.get_current_stream(device_id).ptr
    call.stream_known = True
    return 0


cdef bint shares_stream(Call *call, _Source source, int32_t device_id) except -1:
    """False if this array's library works on another stream than the call, so that one stream must wait for the other."""
    cdef void *own = NULL
    find_stream(call, source, device_id)
    if call.stream_given or call.stream_api == source.api:
        return True
    source.api.current_work_stream(DL_CUDA, device_id, &own)
    return own == call.stream


cdef object stream_number(Call *call):
    """The stream argument of __dlpack__: 1 is the legacy default stream."""
    return <uintptr_t>call.stream if call.stream != NULL else 1


cdef void set_error(void *context, const char *kind, const char *message) noexcept with gil:
    PyErr_SetString(MemoryError if strcmp(kind, "MemoryError") == 0 else RuntimeError, message)


class _Handle:
    """A stream handle as an object with __cuda_stream__, for CuPy."""

    def __init__(self, handle):
        self.handle = handle

    def __cuda_stream__(self):
        return 0, self.handle


cdef object on_stream(Call *call, _Source source, int32_t device_id):
    """A context in which the array library allocates memory for the given stream. Otherwise, when the memory is freed after the
    call, the allocator could reuse it on another stream before the work of the call is done."""
    cuda = source.module.cuda
    handle = <uintptr_t>call.stream
    if source.torch:
        if handle <= 1:  # the legacy default stream has two handles, 0 and 1; PyTorch accepts only 0
            return cuda.stream(cuda.default_stream(device_id))
        if handle == 2:
            raise InvalidError("stream is 2, the default stream of each thread, for which PyTorch allocates no memory; "
                               "pass another stream")
        return cuda.stream(cuda.ExternalStream(handle, device=device_id))
    if hasattr(cuda.Stream, "from_external"):
        return cuda.Stream.from_external(_Handle(handle))
    return cuda.ExternalStream(handle)  # CuPy before 14


cdef DLManagedVersioned *allocate_by_table(Call *call, _Source source, const flash_tensor_t *like, DLDataType dtype, int ndim,
                                           int64_t *shape) except NULL:
    cdef DLManagedVersioned *made = NULL
    cdef DLTensor prototype
    cdef int64_t strides[4]
    cdef int i
    prototype.data = NULL
    prototype.device.device_type = DL_CUDA if like.device_type == FLASH_DEVICE_CUDA else DL_CPU
    prototype.device.device_id = like.device_id
    prototype.ndim = ndim
    prototype.dtype = dtype
    prototype.shape = shape
    prototype.strides = strides
    prototype.byte_offset = 0
    strides[3] = 1
    for i in range(ndim - 1, -1, -1):
        strides[i] = 1 if i == ndim - 1 else strides[i + 1] * shape[i + 1]
    if call.stream_given and like.device_type == FLASH_DEVICE_CUDA and source.torch:
        with on_stream(call, source, like.device_id):
            source.api.managed_tensor_allocator(&prototype, &made, NULL, set_error)
    else:
        source.api.managed_tensor_allocator(&prototype, &made, NULL, set_error)
    if made == NULL:
        raise OutOfMemoryError("the array library allocated no memory and raised no error")
    return made


cdef DLDataType dl_dtype(int32_t dtype) noexcept:
    cdef DLDataType made
    made.lanes = 1
    made.bits = (16 if dtype == FLASH_DTYPE_FLOAT16 or dtype == FLASH_DTYPE_BFLOAT16 else
                 64 if dtype == FLASH_DTYPE_FLOAT64 else 32)
    made.code = DL_BFLOAT if dtype == FLASH_DTYPE_BFLOAT16 else DL_INT if dtype == FLASH_DTYPE_INT32 else DL_FLOAT
    return made


cdef object new_array(Call *call, _Source source, object like, const flash_tensor_t *view, int32_t dtype, int ndim,
                      int64_t *shape, str name, flash_tensor_t *out):
    """A new array of the library and on the device of `like`. `view` describes `like`, and `out` describes the new array. For JAX
    the array is NumPy memory until deliver()."""
    cdef DLManagedVersioned *made
    cdef void *object_pointer = NULL
    cdef tuple sizes
    cdef object array
    if source.kind == KIND_EXCHANGE:
        made = allocate_by_table(call, source, view, dl_dtype(dtype), ndim, shape)
        describe(call, &made.dl_tensor, name, out, WRITE)
        source.api.managed_tensor_to_py_object_no_sync(made, &object_pointer)
        array = <object>object_pointer
        Py_DECREF(array)  # the table returned a new reference, and the cast added one
        return array
    if ndim == 4:
        sizes = (shape[0], shape[1], shape[2], shape[3])
    elif ndim == 3:
        sizes = (shape[0], shape[1], shape[2])
    elif ndim == 2:
        sizes = (shape[0], shape[1])
    else:
        sizes = (shape[0],)
    if source.kind == KIND_OTHER:
        array = new_array_by_namespace(like, view, dtype, sizes, name)
    elif source.kind == KIND_JAX:
        array = aligned_numpy(source, dtype_object(source, like, view, dtype), sizes)
    elif source.kind == KIND_CUPY:
        with source.module.cuda.Device(view.device_id):
            if call.stream_given:
                with on_stream(call, source, view.device_id):
                    array = source.empty(sizes, dtype_object(source, like, view, dtype))
            else:
                array = source.empty(sizes, dtype_object(source, like, view, dtype))
    else:
        array = source.empty(sizes, dtype_object(source, like, view, dtype))
    borrow(call, array, name, out, WRITE)
    return array


cdef object dtype_object(_Source source, object like, const flash_tensor_t *view, int32_t dtype):
    if dtype == view.dtype:
        return like.dtype
    return source.float32 if dtype == FLASH_DTYPE_FLOAT32 else source.module.dtype(DTYPE_OBJECTS[dtype])


cdef object new_array_by_namespace(object like, const flash_tensor_t *view, int32_t dtype, tuple sizes, str name):
    """A new array, made through the array API standard, for libraries that are not known by name."""
    if not hasattr(like, "__array_namespace__"):
        raise TypeError(f"{name} cannot be allocated: {type(like).__name__} has no __array_namespace__; give it as {name}=")
    space = like.__array_namespace__()
    wanted = like.dtype if dtype == view.dtype else getattr(space, DTYPE_OBJECTS[dtype])
    return space.empty(sizes, dtype=wanted, device=like.device)


cdef object aligned_numpy(_Source source, object dtype, tuple sizes):
    """A NumPy array at an address that is a multiple of 64 bytes, so that JAX uses its memory without a copy."""
    cdef int64_t count = dtype.itemsize
    for size in sizes:
        count *= size
    block = source.empty(count + 64, "uint8")
    skip = -block.ctypes.data % 64
    return block[skip:skip + count].view(dtype).reshape(sizes)


cdef object deliver(_Source source, object like, object array):
    """The result for the caller: for JAX, a JAX array that uses the NumPy memory without a copy."""
    if source.kind != KIND_JAX or array is None or type(array).__module__.partition(".")[0] != "numpy":
        return array
    return sys.modules["jax"].device_put(array, like.device)


cdef void *workspace(Call *call, _Source source, const flash_tensor_t *like, size_t size, bint small) except? NULL:
    """The workspace, which exists until finish(call). On a GPU the caller's library allocates it. The allocator of the library
    reuses memory in the order of the stream, so the memory may be released right after the launch."""
    cdef void *memory = NULL
    cdef DLManagedVersioned *made
    cdef DLDataType byte
    cdef int64_t shape = <int64_t>size
    if size == 0:
        return NULL
    if small:
        return larger_workspace(call, size)
    if like.device_type == FLASH_DEVICE_CPU:
        if posix_memalign(&memory, 256, size) != 0:
            raise OutOfMemoryError(f"no memory for a workspace of {size} bytes")
        hold(call, HELD_MEMORY, memory)
        return memory
    if source.kind == KIND_EXCHANGE:
        byte.code = DL_UINT
        byte.bits = 8
        byte.lanes = 1
        made = allocate_by_table(call, source, like, byte, 1, &shape)
        hold(call, HELD_VERSIONED, made)
        return <char *>made.dl_tensor.data + made.dl_tensor.byte_offset
    if source.kind == KIND_CUPY:
        with source.module.cuda.Device(like.device_id):
            if call.stream_given:
                with on_stream(call, source, like.device_id):
                    block = source.empty(size, "uint8")
            else:
                block = source.empty(size, "uint8")
        Py_INCREF(block)
        hold(call, HELD_OBJECT, <void *>block)
        return <void *><uintptr_t>block.data.ptr
    raise UnsupportedError(f"this call needs {size} bytes of scratch memory on the GPU, and libflash knows no allocator of the "
                           "library that q comes from; PyTorch and CuPy have one")
