"""Training: weights in the type of the computation, float32 masters, AdamW, a constant learning rate after a warm-up."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import libflash

from . import attention, text
from .attention import Attention
from .model import GPT, Shape, WholeSequences

RATE = 0.25  # over the channels: 3.3e-4 for 768
RISE = 30  # steps


def use_one_thread() -> None:
    """For models so small that threads mostly wait for each other."""
    torch.set_num_threads(1)
    libflash.set_num_threads(1)


def nudge(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Change the weights by about a rounding error of that type."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.finfo(dtype).eps / 4 * torch.randn_like(parameter))


class Trainer:
    """A model and its optimizer. The same seed gives the same initial weights with every attention."""

    def __init__(
        self,
        shape: Shape,
        attention: Attention,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        *,
        nudged: bool = False,
        compiled: bool = False,
    ) -> None:
        torch.manual_seed(seed)
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        with device:
            model = GPT(shape)
        if nudged:
            nudge(model, dtype)
        self.masters = [parameter.detach().clone() for parameter in model.parameters()]
        self.model = model.to(dtype)
        self.weights = list(self.model.parameters())
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer = torch.optim.AdamW(self.masters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.positions = torch.arange(shape.context, device=device)[None]
        self.attend = WholeSequences(shape, attention, device)
        self.forward = torch.compile(self.model) if compiled else self.model
        self.rate = RATE / shape.channels
        self.steps = 0
        self.state_bytes = (torch.cuda.memory_allocated() - before if device.type == "cuda" else 0) + self.moment_bytes()

    def moment_bytes(self) -> int:
        """The optimizer's two moments, which the first step allocates."""
        return 2 * sum(master.nbytes for master in self.masters)

    def step(self, pieces: torch.Tensor) -> torch.Tensor:
        """One step on (batch, context + 1) tokens; their loss before the step, in nats per token, on the device."""
        logits = self.forward(pieces[:, :-1], self.positions, self.attend)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), pieces[:, 1:].flatten())
        loss.backward()
        torch._foreach_copy_([master.grad for master in self.masters], [weight.grad for weight in self.weights])
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, self.steps / RISE)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)
        self.model.zero_grad(set_to_none=True)
        return loss.detach()


def trained_briefly(shape: Shape, steps: int, tokens: int, dtype: torch.dtype, device: torch.device, seed: int) -> GPT:
    """A model after so many steps of about so many tokens each, for a program that needs one that is not random."""
    trainer = Trainer(shape, attention.by_libflash, dtype, device, seed)
    source, loss = text.load(), torch.tensor(torch.nan)
    for step in range(steps):
        pieces = text.pieces(source, max(1, tokens // shape.context), shape.context + 1, seed * 1_000_003 + step)
        loss = trainer.step(pieces.to(device))
    print(f"trained for {steps} steps, to a loss of {loss.item():.3f}")
    return trainer.model
