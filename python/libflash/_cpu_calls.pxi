# Calls on the CPU: how many threads they use, and how a signal (Ctrl-C) ends them.

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1
    unsigned long PyThread_get_thread_ident() nogil


cdef enum:
    SMALL_WORK = 1 << 19  # products of elements of queries and keys; the CPU backend uses one thread even for more work

cdef int32_t _num_threads = 0        # of set_num_threads(); 0: the default
cdef bint _environment_accepted = False
cdef unsigned long _main_thread = 0  # the thread that runs Python's signal handlers
cdef object _interrupt = None        # what a signal handler raised during a call


def _find_main_thread():
    global _main_thread
    _main_thread = threading.main_thread().ident


_find_main_thread()
os.register_at_fork(after_in_child=_find_main_thread)


cdef int32_t num_threads_for(_Source source, const flash_tensor_t *x, bint small=False) except -1:
    """options.num_threads of a call whose first array is `x`. PyTorch tensors: at most torch.get_num_threads() threads, unless
    set_num_threads() was called. A small problem runs on one thread, without a system call to find out the number of
    processors."""
    global _environment_accepted
    cdef int32_t usual
    cdef int64_t torch_threads
    if _num_threads > 0 or x.device_type != FLASH_DEVICE_CPU:
        return _num_threads
    if small and _environment_accepted:
        return 1
    usual = flash_cpu_threads()
    if usual == 0:  # LIBFLASH_NUM_THREADS is invalid: the call will fail with an error text that says so
        return 0
    _environment_accepted = True  # the library reads the environment once
    if source.torch:
        torch_threads = source.get_num_threads()
        if torch_threads < usual:
            return <int32_t>torch_threads
    return usual


cdef double elements(const flash_tensor_t *x) noexcept:
    cdef double count = 1
    cdef int i
    for i in range(x.ndim):
        count *= <double>x.shape[i]
    return count


cdef bint is_small(const flash_tensor_t *q, const flash_tensor_t *k, const flash_tensor_t *v, int64_t pages=1) noexcept:
    """True for attention that one thread computes in a few milliseconds at most. Such a call uses no other threads and handles no
    signals. `pages` is the number of columns of a block table."""
    cdef double keys, products
    if q.device_type != FLASH_DEVICE_CPU or q.ndim < 3 or k.ndim < 3 or v.ndim != k.ndim:
        return False
    keys = <double>(k.shape[0] if k.ndim == 3 else k.shape[1]) * <double>pages  # as if a packed batch were one sequence
    products = elements(q) * keys
    if v.shape[v.ndim - 1] > q.shape[q.ndim - 1]:
        products *= <double>v.shape[v.ndim - 1] / <double>(q.shape[q.ndim - 1] + 1)
    return products + elements(q) + elements(k) + elements(v) < SMALL_WORK


cdef int32_t run_signal_handlers() noexcept with gil:
    global _interrupt
    try:
        PyErr_CheckSignals()
    except BaseException as error:
        _interrupt = error
        return 1
    return 0


cdef int32_t interrupted(void *context) noexcept nogil:
    return run_signal_handlers()


cdef inline void allow_interrupt(const flash_tensor_t *x, bint small=False) noexcept:
    """Let Python's signal handlers run during the call that follows, if the call is on the CPU and not small, and if this is the
    thread that runs signal handlers."""
    if not small and x.device_type == FLASH_DEVICE_CPU and PyThread_get_thread_ident() == _main_thread:
        flash_set_interrupt(interrupted, NULL)


cdef inline int end_interrupt(const flash_tensor_t *x, bint small=False) except -1:
    """End allow_interrupt(). Raise what a signal handler raised, also if the call was already complete."""
    if not small and x.device_type == FLASH_DEVICE_CPU:
        flash_set_interrupt(NULL, NULL)
        if _interrupt is not None and PyThread_get_thread_ident() == _main_thread:
            raise_interrupt()
    return 0


cdef int raise_interrupt() except -1:
    """Raise what the signal handler raised: KeyboardInterrupt for Ctrl-C, unless the program has a handler of its own."""
    global _interrupt
    error, _interrupt = _interrupt, None
    raise error


def set_num_threads(threads):
    """How many threads a call on the CPU uses, the caller's own included: 1 to 4096, or 0 for the default.

    The default is LIBFLASH_NUM_THREADS from the environment (1 to 4096; another value is refused), else OMP_NUM_THREADS, else
    the processors that the calling thread may run on: its affinity mask, and no more than the CPU quota of its control group
    allows. Calls on PyTorch tensors then use at most torch.get_num_threads().

    Holds for all Python threads, from the next call on. Results do not depend on it. Raises InvalidError for another number.
    """
    global _num_threads
    cdef int64_t wanted = integer(threads, "threads")
    if wanted < 0 or wanted > FLASH_MAX_THREADS:
        raise InvalidError(f"threads is {wanted}; it must be 0 (the default) to {FLASH_MAX_THREADS}")
    _num_threads = <int32_t>wanted


def get_num_threads():
    """How many threads a call on the CPU uses. Raises InvalidError if LIBFLASH_NUM_THREADS is not a number from 1 to 4096."""
    cdef int32_t threads = _num_threads if _num_threads > 0 else flash_cpu_threads()
    if threads == 0:
        raise InvalidError(flash_last_error().decode("utf-8", "replace"))
    return threads
