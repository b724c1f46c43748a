"""Trains a decoder of Llama's shape on long sequences, the context split over several processes or GPUs.

    python tests/examples/train_long.py --small                        on any machine, within a minute: 1 and 2 processes
    python tests/examples/train_long.py --ranks 1 2 --context 65536     1 GPU, then 2 GPUs of this machine
    torchrun --nnodes 2 --nproc-per-node 8 tests/examples/train_long.py --context 262144

Attention is libflash.torch.context_parallel_attention; the weights, gradients and the optimizer are split over the same ranks by
FSDP2. The text is that of Python's standard library, a token is a byte. Every number of ranks starts from the same weights and
sees the same tokens: the curves of the loss must agree but for rounding errors, which training amplifies.

Exit code 1 if a loss does not fall or a curve is further away from the first one than --limit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpt import files, text
from gpt.llama import LlamaShape
from gpt.long_training import Setting, train
from gpt.training import use_one_thread
from gpt.verdict import exit_code, falls, root_mean_square

import libflash

SMALL = LlamaShape(text.VOCABULARY, blocks=2, heads=4, key_heads=2, head_dim=32, hidden=256)
WHOLE = LlamaShape(text.VOCABULARY, blocks=16, heads=32, key_heads=8, head_dim=64, hidden=8192)
LIMIT = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # nats per token, root mean square over the steps


def run_rank(rank: int, ranks: int, folder: str, setting: Setting, one_thread: bool) -> None:
    """A process that this program started."""
    if one_thread:
        use_one_thread()
    if setting.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend_of(setting), init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    train_and_save(setting, pathlib.Path(folder) / "result.json")
    dist.destroy_process_group()
    leave(0)


def leave(code: int) -> NoReturn:
    """End the process without the end of the interpreter, which a thread of gloo can abort: it may still drop tensors of the last
    collective, for which it needs Python.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def train_and_save(setting: Setting, path: pathlib.Path) -> None:
    first = dist.get_rank() == 0
    result = train(setting, show_progress if first else lambda line: None)
    if first:
        print(file=sys.stderr)
        path.write_text(json.dumps(result))


def show_progress(line: str) -> None:
    print(f"\r{line}", end="", file=sys.stderr, flush=True)


def backend_of(setting: Setting) -> str:
    return "nccl" if setting.device == "cuda" else "gloo"


def started_here(ranks: int, setting: Setting, one_thread: bool) -> dict[str, Any]:
    """Train with as many new processes; an exception of one ends all and is raised here. The processes come from a server that
    has imported PyTorch once for all of them.
    """
    multiprocessing.set_forkserver_preload(["torch._dynamo", "libflash.torch"])
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run_rank, (ranks, folder, setting, one_thread), nprocs=ranks, start_method="forkserver")
        return json.loads((pathlib.Path(folder) / "result.json").read_text())


def started_by_torchrun(setting: Setting) -> dict[str, Any] | None:
    """Train as one of torchrun's processes; the result on the first, None on the others."""
    if setting.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend_of(setting))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "result.json"
        train_and_save(setting, path)
        result = json.loads(path.read_text()) if path.exists() else None
    dist.destroy_process_group()
    return result


def report(ranks: int, setting: Setting, result: dict[str, Any], first: list[float]) -> None:
    losses = result["losses"]
    rate = setting.batch * setting.context / statistics.median(result["seconds"][1:])
    peak = f"{result['peak_bytes'] / 1e9:.2f} GB" if result["peak_bytes"] else "-"
    loss = f"{losses[0]:.3f} -> {losses[-1]:.3f}"
    print(f"{ranks:5} {rate:10.0f} {peak:>9}  {loss:<14} {root_mean_square(first, losses):10.1e}")
    print(f"      {result['scheme'].splitlines()[0]}", flush=True)


def verdicts(curves: dict[int, list[float]], limit: float) -> list[str]:
    """What is wrong; NaN is always."""
    wrong = []
    first = next(iter(curves.values()))
    for ranks, curve in curves.items():
        if not falls(curve):
            wrong.append(f"{ranks} ranks: the loss does not fall")
        difference = root_mean_square(first, curve)
        if not difference <= limit:
            wrong.append(f"{ranks} ranks: the curve differs from the first by {difference:.2g}, more than {limit:.2g}")
    return wrong


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--small", action="store_true", help="2 blocks, 4 heads of 32, 512 tokens, 20 steps, one thread a process"
    )
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of processes to train with, one after the other")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the computation; default: bfloat16 on a GPU")
    parser.add_argument("--context", type=int, help="tokens of a sequence, over all ranks")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--scheme", default="auto", help="of context_parallel_attention")
    parser.add_argument("--order", choices=["zigzag", "contiguous"], default="zigzag")
    parser.add_argument("--recompute", action="store_true", help="keep no activations of a block; compute them again in backward")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, help="of the distance between curves, nats per token")
    parser.add_argument("--json", type=pathlib.Path, help="write what was measured to this file")
    options = parser.parse_args(arguments)
    if os.environ.get("RANK", "0") == "0":  # the process that writes, if torchrun started several
        files.check(parser, options)
    cuda = options.device == "cuda"
    options.dtype = getattr(torch, options.dtype or ("bfloat16" if cuda else "float32"))
    options.ranks = options.ranks or ([1, torch.cuda.device_count()] if cuda and not options.small else [1, 2])
    options.context = options.context or (512 if options.small else 32768)
    options.steps = options.steps or (20 if options.small else 50)
    options.limit = options.limit or LIMIT[options.dtype]
    if options.steps < 2:
        parser.error(f"--steps is {options.steps}; it must be at least 2, of which the first is not timed")
    if cuda and "RANK" not in os.environ and max(options.ranks) > torch.cuda.device_count():
        parser.error(f"--ranks is {max(options.ranks)}; this machine has {torch.cuda.device_count()} GPUs")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    setting = Setting(
        SMALL if options.small else WHOLE, options.context, options.batch, options.steps, options.seed, options.device,
        options.dtype, options.scheme, options.order, options.recompute,
    )  # fmt: skip
    results: dict[int, dict[str, Any]] = {}
    if "RANK" in os.environ:
        result = started_by_torchrun(setting)
        if result is None:
            return 0
        results[int(os.environ["WORLD_SIZE"])] = result
    else:
        for ranks in options.ranks:
            results[ranks] = started_here(ranks, setting, options.small)
    first = next(iter(results.values()))["losses"]
    print(
        f"libflash {libflash.__version__}, PyTorch {torch.__version__}, {options.device}, {str(options.dtype)[6:]}: "
        f"{setting.shape.blocks} blocks, {options.batch} x {options.context} tokens a step, {options.steps} steps"
    )
    print("ranks   tokens/s      peak  loss           difference")
    for ranks, result in results.items():
        report(ranks, setting, result, first)
    if options.json:
        options.json.write_text(json.dumps({str(ranks): result for ranks, result in results.items()}, indent=1) + "\n")
    wrong = verdicts({ranks: result["losses"] for ranks, result in results.items()}, options.limit)
    return exit_code(wrong)


if __name__ == "__main__":
    leave(main())
