"""Which operators of libflash PyTorch runs."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """The operators of libflash that ran on plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "libflash":
            self.names.append(function.__name__.partition(".")[0])
        return function(*args, **(kwargs or {}))
