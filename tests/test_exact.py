"""Every kernel gives the exact results of libflash.conformance.checks.exact."""

from __future__ import annotations

import pytest
from harness import check_cpu, cpu_kernels
from libflash.conformance.checks.check import Check
from libflash.conformance.checks.exact import checks

ISAS = pytest.mark.parametrize("isa", cpu_kernels())


@ISAS
@pytest.mark.parametrize("check", checks(), ids=str)
def test_exact(isa: str, check: Check) -> None:
    check_cpu(check, isa)
