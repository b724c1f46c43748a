"""Types of the compiled module. `Array` stands for an array of any library with DLPack; results are of the library of q."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, overload

from ._block_mask import BlockMask

class DLPackArray(Protocol):
    """NumPy, PyTorch, CuPy and JAX arrays, and any other that speaks DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...

class CudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

Array = TypeVar("Array", bound=DLPackArray)
Window: TypeAlias = Sequence[int | None] | None
Align: TypeAlias = Literal["bottom_right", "top_left"]
Layout: TypeAlias = Literal["bshd", "bhsd", "sbhd"]
Stream: TypeAlias = int | CudaStream | None

__version__: str
NO_WINDOW: tuple[int, int]
DTYPE_RULE: str
DTYPE_NAMES: dict[int, str]
DTYPE_OBJECTS: dict[int, str]
ATTENTION_DEFAULTS: dict[str, Any]
BACKWARD_DEFAULTS: dict[str, Any]
DECODE_DEFAULTS: dict[str, Any]

@overload
def attention(
    q: Array,
    k: DLPackArray,
    v: DLPackArray,
    *,
    causal: bool = False,
    causal_align: Align = "bottom_right",
    window_size: Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: DLPackArray | None = None,
    bias: DLPackArray | None = None,
    mask: DLPackArray | None = None,
    learnable_sink: DLPackArray | None = None,
    block_mask: DLPackArray | BlockMask | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    layout: Layout = "bshd",
    cu_seqlens_q: DLPackArray | None = None,
    cu_seqlens_k: DLPackArray | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: DLPackArray | None = None,
    seqused_k: DLPackArray | None = None,
    num_splits: int = 0,
    return_lse: Literal[False] = False,
    out: DLPackArray | None = None,
    lse: DLPackArray | None = None,
    stream: Stream = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> Array: ...
@overload
def attention(
    q: Array,
    k: DLPackArray,
    v: DLPackArray,
    *,
    causal: bool = False,
    causal_align: Align = "bottom_right",
    window_size: Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: DLPackArray | None = None,
    bias: DLPackArray | None = None,
    mask: DLPackArray | None = None,
    learnable_sink: DLPackArray | None = None,
    block_mask: DLPackArray | BlockMask | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    layout: Layout = "bshd",
    cu_seqlens_q: DLPackArray | None = None,
    cu_seqlens_k: DLPackArray | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: DLPackArray | None = None,
    seqused_k: DLPackArray | None = None,
    num_splits: int = 0,
    return_lse: Literal[True],
    out: DLPackArray | None = None,
    lse: DLPackArray | None = None,
    stream: Stream = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Array,
    k: DLPackArray,
    v: DLPackArray,
    *,
    causal: bool = False,
    causal_align: Align = "bottom_right",
    window_size: Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: DLPackArray | None = None,
    bias: DLPackArray | None = None,
    mask: DLPackArray | None = None,
    learnable_sink: DLPackArray | None = None,
    block_mask: DLPackArray | BlockMask | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    layout: Layout = "bshd",
    cu_seqlens_q: DLPackArray | None = None,
    cu_seqlens_k: DLPackArray | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: DLPackArray | None = None,
    seqused_k: DLPackArray | None = None,
    num_splits: int = 0,
    return_lse: bool,
    out: DLPackArray | None = None,
    lse: DLPackArray | None = None,
    stream: Stream = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> Array | tuple[Array, Array]: ...
def attention_backward(
    dout: DLPackArray,
    q: Array,
    k: DLPackArray,
    v: DLPackArray,
    out: DLPackArray,
    lse: DLPackArray,
    *,
    causal: bool = False,
    causal_align: Align = "bottom_right",
    window_size: Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: DLPackArray | None = None,
    bias: DLPackArray | None = None,
    mask: DLPackArray | None = None,
    learnable_sink: DLPackArray | None = None,
    block_mask: DLPackArray | BlockMask | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    layout: Layout = "bshd",
    cu_seqlens_q: DLPackArray | None = None,
    cu_seqlens_k: DLPackArray | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: DLPackArray | None = None,
    seqused_k: DLPackArray | None = None,
    num_splits: int = 0,
    dlse: DLPackArray | None = None,
    deterministic: bool = False,
    dq: DLPackArray | None = None,
    dk: DLPackArray | None = None,
    dv: DLPackArray | None = None,
    dbias: DLPackArray | None = None,
    dsink: DLPackArray | None = None,
    stream: Stream = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> tuple[Array, Array, Array]: ...
@overload
def decode(
    q: Array,
    k_cache: DLPackArray,
    v_cache: DLPackArray,
    *,
    cache_seqlens: DLPackArray | None = None,
    block_table: DLPackArray | None = None,
    cache_batch_idx: DLPackArray | None = None,
    cache_leftpad: DLPackArray | None = None,
    k: DLPackArray | None = None,
    v: DLPackArray | None = None,
    rotary_cos: DLPackArray | None = None,
    rotary_sin: DLPackArray | None = None,
    rotary_interleaved: bool = True,
    causal: bool = True,
    window_size: Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: DLPackArray | None = None,
    learnable_sink: DLPackArray | None = None,
    num_splits: int = 0,
    split_size: int = 0,
    return_lse: Literal[False] = False,
    out: DLPackArray | None = None,
    lse: DLPackArray | None = None,
    stream: Stream = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> Array: ...
@overload
def decode(
    q: Array,
    k_cache: DLPackArray,
    v_cache: DLPackArray,
    *,
    cache_seqlens: DLPackArray | None = None,
    block_table: DLPackArray | None = None,
    cache_batch_idx: DLPackArray | None = None,
    cache_leftpad: DLPackArray | None = None,
    k: DLPackArray | None = None,
    v: DLPackArray | None = None,
    rotary_cos: DLPackArray | None = None,
    rotary_sin: DLPackArray | None = None,
    rotary_interleaved: bool = True,
    causal: bool = True,
    window_size: Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: DLPackArray | None = None,
    learnable_sink: DLPackArray | None = None,
    num_splits: int = 0,
    split_size: int = 0,
    return_lse: Literal[True],
    out: DLPackArray | None = None,
    lse: DLPackArray | None = None,
    stream: Stream = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> tuple[Array, Array]: ...
@overload
def decode(
    q: Array,
    k_cache: DLPackArray,
    v_cache: DLPackArray,
    *,
    cache_seqlens: DLPackArray | None = None,
    block_table: DLPackArray | None = None,
    cache_batch_idx: DLPackArray | None = None,
    cache_leftpad: DLPackArray | None = None,
    k: DLPackArray | None = None,
    v: DLPackArray | None = None,
    rotary_cos: DLPackArray | None = None,
    rotary_sin: DLPackArray | None = None,
    rotary_interleaved: bool = True,
    causal: bool = True,
    window_size: Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: DLPackArray | None = None,
    learnable_sink: DLPackArray | None = None,
    num_splits: int = 0,
    split_size: int = 0,
    return_lse: bool,
    out: DLPackArray | None = None,
    lse: DLPackArray | None = None,
    stream: Stream = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> Array | tuple[Array, Array]: ...
@overload
def merge(
    outs: Sequence[Array],
    lses: Sequence[Array],
    *,
    return_lse: Literal[True] = True,
    layout: Layout = "bshd",
    out: DLPackArray | None = None,
    lse: DLPackArray | None = None,
    stream: Stream = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> tuple[Array, Array]: ...
@overload
def merge(
    outs: Sequence[Array],
    lses: Sequence[Array],
    *,
    return_lse: Literal[False],
    layout: Layout = "bshd",
    out: DLPackArray | None = None,
    lse: DLPackArray | None = None,
    stream: Stream = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> Array: ...
@overload
def merge(
    outs: Sequence[Array],
    lses: Sequence[Array],
    *,
    return_lse: bool,
    layout: Layout = "bshd",
    out: DLPackArray | None = None,
    lse: DLPackArray | None = None,
    stream: Stream = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> Array | tuple[Array, Array]: ...
def compress_block_mask(block_mask: DLPackArray, *, stream: Stream = None) -> BlockMask: ...
def explain(
    q: DLPackArray,
    k: DLPackArray,
    v: DLPackArray,
    /,
    *,
    op: Literal["forward", "backward", "decode"] = "forward",
    **options: Any,
) -> str: ...
def info() -> dict[str, Any]: ...
def set_num_threads(threads: int) -> None: ...
def get_num_threads() -> int: ...
