"""Trains a small transformer to draw in one step, by MeanFlow: a loss with the derivative of attention along a direction.

    python tests/examples/mean_flow.py --small                     on any machine, within a minute
    python tests/examples/mean_flow.py --chart mean_flow.png       also draws the loss and some samples; needs matplotlib

A sample is a circle: a sequence of points, which attend to each other. With noise e, data x and z = (1 - t) x + t e, the network
u(z, r, t) learns the mean velocity of z between the times r and t. MeanFlow (arXiv 2505.13447) trains it on

    |u - target|^2,   target = (e - x) - (t - r) du/dt as a constant,   du/dt along (z, r, t) = (e - x, 0, 1)

so each step needs u, its tangent du/dt (torch.func.jvp) and the gradient of u. A drawing is then one call: x = e - u(e, 0, 1).
PyTorch's fused attention has no forward mode; the program shows what it says.

Exit code 1 if the tangent is wrong, the loss does not fall, or the drawings are not round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Callable

import libflash.torch
import torch
import torch.nn.functional as F
from gpt import files
from gpt.training import use_one_thread
from torch import nn

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """All probabilities in memory: the truth to compare with."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def by_pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x: torch.Tensor, attention: Attention) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(attention(q, k, v).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class MeanVelocity(nn.Module):
    """u(z, r, t): z (batch, points, 2), r and t (batch,)"""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        channels = options.heads * options.head_dim
        self.points = nn.Linear(2, channels)
        self.places = nn.Parameter(0.5 * torch.randn(options.points, channels))
        self.times = nn.Sequential(nn.Linear(4 * WAVES, channels), nn.SiLU(), nn.Linear(channels, channels))
        self.blocks = nn.ModuleList(Block(channels, options.heads) for _ in range(options.blocks))
        self.norm, self.velocity = nn.LayerNorm(channels), nn.Linear(channels, 2)

    def forward(self, z: torch.Tensor, r: torch.Tensor, t: torch.Tensor, attention: Attention) -> torch.Tensor:
        times = self.times(torch.cat([waves(t), waves(t - r)], -1))
        x = self.points(z) + self.places + times[:, None]
        for block in self.blocks:
            x = block(x, attention)
        return self.velocity(self.norm(x))


WAVES = 8


def waves(t: torch.Tensor) -> torch.Tensor:
    angles = t[:, None] * torch.arange(1, WAVES + 1, device=t.device)
    return torch.cat([angles.sin(), angles.cos()], -1)


def circles(count: int, points: int, generator: torch.Generator) -> torch.Tensor:
    """(count, points, 2): circles of several places and sizes, each from a start of its own."""
    place, size, start = (torch.rand(count, n, generator=generator) for n in (2, 1, 1))
    angles = 2 * math.pi * (start + torch.arange(points) / points)
    circle = (0.6 + 0.6 * size)[..., None] * torch.stack([angles.cos(), angles.sin()], -1)
    return circle + (1.2 * place - 0.6)[:, None]


def roundness(drawn: torch.Tensor) -> float:
    """How far points are from the circle through them, over its radius: 0 for circles, about 0.5 for noise."""
    radius = (drawn - drawn.mean(1, keepdim=True)).norm(dim=-1)
    return float((radius.std(1) / radius.mean(1)).mean())


@dataclasses.dataclass
class Batch:
    z: torch.Tensor
    r: torch.Tensor
    t: torch.Tensor
    velocity: torch.Tensor  # e - x, of this sample at every time


def batch(options: argparse.Namespace, generator: torch.Generator) -> Batch:
    x = circles(options.batch, options.points, generator)
    e = torch.randn(x.shape, generator=generator)
    t, r = (torch.rand(2, options.batch, generator=generator)).sort(0, descending=True).values
    r = torch.where(torch.rand(options.batch, generator=generator) < 0.5, t, r)  # half of them: the velocity at one time
    z = x + t[:, None, None] * (e - x)
    return Batch(*(y.to(options.device) for y in (z, r, t, e - x)))


def with_tangent(model: MeanVelocity, b: Batch, attention: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """u and du/dt."""
    direction = (b.velocity, torch.zeros_like(b.r), torch.ones_like(b.t))
    return torch.func.jvp(lambda z, r, t: model(z, r, t, attention), (b.z, b.r, b.t), direction)


def loss_of(model: MeanVelocity, b: Batch, attention: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, each sample by its own size as in MeanFlow, and the mean squared error."""
    u, du = with_tangent(model, b, attention)
    target = b.velocity - (b.t - b.r)[:, None, None] * du.detach()
    error = (u - target).square().mean((1, 2))
    return (error / (error.detach() + 1e-2)).mean(), error.detach().mean()


def disagreement(model: MeanVelocity, b: Batch) -> float:
    """Of the gradient of a step with that by the definition of attention, relative."""
    parameters = list(model.parameters())
    mine, wanted = (torch.autograd.grad(loss_of(model, b, a)[0], parameters) for a in (libflash.torch.attention, by_definition))
    norm = torch.stack([x.norm() for x in wanted]).norm()
    return float(torch.stack([(x - y).norm() for x, y in zip(mine, wanted, strict=True)]).norm() / norm)


def what_pytorch_says(model: MeanVelocity, b: Batch) -> str:
    try:
        loss_of(model, b, by_pytorch)
    except (RuntimeError, NotImplementedError) as error:
        return f"refuses the step: {str(error).splitlines()[0][:110]}"
    return "takes the step, with all probabilities in memory"


@torch.no_grad()
def drawn(model: MeanVelocity, options: argparse.Namespace, count: int) -> torch.Tensor:
    """One call of the network for each drawing."""
    e = torch.randn(count, options.points, 2, generator=torch.Generator().manual_seed(1)).to(options.device)
    zeros = e.new_zeros(count)
    return (e - model(e, zeros, zeros + 1, libflash.torch.attention)).cpu()


@dataclasses.dataclass
class Curves:
    errors: list[float] = dataclasses.field(default_factory=list)
    roundness: list[tuple[int, float]] = dataclasses.field(default_factory=list)  # (step, of one-step drawings)


def train(model: MeanVelocity, options: argparse.Namespace) -> Curves:
    curves, generator = Curves(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps, options.rate / 20)
    for step in range(options.steps):
        loss, error = loss_of(model, batch(options, generator), libflash.torch.attention)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        curves.errors.append(float(error))
        if step % options.every == 0 or step == options.steps - 1:
            curves.roundness.append((step, roundness(drawn(model, options, 64))))
            recent = curves.errors[-options.every :]
            off = curves.roundness[-1][1]
            print(f"step {step:5}   error {sum(recent) / len(recent):.3f}   drawings {off:.3f} from round", flush=True)
    return curves


def draw(path: pathlib.Path, curves: Curves, samples: torch.Tensor) -> None:
    from matplotlib.figure import Figure  # imported here, because only the chart needs it

    figure = Figure(figsize=(12, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    means = torch.tensor(curves.errors).unfold(0, 20, 1).mean(1)
    axes[0].plot(range(20, len(curves.errors) + 1), means)
    axes[0].set(title="squared error, mean of 20 steps", xlabel="step")
    axes[1].semilogy(*zip(*curves.roundness, strict=True))
    axes[1].set(title="spread of the radius of one-step drawings", xlabel="step")
    for i, points in enumerate(samples):
        place = 4 * torch.tensor([i % 4, i // 4])
        axes[2].plot(*torch.cat([points, points[:1]]).add(place).T, ".-", linewidth=0.8)
    axes[2].set(title="one-step drawings", aspect="equal", xticks=[], yticks=[])
    figure.savefig(path, dpi=120)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="for a test on any machine")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=pathlib.Path, help="write the curves there")
    parser.add_argument("--chart", type=pathlib.Path, help="draw the curves and some samples there, as PNG")
    options = parser.parse_args(arguments)
    files.check(parser, options)
    sizes = dict(points=12, blocks=2, heads=4, head_dim=12, batch=64, steps=400, every=100, rate=3e-3)
    large = dict(points=64, blocks=4, heads=6, head_dim=32, batch=128, steps=20000, every=500, rate=1e-3)
    vars(options).update(sizes if options.small else large)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    if options.small:
        use_one_thread()
    torch.manual_seed(0)
    model = MeanVelocity(options).to(options.device)
    some = batch(options, torch.Generator().manual_seed(2))
    print(f"PyTorch's scaled_dot_product_attention {what_pytorch_says(model, some)}")
    curves = train(model, options)
    error = disagreement(model, some)
    print(f"gradient of a step: differs from that by the definition of attention by {error:.1e}")
    if options.json:
        options.json.write_text(json.dumps(dataclasses.asdict(curves)))
    if options.chart:
        draw(options.chart, curves, drawn(model, options, 16))
    wrong = []
    if not error < 1e-4:
        wrong.append("the gradient of a step is wrong")
    if not sum(curves.errors[-50:]) / 50 < 0.8 * curves.errors[0]:
        wrong.append("the error does not fall")
    if not curves.roundness[-1][1] < 0.3:
        wrong.append("the drawings are not round")
    print("\n".join(wrong) or "good")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
