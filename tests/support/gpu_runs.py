"""One case run by one kernel, for every kind of kernels: the results that `check` of the case takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_case import run_backward, run_forward
from gpu_codes import run_cache
from gpu_decode import run_decode
from gpu_statistics import run_statistics
from gpu_tangent import run_backward_tangent, run_forward_tangent

# By kind (gpu_kernels.KINDS); the arguments are the case, the name of the kernel, `device`, and options of the kind.
RUNS: dict[str, Callable[..., dict[str, Any]]] = {
    "forward": run_forward,  # Case
    "statistics": run_statistics,  # StatisticsCase
    "backward": run_backward,  # Case
    "decode": run_decode,  # DecodeCase
    "values in keys": run_cache,  # CacheCase
    "forward_tangent": run_forward_tangent,  # TangentCase
    "backward_tangent": run_backward_tangent,  # TangentCase
}
