"""Calls with prefix sums that nothing has checked: they descend, lie outside of the tensor or overlap. Each sequence that shares
no row with another one is compared with a call for it alone. Every tensor and the workspace are between guard bands.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import abi
import ml_dtypes
import numpy as np
from memory_harness import Guarded, Workspace

LARGEST = 2**31 - 1
TYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}
LIMITS = {"f16": 2.0**-10, "bf16": 2.0**-7, "f32": 2.0**-16, "f64": 1e-11}
HEADS_Q, HEADS_K = 4, 2


class Entries(NamedTuple):
    """Prefix sums of one side, and the rows of its tensor."""

    sums: tuple[int, ...]
    rows: int

    def sequences(self) -> list[slice]:
        begins = [min(max(x, 0), self.rows) for x in self.sums[:-1]]
        return [slice(begin, min(max(x, begin), self.rows)) for begin, x in zip(begins, self.sums[1:], strict=True)]

    def owners(self) -> np.ndarray:
        """How many sequences have each row."""
        counts = np.zeros(self.rows, int)
        for rows in self.sequences():
            counts[rows] += 1
        return counts

    def fit(self) -> bool:
        return int(self.owners().sum()) <= self.rows


class Contents(NamedTuple):
    q: Entries
    k: Entries

    def defined(self, keys_alone: bool) -> list[int]:
        """The sequences whose results must be right. `keys_alone`: not if they share keys."""
        sides = (self.q, self.k) if keys_alone else (self.q,)
        if not all(side.fit() for side in sides):
            return []
        return [b for b in range(len(self.q.sums) - 1) if all((side.owners()[side.sequences()[b]] == 1).all() for side in sides)]


def in_turn(count: int, rows: int) -> Entries:
    """So many sequences, each before the rows of the sequence before it; between two of them there is an empty one."""
    begins = range((count - 1) * rows, -1, -rows)
    return Entries(tuple(x for begin in begins for x in (begin, begin + rows)), count * rows)


Q, K = Entries((0, 60, 60, 190, 320, 330), 335), Entries((0, 150, 150, 150, 290, 333), 340)
# Each sequence with rows begins before the one before it; entries above the rows and below 0.
Q_DESCEND, K_DESCEND = Entries((260, 700, 100, 260, -9, 100), 505), Entries((210, LARGEST, 80, 210, -LARGEST, 80), 515)
# The third sequence has rows of the first one.
Q_OVERLAP, K_OVERLAP = Entries((0, 140, 90, 140, 300, 310), 370), Entries((0, 200, 130, 200, 400, 410), 480)
# The sequences have more rows than the tensor.
Q_MANY, K_MANY = Entries((0, 400, 0, 400, 0, 400), 400), Entries((0, 600, 0, 600, 0, 600), 600)
CONTENTS = {
    "in order": Contents(Q, K),
    "queries descend": Contents(Q_DESCEND, K),
    "keys descend": Contents(Q, K_DESCEND),
    "both descend": Contents(Q_DESCEND, K_DESCEND),
    "queries overlap": Contents(Q_OVERLAP, K),
    "keys overlap": Contents(Q, K_OVERLAP),
    "both overlap": Contents(Q_OVERLAP, K_OVERLAP),
    "too many queries": Contents(Q_MANY, K),
    "too many keys": Contents(Q, K_MANY),
    "too many of both": Contents(Q_MANY, K_MANY),
    "many in turn": Contents(in_turn(40, 21), in_turn(40, 30)),
    "many keys in turn": Contents(Entries(tuple(range(0, 800, 10)), 800), in_turn(40, 135)),
    "many overlap": Contents(Entries((*(0, 500) * 30,), 600), Entries((*(0, 700) * 30,), 900)),
}
# The outputs of each operation, and the side of their rows.
OUTPUTS = {
    "forward": {"out": "q", "lse": "q"},
    "backward": {"dq": "q", "dk": "k", "dv": "k"},
    "forward_tangent": {"tout": "q", "tlse": "q"},
    "backward_tangent": {"tdq": "q", "tdk": "k", "tdv": "k"},
}
Arrays = dict[str, np.ndarray]


def inputs_of(kernel: dict, contents: Contents) -> Arrays:
    random, dtype = np.random.default_rng(3), TYPES[kernel["dtype"]]
    dims = {"q": kernel["head_dim"], "k": kernel["head_dim"], "v": kernel["head_dim_v"], "out": kernel["head_dim_v"]}
    made: Arrays = {}
    for name in ("q", "k", "v", "out", "dout", "tq", "tk", "tv", "tout", "tdout"):
        of = name.replace("tdout", "out").replace("dout", "out").removeprefix("t") if name != "tout" else "out"
        rows, heads = (contents.k.rows, HEADS_K) if of in "kv" else (contents.q.rows, HEADS_Q)
        made[name] = random.standard_normal((rows, heads, dims[of])).astype(dtype)
    wide = np.float64 if kernel["dtype"] == "f64" else np.float32
    made["lse"] = np.full((HEADS_Q, contents.q.rows), 5, wide)
    made["tlse"] = random.standard_normal(made["lse"].shape).astype(wide)
    return made


def like(name: str, x: Arrays) -> np.ndarray:
    """An array of the shape of an output."""
    of = {"lse": "lse", "tlse": "lse", "out": "out", "tout": "out"}.get(name) or name[-1]
    return np.empty_like(x[of])


def alone(x: Arrays, q: slice, k: slice) -> Arrays:
    """The arrays of one sequence, with a batch dimension."""

    def part(name: str, array: np.ndarray) -> np.ndarray:
        rows = k if name.removeprefix("t") in ("k", "v") else q
        return np.ascontiguousarray(array[:, rows] if name.endswith("lse") else array[rows])[None]

    return {name: part(name, array) for name, array in x.items()}


def run(operation: str, kernel: dict, x: Arrays, entries: Contents | None, flags: int) -> dict[str, Guarded]:
    """A call for packed sequences or, without prefix sums, for a batch of one."""
    place: Any = Guarded
    workspace: Any = Workspace
    if kernel["backend"] != "cpu":
        from gpu_memory import GuardedOnGpu, WorkspaceOnGpu

        place, workspace = GuardedOnGpu, WorkspaceOnGpu
    placed = {name: place(array) for name, array in x.items() if name not in OUTPUTS[operation]}
    placed |= {name: place(like(name, x), output=True) for name in OUTPUTS[operation]}
    fields: dict[str, Any] = {"kernel": kernel["name"].encode(), "flags": flags}
    if entries:
        for side, of_side in zip("qk", entries, strict=True):
            placed[f"cu_{side}"] = place(np.array(of_side.sums, np.int32))
            fields[f"cu_seqlens_{side}"] = placed[f"cu_{side}"].view
    views = {name: one.view for name, one in placed.items()}
    named = ["q", "k", "v", "out", "lse"]
    structs = []
    if operation.startswith("backward"):
        named = ["dout", *named]
    if operation == "backward":
        named += ["dq", "dk", "dv"]
    if operation.endswith("tangent"):
        given = {name: views[f"t{name}"] for name in ("q", "k", "v", "out", "lse")}
        if operation == "backward_tangent":
            given |= {name: views[f"t{name}"] for name in ("dout", "dq", "dk", "dv")}
        structs = [abi.options(abi.Tangents, flags=abi.FROM_LSE if operation == "forward_tangent" else 0, **given)]
    arguments = [abi.pointer(views[name]) for name in named]
    arguments += [None] * (3 if operation == "backward_tangent" else 0)
    structs.append(abi.options(abi.AttentionOptions, **fields))
    size = abi.c.c_size_t()
    abi.check(getattr(abi.lib, f"flash_attention_{operation}_workspace_size")(*arguments, *structs, abi.c.byref(size)))
    work = workspace(size.value, "random")
    abi.check(getattr(abi.lib, f"flash_attention_{operation}")(*arguments, *structs, work.address, size.value, None))
    work.check()
    for name, one in placed.items():
        one.name = f"{kernel['name']} {name}"
        one.check_around()
    return placed


def check(operation: str, kernel: dict, contents: Contents, flags: int = 0) -> int:
    """Returns the number of compared sequences."""
    x = inputs_of(kernel, contents)
    placed = run(operation, kernel, x, contents, flags)
    sides = contents._asdict()
    for name, side in OUTPUTS[operation].items():  # rows of no sequence are not written
        owned = sides[side].owners() > 0
        if all(of_side.fit() for of_side in contents):
            one = placed[name]
            mask = np.zeros(one.array.shape, bool)
            mask[(slice(None), owned) if name.endswith("lse") else owned] = True
            one.check(mask)
    defined = contents.defined(keys_alone=operation.startswith("backward"))
    for b in defined:
        q, k = contents.q.sequences()[b], contents.k.sequences()[b]
        if q.stop == q.start and k.stop == k.start:
            continue
        wanted = run(operation, kernel, alone(x, q, k), None, flags)
        for name, side in OUTPUTS[operation].items():
            rows = q if side == "q" else k
            got = placed[name].array[:, rows] if name.endswith("lse") else placed[name].array[rows]
            check_near(f"{kernel['name']} {name} of sequence {b}", got, wanted[name].array[0], LIMITS[kernel["dtype"]])
    return len(defined)


def check_near(what: str, got: np.ndarray, wanted: np.ndarray, limit: float) -> None:
    a, b = (x.astype(np.float64) for x in (got, wanted))
    if np.array_equal(a, b):  # also of infinities
        return
    error = np.sqrt(((a - b) ** 2).sum() / max((b**2).sum(), 1e-300))
    assert error <= limit, f"{what}: relative error {error:.2e}"


def flags_of(operation: str) -> tuple[int, ...]:
    return (0, abi.DETERMINISTIC) if operation == "backward" else (0,)


def every_check(operation: str, kernel: dict) -> Iterator[tuple[str, partial[int]]]:
    """The checks of a kernel, and their names."""
    for name, contents in CONTENTS.items():
        for flags in flags_of(operation):
            yield f"{kernel['name']} {name} flags {flags}", partial(check, operation, kernel, contents, flags)


def main(operation: str, kernels: list[dict]) -> None:
    """All checks; prints the name of each before it begins, so that the last name is that of a call that never ends."""
    for kernel in kernels:
        for name, call in every_check(operation, kernel):
            print(name, flush=True)
            call()
    print("all ended", flush=True)
