"""The options of attention, attention_backward, decode, merge and cache_write. Each option is defined here once.

The defaults of explain(), the schemas of the PyTorch operators and the adapters' groups of options are computed from this list.
`python python/write_options` writes the options to the files that repeat them: signatures and calls of Cython, types, the JAX
adapter. The tests in tests/options check these files and everything else that must agree with the list, including the C structs
and the operands of the JAX adapter. To add an option see CONTRIBUTING.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """The kind of values of an option. `Array` is an array of any library with DLPack; in an adapter, an array of its library."""

    type: str  # in signatures, without "| None"
    error: str  # the error text for a value of another type, after the option's name
    operator: str = ""  # type of the argument of the PyTorch operators
    c: str = ""  # type of the field of the C structs
    array: bool = False


_AN_ARRAY, _POINTER = "must be an array", "const flash_tensor_t *"
SWITCH = Kind("bool", "must be a bool", "bool")
CHOICE = Kind("Literal", "it must be", "str")
NUMBER = Kind("float", "must be a number", "Scalar", "double")  # not float, which fixes the value of a symbolic number
INTEGER = Kind("int", "must be an integer", "SymInt", "int64_t")
TEXT = Kind("str", "must be a str", "str", "const char *")
WINDOW = Kind("Window", "must be a pair (left, right)", "SymInt[2]", "int64_t")
SHARD = Kind("Shard", "must be a triple (count, index, keys)", "SymInt[3]", "int64_t")
SEED = Kind("int | Array", "must be an integer", "SymInt", "uint64_t")
OFFSET = Kind("int", "must be an integer", "SymInt", "uint64_t")
BEGIN = Kind("int | Array", "must be an integer", "", "int64_t")  # an array: one begin for each sequence
MARGIN = Kind("int", "must be an integer", "", "int32_t")
STREAM = Kind("Stream", "must be a CUDA stream handle")
ARRAY = Kind("Array", _AN_ARRAY, "Tensor", _POINTER, array=True)  # of q's type
FLOATS = Kind("Array", _AN_ARRAY, "Tensor", _POINTER, array=True)  # of q's type, or float32
MASK = Kind("Array", _AN_ARRAY, "Tensor", _POINTER, array=True)  # of bool
LENGTHS = Kind("Array", _AN_ARRAY, "Tensor", _POINTER, array=True)  # of int32; int64 on the CPU is converted
BLOCKS = Kind("Array | BlockMask", _AN_ARRAY, "Tensor", _POINTER, array=True)
SCALES = Kind("float | Array", _AN_ARRAY, "Tensor", _POINTER, array=True)  # of float32; a number is one scale for everything
SCHEDULE = Kind("Array", _AN_ARRAY, "Tensor", _POINTER, array=True)  # of int32, made by decode_schedule
NAMES = Kind("tuple[str, ...]", "must be a tuple")
OUTPUT = Kind("Array", _AN_ARRAY, "", _POINTER)  # written by the call

FORWARD, BACKWARD, DECODE, MERGE = ("attention",), ("attention_backward",), ("decode",), ("merge",)
WRITE = ("cache_write",)
ATTENTION = FORWARD + BACKWARD
SCORES = ATTENTION + DECODE
CACHES = DECODE + WRITE


@dataclass(frozen=True)
class Option:
    name: str
    kind: Kind
    default: Any
    operations: tuple[str, ...]
    nullable: bool = False  # None is allowed although it is not the default
    choices: tuple[str, ...] = ()
    c: tuple[str, ...] | None = None  # fields of the C struct; None: the field with the option's name, if the kind has a C type
    flag: str = ""  # FLASH_FLAG_... that the option sets
    operator: str | None = None  # arguments of the PyTorch operators, "": none; None: the argument with the option's name
    rank: int = 0  # the operators' arguments are ordered by rank, then by this list
    adapters: tuple[str, ...] | None = None  # functions of the adapters that have the option; None: those of `operations`
    torch: bool = True  # False: libflash.torch does not have the option
    jax: bool = True

    @property
    def type(self) -> str:
        kind = f"Literal[{', '.join(map(repr, self.choices))}]" if self.choices else self.kind.type
        return f"{kind} | None" if self.default is None or self.nullable else kind

    @property
    def fields(self) -> tuple[str, ...]:
        if self.c is not None:
            return self.c
        return (self.name,) if self.kind.c else ()

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions of the adapters that have the option. attention_backward is not a function of the adapters."""
        if self.adapters is not None:
            return self.adapters
        return tuple(operation for operation in self.operations if operation != "attention_backward")

    @property
    def arguments(self) -> str:
        """The arguments in a schema of a PyTorch operator."""
        if self.operator is not None or not self.kind.operator:
            return self.operator or ""
        optional = "?" if self.default is None else ""
        default = f'"{self.default}"' if isinstance(self.default, str) else self.default
        return f"{self.kind.operator}{optional} {self.name}={list(default) if isinstance(default, tuple) else default}"


def _shard(name: str, kind: Kind, default: Any, operations: tuple[str, ...] = ATTENTION, **more: Any) -> Option:
    """An option for a call with a part of a problem. The adapters do not have it; they have context_parallel_attention."""
    return Option(name, kind, default, operations, operator="", adapters=(), torch=False, jax=False, **more)


# The order is that of the Python signatures. The first option that was added later has rank 1, the next one rank 2, and so on,
# because PyTorch's compile cache outlives a version of libflash and identifies the operators' arguments by position. num_splits
# comes first, because DTensor caches how a call is sharded by the arguments from the first integer on.
OPTIONS = (
    Option("return_lse", SWITCH, True, MERGE, operator=""),
    Option("cache_seqlens", LENGTHS, None, DECODE),
    Option("block_table", LENGTHS, None, DECODE),
    Option("cache_batch_idx", LENGTHS, None, DECODE),
    Option("cache_leftpad", LENGTHS, None, DECODE),
    Option("k", ARRAY, None, DECODE, c=("k_new",), operator=""),  # the operator decode_append has k and v
    Option("v", ARRAY, None, DECODE, c=("v_new",), operator=""),
    Option("rotary_cos", FLOATS, None, CACHES),
    Option("rotary_sin", FLOATS, None, CACHES),
    Option("positions", LENGTHS, None, WRITE),
    Option("rotary_interleaved", SWITCH, True, CACHES, flag="ROTARY_INTERLEAVED"),
    Option("causal", SWITCH, False, ATTENTION, flag="CAUSAL"),
    Option("causal", SWITCH, True, DECODE, flag="CAUSAL"),
    Option("causal_align", CHOICE, "bottom_right", ATTENTION, choices=("bottom_right", "top_left"), flag="TOP_LEFT"),
    Option("window_size", WINDOW, (-1, -1), SCORES, nullable=True, c=("window_left", "window_right"), flag="WINDOW"),
    Option("softmax_scale", NUMBER, None, SCORES, flag="SCALE"),
    Option("softcap", NUMBER, 0.0, SCORES, nullable=True),
    Option("alibi_slopes", FLOATS, None, SCORES),
    Option("bias", FLOATS, None, ATTENTION),
    Option("mask", MASK, None, ATTENTION),
    Option("learnable_sink", FLOATS, None, SCORES),
    Option(
        "block_mask",
        BLOCKS,
        None,
        ATTENTION,
        c=("block_mask", "block_lists"),
        operator="Tensor? block_mask=None, Tensor? row_counts=None, Tensor? row_indices=None, Tensor? col_counts=None, "
        "Tensor? col_indices=None",
    ),
    Option("dropout_p", NUMBER, 0.0, ATTENTION),
    Option("seed", SEED, 0, ATTENTION, c=("seed", "rng_state")),  # libflash.torch draws one by default: None
    Option("offset", OFFSET, 0, ATTENTION, operator="SymInt offset=0, Tensor? rng_state=None"),
    Option("layout", CHOICE, "bshd", (*ATTENTION, *MERGE), choices=("bshd", "bhsd", "sbhd")),
    Option("cu_seqlens_q", LENGTHS, None, ATTENTION),
    Option("cu_seqlens_k", LENGTHS, None, ATTENTION),
    Option("max_seqlen_q", INTEGER, None, ATTENTION),
    Option("max_seqlen_k", INTEGER, None, ATTENTION),
    Option("seqused_q", LENGTHS, None, ATTENTION),
    Option("seqused_k", LENGTHS, None, ATTENTION),
    Option("num_splits", INTEGER, 0, SCORES, rank=-1),
    Option("split_size", INTEGER, 0, DECODE),
    _shard("row_begin", BEGIN, None, c=("row_begin", "row_begins"), flag="POSITIONS"),
    _shard("row_step", INTEGER, 1),
    _shard("column_begin", BEGIN, None, c=("column_begin", "column_begins"), flag="POSITIONS"),
    _shard("column_step", INTEGER, 1),
    _shard("row_positions", LENGTHS, None, flag="POSITIONS"),
    _shard("column_positions", LENGTHS, None, flag="POSITIONS"),
    _shard("sequence_numbers", LENGTHS, None),
    _shard("head_begin", INTEGER, 0),
    _shard("heads_total", INTEGER, 0),
    _shard("sm_margin", MARGIN, 0),
    _shard("resume", SWITCH, False, FORWARD, flag="CONTINUE"),
    Option("dlse", ARRAY, None, BACKWARD),
    Option("deterministic", SWITCH, False, BACKWARD, flag="DETERMINISTIC", adapters=FORWARD),
    _shard("delta", ARRAY, None, BACKWARD),
    _shard("add", SWITCH, False, BACKWARD, flag="ADD"),
    Option("dq", OUTPUT, None, BACKWARD, c=()),
    Option("dk", OUTPUT, None, BACKWARD, c=()),
    Option("dv", OUTPUT, None, BACKWARD, c=()),
    Option("dbias", OUTPUT, None, BACKWARD),
    Option("dsink", OUTPUT, None, BACKWARD),
    Option("k_scale", SCALES, None, CACHES, rank=1),
    Option("v_scale", SCALES, None, CACHES, rank=1),
    Option("k_rope_cache", ARRAY, None, CACHES, rank=1),
    Option("k_rope", ARRAY, None, CACHES, c=("k_rope_new",), operator=""),
    Option("head_dim_v", INTEGER, None, DECODE, c=(), rank=1),
    Option("cache_dtype", CHOICE, None, CACHES, choices=("e4m3", "e5m2"), rank=1),
    Option("cu_seqlens_q", LENGTHS, None, DECODE, rank=2),
    Option("cu_seqlens_new", LENGTHS, None, DECODE, rank=2),
    Option("q_positions", LENGTHS, None, DECODE, rank=2),
    Option("tree_mask", LENGTHS, None, DECODE, rank=2),
    Option("cu_seqlens_tree", LENGTHS, None, DECODE, rank=2),
    Option("shared_groups", LENGTHS, None, DECODE, rank=4),
    Option("shared_lens", LENGTHS, None, DECODE, rank=4),
    # Not in JAX: XLA needs the shape of every result while it compiles, before there is a plan for the device.
    Option("schedule", SCHEDULE, None, DECODE, rank=6, jax=False),
    Option("shard", SHARD, (1, 0, 1), DECODE, c=("shard_count", "shard_index", "shard_keys"), rank=5),
    Option("invariant", SWITCH, False, DECODE, rank=3, flag="INVARIANT_ROWS"),
    Option("return_lse", SWITCH, False, FORWARD + DECODE, operator=""),
    Option("out", OUTPUT, None, FORWARD + DECODE + MERGE, c=(), jax=False),
    Option("lse", OUTPUT, None, FORWARD + DECODE + MERGE, c=(), jax=False),
    Option("max_logit", OUTPUT, None, FORWARD, jax=False),
    Option("entropy", OUTPUT, None, FORWARD, jax=False),
    # In JAX these are results, because arrays are immutable.
    Option("return_stats", NAMES, (), (), adapters=FORWARD, torch=False),
    Option("stream", STREAM, None, SCORES + MERGE + WRITE, torch=False, jax=False),
    # PyTorch's compiler reserves the argument name `kernel`. In JAX, XLA compiles the merge.
    Option("backend", TEXT, None, SCORES + WRITE),
    Option("backend", TEXT, None, MERGE, jax=False),
    Option("kernel", TEXT, None, SCORES + WRITE, operator="str? kernel_name=None"),
    Option("kernel", TEXT, None, MERGE, operator="str? kernel_name=None", jax=False),
)

# The numbers that scores depend on in every operation. context_parallel_attention has them, too.
SCORE_NUMBERS = tuple(option.name for option in OPTIONS if option.kind is NUMBER and option.operations == SCORES)


def options_of(operation: str) -> Iterator[Option]:
    """The options of libflash.attention, attention_backward, decode, merge or cache_write."""
    return (option for option in OPTIONS if operation in option.operations)


def defaults_of(operation: str) -> dict[str, Any]:
    """The defaults of an operation's options, without the arrays that the call writes."""
    return {option.name: option.default for option in options_of(operation) if option.kind is not OUTPUT}


def names_of(kind: Kind, function: str) -> tuple[str, ...]:
    """The options of one kind that a function of the adapters has."""
    return tuple(option.name for option in OPTIONS if option.kind is kind and function in option.functions)


def operator_arguments(function: str, *first: str) -> str:
    """The options in the schema of a PyTorch operator (attention, decode or merge). `first`: arguments that come before the
    options that were added later."""
    given = sorted((option for option in OPTIONS if function in option.functions), key=lambda option: option.rank)
    at_first = [option.arguments for option in given if option.rank <= 0]
    added = [option.arguments for option in given if option.rank > 0]
    return ", ".join(text for text in (*at_first, *first, *added) if text)
