"""Trains a small GPT with QK-clip, and follows its curvature by Hessian-vector products through libflash's attention.

    python tests/examples/curvature_gpt.py --small                    on any machine, within a minute
    python tests/examples/curvature_gpt.py --chart curvature.png      also draws the curves; needs matplotlib

QK-clip (of the optimizer MuonClip): attention reports the largest score of each head as it runs. Where it exceeds a limit, the
rows of the projection that make the head's queries and keys are scaled down. Two models with the same seed are trained, one
without clipping; the learning rate is so high that its scores grow.

The curvature is the largest eigenvalue of the loss's Hessian, by power iteration. A Hessian-vector product is the forward-mode
derivative of the gradient: torch.func.jvp(torch.func.grad(loss)). It is compared with a difference quotient of gradients.

Exit code 1 if a loss does not fall, a clipped head stays far above the limit, or the two Hessian-vector products disagree.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable

import libflash.torch
import torch
import torch.nn.functional as F
from gpt import files, text
from gpt.model import GPT, Shape
from gpt.training import use_one_thread

Parameters = dict[str, torch.Tensor]


@dataclasses.dataclass
class Curves:
    losses: list[float] = dataclasses.field(default_factory=list)
    largest: list[float] = dataclasses.field(default_factory=list)  # score over all blocks and heads, one per step
    clipped: int = 0  # heads, over all steps
    curvature: list[tuple[int, float]] = dataclasses.field(default_factory=list)  # (step, largest eigenvalue)


class Model:
    def __init__(self, shape: Shape, rate: float) -> None:
        torch.manual_seed(0)
        self.shape, self.gpt = shape, GPT(shape)
        self.positions = torch.arange(shape.context)[None]
        self.max_logits = torch.zeros(shape.blocks, shape.heads)
        self.optimizer = torch.optim.AdamW(self.gpt.parameters(), lr=rate, betas=(0.9, 0.95))

    def attend_with_maxima(self, number: int, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.unbind(2)
        return libflash.torch.attention(q, k, v, causal=True, max_logit=self.max_logits[number])

    @staticmethod
    def attend(number: int, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.unbind(2)
        return libflash.torch.attention(q, k, v, causal=True)

    def loss(self, pieces: torch.Tensor, parameters: Parameters | None = None) -> torch.Tensor:
        """In nats per token. With `parameters`, a function of them."""
        if parameters is None:
            logits = self.gpt(pieces[:, :-1], self.positions, self.attend_with_maxima)
        else:
            logits = torch.func.functional_call(self.gpt, parameters, (pieces[:, :-1], self.positions, self.attend))
        return F.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())

    def step(self, pieces: torch.Tensor) -> float:
        loss = self.loss(pieces)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def clip(self, limit: float) -> int:
        """QK-clip: scores are products of queries and keys, so each gets the square root of the factor."""
        factors = (limit / self.max_logits.clamp(min=limit)).sqrt()
        for block, factor in zip(self.gpt.blocks, factors, strict=True):
            for parameter in (block.qkv.weight, block.qkv.bias):
                of_heads = parameter.view(3, self.shape.heads, -1)  # query, key, value
                of_heads[:2].mul_(factor[:, None])
        return int((factors < 1).sum())


def parameters_of(model: Model) -> Parameters:
    return {name: parameter.detach() for name, parameter in model.gpt.named_parameters()}


def dot(a: Parameters, b: Parameters) -> torch.Tensor:
    return sum((a[name] * b[name]).sum() for name in a)


def hessian_product(model: Model, pieces: torch.Tensor) -> Callable[[Parameters], Parameters]:
    gradient = torch.func.grad(lambda parameters: model.loss(pieces, parameters))
    at = parameters_of(model)
    return lambda direction: torch.func.jvp(gradient, (at,), (direction,))[1]


def random_direction(model: Model) -> Parameters:
    generator = torch.Generator().manual_seed(1)
    made = {name: torch.randn(x.shape, generator=generator) for name, x in parameters_of(model).items()}
    norm = dot(made, made).sqrt()
    return {name: x / norm for name, x in made.items()}


def curvature(model: Model, pieces: torch.Tensor, iterations: int) -> float:
    """The eigenvalue of largest magnitude, by power iteration."""
    product, direction, value = hessian_product(model, pieces), random_direction(model), torch.zeros(())
    for _ in range(iterations):
        moved = product(direction)
        value = dot(direction, moved)
        norm = dot(moved, moved).sqrt()
        direction = {name: x / norm for name, x in moved.items()}
    return float(value)


def disagreement(model: Model, pieces: torch.Tensor, step: float = 1e-2) -> float:
    """Of the Hessian-vector product with a central difference of gradients, relative; both are float32."""
    direction, at = random_direction(model), parameters_of(model)
    gradient = torch.func.grad(lambda parameters: model.loss(pieces, parameters))
    forward, back = (gradient({name: x + sign * step * direction[name] for name, x in at.items()}) for sign in (1, -1))
    wanted = {name: (forward[name] - back[name]) / (2 * step) for name in at}
    got = hessian_product(model, pieces)(direction)
    error = {name: got[name] - wanted[name] for name in at}
    return float((dot(error, error) / dot(wanted, wanted)).sqrt())


def train(options: argparse.Namespace, data: torch.Tensor, limit: float | None) -> tuple[Model, Curves]:
    shape = Shape(text.VOCABULARY, options.context, options.blocks, options.heads, options.head_dim)
    model, curves = Model(shape, options.rate), Curves()
    fixed = text.pieces(data, options.batch, options.context + 1, seed=10**6)
    name = "no clip" if limit is None else "QK-clip"
    for step in range(options.steps):
        curves.losses.append(model.step(text.pieces(data, options.batch, options.context + 1, seed=step)))
        curves.largest.append(float(model.max_logits.max()))
        if limit is not None:
            curves.clipped += model.clip(limit)
        if step % options.every == 0 or step == options.steps - 1:
            curves.curvature.append((step, curvature(model, fixed, options.iterations)))
            print(
                f"{name:8} step {step:4}   loss {curves.losses[-1]:.3f}   largest score {curves.largest[-1]:8.2f}"
                f"   clipped {curves.clipped:4}   curvature {curves.curvature[-1][1]:9.2f}",
                flush=True,
            )
    return model, curves


def draw(path: pathlib.Path, results: dict[str, Curves], limit: float) -> None:
    from matplotlib.figure import Figure  # imported here, because only the chart needs it

    figure = Figure(figsize=(12, 3.5), layout="constrained")
    axes = figure.subplots(1, 3)
    for name, curves in results.items():
        axes[0].plot(curves.losses, label=name)
        axes[1].plot(curves.largest, label=name)
        axes[2].plot(*zip(*curves.curvature, strict=True), label=name)
    axes[1].axhline(limit, color="gray", linewidth=0.8)
    for axis, title in zip(axes, ("loss (nats per token)", "largest score", "largest eigenvalue of the Hessian"), strict=True):
        axis.set(title=title, xlabel="step")
    axes[1].set_yscale("log")
    axes[0].legend()
    figure.savefig(path, dpi=120)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="for a test on any machine")
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--limit", type=float, default=20.0, help="of the scores, for QK-clip")
    parser.add_argument("--json", type=pathlib.Path, help="write the curves there")
    parser.add_argument("--chart", type=pathlib.Path, help="draw the curves there, as PNG")
    options = parser.parse_args(arguments)
    files.check(parser, options)
    sizes = dict(context=64, blocks=2, heads=4, head_dim=16, batch=8, steps=60, every=15, iterations=6, rate=2e-2)
    large = dict(context=256, blocks=4, heads=6, head_dim=32, batch=8, steps=400, every=25, iterations=12, rate=1e-2)
    vars(options).update(sizes if options.small else large)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    if options.small:
        use_one_thread()
    data = text.load(1 << 20)
    results, models = {}, {}
    for name, limit in (("no clip", None), ("QK-clip", options.limit)):
        models[name], results[name] = train(options, data, limit)
    error = disagreement(models["QK-clip"], text.pieces(data, 2, options.context + 1, seed=0))
    print(f"Hessian-vector product and difference of gradients differ by {100 * error:.2f} %")
    if options.json:
        options.json.write_text(json.dumps({name: dataclasses.asdict(curves) for name, curves in results.items()}))
    if options.chart:
        draw(options.chart, results, options.limit)
    wrong = [f"the loss of {name} does not fall" for name, x in results.items() if not x.losses[-1] < x.losses[0] - 1]
    if max(results["QK-clip"].largest[1:]) > 2 * options.limit:
        wrong.append("a clipped head is far above the limit")
    if not error < 0.05:
        wrong.append("the Hessian-vector product is wrong")
    print("\n".join(wrong) or "good")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
