"""Kernels run on the host with prefix sums that nothing has checked: they descend, lie outside of the tensor or overlap."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from emulated_kernels import (
    ATTENTION_KERNELS,
    BACKWARD_KERNELS_SM90,
    BACKWARD_TANGENT_KERNELS,
    BACKWARD_TANGENT_KERNELS_SM90,
    DOUBLE_KERNELS,
    FORWARD_KERNELS_SM90,
    WIDE_BACKWARD_KERNELS_SM90,
)
from emulated_programs import Program
from emulated_runs import Run, runs

pytestmark = pytest.mark.early

PLAIN, GENERAL = 0, 1  # instances of sm80
RAGGED, BLOCK_MASK = 1, 2  # of sm90


def few(program: Program) -> Program:
    """With fewer contents, where they take long on the host."""
    return program._replace(defines=(*program.defines, ("FEW_CONTENTS", 1)))


def contents_of(run: Run) -> int:
    return 3 if "FEW_CONTENTS" in dict(run.program.defines) else 10


def backward(arch: str, dtype: str, head_dim: int, tile: str, header: str, *changed: str) -> Program:
    defines = {"ARCHITECTURE": f'"{arch}"', "DTYPE": dtype, "HEAD_DIM": head_dim, "BACKWARD_TILE": tile}
    defines["KERNEL_HEADER"] = f'"cuda/{header}"'
    return Program("backward_contents.cpp", ("attention/backward_steps.cuh", header, *changed), tuple(defines.items()))


def backward_sm80(name: str) -> Program:
    dtype, head_dim, _, tile = ATTENTION_KERNELS[name][:4]
    return backward("sm80", dtype, head_dim, tile, "sm80/backward.cuh", "sm80/backward_wide.cuh")


def backward_f64(name: str) -> Program:
    head_dim, _, tile = DOUBLE_KERNELS[name][:3]
    return backward("sm80", "f64_", head_dim, f"{tile}, 1", "sm80/backward_f64.cuh")


def backward_sm90(name: str) -> Program:
    dtype, head_dim, tile, stages = BACKWARD_KERNELS_SM90[name]
    return backward("sm90", dtype, head_dim, f"{tile}, {stages}", "sm90/backward.cuh")


def wide_backward_sm90(name: str) -> Program:
    dtype, head_dim, tile, stages = WIDE_BACKWARD_KERNELS_SM90[name]
    program = backward("sm90", dtype, head_dim, f"{tile}, {stages}", "sm90/backward_wide.cuh")
    return program._replace(defines=(*program.defines, ("WIDE_HEADS", 1)))


# The seed of the order, thread blocks that add to dq in a fixed order at the same time, the instance, whether a kernel computes
# dq.
BACKWARD_RUNS = [
    *runs({f"sm80-{x}": few(backward_sm80(x)) for x in ("f16-128", "f32-64")}, lambda _: ((0, 0, PLAIN, 0), (0, 0, GENERAL, 1))),
    *runs({"sm80-bf16-512": few(backward_sm80("bf16-512"))}, lambda _: ((0, 0, GENERAL, 1),)),
    *runs({"sm80-f64-128": few(backward_f64("128"))}, lambda _: ((0, 0, GENERAL, 1),)),
    *runs(
        {f"sm90-{x}": backward_sm90(x) for x in ("bf16-64", "bf16-256")},
        lambda _: ((1, 0, RAGGED, 0), (1, 3, RAGGED, 0), (2, 2, BLOCK_MASK, 0)),
    ),
    *runs({"sm90-bf16-512": few(wide_backward_sm90("bf16-512"))}, lambda _: ((1, 0, PLAIN, 1),)),
]


@pytest.mark.parametrize("run", BACKWARD_RUNS)
def test_backward_with_unchecked_prefix_sums(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 3 * contents_of(run)  # three gradients


def tangent(arch: str, dtype: str, head_dim: int, tile: str, header: str) -> Program:
    defines = {"ARCHITECTURE": f'"{arch}"', "DTYPE": dtype, "HEAD_DIM": head_dim, "TANGENT_TILE": tile}
    defines["KERNEL_HEADER"] = f'"cuda/{header}"'
    return Program("tangent_contents.cpp", (header,), tuple(defines.items()))


def tangent_sm80(name: str) -> Program:
    dtype, head_dim, tile = BACKWARD_TANGENT_KERNELS[name]
    return tangent("sm80", dtype, head_dim, f"{tile}, 1", "sm80/backward_tangent.cuh")


def tangent_f64(name: str) -> Program:
    head_dim, _, _, tile = DOUBLE_KERNELS[name][:4]
    return tangent("sm80", "f64_", head_dim, f"{tile}, 1", "sm80/backward_tangent_f64.cuh")


def tangent_sm90(name: str) -> Program:
    dtype, head_dim, tile, stages = BACKWARD_TANGENT_KERNELS_SM90[name]
    program = tangent("sm90", dtype, head_dim, f"{tile}, {stages}", "sm90/backward_tangent.cuh")
    return program._replace(defines=(*program.defines, ("STAGES", stages)))


TANGENT_RUNS = [
    *runs({f"sm80-{x}": few(tangent_sm80(x)) for x in ("f16-128", "f32-64")}, lambda _: ((0,),)),
    *runs({"sm80-f64-128": few(tangent_f64("128"))}, lambda _: ((0,),)),
    *runs({f"sm90-{x}": tangent_sm90(x) for x in ("bf16-64", "bf16-256")}, lambda _: ((1,),)),
]


@pytest.mark.parametrize("run", TANGENT_RUNS)
def test_tangents_of_backward_with_unchecked_prefix_sums(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 3 * contents_of(run)


def forward(arch: str, dtype: str, head_dim: int, tile: str, header: str, **more: int) -> Program:
    defines = {"ARCHITECTURE": f'"{arch}"', "DTYPE": dtype, "HEAD_DIM": head_dim, "FORWARD_TILE": tile}
    defines |= {"KERNEL_HEADER": f'"cuda/{header}"', **more}
    return Program("forward_contents.cpp", ("attention/start_head_maxima.cuh", header), tuple(defines.items()))


def forward_sm80(name: str) -> Program:
    dtype, head_dim, tile = ATTENTION_KERNELS[name][:3]
    return forward("sm80", dtype, head_dim, f"{tile}, 1", "sm80/forward.cuh")


def forward_f64(name: str) -> Program:
    head_dim, tile = DOUBLE_KERNELS[name][:2]
    return forward("sm80", "f64_", head_dim, f"{tile}, 1", "sm80/forward_f64.cuh")


def forward_sm90(name: str) -> Program:
    dtype, head_dim, _, tile, stages = FORWARD_KERNELS_SM90[name]
    return forward("sm90", dtype, head_dim, f"{tile}, {stages}", "sm90/forward.cuh", OF_SM90=1, HEAD_DIM_V=head_dim)


FORWARD_RUNS = [
    *runs({f"sm80-{x}": few(forward_sm80(x)) for x in ("f16-128", "f32-64")}, lambda _: ((0,),)),
    *runs({"sm80-f64-128": few(forward_f64("128"))}, lambda _: ((0,),)),
    *runs({f"sm90-{x}": forward_sm90(x) for x in ("bf16-64", "bf16-256")}, lambda _: ((1,),)),
]


@pytest.mark.parametrize("run", FORWARD_RUNS)
def test_forward_with_unchecked_prefix_sums(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 2 * contents_of(run)  # out and lse
