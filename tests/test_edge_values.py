"""Special values, NaN and infinity on every kernel: the checks of libflash.conformance."""

from __future__ import annotations

import pytest
from harness import check_cpu, cpu_kernels
from libflash.conformance.checks import broken_values, edges
from libflash.conformance.checks.check import Check

ISAS = pytest.mark.parametrize("isa", cpu_kernels())


@ISAS
@pytest.mark.parametrize("check", [*edges.checks(), *broken_values.checks()], ids=str)
def test_edge(isa: str, check: Check) -> None:
    check_cpu(check, isa)
