# explain(): the plan of a call. info(): this build and machine.

ATTENTION_DEFAULTS = dict(defaults_of("attention"), window_size=NO_WINDOW)
BACKWARD_DEFAULTS = dict(ATTENTION_DEFAULTS, **defaults_of("attention_backward") | {"window_size": NO_WINDOW})
DECODE_DEFAULTS = dict(defaults_of("decode"), window_size=NO_WINDOW, shard=NO_SHARD)
MERGE_DEFAULTS = defaults_of("merge")
# The outputs that decide which kernel runs are options of explain(), too.
cdef dict _explained = dict(
    forward=dict(ATTENTION_DEFAULTS, max_logit=None, entropy=None), backward=dict(BACKWARD_DEFAULTS, dbias=None, dsink=None),
    decode=DECODE_DEFAULTS)


cdef dict with_defaults(dict options, dict defaults, str function, str op=""):
    for name in options:
        if name not in defaults:
            raise TypeError(f"{function} knows no option {name!r}{op}")
    return {**defaults, **options}


def explain(q, k, v, /, *, op="forward", **options):
    """The plan of a call as text: kernel, tile, splits and workspace, and why the other kernels are not used.

    Parameters
    ----------
    q, k, v : the arrays of the call; with op="decode" k and v are the caches. Their contents are not read.
        v may be None with head_dim_v.
    op : "forward", "backward" or "decode"
    options : those of attention(), attention_backward() or decode(); of the outputs max_logit, entropy, dbias and dsink, which
        are not written. The other outputs are described as the call allocates them.

    Returns
    -------
    str; also for a call that no kernel supports. An invalid call raises what the call itself would raise.
    """
    cdef Call call
    cdef Extras extras
    cdef flash_attention_options_t attention
    cdef flash_decode_options_t decode
    cdef flash_tensor_t tq, tk, tv
    cdef size_t needed = 0
    cdef bytearray buffer = bytearray()
    cdef dict o
    cdef Layout axes
    one_of(op, ("forward", "backward", "decode"), "op")
    o = with_defaults(options, _explained[op], "explain()", f" of op={op!r}")
    flag(o["return_lse"], "return_lse")
    start(&call, o["stream"])
    try:
        borrow(&call, q, "q", &tq)
        if op == "decode":
            borrow_caches(&call, k, v, o["head_dim_v"], o["cache_dtype"], READ, &tk, &tv)
            check_new_rows(o["k"], o["v"], v)
        else:
            borrow(&call, k, "k", &tk)
            borrow(&call, v, "v", &tv)
        if op == "decode":
            decode_options_from(&call, &extras, &decode, o)
            decode.num_threads = num_threads_for(source_of(q, "q"), &tq)
        else:
            attention_options_from(&call, &extras, &attention, o)
            shard_options_from(&call, &extras, &attention, o)
            attention.num_threads = num_threads_for(source_of(q, "q"), &tq)
            axes = layout_of(o["layout"])
            to_bshd(&tq, axes)
            to_bshd(&tk, axes)
            to_bshd(&tv, axes)
            check_bounds(&attention, &tq, &tk)
            if op == "backward":
                options_of_backward(&call, &extras, &attention, o)
            else:
                options_of_forward(&call, &extras, &attention, o)
        buffer = bytearray(4096)
        while True:
            if op == "decode":
                check(flash_attention_decode_explain(&tq, &tk, &tv, &decode, buffer, <size_t>len(buffer), &needed))
            elif op == "backward":
                check_shapes(flash_attention_backward_explain(&tq, &tk, &tv, &attention, buffer, <size_t>len(buffer), &needed),
                             &tq, &tk, &tv, axes)
            else:
                check_shapes(flash_attention_forward_explain(&tq, &tk, &tv, &attention, buffer, <size_t>len(buffer), &needed),
                             &tq, &tk, &tv, axes)
            if needed <= <size_t>len(buffer):
                break
            buffer = bytearray(needed)
    finally:
        finish(&call)
    return python_names(buffer[:max(0, <Py_ssize_t>needed - 1)].decode("utf-8", "replace"))


cdef int options_of_forward(Call *call, Extras *extras, flash_attention_options_t *made, dict o) except -1:
    if flag(o["resume"], "resume"):
        made.flags |= FLASH_FLAG_CONTINUE
    made.max_logit = extra(call, extras, o["max_logit"], "max_logit", WRITE)
    made.entropy = extra(call, extras, o["entropy"], "entropy", WRITE)
    return 0


cdef int options_of_backward(Call *call, Extras *extras, flash_attention_options_t *made, dict o) except -1:
    if flag(o["deterministic"], "deterministic"):
        made.flags |= FLASH_FLAG_DETERMINISTIC
    if flag(o["add"], "add"):
        made.flags |= FLASH_FLAG_ADD
    made.dlse = extra(call, extras, o["dlse"], "dlse")
    made.delta = extra(call, extras, o["delta"], "delta")
    made.dbias = extra(call, extras, o["dbias"], "dbias", WRITE)
    made.dsink = extra(call, extras, o["dsink"], "dsink", WRITE)
    return 0


def info():
    """This build and machine: a dict of

    version, build (how it was compiled: a dict), cpu (instruction set and number of threads), cuda (one line), devices (a list of
    dicts), kernels (a list of dicts; `usable`, else `why_not`; `name` is what kernel= takes).
    """
    cdef flash_kernel_info_t kernel
    cdef flash_device_info_t device
    cdef int32_t i
    kernels = []
    for i in range(flash_kernel_count()):
        memset(&kernel, 0, sizeof(kernel))
        kernel.struct_size = sizeof(kernel)
        check(flash_kernel_info(i, &kernel))
        kernels.append(dict(
            name=kernel.name.decode(), operation=kernel.operation.decode(), backend=kernel.backend.decode(),
            dtype=kernel.dtype.decode(), usable=bool(kernel.usable), why_not=kernel.why_not.decode(), head_dim=kernel.head_dim,
            head_dim_v=kernel.head_dim_v, tile_q=kernel.tile_q, tile_k=kernel.tile_k, stages=kernel.stages))
    devices = []
    for i in range(flash_device_count()):
        memset(&device, 0, sizeof(device))
        device.struct_size = sizeof(device)
        check(flash_device_info(i, &device))
        devices.append(dict(
            name=(<const char *>device.name).decode("utf-8", "replace"), arch=device.arch, multiprocessors=device.multiprocessors,
            shared_memory_bytes=device.shared_memory_bytes, memory_bytes=device.memory_bytes))
    lines = (line.partition(":") for line in flash_build_info().decode().splitlines())
    return dict(
        version=flash_version_string().decode(), build={key.strip(): value.strip() for key, colon, value in lines if colon},
        cpu=dict(isa=flash_cpu_isa().decode(), threads=get_num_threads()), cuda=flash_cuda_state().decode(), devices=devices,
        kernels=kernels)


__version__ = flash_version_string().decode()
if flash_version() // 100 != FLASH_VERSION // 100:
    raise VersionError(f"libflash._core was built for libflash {FLASH_VERSION // 10000}.{FLASH_VERSION // 100 % 100}, but "
                       f"{__version__} was loaded")
