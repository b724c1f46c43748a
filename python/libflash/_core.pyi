"""Types of the compiled module. `_Array` stands for an array of any library with DLPack; results are of the library of q."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, overload

from ._block_mask import BlockMask

class _DLPackArray(Protocol):
    """NumPy, PyTorch, CuPy and JAX arrays, and any other with DLPack. JAX declares no more than this."""

    def __dlpack__(self) -> Any: ...

class _CudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

_Array = TypeVar("_Array", bound=_DLPackArray)
_Window: TypeAlias = Sequence[int | None] | None
_Align: TypeAlias = Literal["bottom_right", "top_left"]
_Layout: TypeAlias = Literal["bshd", "bhsd", "sbhd"]
_Stream: TypeAlias = int | _CudaStream | None

__version__: str
NO_WINDOW: tuple[int, int]
DTYPE_RULE: str
DTYPE_NAMES: dict[int, str]
DTYPE_OBJECTS: dict[int, str]
ATTENTION_DEFAULTS: dict[str, Any]
BACKWARD_DEFAULTS: dict[str, Any]
DECODE_DEFAULTS: dict[str, Any]
MERGE_DEFAULTS: dict[str, Any]

@overload
def attention(
    q: _Array,
    k: _DLPackArray,
    v: _DLPackArray,
    *,
    causal: bool = False,
    causal_align: _Align = "bottom_right",
    window_size: _Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: _DLPackArray | None = None,
    bias: _DLPackArray | None = None,
    mask: _DLPackArray | None = None,
    learnable_sink: _DLPackArray | None = None,
    block_mask: _DLPackArray | BlockMask | None = None,
    dropout_p: float = 0.0,
    seed: int | _DLPackArray = 0,
    offset: int = 0,
    layout: _Layout = "bshd",
    cu_seqlens_q: _DLPackArray | None = None,
    cu_seqlens_k: _DLPackArray | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: _DLPackArray | None = None,
    seqused_k: _DLPackArray | None = None,
    num_splits: int = 0,
    return_lse: Literal[False] = False,
    out: _DLPackArray | None = None,
    lse: _DLPackArray | None = None,
    stream: _Stream = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> _Array: ...
@overload
def attention(
    q: _Array,
    k: _DLPackArray,
    v: _DLPackArray,
    *,
    causal: bool = False,
    causal_align: _Align = "bottom_right",
    window_size: _Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: _DLPackArray | None = None,
    bias: _DLPackArray | None = None,
    mask: _DLPackArray | None = None,
    learnable_sink: _DLPackArray | None = None,
    block_mask: _DLPackArray | BlockMask | None = None,
    dropout_p: float = 0.0,
    seed: int | _DLPackArray = 0,
    offset: int = 0,
    layout: _Layout = "bshd",
    cu_seqlens_q: _DLPackArray | None = None,
    cu_seqlens_k: _DLPackArray | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: _DLPackArray | None = None,
    seqused_k: _DLPackArray | None = None,
    num_splits: int = 0,
    return_lse: Literal[True],
    out: _DLPackArray | None = None,
    lse: _DLPackArray | None = None,
    stream: _Stream = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> tuple[_Array, _Array]: ...
@overload
def attention(
    q: _Array,
    k: _DLPackArray,
    v: _DLPackArray,
    *,
    causal: bool = False,
    causal_align: _Align = "bottom_right",
    window_size: _Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: _DLPackArray | None = None,
    bias: _DLPackArray | None = None,
    mask: _DLPackArray | None = None,
    learnable_sink: _DLPackArray | None = None,
    block_mask: _DLPackArray | BlockMask | None = None,
    dropout_p: float = 0.0,
    seed: int | _DLPackArray = 0,
    offset: int = 0,
    layout: _Layout = "bshd",
    cu_seqlens_q: _DLPackArray | None = None,
    cu_seqlens_k: _DLPackArray | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: _DLPackArray | None = None,
    seqused_k: _DLPackArray | None = None,
    num_splits: int = 0,
    return_lse: bool,
    out: _DLPackArray | None = None,
    lse: _DLPackArray | None = None,
    stream: _Stream = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> _Array | tuple[_Array, _Array]: ...
def attention_backward(
    dout: _DLPackArray,
    q: _Array,
    k: _DLPackArray,
    v: _DLPackArray,
    out: _DLPackArray,
    lse: _DLPackArray,
    *,
    causal: bool = False,
    causal_align: _Align = "bottom_right",
    window_size: _Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: _DLPackArray | None = None,
    bias: _DLPackArray | None = None,
    mask: _DLPackArray | None = None,
    learnable_sink: _DLPackArray | None = None,
    block_mask: _DLPackArray | BlockMask | None = None,
    dropout_p: float = 0.0,
    seed: int | _DLPackArray = 0,
    offset: int = 0,
    layout: _Layout = "bshd",
    cu_seqlens_q: _DLPackArray | None = None,
    cu_seqlens_k: _DLPackArray | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: _DLPackArray | None = None,
    seqused_k: _DLPackArray | None = None,
    num_splits: int = 0,
    dlse: _DLPackArray | None = None,
    deterministic: bool = False,
    dq: _DLPackArray | None = None,
    dk: _DLPackArray | None = None,
    dv: _DLPackArray | None = None,
    dbias: _DLPackArray | None = None,
    dsink: _DLPackArray | None = None,
    stream: _Stream = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> tuple[_Array, _Array, _Array]: ...
@overload
def decode(
    q: _Array,
    k_cache: _DLPackArray,
    v_cache: _DLPackArray,
    *,
    cache_seqlens: _DLPackArray | None = None,
    block_table: _DLPackArray | None = None,
    cache_batch_idx: _DLPackArray | None = None,
    cache_leftpad: _DLPackArray | None = None,
    k: _DLPackArray | None = None,
    v: _DLPackArray | None = None,
    rotary_cos: _DLPackArray | None = None,
    rotary_sin: _DLPackArray | None = None,
    rotary_interleaved: bool = True,
    causal: bool = True,
    window_size: _Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: _DLPackArray | None = None,
    learnable_sink: _DLPackArray | None = None,
    num_splits: int = 0,
    split_size: int = 0,
    return_lse: Literal[False] = False,
    out: _DLPackArray | None = None,
    lse: _DLPackArray | None = None,
    stream: _Stream = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> _Array: ...
@overload
def decode(
    q: _Array,
    k_cache: _DLPackArray,
    v_cache: _DLPackArray,
    *,
    cache_seqlens: _DLPackArray | None = None,
    block_table: _DLPackArray | None = None,
    cache_batch_idx: _DLPackArray | None = None,
    cache_leftpad: _DLPackArray | None = None,
    k: _DLPackArray | None = None,
    v: _DLPackArray | None = None,
    rotary_cos: _DLPackArray | None = None,
    rotary_sin: _DLPackArray | None = None,
    rotary_interleaved: bool = True,
    causal: bool = True,
    window_size: _Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: _DLPackArray | None = None,
    learnable_sink: _DLPackArray | None = None,
    num_splits: int = 0,
    split_size: int = 0,
    return_lse: Literal[True],
    out: _DLPackArray | None = None,
    lse: _DLPackArray | None = None,
    stream: _Stream = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> tuple[_Array, _Array]: ...
@overload
def decode(
    q: _Array,
    k_cache: _DLPackArray,
    v_cache: _DLPackArray,
    *,
    cache_seqlens: _DLPackArray | None = None,
    block_table: _DLPackArray | None = None,
    cache_batch_idx: _DLPackArray | None = None,
    cache_leftpad: _DLPackArray | None = None,
    k: _DLPackArray | None = None,
    v: _DLPackArray | None = None,
    rotary_cos: _DLPackArray | None = None,
    rotary_sin: _DLPackArray | None = None,
    rotary_interleaved: bool = True,
    causal: bool = True,
    window_size: _Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: _DLPackArray | None = None,
    learnable_sink: _DLPackArray | None = None,
    num_splits: int = 0,
    split_size: int = 0,
    return_lse: bool,
    out: _DLPackArray | None = None,
    lse: _DLPackArray | None = None,
    stream: _Stream = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> _Array | tuple[_Array, _Array]: ...
@overload
def merge(
    outs: Sequence[_Array],
    lses: Sequence[_Array],
    *,
    return_lse: Literal[True] = True,
    layout: _Layout = "bshd",
    out: _DLPackArray | None = None,
    lse: _DLPackArray | None = None,
    stream: _Stream = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> tuple[_Array, _Array]: ...
@overload
def merge(
    outs: Sequence[_Array],
    lses: Sequence[_Array],
    *,
    return_lse: Literal[False],
    layout: _Layout = "bshd",
    out: _DLPackArray | None = None,
    lse: _DLPackArray | None = None,
    stream: _Stream = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> _Array: ...
@overload
def merge(
    outs: Sequence[_Array],
    lses: Sequence[_Array],
    *,
    return_lse: bool,
    layout: _Layout = "bshd",
    out: _DLPackArray | None = None,
    lse: _DLPackArray | None = None,
    stream: _Stream = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> _Array | tuple[_Array, _Array]: ...
def compress_block_mask(block_mask: _DLPackArray, *, stream: _Stream = None) -> BlockMask: ...
def explain(
    q: _DLPackArray,
    k: _DLPackArray,
    v: _DLPackArray,
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
def torch_is_plain() -> bool: ...
def call_as_operator(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any: ...
