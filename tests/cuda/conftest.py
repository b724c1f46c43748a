"""What every test on a GPU begins with."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def first_device() -> None:
    """The first device is current: other runtimes in the process may have left another one so when they began."""
    try:
        import torch
    except ImportError:
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
