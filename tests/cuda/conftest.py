"""A fixture of all tests on a GPU."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def first_device() -> None:
    """Make the first device current. Another runtime in the process may have changed the current device when it started."""
    try:
        import torch
    except ImportError:
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
