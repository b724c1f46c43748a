"""Context parallelism on one GPU: the steps of all ranks, each in a thread, with a mailbox in place of the process group."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import libflash

torch = pytest.importorskip("torch")
from libflash._context_layout import Layout, tokens_of  # noqa: E402

from libflash import _torch_context_group as groups  # noqa: E402  (these need torch)
from libflash import _torch_context_schedule as schedules  # noqa: E402
from libflash import _torch_context_transport as transports  # noqa: E402

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
RANKS, TOKENS, HEADS, DIM = 4, 4 * 2 * 37, 4, 64
DOCUMENTS = (0, 0, 30, 31, 190, TOKENS)
CASES: dict[str, tuple[bool, str, bool, dict[str, Any]]] = {  # all gathered, order, documents, options
    "ring": (False, "zigzag", False, {"causal": True, "dropout_p": 0.25, "seed": 7}),
    "ring, documents": (False, "zigzag", True, {"causal": True, "window_size": (80, 0)}),
    "ring, ALiBi": (False, "contiguous", True, {"causal": True, "alibi": True}),
    "halo": (False, "contiguous", False, {"window_size": (50, 0)}),
    "ring, causal": (False, "zigzag", False, {"causal": True}),
    "ring, all pairs": (False, "zigzag", False, {}),
    "ring, neighbours": (False, "contiguous", False, {"causal": True, "deterministic": True}),
    "all_gather": (True, "zigzag", False, {"causal": True, "softcap": 5.0}),
    "all_gather, documents": (True, "zigzag", True, {"causal": True, "dropout_p": 0.5, "seed": 1}),
}


class Mailbox:
    """What the ranks send each other."""

    def __init__(self) -> None:
        self.boxes: dict[Any, queue.Queue] = defaultdict(queue.Queue)
        self.lock = threading.Lock()

    def box(self, *key: int) -> queue.Queue:
        with self.lock:
            return self.boxes[key]

    def gather(self, axis: groups.Axis, x: torch.Tensor) -> list[torch.Tensor]:
        return list(self.swap(axis, torch.stack([x] * axis.size)))

    def swap(self, axis: groups.Axis, sent: torch.Tensor) -> torch.Tensor:
        for to, piece in enumerate(sent):
            self.box(axis.rank, to, -1).put(piece.clone())
        return torch.stack([self.box(source, axis.rank, -1).get(timeout=60) for source in range(axis.size)])


class Exchange:
    def __init__(self, mailbox: Mailbox, axis: groups.Axis, tag: int, to: int | None, sent: tuple, source: int | None,
                 like: tuple) -> None:  # fmt: skip
        for n, x in enumerate(sent if to is not None else ()):
            mailbox.box(axis.rank, to, tag + n).put(x.clone())
        self.boxes = [mailbox.box(source, axis.rank, tag + n) for n in range(len(like) if source is not None else 0)]

    def wait(self) -> tuple[torch.Tensor, ...]:
        return tuple(box.get(timeout=60) for box in self.boxes)


def inputs(documents: bool) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(3)
    lead = (TOKENS,) if documents else (2, TOKENS)
    shapes = {"q": HEADS, "k": 2, "v": 2, "dout": HEADS}
    return {n: torch.from_numpy(random.standard_normal((*lead, heads, DIM), dtype=np.float32)) for n, heads in shapes.items()}


def rows_of(dout: torch.Tensor, packed: bool) -> torch.Tensor:
    """Some values with the shape of lse."""
    return dout[..., 0].float().movedim(-1, 0 if packed else 1).contiguous()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=CUDA), "cpu"])
@pytest.mark.parametrize("in_parts", [False, True])
def test_ranks_of_a_group(device: str, name: str, dtype: str, in_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against one call in float32 on the CPU; with positions, and in parts where these serve."""
    gathered, order, documents, given = CASES[name]
    if in_parts and (documents or given.keys() & {"dropout_p", "alibi", "window_size"}):
        pytest.skip("parts do not serve this")
    monkeypatch.setattr(schedules, "serves", lambda *given: in_parts)
    mailbox = Mailbox()
    monkeypatch.setattr(transports, "Exchange", partial(Exchange, mailbox))
    monkeypatch.setattr(groups, "gather", mailbox.gather)
    monkeypatch.setattr(groups, "swap", mailbox.swap)
    x = {key: value.to(getattr(torch, dtype)) for key, value in inputs(documents).items()}
    sink = torch.linspace(-1, 1, HEADS)
    slopes = {"alibi_slopes": torch.linspace(0.1, 0.5, HEADS)} if given.get("alibi") else {}
    options = {key: value for key, value in given.items() if key != "alibi"}
    options.setdefault("causal", False)
    window = options.get("window_size", (-1, 0 if options["causal"] else -1))
    layout = Layout(order, TOKENS, RANKS, DOCUMENTS if documents else None)
    dim = 0 if documents else 1

    def run(rank: int) -> dict[str, torch.Tensor]:
        places = torch.from_numpy(tokens_of(order, TOKENS, rank, RANKS).copy())
        mine = {key: value.index_select(dim, places).to(device) for key, value in x.items()}
        ranks = groups.Ranks(groups.ALONE, groups.Axis(None, rank, RANKS), None)
        schedule = schedules.Schedule(ranks, layout, window, gathered, options | {k: s.to(device) for k, s in slopes.items()})
        q, k, v = mine["q"], mine["k"], mine["v"]
        schedule.sink = sink.to(device)
        out, lse = schedule.forward(q, k, v)
        dsink = torch.zeros_like(schedule.sink)
        dlse = rows_of(mine["dout"], documents)
        dq, dk, dv = schedule.backward(mine["dout"], q, k, v, out, lse, dlse, dsink)
        made = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "dsink": dsink}
        return {"places": places} | {n: t.cpu() for n, t in made.items()}

    with ThreadPoolExecutor(RANKS) as pool:
        parts = list(pool.map(run, range(RANKS)))
    q, k, v, dout = (value.float() for value in x.values())
    packed = {f"cu_seqlens_{side}": torch.tensor(DOCUMENTS, dtype=torch.int32) for side in "qk"} if documents else {}
    forward = {n: value for n, value in options.items() if n != "deterministic"}
    out, lse = libflash.attention(q, k, v, return_lse=True, learnable_sink=sink, **forward, **slopes, **packed)
    dsink = torch.zeros_like(sink)
    gradients = libflash.attention_backward(
        dout, q, k, v, out, lse, dlse=rows_of(dout, documents), learnable_sink=sink, dsink=dsink, **options, **slopes, **packed
    )
    exact = dict(zip(("dq", "dk", "dv"), gradients, strict=True)) | {"out": out, "lse": lse, "dsink": dsink}
    for n, wanted in exact.items():
        got = torch.zeros_like(wanted)
        for part in parts:
            if n == "dsink":
                got += part[n]
            else:
                got.index_copy_(wanted.ndim - 1 if n == "lse" else dim, part["places"], part[n].float())
        error = (got - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
        assert error <= (1e-5 if dtype == "float32" else 1e-2), f"{n}: {error}"
