# What PyTorch does around a call: autograd, autocast, transforms, tracing. The library sees memory only. Where PyTorch does
# more, a call goes to libflash/torch.py, whose operators PyTorch's dispatcher knows.

cdef extern from *:
    """
    static _Thread_local int libflash_operator_depth = 0;
    """
    int operator_depth "libflash_operator_depth"


cdef class _TorchState:
    """PyTorch's functions that say so, looked up once."""

    cdef object grad_enabled       # torch.is_grad_enabled
    cdef object autocast_enabled
    cdef object transform_level    # of torch.func; None outside
    cdef object forward_ad         # module whose _current_level is -1 outside dual levels
    cdef object dispatch_modes     # how many are active
    cdef object tracing            # torch.jit.trace
    cdef object is_neg
    cdef object increment_version


cdef _TorchState _torch = None


cdef int load_torch_state(object torch) except -1:
    global _torch
    if _torch is not None:
        return 0
    from torch.autograd import forward_ad
    cdef _TorchState state = _TorchState.__new__(_TorchState)
    state.grad_enabled = torch.is_grad_enabled
    state.autocast_enabled = torch._C._is_any_autocast_enabled
    state.transform_level = torch._C._functorch.maybe_current_level
    state.forward_ad = forward_ad
    state.dispatch_modes = torch._C._len_torch_dispatch_stack
    state.tracing = torch._C._is_tracing
    state.is_neg = torch.Tensor.is_neg
    state.increment_version = torch.autograd.graph.increment_version
    _torch = state
    return 0


cdef bint has_own_behaviour(object cls, object torch) except -1:
    """True for a subclass that overrides what operators do with it."""
    if cls.__torch_dispatch__ != torch.Tensor.__torch_dispatch__:
        return True
    function = getattr(cls.__torch_function__, "__func__", cls.__torch_function__)
    return (function is not torch.Tensor.__torch_function__.__func__
            and function is not torch._C._disabled_torch_function_impl)


cdef bint is_watched() except -1:
    """True if a transform, a dispatch mode or a tracer wants to see the operator."""
    return (_torch.dispatch_modes() != 0 or _torch.transform_level() is not None or _torch.forward_ad._current_level >= 0
            or _torch.tracing())


cdef bint gradients_wanted(tuple arrays) except -1:
    """True if PyTorch records gradients and one of the arrays requires one."""
    if not _torch.grad_enabled():
        return False
    for x in arrays:
        if x is not None and getattr(x, "requires_grad", False):
            return True
    return False


cdef bint belongs_to_adapter(_Source source, tuple arrays) except -1:
    """True if the call must go through libflash/torch.py. Inside an operator it has."""
    return operator_depth == 0 and (
        source.subclass or gradients_wanted(arrays) or is_watched() or _torch.autocast_enabled())


cdef object without_negative_bit(Call *call, object x, str name, Role role):
    """The tensor, or a copy with its values if `x` is a view that negates its memory."""
    if not _torch.is_neg(x):
        return x
    if role == WRITE or call.stream_given:
        raise InvalidError(f"{name} is a negative view (its is_neg() is true), which has no memory of its own values"
                           + (" to write to" if role == WRITE else " on the given stream") + f"; pass {name}.resolve_neg()")
    x = x.resolve_neg()
    Py_INCREF(x)
    hold(call, HELD_OBJECT, <void *>x)
    return x


cdef int count_write(object x) except -1:
    """Tell PyTorch's autograd that `x` has new values, so that it notices saved tensors that are stale."""
    if x is not None and _torch is not None and source_of(x, "out").torch:
        _torch.increment_version(x)
    return 0


def torch_is_plain():
    """True if no transform, dispatch mode or tracer wants to see the operator."""
    if _torch is None:
        load_torch_state(sys.modules["torch"])
    return not is_watched()


def call_as_operator(function, args, options):
    """function(*args, **options) as the body of a PyTorch operator: calls inside go straight to the library."""
    global operator_depth
    operator_depth += 1
    try:
        return function(*args, **options)
    finally:
        operator_depth -= 1
