"""A small inference engine on libflash.decode: many requests at a time, on a CPU.

    python tests/examples/train_gpt.py --context 1024 --positions rotary --save gpt.pt
    python tests/examples/serve_gpt.py --checkpoint gpt.pt
    python tests/examples/serve_gpt.py --small --check      on any machine, within a minute; trains a model first

Requests come and go while others generate (continuous batching). Prompts are read in chunks beside rows that generate, in one
call of libflash.decode. Prompts that begin alike share pages of the cache (--no-share: not). Tokens that followed earlier in the
text are drafted as a tree, and one call finds which of them the model agrees with (--nodes 1: no drafts). The cache may have 8
bits (--cache).

--check generates every text again, alone, without drafts and shared pages: exit code 1 if logits differ by more than rounding
errors, or a token differs that rounding errors do not explain. Rows of attention are invariant (--free: not), and every step has
the same number of rows, so that logits have the same bits; only those after a drafted branch differ in their last bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import time

import torch
from gpt import checkpoint, files, text
from gpt.draft import MOST_NODES
from gpt.engine import Engine, Request, Settings
from gpt.model import GPT, Shape
from gpt.paged import CODES
from gpt.training import trained_briefly, use_one_thread
from gpt.verdict import exit_code

import libflash

# The largest difference of logits by rounding errors. Keys that differ by one may have neighbouring codes.
NOISE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
CODE_NOISE = {"int8": 0.02, "e4m3": 0.1, "e5m2": 0.2}
# Of what is not given: with --small, and without.
SIZES = {"requests": (12, 32), "shared": (40, 256), "prompt": (24, 128), "new": (32, 128), "train_steps": (60, 300)}


def trained(options: argparse.Namespace) -> GPT:
    """The checkpoint's model, or one after a short training."""
    if options.checkpoint:
        return checkpoint.load_or_exit(options.checkpoint, torch.device("cpu"), options.dtype)
    blocks, heads, head_dim = (2, 4, 32) if options.small else (6, 6, 64)
    shape = Shape(text.VOCABULARY, options.context, blocks, heads, head_dim, options.positions)
    return trained_briefly(shape, options.train_steps, 1024, options.dtype, torch.device("cpu"), options.seed)


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """Of different lengths; all but every fourth begin with the same text."""
    source = text.load()
    beginning = text.pieces(source, 1, options.shared, options.seed - 1)[0].tolist()
    made = []
    for number, piece in enumerate(text.pieces(source, options.requests, options.prompt, options.seed - 2).tolist()):
        own = piece[: 1 + (number * 7) % options.prompt]
        made.append(own if number % 4 == 3 else beginning + own)
    return made


def serve(engine: Engine, given: list[list[int]], new: int, arrivals: int) -> list[Request]:
    """Requests arrive a few at each step."""
    coming, requests = list(given), []
    start, said = time.perf_counter(), 0.0
    while coming or engine.busy:
        for prompt in coming[:arrivals]:
            requests.append(engine.add(prompt, new))
        del coming[:arrivals]
        engine.step()
        seconds = time.perf_counter() - start
        if sys.stderr.isatty() and seconds > said + 0.2:
            said = seconds
            print(f"\r{progress(engine, seconds)}", end="", file=sys.stderr, flush=True)
    if said:
        print(file=sys.stderr)
    return requests


def progress(engine: Engine, seconds: float) -> str:
    counts = engine.counts
    return (
        f"step {counts.steps}: {len(engine.running)} running, {len(engine.waiting)} waiting, "
        f"{engine.pages.available} pages available, {counts.generated} tokens, {counts.generated / seconds:.0f} tokens/s "
    )


@dataclasses.dataclass(frozen=True)
class Check:
    """The texts of the engine against those of each request alone."""

    same: int  # texts with the same tokens
    equal: int  # texts whose logits are the same too, bit for bit
    texts: int
    difference: float  # the largest of the best logits, up to the first different token
    gap: float  # the largest at a first different token, of the two best logits of the request alone
    limit: float
    seconds: float

    def complaints(self) -> list[str]:
        wrong = []
        if not self.difference <= self.limit:
            wrong.append(f"logits differ from those alone by {self.difference:.2g}, more than {self.limit:.2g}")
        if not self.gap <= 2 * self.limit:
            wrong.append(
                f"another token than alone although the best one leads by {self.gap:.2g}, more than twice {self.limit:.2g}"
            )
        return wrong


def check(model: GPT, requests: list[Request], options: argparse.Namespace) -> Check:
    alone = dataclasses.replace(settings(options), batch=1, share=False, nodes=1)
    same, equal, gap, start = 0, 0, 0.0, time.perf_counter()
    apart: list[torch.Tensor] = []
    for request in requests:
        (other,) = serve(Engine(model, alone, options.dtype), [request.prompt], request.new, 1)
        same += other.text == request.text
        equal += (other.text, other.best, other.gaps) == (request.text, request.best, request.gaps)
        pairs = zip(other.text[len(other.prompt) :], request.text[len(other.prompt) :], strict=True)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is not None:
            gap = max(gap, other.gaps[first])
        upto = slice(None if first is None else first + 1)
        apart.append(torch.tensor(other.best[upto]) - torch.tensor(request.best[upto]))
    limit = max(NOISE[options.dtype], CODE_NOISE.get(options.cache, 0.0))
    return Check(same, equal, len(requests), torch.cat(apart).abs().max().item(), gap, limit, time.perf_counter() - start)


def settings(options: argparse.Namespace) -> Settings:
    return Settings(
        options.batch, options.budget, options.pages, options.page_size, not options.no_share, options.nodes, options.depth,
        options.cache, not options.free,
    )  # fmt: skip


def report(engine: Engine, requests: list[Request], seconds: float) -> None:
    counts = engine.counts
    read = sum(len(request.prompt) for request in requests)
    print(f"{counts.generated} tokens of {len(requests)} requests in {seconds:.2f} s: {counts.generated / seconds:.0f} tokens/s")
    print(f"{counts.steps} steps of {counts.rows / counts.steps:.1f} rows; {counts.shared} of {read} tokens of prompts shared")
    share = counts.accepted / counts.drafted if counts.drafted else 0.0
    print(f"drafted {counts.drafted} tokens, {counts.accepted} accepted ({share:.0%})")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="2 blocks, 4 heads of 32, short texts, one thread")
    parser.add_argument("--check", action="store_true", help="compare with the text of each request alone")
    parser.add_argument("--checkpoint", type=pathlib.Path, help="what train_gpt.py --save wrote; default: train a model first")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--requests", type=int, help="number of requests")
    parser.add_argument("--arrivals", type=int, default=2, help="requests that arrive at each step")
    parser.add_argument("--shared", type=int, help="tokens with which most prompts begin")
    parser.add_argument("--prompt", type=int, help="most further tokens of a prompt")
    parser.add_argument("--new", type=int, help="tokens to generate for each")
    parser.add_argument("--batch", type=int, default=8, help="most requests at a time")
    parser.add_argument("--budget", type=int, default=48, help="most rows of a step")
    parser.add_argument("--pages", type=int, default=256, help="pages of the cache")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--no-share", action="store_true", help="no shared pages")
    parser.add_argument("--nodes", type=int, default=8, help="tokens of a draft with the one before it; 1: none")
    parser.add_argument("--depth", type=int, default=5, help="most tokens of a draft one after the other")
    parser.add_argument("--cache", choices=["same", *CODES], default="same", help="type of the cache")
    parser.add_argument("--free", action="store_true", help="rows of attention that are not invariant")
    parser.add_argument("--positions", choices=["learned", "rotary"], default="rotary", help="of a model that is trained first")
    parser.add_argument("--train-steps", type=int, help="of a model that is trained first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path, help="write what was measured to this file")
    options = parser.parse_args(arguments)
    files.check(parser, options)
    options.dtype = getattr(torch, options.dtype)
    for name, (small, large) in SIZES.items():
        if getattr(options, name) is None:
            setattr(options, name, small if options.small else large)
    options.context = options.shared + options.prompt + options.new
    for name in (*SIZES, "nodes", "depth", "budget", "batch", "arrivals", "pages", "page_size"):
        given = getattr(options, name)
        if given < 1 or (name == "nodes" and given > MOST_NODES):
            rule = f"1 to {MOST_NODES}" if name == "nodes" else "1 or more"
            parser.error(f"--{name.replace('_', '-')} is {given}; it must be {rule}")
    if (room := options.pages * options.page_size) < options.context:
        parser.error(f"--pages is {options.pages}, room for {room} tokens; a request has up to {options.context}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    if options.small:
        use_one_thread()
    model = trained(options)
    if model.shape.context < options.context:
        print(f"the checkpoint's context is {model.shape.context}; requests have up to {options.context} tokens", file=sys.stderr)
        return 2
    engine = Engine(model, settings(options), options.dtype)
    dtype = str(options.dtype).removeprefix("torch.")
    kept = "" if options.cache == "same" else f", a cache of {options.cache}"
    print(f"libflash {libflash.__version__}, {dtype}{kept}: {options.requests} requests, {options.new} tokens for each")
    given = prompts(options)
    with torch.no_grad():
        start = time.perf_counter()
        requests = serve(engine, given, options.new, options.arrivals)
        seconds = time.perf_counter() - start
        report(engine, requests, seconds)
        found = check(model, requests, options) if options.check else None
    first = requests[0]
    print(
        f"{text.shown(torch.tensor(first.prompt))[-40:]!r} goes on {text.shown(torch.tensor(first.text[len(first.prompt) :]))!r}"
    )
    wrong = []
    if found is not None:
        alone = engine.counts.generated / found.seconds
        print(f"alone, {alone:.0f} tokens/s: the same tokens in {found.same} of {found.texts} texts", end="")
        print("" if found.same == found.texts else f"; first others where the two best are {found.gap:.1e} apart")
        print(f"logits: the same bits in {found.equal} of {found.texts} texts", end="")
        print(f"; differ by {found.difference:.1e}; up to {found.limit:.1e} is noise")
        wrong = found.complaints()
    if options.json:
        measured = {"seconds": seconds, "counts": dataclasses.asdict(engine.counts), "texts": [one.text for one in requests]}
        measured["check"] = None if found is None else dataclasses.asdict(found)
        options.json.write_text(json.dumps(measured, indent=1) + "\n")
    return exit_code(wrong)


if __name__ == "__main__":
    sys.exit(main())
