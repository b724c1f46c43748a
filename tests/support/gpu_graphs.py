"""Calls in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch


def captured(call: Callable[[], object], device: str = "cuda") -> Callable[[], object]:
    """The call as a graph: captured in global mode, in which a synchronisation, a cudaMalloc or the legacy stream is an error.
    With "cpu" the call itself, so that tests of graphs run without a GPU.
    """
    call()  # the first launch loads the kernels
    if device == "cpu":
        return call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        call()
    return graph.replay
