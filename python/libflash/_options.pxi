# Conversion of keyword arguments to the option structs of the C library. python/write_options writes the lists of names and the
# conversions of numbers.

cdef enum Layout:
    BSHD = 0
    BHSD = 1
    SBHD = 2

cdef enum:
    MAX_EXTRAS = 28

# The values of options that are texts.
cdef dict LAYOUTS = {"bshd": BSHD, "bhsd": BHSD, "sbhd": SBHD}
cdef dict ALIGNMENTS = {"bottom_right": 0, "top_left": FLASH_FLAG_TOP_LEFT}
cdef dict CACHE_DTYPES = {"e4m3": FLASH_DTYPE_FLOAT8_E4M3, "e5m2": FLASH_DTYPE_FLOAT8_E5M2, None: FLASH_DTYPE_NONE}

# Default values, compared by identity before anything else.
cdef object _bottom_right = "bottom_right"
cdef object _bshd = "bshd"

# The optional tensors of one call, which the option structs point to.
cdef struct Extras:
    int count
    flash_tensor_t tensors[MAX_EXTRAS]
    flash_block_lists_t lists


cdef object value_of(dict values, object given, str name):
    """The value for a text. one_of() takes longer, and is left to refusals."""
    if given is None or isinstance(given, str):
        found = values.get(given)
        if found is not None:
            return found
    return values[one_of(given, values, name)]


cdef Layout layout_of(object layout) except *:
    return BSHD if layout is _bshd else value_of(LAYOUTS, layout, "layout")


cdef inline void swap_axes(flash_tensor_t *x, int a, int b) noexcept:
    x.shape[a], x.shape[b] = x.shape[b], x.shape[a]
    x.stride[a], x.stride[b] = x.stride[b], x.stride[a]


cdef inline void to_bshd(flash_tensor_t *x, Layout layout) noexcept:
    """Reorder the axes of the description to the C library's. Packed tensors have only one order."""
    if x.ndim == 4 and layout == BHSD:
        swap_axes(x, 1, 2)
    elif x.ndim == 4 and layout == SBHD:
        swap_axes(x, 0, 1)


cpdef bint flag(object x, str name) except -1:
    """A bool of Python or NumPy. Anything else is refused: "no" and "False" are true in Python."""
    if x is True:
        return True
    if x is False:
        return False
    if type(x).__module__ == "numpy" and type(x).__name__ in ("bool", "bool_"):
        return bool(x)
    refuse_traced(x, name)
    raise TypeError(f"{name} must be a bool, not {plainly(x)}")


cdef double number(object x, str name) except? -1:
    if isinstance(x, float):
        return <double>x
    if requires_grad(x) and records_gradients():
        raise UnsupportedError(f"{name} requires a gradient, and there is none for it; pass float({name})")
    return real_of(x, name)


cdef int64_t integer(object x, str name) except? -1:
    cdef int overflow = 0
    cdef int64_t value
    if x is _zero:
        return 0
    if type(x) is not int:
        x = integer_of(x, name)
    value = PyLong_AsLongLongAndOverflow(x, &overflow)
    if overflow != 0:
        raise InvalidError(f"{name} is {shortened(x)}, which does not fit 64 bits")
    return value


cdef uint64_t unsigned(object x, str name) except? 0xFFFFFFFFFFFFFFFF:
    if x is _zero:
        return 0
    if type(x) is not int:
        refuse_key(x, name)
    if x is None and name == "seed":
        raise TypeError("seed is None; it must be an integer from 0 to 2**64 - 1 (default 0), or an array of two, seed and "
                        "offset. libflash.torch.attention takes None and draws a seed")
    try:
        return <uint64_t>(x if type(x) is int else integer_of(x, name))
    except OverflowError:
        raise InvalidError(f"{name} is {shortened(x)}; it must be from 0 to 2**64 - 1") from None


cdef const char *text(Call *call, object x, str name) except? NULL:
    """UTF-8 that lives as long as the call; NULL for None."""
    if x is None:
        return NULL
    if not isinstance(x, str):
        raise TypeError(f"{name} must be a str, not {described(x)}")
    if "\0" in <str>x:  # the C library would not see the rest
        raise InvalidError(f"{name} is {shortened(x)}; it must not contain a null character")
    cdef bytes encoded = (<str>x).encode()
    Py_INCREF(encoded)
    hold(call, HELD_OBJECT, <void *>encoded)
    return encoded


cdef flash_tensor_t *extra(Call *call, Extras *extras, object x, str name, Role role=READ) except? NULL:
    """An optional tensor; NULL for None."""
    if x is None:
        return NULL
    cdef flash_tensor_t *made = &extras.tensors[extras.count]
    borrow(call, x, name, made, role)
    extras.count += 1
    return made


cdef bint is_array(object x):
    """True for an array with dimensions. A NumPy scalar or a tensor without dimensions is a number."""
    return type(x) is not int and hasattr(x, "__dlpack__") and getattr(x, "ndim", 1) != 0


cdef flash_tensor_t *random_state(Call *call, Extras *extras, object seed) except NULL:
    """Seed and offset of the dropout mask, from an array that the kernels read."""
    refuse_key(seed, "seed")
    cdef flash_tensor_t *made = extra(call, extras, seed, "seed", RANDOM)
    if made.ndim != 1 or made.shape[0] != 2:
        raise InvalidError(f"seed is an array of shape {tuple([made.shape[i] for i in range(made.ndim)])}; an array must hold "
                           "two numbers, seed and offset")
    return made


cdef uint32_t mask_flags(object causal, object causal_align, object window_size, int64_t *left, int64_t *right) except *:
    cdef uint32_t flags = FLASH_FLAG_CAUSAL if flag(causal, "causal") else 0
    if causal_align is not _bottom_right:
        flags |= <uint32_t>value_of(ALIGNMENTS, causal_align, "causal_align")
    if window_size is None or window_size is _no_window:
        return flags
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        refuse_traced(window_size, "window_size")
        raise TypeError(f"window_size must be a pair (left, right), not {plainly(window_size)}")
    left[0] = -1 if window_size[0] is None else integer(window_size[0], "window_size[0]")
    right[0] = -1 if window_size[1] is None else integer(window_size[1], "window_size[1]")
    if left[0] != -1 or right[0] != -1:
        flags |= FLASH_FLAG_WINDOW
    return flags


cdef int attention_options(
        Call *call, Extras *extras, flash_attention_options_t *made, causal, causal_align, window_size, softmax_scale, softcap,
        alibi_slopes, bias, mask, learnable_sink, block_mask, dropout_p, seed, offset, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, seqused_q, seqused_k, num_splits, backend, kernel) except -1:
    extras.count = 0
    memset(made, 0, sizeof(flash_attention_options_t))
    made.struct_size = sizeof(flash_attention_options_t)
    made.flags = mask_flags(causal, causal_align, window_size, &made.window_left, &made.window_right)
    if softmax_scale is not None:
        made.flags |= FLASH_FLAG_SCALE
        made.softmax_scale = number(softmax_scale, "softmax_scale")
    made.softcap = number(softcap, "softcap") if softcap is not None else 0
    made.dropout_p = number(dropout_p, "dropout_p")
    if is_array(seed):
        made.rng_state = random_state(call, extras, seed)
    else:
        made.seed = unsigned(seed, "seed")
    made.offset = unsigned(offset, "offset")
    if made.rng_state != NULL and made.offset != 0:
        raise InvalidError(f"offset is {offset}; it must be 0 when seed is an array, which holds both")
    made.num_splits = integer(num_splits, "num_splits")
    made.max_seqlen_q = bound(max_seqlen_q, "max_seqlen_q")
    made.max_seqlen_k = bound(max_seqlen_k, "max_seqlen_k")
    made.cu_seqlens_q = extra(call, extras, cu_seqlens_q, "cu_seqlens_q", LENGTHS)
    made.cu_seqlens_k = extra(call, extras, cu_seqlens_k, "cu_seqlens_k", LENGTHS)
    made.seqused_q = extra(call, extras, seqused_q, "seqused_q", LENGTHS)
    made.seqused_k = extra(call, extras, seqused_k, "seqused_k", LENGTHS)
    made.alibi_slopes = extra(call, extras, alibi_slopes, "alibi_slopes")
    made.bias = extra(call, extras, bias, "bias")
    made.mask = extra(call, extras, mask, "mask")
    made.learnable_sink = extra(call, extras, learnable_sink, "learnable_sink")
    if block_mask is not None:
        if isinstance(block_mask, BlockMask):
            block_lists(call, block_mask, &extras.lists)
            made.block_lists = &extras.lists
        else:
            made.block_mask = extra(call, extras, block_mask, "block_mask")
    made.backend = text(call, backend, "backend")
    made.kernel = text(call, kernel, "kernel")
    return 0


cdef int attention_options_from(Call *call, Extras *extras, flash_attention_options_t *made, dict o) except -1:
    return attention_options(
        call, extras, made, o["causal"], o["causal_align"], o["window_size"], o["softmax_scale"], o["softcap"], o["alibi_slopes"],
        o["bias"], o["mask"], o["learnable_sink"], o["block_mask"], o["dropout_p"], o["seed"], o["offset"], o["cu_seqlens_q"],
        o["cu_seqlens_k"], o["max_seqlen_q"], o["max_seqlen_k"], o["seqused_q"], o["seqused_k"], o["num_splits"], o["backend"],
        o["kernel"])


cdef int begins(Call *call, Extras *extras, object x, str name, int64_t *number,
                const flash_tensor_t **numbers) except -1:
    """One number, or an array with a number for each sequence."""
    if x is None:
        return 0
    if is_array(x):
        numbers[0] = extra(call, extras, x, name, LENGTHS)
    else:
        number[0] = integer(x, name)
    return 1


cdef int shard_options(Call *call, Extras *extras, flash_attention_options_t *made, row_begin, row_step, column_begin,
                       column_step, row_positions, column_positions, sequence_numbers, head_begin, heads_total,
                       sm_margin) except -1:
    """Fill in the options of a call on a part of a problem (a shard)."""
    cdef int placed = begins(call, extras, row_begin, "row_begin", &made.row_begin, &made.row_begins)
    placed |= begins(call, extras, column_begin, "column_begin", &made.column_begin, &made.column_begins)
    made.row_step = integer(row_step, "row_step")
    made.column_step = integer(column_step, "column_step")
    made.row_positions = extra(call, extras, row_positions, "row_positions", LENGTHS)
    made.column_positions = extra(call, extras, column_positions, "column_positions", LENGTHS)
    if placed or made.row_positions != NULL or made.column_positions != NULL:
        made.flags |= FLASH_FLAG_POSITIONS
    made.sequence_numbers = extra(call, extras, sequence_numbers, "sequence_numbers", LENGTHS)
    made.head_begin = integer(head_begin, "head_begin")
    made.heads_total = integer(heads_total, "heads_total")
    cdef int64_t margin = integer(sm_margin, "sm_margin")
    if not 0 <= margin <= INT32_MAX:
        raise InvalidError(f"sm_margin is {margin}; it must be from 0 to 2**31 - 1")
    made.sm_margin = <int32_t>margin
    return 0


cdef int shard_options_from(Call *call, Extras *extras, flash_attention_options_t *made, dict o) except -1:
    return shard_options(call, extras, made, o["row_begin"], o["row_step"], o["column_begin"], o["column_step"],
                         o["row_positions"], o["column_positions"], o["sequence_numbers"], o["head_begin"], o["heads_total"],
                         o["sm_margin"])


cdef int refuse_shard_options(dict options) except -1:
    """Refuse each of these options that is not at its default. Called where PyTorch or JAX trace, transform or record
    gradients."""
    for name, value in options.items():
        if value is None or value is False:
            continue
        # An array is never compared. A begin of 0 is an option that is given: without a begin there are no positions.
        if (is_traced(value) or is_array(value) or name in ("row_begin", "column_begin") or type(value) is float
                or value != (1 if name.endswith("_step") else 0)):
            raise UnsupportedError(f"{name} cannot be given where PyTorch or JAX trace, transform or record gradients; "
                                   "context_parallel_attention of libflash.torch is differentiable")
    return 0


cdef int64_t bound(object x, str name) except? -1:
    """An upper bound of lengths. If it is not known: 0 in the C library, None or 0 in Python."""
    return 0 if x is None else integer(x, name)


cdef int block_lists(Call *call, object block_mask, flash_block_lists_t *lists) except -1:
    borrow(call, block_mask.row_counts, "block_mask.row_counts", &lists.row_counts)
    borrow(call, block_mask.row_indices, "block_mask.row_indices", &lists.row_indices)
    borrow(call, block_mask.col_counts, "block_mask.col_counts", &lists.col_counts)
    borrow(call, block_mask.col_indices, "block_mask.col_indices", &lists.col_indices)
    return 0


cdef int decode_options(
        Call *call, Extras *extras, flash_decode_options_t *made, cache_seqlens, block_table, cache_batch_idx, cache_leftpad, k,
        v, rotary_cos, rotary_sin, rotary_interleaved, causal, window_size, softmax_scale, softcap, alibi_slopes, learnable_sink,
        num_splits, split_size, k_scale, v_scale, k_rope_cache, k_rope, cu_seqlens_q, cu_seqlens_new, q_positions, tree_mask,
        cu_seqlens_tree, shared_groups, shared_lens, schedule, shard, invariant, backend, kernel) except -1:
    cdef Role role = READ if k is None else WRITE
    extras.count = 0
    memset(made, 0, sizeof(flash_decode_options_t))
    made.struct_size = sizeof(flash_decode_options_t)
    made.flags = mask_flags(causal, "bottom_right", window_size, &made.window_left, &made.window_right)
    if flag(rotary_interleaved, "rotary_interleaved") and rotary_cos is not None:
        made.flags |= FLASH_FLAG_ROTARY_INTERLEAVED
    if flag(invariant, "invariant"):
        made.flags |= FLASH_FLAG_INVARIANT_ROWS
    if softmax_scale is not None:
        made.flags |= FLASH_FLAG_SCALE
        made.softmax_scale = number(softmax_scale, "softmax_scale")
    made.softcap = number(softcap, "softcap") if softcap is not None else 0
    made.num_splits = integer(num_splits, "num_splits")
    made.split_size = integer(split_size, "split_size")
    made.cache_seqlens = extra(call, extras, cache_seqlens, "cache_seqlens", LENGTHS)
    made.block_table = extra(call, extras, block_table, "block_table", LENGTHS)
    made.cache_batch_idx = extra(call, extras, cache_batch_idx, "cache_batch_idx", LENGTHS)
    made.cache_leftpad = extra(call, extras, cache_leftpad, "cache_leftpad", LENGTHS)
    made.k_new = extra(call, extras, k, "k")
    made.v_new = extra(call, extras, v, "v")
    made.rotary_cos = extra(call, extras, rotary_cos, "rotary_cos")
    made.rotary_sin = extra(call, extras, rotary_sin, "rotary_sin")
    made.alibi_slopes = extra(call, extras, alibi_slopes, "alibi_slopes")
    made.learnable_sink = extra(call, extras, learnable_sink, "learnable_sink")
    made.k_scale = cache_scale(call, extras, k_scale, "k_scale", role)
    made.v_scale = cache_scale(call, extras, v_scale, "v_scale", role)
    made.k_rope_cache = extra(call, extras, k_rope_cache, "k_rope_cache", role)
    made.k_rope_new = extra(call, extras, k_rope, "k_rope")
    made.cu_seqlens_q = extra(call, extras, cu_seqlens_q, "cu_seqlens_q", LENGTHS)
    made.cu_seqlens_new = extra(call, extras, cu_seqlens_new, "cu_seqlens_new", LENGTHS)
    made.q_positions = extra(call, extras, q_positions, "q_positions", LENGTHS)
    made.tree_mask = extra(call, extras, tree_mask, "tree_mask", LENGTHS)
    made.cu_seqlens_tree = extra(call, extras, cu_seqlens_tree, "cu_seqlens_tree", LENGTHS)
    made.shared_groups = extra(call, extras, shared_groups, "shared_groups", LENGTHS)
    made.shared_lens = extra(call, extras, shared_lens, "shared_lens", LENGTHS)
    made.schedule = extra(call, extras, schedule, "schedule")
    if shard is not _whole:
        read_shard(shard, made)
    made.backend = text(call, backend, "backend")
    made.kernel = text(call, kernel, "kernel")
    return 0


cdef int read_shard(object shard, flash_decode_options_t *made) except -1:
    if not isinstance(shard, (tuple, list)) or len(shard) != 3:
        refuse_traced(shard, "shard")
        raise TypeError(f"shard must be a triple (count, index, keys), not {plainly(shard)}")
    made.shard_count = integer(shard[0], "shard[0]")
    made.shard_index = integer(shard[1], "shard[1]")
    made.shard_keys = integer(shard[2], "shard[2]")
    return 0


cdef flash_tensor_t *cache_scale(Call *call, Extras *extras, object x, str name, Role role) except? NULL:
    """The scales of a cache; NULL for None. A call that writes new rows writes the scales if each cached row has its own, and
    reads all others. A number, or an array without dimensions, is one scale for everything."""
    cdef flash_tensor_t *made
    if x is None:
        return NULL
    if is_scalar(x):
        made = &extras.tensors[extras.count]
        extras.count += 1
        memset(made, 0, sizeof(flash_tensor_t))
        made.data = malloc(sizeof(float))
        if made.data == NULL:
            raise OutOfMemoryError(f"no memory for {name}")
        hold(call, HELD_MEMORY, made.data)
        (<float *>made.data)[0] = <float>scale_of(x, name)
        made.dtype, made.ndim, made.shape[0], made.stride[0] = FLASH_DTYPE_FLOAT32, 1, 1, 1
        return made
    if isinstance(x, (bool, str, bytes, list, tuple, dict)):
        raise TypeError(f"{name} must be a number or an array, not {described(x)}")
    made = extra(call, extras, x, name, role if rows_have_scales(x) else READ)
    if made.ndim == 0:
        made.ndim, made.shape[0], made.stride[0] = 1, 1, 1
    return made


cdef str dtype_name(int32_t dtype):
    return next(name for name, number in DTYPE_NUMBERS.items() if number == dtype)


cdef double scale_of(object x, str name) except? -1:
    cdef double value = number(x, name)
    if not isfinite(value):
        raise InvalidError(f"{name} is {value}; it must be finite")
    return value


cdef bint rows_have_scales(object scale) except -1:
    return getattr(scale, "ndim", 0) > 2 if not isinstance(scale, TensorShape) else len(scale.shape) > 2


cdef int32_t byte_dtype_of(object cache_dtype) except -1:
    """The dtype of the elements of caches of uint8."""
    return value_of(CACHE_DTYPES, cache_dtype, "cache_dtype")


cdef int borrow_caches(Call *call, object k_cache, object v_cache, object head_dim_v, object cache_dtype, Role role,
                       flash_tensor_t *k, flash_tensor_t *v) except -1:
    """Describe both caches. Without v_cache, the values are the first head_dim_v channels of k_cache."""
    call.byte_dtype = byte_dtype_of(cache_dtype)
    borrow(call, k_cache, "k_cache", k, role)
    if call.byte_dtype != FLASH_DTYPE_NONE and k.dtype != call.byte_dtype:
        raise InvalidError(f"cache_dtype is {cache_dtype!r}, but k_cache is neither that nor uint8: "
                           f"{dtype_name(k.dtype)}")
    if v_cache is not None:
        borrow(call, v_cache, "v_cache", v, role)
        if head_dim_v is not None:
            raise InvalidError(f"head_dim_v is {integer(head_dim_v, 'head_dim_v')}; it is given only without v_cache: then the "
                               "values are the first head_dim_v channels of k_cache")
    else:
        if head_dim_v is None:
            raise InvalidError("head_dim_v is None; without v_cache it must be given: the values are the first head_dim_v "
                               "channels of k_cache")
        v[0] = k[0]
        if k.ndim == 4:
            v.shape[3] = integer(head_dim_v, "head_dim_v")
            if not 1 <= v.shape[3] <= k.shape[3]:
                raise InvalidError(f"head_dim_v is {head_dim_v}; it must be at least 1 and at most the channels of k_cache, "
                                   f"{k.shape[3]}")
    call.byte_dtype = FLASH_DTYPE_NONE
    return 0


cdef int decode_options_from(Call *call, Extras *extras, flash_decode_options_t *made, dict o) except -1:
    return decode_options(
        call, extras, made, o["cache_seqlens"], o["block_table"], o["cache_batch_idx"], o["cache_leftpad"], o["k"], o["v"],
        o["rotary_cos"], o["rotary_sin"], o["rotary_interleaved"], o["causal"], o["window_size"], o["softmax_scale"],
        o["softcap"], o["alibi_slopes"], o["learnable_sink"], o["num_splits"], o["split_size"], o["k_scale"], o["v_scale"],
        o["k_rope_cache"], o["k_rope"], o["cu_seqlens_q"], o["cu_seqlens_new"], o["q_positions"], o["tree_mask"],
        o["cu_seqlens_tree"], o["shared_groups"], o["shared_lens"], o["schedule"], o["shard"], o["invariant"], o["backend"],
        o["kernel"])
