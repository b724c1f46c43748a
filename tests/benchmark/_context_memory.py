"""A model of the peak memory of context parallel attention on a rank: what PyTorch's allocator holds beyond q, k and v, from the
shapes, and from the workspaces of the calls.

For CUDA tensors of 16 bits without windows, documents, ALiBi and dropout, batch 1: python/libflash/_torch_context_schedule.py
follows the same steps. Tensors have the size of the rank's tokens; `out` stands for out and lse.

    ring, forward       a result of each step that this rank sees, K and V of two steps; at the end the merged result beside them
    ring, backward      out; dq, dk, dv of the own step and of another one; K and V of two steps, dk and dv that arrive; sums in
                        float32 from the third step on
    all_gather          K and V of all ranks twice, while they are put in order; results and gradients of one call
    heads               q, k, v, out with all tokens and a share of the heads; each exchange holds what it sends and receives
    heads_ring          both

Symmetric memory, through which keys are sent if the ranks share some, has K and V of the rank, and after a backward call of a
ring gradients of one or two steps; it counts as held from the beginning, although PyTorch's allocator does not have it. K and V
of all ranks arrive in order then, and gradients for other ranks are made in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from libflash._context_choice import key_heads_repeated
from libflash._context_layout import Layout
from libflash._torch_context_group import ALONE, Axis, Ranks
from libflash._torch_context_parts import MOST_RESULTS, Part, keys_used, parts_of
from libflash._torch_context_transport import ALIGNMENT, SLOTS

# Bytes of the workspace of a call: operation, rows, keys, numbers of query and key heads, causal.
Workspace = Callable[[str, int, int, tuple[int, int], bool], int]


def no_workspace(*call: Any) -> int:
    """The workspace of calls on the CPU, which PyTorch's allocator does not have."""
    del call
    return 0


@dataclass
class Held:
    """Bytes that are held, and the most so far."""

    now: int = 0
    peak: int = 0

    def take(self, size: int) -> int:
        self.now += size
        self.peak = max(self.peak, self.now)
        return size

    def give(self, size: int) -> None:
        self.now -= size


@dataclass(frozen=True)
class Rows:
    """Bytes of one token: of q, of k, of v, of out, of lse; `wide`: a float32 number over one of q's type."""

    q: int
    k: int
    v: int
    out: int
    lse: int
    wide: int

    @property
    def kv(self) -> int:
        return self.k + self.v

    @property
    def result(self) -> int:
        return self.out + self.lse


@dataclass(frozen=True)
class Shape:
    """Tokens and heads of a rank. `element`: bytes of a number."""

    tokens: int
    heads_q: int
    heads_k: int
    head_dim: int
    element: int = 2

    @property
    def heads(self) -> tuple[int, int]:
        return self.heads_q, self.heads_k

    def rows(self) -> Rows:
        q, k = (heads * self.head_dim * self.element for heads in self.heads)
        return Rows(q, k, k, q, 4 * self.heads_q, 4 // self.element)


@dataclass
class SumOfTerms:
    """As libflash._torch_context_parts.Sum: two terms, or a total in float32. `row`: bytes of a token."""

    held: Held
    size: int
    row: int
    wide: int
    terms: list[int] = field(default_factory=list)
    total: bool = False

    def add(self, tokens: int) -> None:
        self.terms.append(tokens)
        if self.total or len(self.terms) > 2:
            if not self.total:
                self.held.take(self.size * self.row * self.wide)
            self.total = True
            self.held.give(sum(self.terms) * self.row)
            self.terms = []

    def finish(self) -> None:
        """At the end one term is held, or the total in the type of the terms."""
        if self.total and self.wide > 1:
            self.held.take(self.size * self.row)
            self.held.give(self.size * self.row * self.wide)
        elif not self.total:
            self.held.give((sum(self.terms) - max(self.terms)) * self.row)


@dataclass
class Schedule:
    """One call on a rank, after an exchange of heads."""

    held: Held
    ranks: Ranks
    layout: Layout
    causal: bool
    shape: Shape  # tokens and heads of the rank after the exchange
    workspace: Workspace
    symmetric: bool

    def __post_init__(self) -> None:
        self.rows = self.shape.rows()

    def parts(self, rows: int, columns: int | None) -> tuple[Part, ...]:
        """`columns` None: the keys of all ranks."""
        everything = tuple(range(self.ranks.size))
        keys = everything if columns is None else self.ranks.members(columns)
        return parts_of(self.layout, self.ranks.members(rows), keys, self.causal)

    def during(self, operation: str, part: Part, heads: tuple[int, int] | None = None) -> None:
        rows = part.rows.stop - part.rows.start
        self.held.give(self.held.take(self.workspace(operation, rows, part.keys, heads or self.shape.heads, part.causal)))

    # -- forward

    def results(self, parts: tuple[Part, ...]) -> list[int]:
        """The bytes of each result."""
        made = []
        for part in parts:
            made.append(self.held.take((part.rows.stop - part.rows.start) * self.rows.result))
            self.during("forward", part)
        return made

    def merge(self, results: list[int], wide: int = 1) -> list[int]:
        """One result in place of several."""
        size = self.shape.tokens * (self.rows.out * wide + self.rows.lse)
        if results != [size]:
            self.held.take(size)
            self.held.give(sum(results))
        return [size]

    def take_symmetric_memory(self, gathered: bool, backward: bool) -> None:
        slots = min(SLOTS, self.ranks.ring.size - 1) if backward and not gathered else 0
        for row in (self.rows.k, self.rows.v):
            self.held.take((1 + slots) * -(-self.shape.tokens * row // ALIGNMENT) * ALIGNMENT)

    def gather(self) -> int:
        """K and V of all ranks."""
        size = self.ranks.ring.size * self.shape.tokens
        if self.symmetric:
            return self.held.take(size * self.rows.kv)
        for row in (self.rows.k, self.rows.v):
            received = self.held.take(size * row)
            self.held.take(size * row)
            self.held.give(received)
        return size * self.rows.kv

    def forward(self, gathered: bool) -> None:
        ring, rows = self.ranks.ring, self.rows
        if gathered:
            keys = self.gather()
            results = self.results(self.parts(ring.rank, None))
            self.held.give(keys)
            self.merge(results)
            return
        steps = [self.parts(ring.rank, (ring.rank - step) % ring.size) for step in range(ring.size)]
        sizes = [0, *(keys_used(parts) * rows.kv for parts in steps[1:]), 0]
        self.held.take(sizes[1])
        results = self.results(steps[0])
        for step in range(1, ring.size):
            self.held.give(sizes[step - 1])
            self.held.take(sizes[step + 1])
            results += self.results(steps[step])
            if len(results) > MOST_RESULTS:
                results = self.merge(results, rows.wide)
        self.held.give(sizes[ring.size - 1])
        self.merge(results)

    # -- backward

    def gradients(self, parts: tuple[Part, ...], columns_of_others: bool = True) -> tuple[int, int]:
        """The gradients for the keys of another rank, or of all ranks. Returns the rows of dq, and the number of keys whose dk
        and dv are held.
        """
        used = keys_used(parts)
        if self.symmetric and len(parts) == 1 and columns_of_others:
            rows = parts[0].rows.stop - parts[0].rows.start
            self.held.take(rows * self.rows.q)
            self.during("backward", parts[0])
            return rows, 0
        sums = [SumOfTerms(self.held, used, row, self.rows.wide) for row in (self.rows.k, self.rows.v)]
        rows = max(part.rows.stop for part in parts) - min(part.rows.start for part in parts)
        self.held.take(rows * self.rows.q)
        for part in parts:
            for total in sums:
                self.held.take(part.keys * total.row)
            self.during("backward", part)
            for total in sums:
                total.add(part.keys)
        for total in sums:
            total.finish()
        return rows, used

    def own(self, halves: slice) -> None:
        """Backward with the rank's own keys, for a half of the heads."""
        group = self.shape.heads_q // self.shape.heads_k
        keys = len(range(self.shape.heads_k)[halves])
        if keys:
            (part,) = self.parts(self.ranks.ring.rank, self.ranks.ring.rank)
            self.during("backward", part, (keys * group, keys))

    def backward(self, gathered: bool) -> None:
        ring, rows, held, tokens = self.ranks.ring, self.rows, self.held, self.shape.tokens
        if gathered:
            keys = self.gather()
            used = self.gradients(self.parts(ring.rank, None), columns_of_others=False)[1]
            held.give(keys)
            for row in (rows.k, rows.v):
                self.scatter_sum(row, used)
            held.give(used * rows.kv)
            return
        steps = [self.parts(ring.rank, (ring.rank - step) % ring.size) for step in range(ring.size)]
        sizes = [0, *(keys_used(parts) * rows.kv for parts in steps[1:]), 0]
        dq, dk, dv = (SumOfTerms(held, tokens, row, rows.wide) for row in (rows.q, rows.k, rows.v))
        held.take(sizes[1])
        held.take(tokens * (rows.q + rows.kv))
        half = self.shape.heads_k // 2
        self.own(slice(half))
        sent, arriving = 0, 0
        for step in range(1, ring.size):
            held.give(sizes[step - 1])
            held.take(sizes[step + 1])
            made = 0
            if steps[step]:
                of_rows, made = self.gradients(steps[step])
                dq.add(of_rows)
            for total in (dk, dv) if arriving else ():
                total.add(arriving)
            user = (ring.rank + step) % ring.size
            arriving = keys_used(self.parts(user, ring.rank))
            held.give(sent * rows.kv)
            held.take(arriving * rows.kv)
            sent = made
        self.own(slice(half, None))
        dq.add(tokens)
        kept = 0
        for total in (dk, dv):
            total.add(tokens)
            kept += 0 if total.terms else held.take(tokens * total.row)  # dk and dv of the own step, until both are added
        held.give(kept)
        for total in (dk, dv) if arriving else ():
            total.add(arriving)
        for total in (dk, dv, dq):
            total.finish()
        held.give(sizes[ring.size - 1] + sent * rows.kv)

    def scatter_sum(self, row: int, used: int) -> None:
        tokens = self.shape.tokens
        size = self.ranks.ring.size * tokens * row
        filled = size if used < self.ranks.ring.size * tokens else 0
        self.held.take(filled + 2 * size)  # with zeros; sent and received
        self.held.take(tokens * row * self.rows.wide)
        self.held.give(2 * size + filled)
        if self.rows.wide > 1:
            self.held.take(tokens * row)
            self.held.give(tokens * row * self.rows.wide)


def exchange(held: Held, size: int, repeated: int = 0, summed: int = 0) -> None:
    """An exchange of a tensor of `size` bytes for one of the same size. `repeated`: bytes of a copy with repeated heads, which is
    sent; `summed`: bytes of the sum over repeated heads, which is kept instead.
    """
    held.take(repeated + 2 * size)  # sent and received
    held.give(size)
    held.take(size + summed)  # in order
    held.give(repeated + size + (size if summed else 0))


def ranks_of(scheme: str, mesh: tuple[int, ...], rank: int) -> Ranks:
    if len(mesh) == 2:
        return Ranks(Axis(None, rank // mesh[1], mesh[0]), Axis(None, rank % mesh[1], mesh[1]), None)
    axis = Axis(None, rank, mesh[0])
    return Ranks(axis, ALONE, None) if scheme == "heads" else Ranks(ALONE, axis, None)


def peak(
    scheme: str, shape: Shape, mesh: tuple[int, ...], causal: bool, backward: bool, rank: int, order: str = "zigzag",
    workspace: Workspace = no_workspace, symmetric: bool = False,
) -> int:  # fmt: skip
    """The peak of forward without gradients, or of forward and backward. `symmetric`: whether keys are sent through symmetric
    memory.
    """
    held, ranks = Held(), ranks_of(scheme, mesh, rank)
    layout = Layout(order, shape.tokens * ranks.size, ranks.size)
    share, rows = ranks.heads.size, shape.rows()
    repeat = key_heads_repeated(shape.heads_q, shape.heads_k, share)
    inner = Shape(shape.tokens * share, shape.heads_q // share, shape.heads_k * repeat // share, shape.head_dim, shape.element)
    schedule = Schedule(held, ranks, layout, causal, inner, workspace, symmetric and ranks.ring.size > 1)
    if schedule.symmetric:
        schedule.take_symmetric_memory(scheme == "all_gather", backward)
    n, exchanged, gathered = shape.tokens, share > 1, scheme == "all_gather" or ranks.ring.size == 1
    keys = [n * row * repeat for row in (rows.k, rows.v)]
    if exchanged:
        exchange(held, n * rows.q)
        for size in keys:
            exchange(held, size, repeated=size if repeat > 1 else 0)
    schedule.forward(gathered and not exchanged) if ranks.ring.size > 1 else one_call(schedule, "forward")
    if exchanged:
        exchange(held, n * rows.out)
        exchange(held, n * rows.lse)
    if not backward:
        return held.peak
    if exchanged:
        exchange(held, n * rows.out)
        exchange(held, n * rows.lse, repeated=n * rows.lse)  # a tensor of zeros
    schedule.backward(gathered and not exchanged) if ranks.ring.size > 1 else one_call(schedule, "backward")
    if exchanged:
        exchange(held, n * rows.q)
        for size, row in zip(keys, (rows.k, rows.v), strict=True):
            exchange(held, size, summed=n * row if repeat > 1 else 0)
    return held.peak


def one_call(schedule: Schedule, operation: str) -> None:
    """All rows and keys of a share of the heads, with nothing to merge."""
    tokens, rows = schedule.shape.tokens, schedule.rows
    schedule.held.take(tokens * (rows.result if operation == "forward" else rows.q + rows.kv))
    schedule.during(operation, Part(slice(0, tokens), tokens, schedule.causal))
