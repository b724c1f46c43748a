"""Generates text greedily with a key/value cache, the attention of every step by libflash.decode and by plain PyTorch.

    python tests/examples/train_gpt.py --context 1024 --steps 300 --save gpt.pt
    python tests/examples/decode_gpt.py --checkpoint gpt.pt
    python tests/examples/decode_gpt.py --small           on any machine, within a minute; trains a model first

"pytorch slices" attends to slices of the cache, "pytorch mask" to the whole cache under a mask, which a CUDA graph can capture;
on a GPU libflash and the latter are timed as graphs too. The contenders generate in turn, in one process; times are medians.

Exit code 1 if logits for the same tokens differ by more than rounding errors, or if libflash generates another token than PyTorch
and rounding errors do not explain it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time

import torch
from gpt import attention, checkpoint, files, text
from gpt.cache import Cache, LibflashCache, MaskedCache, SlicedCache
from gpt.generation import Generation
from gpt.model import GPT, Shape
from gpt.training import trained_briefly, use_one_thread
from gpt.verdict import exit_code

import libflash

NOISE_FACTOR = 3.0  # times the difference between the two PyTorch versions
SLICES, MASK, OURS = "pytorch slices", "pytorch mask", "libflash"
CACHES: dict[str, type[Cache]] = {SLICES: SlicedCache, MASK: MaskedCache, OURS: LibflashCache}


@dataclasses.dataclass(frozen=True)
class Agreement:
    """libflash against "pytorch slices"; logits for the tokens that the latter generated."""

    difference: float  # largest difference of logits
    noise: float  # the same between the two PyTorch versions
    limit: float
    same: int  # sequences with the same tokens
    sequences: int
    gap: float  # at the first different token: logit of PyTorch's token minus that of libflash's, both by PyTorch

    def complaints(self) -> list[str]:
        wrong = []
        if not self.difference <= self.limit:
            wrong.append(f"logits differ by {self.difference:.2g}, more than {self.limit:.2g}")
        if not self.gap <= 2 * self.limit:
            wrong.append(f"another token although PyTorch's is better by {self.gap:.2g}, more than twice {self.limit:.2g}")
        return wrong


def rounding(logits: torch.Tensor, dtype: torch.dtype, blocks: int) -> float:
    """Bound of the rounding errors of a logit: an error in each of the two sums of a block, with random signs; eight times that,
    for the largest of many."""
    return 8 * (2 * blocks) ** 0.5 * torch.finfo(dtype).eps / 2 * logits.abs().max().item()


def agreement(generations: dict[str, Generation], dtype: torch.dtype, blocks: int) -> Agreement:
    new = generations[SLICES].run().clone()
    own = generations[OURS].run().clone()
    logits = {name: generation.logits_along(new).float() for name, generation in generations.items()}
    difference, noise = ((logits[name] - logits[SLICES]).abs().max().item() for name in (OURS, MASK))
    gap = 0.0
    for sequence, place in first_differences(new, own):
        of = logits[SLICES][sequence, place]
        gap = max(gap, (of[new[sequence, place]] - of[own[sequence, place]]).item())
    limit = max(NOISE_FACTOR * noise, rounding(logits[SLICES], dtype, blocks))
    return Agreement(difference, noise, limit, int((new == own).all(1).sum()), len(new), gap)


def first_differences(a: torch.Tensor, b: torch.Tensor) -> list[tuple[int, int]]:
    """(sequence, position) of the first tokens that differ; up to there the inputs are the same."""
    differ = a != b
    return [(sequence, int(differ[sequence].int().argmax())) for sequence in range(len(a)) if differ[sequence].any()]


def timed(generations: dict[str, Generation], rounds: int, device: torch.device) -> dict[str, float]:
    """Median seconds per step of each."""
    seconds: dict[str, list[float]] = {name: [] for name in generations}
    for number in range(rounds + 1):  # the first is not timed
        for name, generation in generations.items():
            wait(device)
            start = time.perf_counter()
            generation.run()
            wait(device)
            if number:
                seconds[name].append((time.perf_counter() - start) / generation.new)
    return {name: statistics.median(values) for name, values in seconds.items()}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def trained(options: argparse.Namespace) -> GPT:
    """The checkpoint's model, or one after a short training."""
    if options.checkpoint:
        return checkpoint.load_or_exit(options.checkpoint, options.device, options.dtype)
    blocks, heads, head_dim = (2, 4, 32) if options.small else (12, 12, 64)
    context = options.prompt + options.new
    shape = Shape(text.VOCABULARY, context, blocks, heads, head_dim, options.positions)
    return trained_briefly(shape, options.train_steps, options.train_tokens, options.dtype, options.device, options.seed)


def generations(model: GPT, prompts: torch.Tensor, options: argparse.Namespace, names: list[str]) -> dict[str, Generation]:
    made = {}
    for name in names:
        way = attention.by_libflash if name == OURS else attention.by_pytorch
        capacity = prompts.shape[1] + options.new
        cache = CACHES[name](model.shape, len(prompts), capacity, way, prompts.device, options.dtype)
        made[name] = Generation(model, cache, prompts, options.new)
    return made


def report(seconds: dict[str, float], batch: int, found: Agreement) -> None:
    print(f"{'attention':<22} {'us/step':>9} {'tokens/s':>9} {'ratio':>6}")
    for name, step in seconds.items():
        print(f"{name:<22} {step * 1e6:9.0f} {batch / step:9.0f} {next(iter(seconds.values())) / step:6.2f}")
    print(f"tokens: the same in {found.same} of {found.sequences} sequences", end="")
    print("" if found.same == found.sequences else f"; first others where the two best are {found.gap:.1e} apart")
    print(f"logits: differ by {found.difference:.1e}; PyTorch's two ways by {found.noise:.1e}; up to {found.limit:.1e} is noise")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="2 blocks, 4 heads of 32, a short prompt, one thread")
    parser.add_argument("--checkpoint", type=pathlib.Path, help="what train_gpt.py --save wrote; default: train a model first")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU")
    parser.add_argument("--batch", type=int, help="sequences")
    parser.add_argument("--prompt", type=int, help="tokens of each to begin with")
    parser.add_argument("--new", type=int, help="tokens to generate after them")
    parser.add_argument("--rounds", type=int, default=3, help="timed generations of each contender")
    parser.add_argument("--positions", choices=["learned", "rotary"], default="rotary", help="of a model that is trained first")
    parser.add_argument("--train-steps", type=int, help="of a model that is trained first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path, help="write what was measured to this file")
    options = parser.parse_args(arguments)
    files.check(parser, options)
    cuda = options.device.type == "cuda"
    options.dtype = getattr(torch, options.dtype or ("bfloat16" if cuda else "float32"))
    options.batch = options.batch or (3 if options.small else 8)
    options.prompt = options.prompt or (48 if options.small else 896)
    options.new = options.new or (24 if options.small else 128)
    options.train_steps = options.train_steps or (60 if options.small else 300)
    options.train_tokens = 512 if options.small else 16384
    if options.prompt < 3:
        parser.error(f"--prompt is {options.prompt}; it must be 3 or more")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    if options.small:
        use_one_thread()
    cuda = options.device.type == "cuda"
    model = trained(options)
    shape = model.shape
    if shape.context < options.prompt + options.new:
        sys.exit(f"--prompt and --new are {options.prompt + options.new} tokens; the model's context is {shape.context}")
    name = torch.cuda.get_device_name(options.device) if cuda else "CPU"
    dtype = str(options.dtype).removeprefix("torch.")
    print(
        f"libflash {libflash.__version__}, PyTorch {torch.__version__}, {name}, {dtype}: {shape.blocks} blocks, "
        f"{shape.heads} heads of {shape.head_dim}, {shape.positions} positions; "
        f"{options.batch} sequences of {options.prompt} + {options.new} tokens"
    )
    prompts = text.pieces(text.load(), options.batch, options.prompt, options.seed - 1).to(options.device)
    with torch.no_grad():
        made = generations(model, prompts, options, list(CACHES))
        found = agreement(made, options.dtype, shape.blocks)
        if cuda:
            graphs = generations(model, prompts, options, [MASK, OURS])
            for generation in graphs.values():
                generation.capture()
            made |= {f"{name}, graph": generation for name, generation in graphs.items()}
        seconds = timed(made, options.rounds, options.device)
    wrong = found.complaints()
    if cuda and not torch.equal(made[OURS].tokens, made[f"{OURS}, graph"].tokens):
        wrong.append("a CUDA graph of libflash's steps generates other tokens than the steps one by one")
    report(seconds, options.batch, found)
    print(f"{text.shown(prompts[0])[-60:]!r} goes on {text.shown(made[OURS].tokens[0, options.prompt :])!r}")
    if options.json:
        setting = {"torch": torch.__version__, "libflash": libflash.__version__, "device": name, "dtype": dtype}
        setting |= dataclasses.asdict(shape) | {"batch": options.batch, "prompt": options.prompt, "new": options.new}
        measured = {"seconds_per_step": seconds, "agreement": dataclasses.asdict(found)}
        options.json.write_text(json.dumps(setting | measured, indent=1) + "\n")
    return exit_code(wrong)


if __name__ == "__main__":
    sys.exit(main())
