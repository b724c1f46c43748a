"""Test problems as tensors of PyTorch and arrays of JAX, bit for bit, and back."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .case import Case, Inputs
from .reference_tangent import Tangents
from .rounding import DTYPES

BFLOAT16 = DTYPES.get("bf16")


def torch_of(x: Any, device: str = "cpu") -> Any:
    """A tensor that shares memory with a NumPy array, or a copy on another device; anything else unchanged."""
    torch = sys.modules["torch"]
    if not isinstance(x, np.ndarray):
        return x
    shared = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == BFLOAT16 else torch.from_numpy(x)
    return shared.to(device)


def numpy_of(x: Any) -> np.ndarray:
    """A NumPy array from an array of either library."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return np.asarray(x)
    x = x.detach().cpu()
    return x.view(torch.int16).numpy().view(BFLOAT16) if x.dtype == torch.bfloat16 else x.numpy()


def gradient_names(options: dict) -> list[str]:
    return ["dq", "dk", "dv", *(["dbias"] if "bias" in options else []), *(["dsink"] if "learnable_sink" in options else [])]


def owned(case: Case, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Remove the rows of packed tensors that belong to no sequence, which the library does not write."""
    if not case.packed:
        return results
    rows = {"q": sum(case.seqlen_q), "k": sum(case.seqlen_k)}
    sides = {"o": "q", "dq": "q", "dk": "k", "dv": "k"}
    cut = {name: x[: rows[sides[name]]] if name in sides else x for name, x in results.items()}
    return cut | {"lse": results["lse"][:, : rows["q"]]}


def torch_run(case: Case, attention: Any, device: str = "cpu", **more: Any) -> dict[str, np.ndarray]:
    return torch_results(case.inputs(), attention, device, **more)


def torch_results(x: Inputs, attention: Any, device: str = "cpu", **more: Any) -> dict[str, np.ndarray]:
    """All results by PyTorch's autograd, under the names o, lse, dq, dk, dv, dbias, dsink; without dout those of forward alone.
    `attention` has the arguments of libflash.torch.attention and returns (out, lse), where lse may be None.
    """
    torch = sys.modules["torch"]
    options = {"seed": 0} | {name: torch_of(value, device) for name, value in x.options.items()}  # the default would be random
    leaves = [torch_of(value, device) for value in (x.q, x.k, x.v)]
    if x.dout is None:
        o, lse = attention(*leaves, return_lse=True, **options, **more)
        return named(["o", "lse"], [o, lse])
    leaves += [options[name] for name in ("bias", "learnable_sink") if name in options]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    o, lse = attention(*leaves[:3], return_lse=True, **options, **more)
    results, cotangents = [o], [torch_of(x.dout, device)]
    if x.dlse is not None:
        results, cotangents = [o, lse], [*cotangents, torch_of(x.dlse, device)]
    gradients = torch.autograd.grad(results, leaves, cotangents)
    return named(["o", "lse", *gradient_names(x.options)], [o, lse, *gradients])


def split_by_tangents(x: Inputs, t: Tangents) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(inputs that have tangents, these tangents, the other inputs)"""
    given = {"q": x.q, "k": x.k, "v": x.v, "dout": x.dout, "dlse": x.dlse}
    given |= {name: x.options[name] for name in ("bias", "learnable_sink") if name in x.options}
    given = {name: value for name, value in given.items() if value is not None}
    tangents = {name: getattr(t, name) for name in given if getattr(t, name) is not None}
    rest = {name: value for name, value in given.items() if name not in tangents}
    return {name: given[name] for name in tangents}, tangents, rest


TANGENT_NAMES = {"o": "to", "lse": "tlse"}  # other results: "t" and the name


def torch_tangents(x: Inputs, t: Tangents, attention: Any, device: str = "cpu") -> dict[str, np.ndarray]:
    """Tangents of the results by torch.func.jvp; with dout also of the gradients, by jvp of vjp."""
    torch = sys.modules["torch"]
    options = {"seed": 0} | {name: torch_of(value, device) for name, value in x.options.items()}
    primals, tangents, rest = ({name: torch_of(y, device) for name, y in part.items()} for part in split_by_tangents(x, t))
    names = ["q", "k", "v", *(name for name in ("bias", "learnable_sink") if name in x.options)]

    def forward(*leaves: Any) -> dict[str, Any]:
        o, lse = attention(*leaves[:3], return_lse=True, **options | dict(zip(names[3:], leaves[3:], strict=True)))
        return {"o": o} if lse is None else {"o": o, "lse": lse}

    def everything(differentiated: dict[str, Any]) -> dict[str, Any]:
        given = rest | differentiated
        leaves = [given[name] for name in names]
        if x.dout is None:
            return forward(*leaves)
        made, pull = torch.func.vjp(forward, *leaves)
        cotangents = {"o": given["dout"]}
        if "lse" in made:
            cotangents["lse"] = given["dlse"] if "dlse" in given else torch.zeros_like(made["lse"])
        return made | dict(zip(gradient_names(x.options), pull(cotangents), strict=True))

    if not primals:
        raise NotImplementedError("no input has a tangent")
    _, made = torch.func.jvp(everything, (primals,), (tangents,))
    return {TANGENT_NAMES.get(name, "t" + name): numpy_of(y) for name, y in made.items()}


def jax_tangents(x: Inputs, t: Tangents, attention: Any) -> dict[str, np.ndarray]:
    """As torch_tangents, by jax.jvp and jax.vjp, compiled as one program."""
    jax = sys.modules["jax"]
    arrays = {name: value for name, value in x.options.items() if isinstance(value, np.ndarray)}
    numbers = {name: value for name, value in x.options.items() if name not in arrays}
    primals, tangents, rest = split_by_tangents(x, t)
    names = ["q", "k", "v", *(name for name in ("bias", "learnable_sink") if name in arrays)]
    options = {name: value for name, value in arrays.items() if name not in names}

    def everything(differentiated: dict[str, Any], rest: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        given = rest | differentiated

        def forward(*leaves: Any) -> dict[str, Any]:
            more = dict(zip(names[3:], leaves[3:], strict=True))
            o, lse = attention(*leaves[:3], return_lse=True, **more, **options, **numbers)
            return {"o": o} if lse is None else {"o": o, "lse": lse}

        leaves = [given[name] for name in names]
        if x.dout is None:
            return forward(*leaves)
        made, pull = jax.vjp(forward, *leaves)
        cotangents = {"o": given["dout"]}
        if "lse" in made:
            cotangents["lse"] = given["dlse"] if "dlse" in given else jax.numpy.zeros_like(made["lse"])
        return made | dict(zip(gradient_names(x.options), pull(cotangents), strict=True))

    @jax.jit
    def tangent(primals: Any, tangents: Any, rest: Any, options: Any) -> Any:
        return jax.jvp(lambda differentiated: everything(differentiated, rest, options), (primals,), (tangents,))[1]

    made = tangent(primals, tangents, rest, options)
    return {TANGENT_NAMES.get(name, "t" + name): numpy_of(y) for name, y in made.items()}


def jax_run(case: Case, attention: Any, **more: Any) -> dict[str, np.ndarray]:
    return jax_results(case.inputs(), attention, **more)


def jax_results(x: Inputs, attention: Any, **more: Any) -> dict[str, np.ndarray]:
    """As torch_results, by jax.vjp, compiled as one program."""
    jax = sys.modules["jax"]
    arrays = {name: value for name, value in x.options.items() if isinstance(value, np.ndarray)}
    numbers = {name: value for name, value in x.options.items() if name not in arrays}
    wanted = {name: arrays.pop(name) for name in ("bias", "learnable_sink") if name in arrays}

    def forward(q: Any, k: Any, v: Any, wanted: Any, arrays: Any) -> Any:
        out, lse = attention(q, k, v, return_lse=True, **wanted, **arrays, **numbers, **more)
        return (out, lse) if x.dlse is not None else (out, jax.lax.stop_gradient(lse))

    @jax.jit
    def both(q: Any, k: Any, v: Any, wanted: Any, arrays: Any, dout: Any, dlse: Any) -> Any:
        (out, lse), pull = jax.vjp(lambda *leaves: forward(*leaves, arrays), q, k, v, wanted)
        dq, dk, dv, rest = pull((dout, jax.tree.map(jax.numpy.zeros_like, lse) if dlse is None else dlse))
        return out, lse, dq, dk, dv, *(rest[name] for name in ("bias", "learnable_sink") if name in rest)

    if x.dout is None:
        results, names = jax.jit(forward)(x.q, x.k, x.v, wanted, arrays), ["o", "lse"]
    else:
        results, names = both(x.q, x.k, x.v, wanted, arrays, x.dout, x.dlse), ["o", "lse", *gradient_names(x.options)]
    return named(names, results)


def named(names: list[str], results: Any) -> dict[str, np.ndarray]:
    """The results that are not None, as NumPy arrays. A function that does not return lse has None in its place."""
    return {name: numpy_of(x) for name, x in zip(names, results, strict=True) if x is not None}
