"""libflash: exact attention for any DLPack array, on the CPU and on NVIDIA GPUs.

    out = libflash.attention(q, k, v, causal=True)

q, k, v are (batch, seqlen, heads, head_dim) arrays of NumPy (1.26 or later), PyTorch, CuPy, JAX or any library with DLPack; out
is one of the same library. Arrays are not copied, and libflash imports only the library that the arrays come from.

Adapters, each imported on its own: libflash.torch (autograd, torch.compile), libflash.jax (jit, grad, vmap), libflash.flash_attn
(the functions of the flash-attn package).
"""

from ._block_mask import BlockMask
from ._core import (
    __version__,
    attention,
    attention_backward,
    attention_backward_tangent,
    attention_tangent,
    cache_write,
    compress_block_mask,
    decode,
    decode_schedule,
    explain,
    get_num_threads,
    info,
    merge,
    set_num_threads,
)
from ._errors import (
    CancelledError,
    CudaError,
    Error,
    InternalError,
    InvalidError,
    NoDeviceError,
    OutOfMemoryError,
    UnsupportedError,
    VersionError,
    WorkspaceError,
)

__all__ = [
    "BlockMask",
    "CancelledError",
    "CudaError",
    "Error",
    "InternalError",
    "InvalidError",
    "NoDeviceError",
    "OutOfMemoryError",
    "UnsupportedError",
    "VersionError",
    "WorkspaceError",
    "__version__",
    "attention",
    "attention_backward",
    "attention_backward_tangent",
    "attention_tangent",
    "cache_write",
    "compress_block_mask",
    "decode",
    "decode_schedule",
    "explain",
    "get_num_threads",
    "info",
    "merge",
    "set_num_threads",
]
