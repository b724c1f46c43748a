"""libflash.torch in forward mode and differentiated twice, in float64, with all options, against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from second_problem import SecondProblem, chosen

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402

func = torch.func
Tensors = dict[str, torch.Tensor]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch at its first dual level


def tensor(x: Any) -> Any:
    return torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x


@pytest.mark.parametrize("name", chosen(2))
def test_options(name: str) -> None:
    """jvp, jvp of vjp, the gradients of both, and create_graph."""
    problem = SecondProblem(name)
    options = {"seed": 0} | {n: tensor(x) for n, x in problem.options.items()}
    inputs, direction = ({n: tensor(x) for n, x in given.items()} for given in (problem.inputs, problem.direction))
    y, ty = (tuple(map(tensor, given)) for given in (problem.cotangents, problem.moved_cotangents))

    def attention(leaves: Tensors) -> Any:
        leaves = dict(leaves)
        q, k, v = (leaves.pop(n) for n in "qkv")
        return libflash.torch.attention(q, k, v, return_lse=True, **leaves, **options)

    def backward(leaves: Tensors, *cotangents: torch.Tensor) -> Tensors:
        return func.vjp(attention, leaves)[1](cotangents)[0]

    wanted = problem.forward()
    gradients, moved = problem.backward(along_cotangents=True)
    along_inputs = problem.backward(along_cotangents=False)[1]
    primals, tangents = func.jvp(attention, (inputs,), (direction,))
    problem.check([*primals, *tangents], wanted, ("o", "lse", "o", "lse"))
    first, second = func.jvp(backward, (inputs, *y), (direction, *ty))
    problem.check_gradients(first, gradients)
    problem.check_gradients(second, moved)
    of_inputs, *of_cotangents = func.vjp(backward, inputs, *y)[1](direction)
    problem.check_gradients(of_inputs, along_inputs)
    problem.check(of_cotangents, wanted[2:], ("o", "lse"))
    of_inputs, of_direction = func.vjp(lambda x, t: func.jvp(attention, (x,), (t,)), inputs, direction)[1]((ty, y))
    problem.check_gradients(of_inputs, moved)
    problem.check_gradients(of_direction, gradients)

    leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    cotangents = [x.clone().requires_grad_() for x in y]
    first = torch.autograd.grad(attention(leaves), list(leaves.values()), cotangents, create_graph=True)
    double = torch.autograd.grad(first, [*leaves.values(), *cotangents], list(direction.values()))
    problem.check_gradients(dict(zip(leaves, double, strict=False)), along_inputs)
    problem.check(double[len(leaves) :], wanted[2:], ("o", "lse"))
