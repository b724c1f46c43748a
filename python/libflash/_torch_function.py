"""The base class of the autograd Functions."""

from __future__ import annotations

from typing import Any

import torch

_SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction


class Function(_SingleLevelFunction):  # type: ignore[misc]
    """A Function of one level, as those of PyTorch's own operators: under torch.func each level runs the Autograd key again."""

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int, ...]:
        """Compiled autograd asks for this key. It guards by itself what backward reads from ctx."""
        return (ctx._autograd_function_id,)
