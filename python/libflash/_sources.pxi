# The library of an array. What a call needs to know about it is looked up once per type and cached.

cdef enum Kind:
    KIND_OTHER = 0    # anything with __dlpack__
    KIND_EXCHANGE = 1  # has DLPack's C exchange table: PyTorch, tvm-ffi
    KIND_NUMPY = 2
    KIND_CUPY = 3
    KIND_JAX = 4


cdef class _Source:
    """One type of array."""

    cdef Kind kind
    cdef bint torch             # PyTorch: see _torch_state.pxi
    cdef bint subclass          # a subclass of torch.Tensor that overrides operators: its memory alone does not define its values
    cdef bint traced            # JAX's placeholder inside jit, grad and vmap: a shape without data
    cdef bint no_max_version    # its __dlpack__ is older than DLPack 1.0 and has no argument max_version
    cdef DLExchange *api
    cdef object get_num_threads  # torch.get_num_threads
    cdef object module          # allocates outputs; None: through the array's __array_namespace__
    cdef object empty           # module.empty
    cdef object float32
    cdef object uint16
    cdef object uint8


cdef dict _sources = {}          # type -> _Source
cdef tuple _no_arguments = ()
cdef dict _versioned = {"max_version": (1, 3)}


cdef DLExchange *exchange_table(object cls) except? NULL:
    """The exchange table of a type, in the supported major version, or NULL."""
    cdef object capsule = getattr(cls, "__dlpack_c_exchange_api__", None)
    if capsule is None or not PyCapsule_IsValid(capsule, "dlpack_exchange_api"):
        return NULL
    cdef DLExchangeHeader *header = <DLExchangeHeader *>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    while header != NULL and header.version.major != DL_MAJOR:
        header = header.prev_api
    return <DLExchange *>header


cdef bint is_kind_of(object cls, str library, str path) except -1:
    """True if `cls` is `library.path` or derives from it. A library that is not loaded cannot have made the array."""
    cdef object base = sys.modules.get(library)
    if base is None:
        return False
    for name in path.split("."):
        base = getattr(base, name, None)
        if base is None:
            return False
    return issubclass(cls, base)


cdef _Source new_source(object x, str name):
    cdef object cls = type(x)
    cdef _Source source = _Source.__new__(_Source)
    cdef str root = cls.__module__.partition(".")[0]
    source.api = exchange_table(cls)
    if is_kind_of(cls, "torch", "Tensor"):
        source.torch = True
        source.module = sys.modules["torch"]
        load_torch_state(source.module)
        source.subclass = has_own_behaviour(cls, source.module)
        source.get_num_threads = source.module.get_num_threads
        if cls.__name__ == "FakeTensor":
            raise TypeError(f"{name} is a FakeTensor, which has no data: use libflash.torch.attention under tracing")
    if source.api != NULL:
        source.kind = KIND_EXCHANGE
    elif is_kind_of(cls, "jax", "core.Tracer"):
        source.kind = KIND_JAX
        source.traced = True
    elif is_kind_of(cls, "jax", "ShapeDtypeStruct"):
        raise TypeError(f"{name} is a jax.ShapeDtypeStruct, a shape without data: use jax.eval_shape")
    elif not hasattr(cls, "__dlpack__"):
        raise TypeError(f"{name} must be an array (NumPy, PyTorch, CuPy, JAX or another with __dlpack__), "
                        f"not {described(x)}")
    elif is_kind_of(cls, "numpy", "ndarray"):
        if is_kind_of(cls, "numpy", "ma.MaskedArray"):
            raise TypeError(f"{name} is a masked array: its mask would be lost; pass {name}.filled(...)")
        source.kind = KIND_NUMPY
        set_numpy(source)
    elif is_kind_of(cls, "cupy", "ndarray"):
        source.kind = KIND_CUPY
        source.module = sys.modules["cupy"]
        source.empty = source.module.empty
        source.float32 = source.module.float32
    elif root in ("jax", "jaxlib"):
        source.kind = KIND_JAX
        set_numpy(source)
    _sources[cls] = source
    return source


cdef int set_numpy(_Source source) except -1:
    source.module = sys.modules["numpy"]
    source.empty = source.module.empty
    source.float32 = source.module.dtype("float32")
    source.uint16 = source.module.dtype("uint16")
    source.uint8 = source.module.dtype("uint8")
    return 0


cdef inline _Source source_of(object x, str name):
    cdef object found = _sources.get(type(x))
    if found is not None:
        return <_Source>found
    return new_source(x, name)


cdef bint needs_xla(object first, tuple others) except -1:
    """True if only XLA can run the call: an array is traced, or an array of JAX is not on one CPU device."""
    if only_for_xla(first):
        return True
    for x in others:
        if x is not None and type(x) is not int and type(x) is not float and only_for_xla(x):
            return True
    return False


cdef bint only_for_xla(object x) except -1:
    cdef object found = _sources.get(type(x))
    if is_kind_of(type(x), "jax", "core.Tracer"):
        return True
    if found is None or (<_Source>found).kind != KIND_JAX or x.is_deleted():  # deleted: refused by name when it is borrowed
        return False
    devices = x.devices()
    return len(devices) != 1 or next(iter(devices)).platform != "cpu"
