# cache_write: new rows of keys and values to slots of a KV cache.


def cache_write(k, v, k_cache, v_cache, slots, *, k_scale=None, v_scale=None, k_rope_cache=None, k_rope=None, rotary_cos=None,
                rotary_sin=None, rotary_interleaved=True, positions=None, cache_dtype=None, stream=None, backend=None,
                kernel=None):
    """Write new rows of keys and values to slots of a cache, in place, as inference engines do before they compute attention.

    Row i goes to row slots[i] % rows of entry or page slots[i] // rows, where rows is k_cache.shape[1]. A slot outside of the
    cache, such as -1, means that the row is not written. No other row changes. Afterwards decode() without k attends to the rows.

    Parameters
    ----------
    k : (total, heads_k, channels of k_cache), v : (total, heads_k, head_dim_v)
        Rows of any sequences, in any order. v and v_cache are None where the values are channels of the keys.
    k_cache : (entries or pages, rows, heads_k, channels), v_cache : (entries or pages, rows, heads_k, head_dim_v)
        As in decode(); k's type, or of 8 bits.
    slots : (total,) int32 or int64
        No slot twice.
    k_scale, v_scale : as in decode(), but not for each sequence
        Those for the rows of the cache are computed and written.
    k_rope_cache, k_rope : as in decode(); k_rope (total, heads_k, channels of k_rope_cache)
    rotary_cos, rotary_sin, rotary_interleaved : as in decode(), for k, or for k_rope if it is given
    positions : (total,) int32 (int64 on the CPU: converted)
        The position of each row; required with rotary_cos, and refused without.
    cache_dtype : "e4m3" or "e5m2": the type of the elements of caches of uint8
    stream, backend, kernel : as in attention()

    Raises
    ------
    As attention(). Nothing is written then. On CUDA slots and positions are not checked: no slot may come twice; a position
    outside of the tables uses their first or last row.
    """
    cdef Call call
    cdef Extras extras
    cdef flash_cache_write_options_t options
    cdef flash_tensor_t tk, tk_cache, tslots
    cdef flash_tensor_t *tv
    cdef flash_tensor_t *tv_cache
    cdef flash_status_t status
    cdef void *on
    cdef _Source source = source_of(k, "k")
    if (source.torch and (dispatcher_needed(source) or records_gradients() and one_requires_grad(
                (k, v, k_cache, v_cache, k_scale, v_scale, k_rope_cache, k_rope, rotary_cos, rotary_sin)))):
        return by_adapter(source, "cache_write", (k, v, k_cache, v_cache, slots), without_none(dict(
            k_scale=k_scale, v_scale=v_scale, k_rope_cache=k_rope_cache, k_rope=k_rope, rotary_cos=rotary_cos,
            rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved, positions=positions, cache_dtype=cache_dtype,
            stream=stream, backend=backend, kernel=kernel)))
    if source.kind == KIND_JAX:
        raise InvalidError("k_cache is a JAX array; those are immutable: use libflash.jax.cache_write, which returns the new "
                           "caches")
    start(&call, stream)
    try:
        memset(&options, 0, sizeof(options))
        options.struct_size = sizeof(options)
        extras.count = 0
        borrow(&call, k, "k", &tk)
        call.byte_dtype = byte_dtype_of(cache_dtype)
        borrow(&call, k_cache, "k_cache", &tk_cache, WRITE)
        if call.byte_dtype != FLASH_DTYPE_NONE and tk_cache.dtype != call.byte_dtype:
            raise InvalidError(f"cache_dtype is {cache_dtype!r}, but k_cache is neither that nor uint8: "
                               f"{dtype_name(tk_cache.dtype)}")
        tv_cache = extra(&call, &extras, v_cache, "v_cache", WRITE)
        call.byte_dtype = FLASH_DTYPE_NONE
        tv = extra(&call, &extras, v, "v")
        borrow(&call, slots, "slots", &tslots, SLOTS)
        options.k_scale = cache_scale(&call, &extras, k_scale, "k_scale", WRITE)
        options.v_scale = cache_scale(&call, &extras, v_scale, "v_scale", WRITE)
        options.k_rope_cache = extra(&call, &extras, k_rope_cache, "k_rope_cache", WRITE)
        options.k_rope_new = extra(&call, &extras, k_rope, "k_rope")
        options.rotary_cos = extra(&call, &extras, rotary_cos, "rotary_cos")
        options.rotary_sin = extra(&call, &extras, rotary_sin, "rotary_sin")
        options.positions = extra(&call, &extras, positions, "positions", LENGTHS)
        if flag(rotary_interleaved, "rotary_interleaved"):
            options.flags |= FLASH_FLAG_ROTARY_INTERLEAVED
        options.num_threads = num_threads_for(source, &tk)
        options.backend = text(&call, backend, "backend")
        options.kernel = text(&call, kernel, "kernel")
        on = call.stream
        with nogil:
            status = flash_cache_write(&tk, tv, &tk_cache, tv_cache, &tslots, &options, on)
        check(status)
        for array in (k_cache, v_cache, k_rope_cache):
            count_write(array)
        for scale in (k_scale, v_scale):
            if scale is not None and rows_have_scales(scale):
                count_write(scale)
    finally:
        finish(&call)
