"""Training: weights of the type that computes, masters in float32, AdamW, a learning rate that rises and then stays."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .attention import Attention
from .model import GPT, Shape, WholeSequences

LEARNING_RATE = 6e-4
RISE = 20  # steps


class Trainer:
    """A model and how it learns. The same seed gives the same weights whatever the attention."""

    def __init__(
        self, shape: Shape, attention: Attention, dtype: torch.dtype, device: torch.device, seed: int, *, compiled: bool = False
    ) -> None:
        torch.manual_seed(seed)
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        with device:
            model = GPT(shape)
        self.masters = [parameter.detach().clone() for parameter in model.parameters()]
        self.model = model.to(dtype)
        self.weights = list(self.model.parameters())
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer = torch.optim.AdamW(self.masters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.positions = torch.arange(shape.context, device=device)[None]
        self.attend = WholeSequences(shape, attention, device)
        self.forward = torch.compile(self.model) if compiled else self.model
        self.steps = 0
        self.state_bytes = (torch.cuda.memory_allocated() - before if device.type == "cuda" else 0) + self.moment_bytes()

    def moment_bytes(self) -> int:
        """The optimizer's two moments, which its first step allocates."""
        return 2 * sum(master.nbytes for master in self.masters)

    def step(self, pieces: torch.Tensor) -> torch.Tensor:
        """One step on (batch, context + 1) tokens; their loss before it, in nats a token, on the device."""
        logits = self.forward(pieces[:, :-1], self.positions, self.attend)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), pieces[:, 1:].flatten())
        loss.backward()
        torch._foreach_copy_([master.grad for master in self.masters], [weight.grad for weight in self.weights])
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, self.steps / RISE)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)
        self.model.zero_grad(set_to_none=True)
        return loss.detach()
