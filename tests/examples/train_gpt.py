"""Trains a GPT of GPT-2's small shape on the sources of Python's standard library, with attention by libflash and by PyTorch.

    python tests/examples/train_gpt.py                   on a GPU; contexts of 1024, 8192 and 16384 tokens
    python tests/examples/train_gpt.py --small           on any machine, within a minute

Model, seeds, data and tokens per step are the same; only the attention differs. The contenders take their steps in turn, in one
process; times are medians. "pytorch default" is scaled_dot_product_attention with its own choice, "pytorch flash" the same
restricted to FlashAttention-2. Results of two exact methods differ by rounding errors, which training amplifies. The distance
between PyTorch's curves is therefore the measure for that of libflash from the first one. "pytorch nudged" is "default" with
initial weights that differ by a rounding error.

Exit code 1 if a loss does not fall or libflash's curve is further away than twice that.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import statistics
import sys
import time

import torch
from gpt import attention, checkpoint, files, text
from gpt.model import Shape
from gpt.training import Trainer, use_one_thread
from gpt.verdict import exit_code, falls, root_mean_square

import libflash

OURS = "libflash"
NUDGED = "pytorch nudged"
NOISE_FACTOR = 2.0  # times the largest difference between PyTorch's curves
LEAST_LIMIT = {"float32": 1e-5, "bfloat16": 5e-3}  # nats; if PyTorch's curves nearly coincide
UNTIMED = 5  # steps of each contender


@dataclasses.dataclass(frozen=True)
class Row:
    """Results of a contender at one context length; losses in nats per token, one per step."""

    context: int
    batch: int
    contender: str
    ran: str
    tokens_per_second: float
    peak_bytes: int | None  # weights, optimizer and temporaries; None if not measured
    losses: list[float]
    difference: float  # root mean square over the steps, from the first contender


class Contender:
    """An attention function and the model that it trains."""

    def __init__(self, name: str, shape: Shape, options: argparse.Namespace) -> None:
        self.name, self.device = name, options.device
        self.backend = "default" if name in (OURS, NUDGED) else name.removeprefix("pytorch ")
        way = attention.by_libflash if name == OURS else attention.by_pytorch
        self.trainer = Trainer(
            shape, way, options.dtype, options.device, options.seed, nudged=name == NUDGED, compiled=options.compile
        )
        self.ran = self.what_runs(shape, options)
        self.seconds: list[float] = []
        self.losses: list[torch.Tensor] = []
        self.step_bytes = 0

    def what_runs(self, shape: Shape, options: argparse.Namespace) -> str:
        size = (1, shape.context, 3, shape.heads, shape.head_dim)
        like = torch.empty(size, dtype=options.dtype, device=options.device)[:, :, 0]
        with attention.held_to(self.backend):
            return attention.libflash_choice(like) if self.name == OURS else attention.pytorch_choice(like)

    def step(self, pieces: torch.Tensor) -> None:
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        with attention.held_to(self.backend):
            self.losses.append(self.trainer.step(pieces))
        if cuda:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - start)
        if cuda and len(self.seconds) > UNTIMED:
            self.step_bytes = max(self.step_bytes, torch.cuda.max_memory_allocated() - before)

    def curve(self) -> list[float]:
        return [loss.item() for loss in self.losses]


def compared(context: int, options: argparse.Namespace) -> list[Row]:
    """All contenders at one context length, PyTorch's first."""
    shape = Shape(text.VOCABULARY, context, options.blocks, options.heads, options.head_dim, options.positions)
    batch = max(1, options.tokens // context)
    source = text.load()
    names = [f"pytorch {backend}" for backend in options.peers] + [NUDGED, OURS]
    contenders = [Contender(name, shape, options) for name in names]
    for step in range(options.steps):
        pieces = text.pieces(source, batch, context + 1, options.seed * 1_000_003 + step).to(options.device)
        turn = step % len(contenders)
        for contender in contenders[turn:] + contenders[:turn]:
            contender.step(pieces)
    if options.save:
        checkpoint.save(contenders[-1].trainer.model, options.save)
    first = contenders[0].curve()
    return [row(contender, context, batch, first) for contender in contenders]


def row(contender: Contender, context: int, batch: int, first: list[float]) -> Row:
    median = statistics.median(contender.seconds[UNTIMED:])
    peak = contender.trainer.state_bytes + contender.step_bytes if contender.step_bytes else None
    curve = contender.curve()
    return Row(
        context, batch, contender.name, contender.ran, batch * context / median, peak, curve, root_mean_square(first, curve)
    )


def limit(rows: list[Row], dtype: str) -> float:
    """Limit of the distance between the curve of libflash and that of PyTorch's own choice."""
    peers = [row.losses for row in rows if row.contender != OURS]
    noise = max((root_mean_square(a, b) for a, b in itertools.combinations(peers, 2)), default=0.0)
    return max(NOISE_FACTOR * noise, LEAST_LIMIT[dtype])


def verdicts(rows: list[Row], dtype: str) -> list[str]:
    """The errors of the results at one context length; NaN is always one."""
    wrong = []
    for row in rows:
        if not falls(row.losses):
            wrong.append(f"context {row.context}: the loss of {row.contender} does not fall")
    allowed = limit(rows, dtype)
    if not rows[-1].difference <= allowed:
        wrong.append(f"context {rows[-1].context}: the curves differ by {rows[-1].difference:.2g}, more than {allowed:.2g}")
    return wrong


HEADINGS = "context batch  attention         tokens/s  ratio      peak  loss           difference"


def line(row: Row, first: Row) -> str:
    peak = f"{row.peak_bytes / 1e9:6.2f} GB" if row.peak_bytes else "-"
    loss = f"{row.losses[0]:.3f} -> {row.losses[-1]:.3f}"
    return (
        f"{row.context:7} {row.batch:5}  {row.contender:<16} {row.tokens_per_second:9.0f} "
        f"{row.tokens_per_second / first.tokens_per_second:6.2f} {peak:>9}  {loss:<14} {row.difference:10.1e}"
    )


def report(rows: list[Row], dtype: str) -> None:
    for row in rows:
        print(line(row, rows[0]))
    ran = "; ".join(f"{row.contender}: {row.ran}" for row in rows)
    print(f"        {ran}; a difference up to {limit(rows, dtype):.1e} is noise", flush=True)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="2 blocks, 4 heads of 32, short contexts, 30 steps, one thread")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU")
    parser.add_argument("--context", type=int, nargs="+", help="tokens of a sequence: one table each")
    parser.add_argument("--tokens", type=int, help="tokens a step; the batch follows")
    parser.add_argument("--steps", type=int, help="of each contender at each context")
    parser.add_argument(
        "--head-dim", type=int, help="default: 64 (--small: 32); the channels of all heads together stay as they are"
    )
    parser.add_argument("--positions", choices=["learned", "rotary"], default="learned")
    parser.add_argument("--peers", nargs="+", choices=list(attention.BACKENDS), help="PyTorch's ways; the first is the measure")
    parser.add_argument("--compile", action="store_true", help="the model through torch.compile, for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=pathlib.Path, help="the model that libflash trained, for decode_gpt.py; one context only")
    parser.add_argument("--json", type=pathlib.Path, help="write what was measured to this file")
    options = parser.parse_args(arguments)
    files.check(parser, options)
    cuda = options.device.type == "cuda"
    options.dtype = getattr(torch, options.dtype or ("bfloat16" if cuda else "float32"))
    options.blocks, channels = (2, 128) if options.small else (12, 768)
    options.head_dim = options.head_dim or (32 if options.small else 64)
    if options.head_dim < 1 or channels % options.head_dim:
        parser.error(f"--head-dim is {options.head_dim}; it must divide {channels}, the channels of all heads together")
    options.heads = channels // options.head_dim
    options.context = options.context or ([64, 256] if options.small else [1024, 8192, 16384])
    options.tokens = options.tokens or (512 if options.small else 16384)
    options.steps = options.steps or (30 if options.small else 100)
    options.peers = options.peers or (["default", "flash"] if cuda else ["default", "math"])
    if options.steps <= UNTIMED:
        parser.error(f"--steps is {options.steps}; it must be more than {UNTIMED}, which are not timed")
    if options.save and len(options.context) != 1:
        parser.error(f"--save takes the model of one --context, not of {len(options.context)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    if options.small:
        use_one_thread()
    dtype = str(options.dtype).removeprefix("torch.")
    name = torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else "CPU"
    print(
        f"libflash {libflash.__version__}, PyTorch {torch.__version__}, {name}, {dtype}: {options.blocks} blocks, "
        f"{options.heads} heads of {options.head_dim}, {options.steps} steps{', compiled' if options.compile else ''}"
    )
    print(HEADINGS)
    rows: list[Row] = []
    wrong: list[str] = []
    for context in options.context:
        found = compared(context, options)
        report(found, dtype)
        wrong += verdicts(found, dtype)
        rows += found
    if options.json:
        setting = {"torch": torch.__version__, "libflash": libflash.__version__, "device": name, "dtype": dtype}
        setting |= {"positions": options.positions, "compiled": options.compile, "seed": options.seed}
        options.json.write_text(json.dumps(setting | {"rows": [dataclasses.asdict(row) for row in rows]}, indent=1) + "\n")
    return exit_code(wrong)


if __name__ == "__main__":
    sys.exit(main())
