# PyTorch's state during a call: autograd, autocast, transforms, tracing. The C library only reads and writes memory. If PyTorch
# has more to do, the call goes to libflash/torch.py, which uses operators of PyTorch's dispatcher.

cdef extern from "Python.h":
    # In the stable ABI these two functions pass arguments without building a tuple; the calls that Cython generates build one.
    object PyObject_CallNoArgs(object function)
    object PyObject_CallFunctionObjArgs(object function, ...)
    ctypedef object (*c_function "PyCFunction")(object owner, void *nothing)
    c_function PyCFunction_GetFunction(object function) except NULL
    int PyCFunction_GetFlags(object function) except -1
    int METH_NOARGS

cdef extern from *:
    """
    static _Thread_local int libflash_operator_depth = 0;
    """
    int operator_depth "libflash_operator_depth"


cdef class _Query:
    """A function of PyTorch without arguments. If the function is written in C, it is called directly, without Python's call
    protocol."""

    cdef object function
    cdef c_function direct  # NULL: call `function`
    cdef object owner       # first argument of `direct`


cdef class _TorchState:
    """PyTorch's functions that return its state, looked up once."""

    cdef _Query grad_enabled       # torch.is_grad_enabled
    cdef _Query autocast_enabled
    cdef _Query in_transform       # True inside a transform of torch.func
    cdef dict forward_ad           # names of a module whose _current_level is -1 outside dual levels
    cdef _Query dispatch_modes     # number of active dispatch modes
    cdef list pre_dispatch_modes   # make_fx(pre_dispatch=True), not in dispatch_modes: each entry a mode or None; None: unknown
    cdef object in_pre_dispatch    # used if the list is unknown: a function of PyTorch, which takes longer
    cdef _Query tracing            # torch.jit.trace
    cdef _Query profiling
    cdef c_function is_neg         # Tensor.is_neg; NULL before the first tensor, or if the method is not written in C
    cdef object increment_version
    cdef tuple plain_types         # of tensors


cdef _TorchState _torch = None
cdef object _zero = 0      # compared by identity first
cdef object _outside = -1  # of forward-mode AD
cdef tuple _plain_values = (bool, int, float, str, tuple, list)


cdef int load_torch_state(object torch) except -1:
    global _torch
    if _torch is not None:
        return 0
    from torch.autograd import forward_ad
    cdef _TorchState state = _TorchState.__new__(_TorchState)
    state.grad_enabled = query(torch.is_grad_enabled)
    state.autocast_enabled = query(torch._C._is_any_autocast_enabled)
    state.in_transform = query(torch._C._are_functorch_transforms_active)
    state.forward_ad = forward_ad.__dict__
    state.dispatch_modes = query(torch._C._len_torch_dispatch_stack)
    state.pre_dispatch_modes = pre_dispatch_modes(torch)
    state.in_pre_dispatch = functools.partial(torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch)
    state.tracing = query(torch._C._is_tracing)
    state.profiling = query(torch._C._autograd._profiler_enabled)
    state.increment_version = increment_version(torch)
    state.plain_types = (torch.Tensor, torch.nn.Parameter)
    _torch = state
    return 0


cdef c_function direct_of(object function):
    """The C function that a builtin function or method calls, if it takes no arguments; else NULL."""
    if type(function) is type(len) and PyCFunction_GetFlags(function) == METH_NOARGS:
        return PyCFunction_GetFunction(function)
    return NULL


cdef _Query query(object function):
    cdef _Query made = _Query.__new__(_Query)
    made.function = function
    made.direct = direct_of(function)
    made.owner = getattr(function, "__self__", None)
    return made


cdef inline object answer(_Query query):
    return PyObject_CallNoArgs(query.function) if query.direct == NULL else query.direct(query.owner, NULL)


cdef list pre_dispatch_modes(object torch):
    """PyTorch's own list, which all threads share. None if this version of PyTorch stores the modes in another way."""
    owner = getattr(torch._ops, "_mode_stack_state_for_pre_dispatch", None)
    found = getattr(owner, "_ModeStackStateForPreDispatch__infra_modes", None)
    return found if type(found) is list and len(found) == 2 else None


cdef object increment_version(object torch):
    """A function that counts a new version of each tensor of a tuple."""
    try:
        torch._C._increment_version(())
        return torch._C._increment_version
    except (AttributeError, TypeError):  # the C function of an older PyTorch takes one tensor
        return lambda tensors: torch.autograd.graph.increment_version(tensors[0])


cdef bint has_own_behaviour(object cls, object torch) except -1:
    """True for a subclass that overrides what operators do with it."""
    if cls.__torch_dispatch__ != torch.Tensor.__torch_dispatch__:
        return True
    function = getattr(cls.__torch_function__, "__func__", cls.__torch_function__)
    return (function is not torch.Tensor.__torch_function__.__func__
            and function is not torch._C._disabled_torch_function_impl)


cdef inline bint is_true(_Query query) except -1:
    return answer(query) is True


cdef bint is_observed() except -1:
    """True if a transform, a dispatch mode or a tracer must see the call."""
    cdef object modes = answer(_torch.dispatch_modes)
    cdef list before = _torch.pre_dispatch_modes
    cdef object level = _torch.forward_ad["_current_level"]
    return (modes is not _zero and modes != 0 or level is not _outside and level != _outside or is_true(_torch.in_transform)
            or is_true(_torch.tracing)
            or (before[0] is not None or before[1] is not None if before is not None else _torch.in_pre_dispatch()))


cdef bint dispatcher_needed(_Source source) except -1:
    """True if the call must go through libflash/torch.py even if no tensor requires a gradient. A call inside an operator already
    came through libflash/torch.py."""
    return operator_depth == 0 and (source.subclass or is_observed() or is_true(_torch.autocast_enabled))


cdef inline bint records_gradients() except -1:
    return operator_depth == 0 and is_true(_torch.grad_enabled)


cdef int refuse_tracing(_Source source, str operation) except -1:
    """Refuse tracing, for an operation that libflash/torch.py does not have: PyTorch's tracers would record its results as
    constants."""
    if not source.torch or operator_depth != 0 or not is_observed():
        return 0
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if is_true(_torch.tracing) or tracer is not None and tracer.get_proxy_mode() is not None:
        raise UnsupportedError(f"{operation} cannot be traced by torch.jit.trace or make_fx, which would record its results as "
                               "constants; trace libflash.torch.attention and its gradients, and pass block masks that are ready")
    return 0


cdef inline bint requires_grad(object x) except -1:
    return x is not None and getattr(x, "requires_grad", False)


cdef bint one_requires_grad(tuple arrays) except -1:
    for x in arrays:
        if requires_grad(x):
            return True
    return False


cdef object without_negative_bit(Call *call, object x, str name, Role role):
    """The tensor, or a copy with its values if `x` is a view that negates its memory."""
    if _torch.is_neg == NULL:
        _torch.is_neg = direct_of(x.is_neg)
    if (x.is_neg() if _torch.is_neg == NULL else _torch.is_neg(x, NULL)) is False:
        return x
    if role == WRITE or call.stream_given:
        raise InvalidError(f"{name} is a negative view (its is_neg() is true), which has no memory of its own values"
                           + (" to write to" if role == WRITE else " on the given stream") + f"; pass {name}.resolve_neg()")
    x = x.resolve_neg()
    Py_INCREF(x)
    hold(call, HELD_OBJECT, <void *>x)
    return x


cdef int count_write(object x) except -1:
    """Count a new version of `x` in PyTorch's autograd, which then refuses a backward pass that saved the old values."""
    if x is not None and _torch is not None and source_of(x, "out").torch:
        tensors = (x,)
        PyObject_CallFunctionObjArgs(_torch.increment_version, <void *>tensors, NULL)
    return 0


def needs_no_operator(tuple tensors):
    """True if the library can be called without PyTorch's dispatcher: plain tensors, the first of which has data, or None, and no
    transform, dispatch mode, tracer or profiler. torch.compile cannot trace this function."""
    if _torch is None:
        load_torch_state(sys.modules["torch"])
    for x in tensors:
        if x is not None and type(x) not in _torch.plain_types:
            return False
    return not is_observed() and not is_true(_torch.profiling) and (tensors[0] is None or not tensors[0].is_meta)


def call_directly(function, tuple tensors, dict options, dict known):
    """function(*tensors, **options) if PyTorch has nothing to do for the call: plain tensors and no gradient, autocast,
    transform, mode, tracer or profiler. NotImplemented for any other call.

    `known` has the options that may be passed to `function` unchanged; True: also if they are None.
    """
    if _torch is None:
        load_torch_state(sys.modules["torch"])
    cdef bint records = is_true(_torch.grad_enabled)
    for x in tensors:
        if type(x) not in _torch.plain_types or records and requires_grad(x):
            return NotImplemented
    for name, x in options.items():
        none_allowed = known.get(name)
        if none_allowed is None or x is None and none_allowed is False:
            return NotImplemented
        if type(x) in _torch.plain_types:
            if records and requires_grad(x):
                return NotImplemented
        elif x is not None and type(x) not in _plain_values:
            return NotImplemented
    if is_observed() or is_true(_torch.autocast_enabled) or is_true(_torch.profiling) or tensors[0].is_meta:
        return NotImplemented
    return call_as_operator(function, tensors, options)


def call_as_operator(function, tuple args, dict options):
    """function(*args, **options) as the body of a PyTorch operator: calls within it go to the library directly."""
    global operator_depth
    operator_depth += 1
    try:
        return PyObject_Call(function, args, options)
    finally:
        operator_depth -= 1
