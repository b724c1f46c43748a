"""Fixtures of all tests on a GPU, and of those that run kernels on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from emulated_runs import Run


@pytest.fixture(autouse=True)
def first_device() -> None:
    """Make the first device current. Another runtime in the process may have changed the current device when it started."""
    try:
        import torch
    except ImportError:
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(0)


@pytest.fixture(scope="session")  # so that the runs of all files start together
def output(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Run], str]]:
    """The output of a run of test_on_host_*.py."""
    from emulated_runs import started_together  # imported here, because it searches for the headers of CUDA
    from kernels_on_host import CUDA_HEADERS, CXX

    if CXX is None or CUDA_HEADERS is None:
        pytest.skip("no g++ or no CUDA headers")
    with started_together(request, tmp_path_factory) as output_of:
        yield output_of
