"""Types of the compiled module. `_Array` stands for an array of any library with DLPack; results are of the library of q."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, overload

from ._block_mask import BlockMask
from ._option_types import AttentionOptions, DecodeOptions, MergeOptions, Results

class _DLPackArray(Protocol):
    """NumPy, PyTorch, CuPy and JAX arrays, and any other with DLPack. JAX declares no more than this."""

    def __dlpack__(self) -> Any: ...

class _CudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

_Array = TypeVar("_Array", bound=_DLPackArray)
_Stream: TypeAlias = int | _CudaStream | None

__version__: str
NO_WINDOW: tuple[int, int]
NO_SHARD: tuple[int, int, int]
DTYPE_RULE: str
DTYPE_NAMES: dict[int, str]
SMALL_DTYPE_NAMES: dict[int, str]
DTYPE_OBJECTS: dict[int, str]
ATTENTION_DEFAULTS: dict[str, Any]
BACKWARD_DEFAULTS: dict[str, Any]
DECODE_DEFAULTS: dict[str, Any]
MERGE_DEFAULTS: dict[str, Any]
TANGENT_DEFAULTS: dict[str, Any]

class _StreamOption(TypedDict, total=False):
    stream: _Stream

class _ShardOptions(TypedDict, total=False):
    """For a call with a part of a problem."""

    row_begin: int | _DLPackArray | None
    row_step: int
    column_begin: int | _DLPackArray | None
    column_step: int
    row_positions: _DLPackArray | None
    column_positions: _DLPackArray | None
    sequence_numbers: _DLPackArray | None
    head_begin: int
    heads_total: int
    sm_margin: int

class _Attention(AttentionOptions[_DLPackArray], _ShardOptions, _StreamOption, total=False):
    seed: int | _DLPackArray

class _Forward(_Attention, Results[_DLPackArray], total=False):
    resume: bool
    max_logit: _DLPackArray | None
    entropy: _DLPackArray | None

class _Backward(_Attention, total=False):
    dlse: _DLPackArray | None
    deterministic: bool
    delta: _DLPackArray | None
    add: bool
    dq: _DLPackArray | None
    dk: _DLPackArray | None
    dv: _DLPackArray | None
    dbias: _DLPackArray | None
    dsink: _DLPackArray | None

class _Decode(DecodeOptions[_DLPackArray], _StreamOption, total=False): ...
class _Merge(MergeOptions[_DLPackArray], _StreamOption, total=False): ...

@overload
def attention(
    q: _Array, k: _DLPackArray, v: _DLPackArray, *, return_lse: Literal[False] = False, **options: Unpack[_Forward]
) -> _Array: ...
@overload
def attention(
    q: _Array, k: _DLPackArray, v: _DLPackArray, *, return_lse: Literal[True], **options: Unpack[_Forward]
) -> tuple[_Array, _Array]: ...
@overload
def attention(
    q: _Array, k: _DLPackArray, v: _DLPackArray, *, return_lse: bool, **options: Unpack[_Forward]
) -> _Array | tuple[_Array, _Array]: ...
def attention_backward(
    dout: _DLPackArray,
    q: _Array,
    k: _DLPackArray,
    v: _DLPackArray,
    out: _DLPackArray,
    lse: _DLPackArray,
    **options: Unpack[_Backward],
) -> tuple[_Array, _Array, _Array]: ...
def attention_tangent(
    q: _Array,
    k: _DLPackArray,
    v: _DLPackArray,
    tq: _DLPackArray | None = None,
    tk: _DLPackArray | None = None,
    tv: _DLPackArray | None = None,
    *,
    tbias: _DLPackArray | None = None,
    tsink: _DLPackArray | None = None,
    out: _DLPackArray | None = None,
    lse: _DLPackArray | None = None,
    dout: _DLPackArray | None = None,
    tdout: _DLPackArray | None = None,
    tdlse: _DLPackArray | None = None,
    tdelta: _DLPackArray | None = None,
    dlse: _DLPackArray | None = None,
    delta: _DLPackArray | None = None,
    **options: Any,
) -> tuple[_Array, _Array, _Array, _Array]: ...
def attention_backward_tangent(
    dout: _DLPackArray,
    q: _Array,
    k: _DLPackArray,
    v: _DLPackArray,
    out: _DLPackArray,
    lse: _DLPackArray,
    tout: _DLPackArray | None,
    tlse: _DLPackArray,
    tq: _DLPackArray | None = None,
    tk: _DLPackArray | None = None,
    tv: _DLPackArray | None = None,
    *,
    tbias: _DLPackArray | None = None,
    tsink: _DLPackArray | None = None,
    tdout: _DLPackArray | None = None,
    tdlse: _DLPackArray | None = None,
    tdelta: _DLPackArray | None = None,
    dlse: _DLPackArray | None = None,
    delta: _DLPackArray | None = None,
    tdbias: _DLPackArray | None = None,
    tdsink: _DLPackArray | None = None,
    dq: _DLPackArray | None = None,
    dk: _DLPackArray | None = None,
    dv: _DLPackArray | None = None,
    dbias: _DLPackArray | None = None,
    dsink: _DLPackArray | None = None,
    **options: Any,
) -> tuple[_Array, _Array, _Array]: ...
@overload
def decode(
    q: _Array,
    k_cache: _DLPackArray,
    v_cache: _DLPackArray | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Decode],
) -> _Array: ...
@overload
def decode(
    q: _Array,
    k_cache: _DLPackArray,
    v_cache: _DLPackArray | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Decode],
) -> tuple[_Array, _Array]: ...
@overload
def decode(
    q: _Array, k_cache: _DLPackArray, v_cache: _DLPackArray | None = None, *, return_lse: bool, **options: Unpack[_Decode]
) -> _Array | tuple[_Array, _Array]: ...
def decode_schedule(
    q: _Array, k_cache: _DLPackArray, v_cache: _DLPackArray | None = None, *, stream: _Stream = None, **options: Any
) -> _Array | None: ...
@overload
def merge(
    outs: Sequence[_Array], lses: Sequence[_Array], *, return_lse: Literal[True] = True, **options: Unpack[_Merge]
) -> tuple[_Array, _Array]: ...
@overload
def merge(outs: Sequence[_Array], lses: Sequence[_Array], *, return_lse: Literal[False], **options: Unpack[_Merge]) -> _Array: ...
@overload
def merge(
    outs: Sequence[_Array], lses: Sequence[_Array], *, return_lse: bool, **options: Unpack[_Merge]
) -> _Array | tuple[_Array, _Array]: ...
def cache_write(
    k: _DLPackArray,
    v: _DLPackArray | None,
    k_cache: _DLPackArray,
    v_cache: _DLPackArray | None,
    slots: _DLPackArray,
    *,
    k_scale: float | _DLPackArray | None = None,
    v_scale: float | _DLPackArray | None = None,
    k_rope_cache: _DLPackArray | None = None,
    k_rope: _DLPackArray | None = None,
    rotary_cos: _DLPackArray | None = None,
    rotary_sin: _DLPackArray | None = None,
    rotary_interleaved: bool = True,
    positions: _DLPackArray | None = None,
    cache_dtype: Literal["e4m3", "e5m2"] | None = None,
    stream: _Stream = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> None: ...
def compress_block_mask(block_mask: _DLPackArray, *, stream: _Stream = None) -> BlockMask: ...
def explain(
    q: _DLPackArray,
    k: _DLPackArray,
    v: _DLPackArray | None,
    /,
    *,
    op: Literal["forward", "backward", "decode"] = "forward",
    **options: Any,
) -> str: ...
def info() -> dict[str, Any]: ...
def set_num_threads(threads: int) -> None: ...
def get_num_threads() -> int: ...
def flag(x: object, name: str) -> bool: ...

class TensorShape:
    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, device: str) -> None: ...

def check_attention(
    q: TensorShape,
    k: TensorShape,
    v: TensorShape,
    out: TensorShape,
    lse: TensorShape | None,
    gradients: tuple[TensorShape, TensorShape | None, TensorShape | None] | None,
    **options: Any,
) -> None: ...
def check_decode(
    q: TensorShape, k_cache: TensorShape, v_cache: TensorShape, out: TensorShape, lse: TensorShape, **options: Any
) -> None: ...
def needs_no_operator(tensors: tuple[Any, ...]) -> bool: ...
def refuse_nested(x: Any, name: str) -> None: ...
def call_directly(
    function: Callable[..., Any], tensors: tuple[Any, ...], options: dict[str, Any], known: dict[str, bool]
) -> Any: ...
def call_as_operator(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any: ...
