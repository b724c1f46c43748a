"""Training with the context split over the ranks of a torch.distributed group, and the weights over the same ranks by FSDP2.

A rank is a process with one device. All ranks call the same functions at the same time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import libflash.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from . import text
from .llama import Attend, Llama, LlamaShape

RATE = 0.25  # over the channels
RISE = 10  # steps


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all ranks have in common."""

    shape: LlamaShape
    context: int  # tokens of a sequence, over all ranks
    batch: int  # sequences of a step
    steps: int
    seed: int
    device: str  # "cuda" or "cpu"
    dtype: torch.dtype
    scheme: str
    order: str
    recompute: bool


class LongTrainer:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        ranks = dist.get_world_size()
        self.device = torch.device(setting.device, dist.get_rank() % torch.cuda.device_count() if setting.device == "cuda" else 0)
        self.mesh = init_device_mesh(setting.device, (ranks,), mesh_dim_names=("context",))
        torch.manual_seed(setting.seed)  # the same weights on all ranks before they are split
        with self.device:
            self.model = Llama(setting.shape, self.attend(), recompute=setting.recompute)
        policy = MixedPrecisionPolicy(param_dtype=setting.dtype, reduce_dtype=torch.float32)
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=self.mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
        self.positions = libflash.torch.positions(setting.context, mesh=self.mesh, order=setting.order).to(self.device)
        self.steps = 0

    def attend(self) -> Attend:
        mesh, setting = self.mesh, self.setting

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return libflash.torch.context_parallel_attention(
                q, k, v, mesh=mesh, scheme=setting.scheme, order=setting.order, causal=True
            )

        return attention

    def explain(self) -> str:
        shape, setting = self.setting.shape, self.setting
        tokens = setting.context // dist.get_world_size()
        like = torch.empty(1, tokens, shape.heads, shape.head_dim, dtype=setting.dtype, device=self.device)
        keys = like[:, :, : shape.key_heads]
        return libflash.torch.explain_context_parallel(
            like, keys, keys, mesh=self.mesh, scheme=setting.scheme, order=setting.order, causal=True
        )

    def share(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's part of (batch, context)."""
        return libflash.torch.shard(tokens, mesh=self.mesh, order=self.setting.order).to(self.device)

    def step(self, pieces: torch.Tensor) -> float:
        """One step on (batch, context + 1) tokens, the same on all ranks; the loss before it, in nats per token of all ranks."""
        logits = self.model(self.share(pieces[:, :-1]), self.positions)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), self.share(pieces[:, 1:]).flatten())
        loss.backward()  # FSDP averages the gradients; the ranks have equally many tokens, so that is the gradient of the mean
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = RATE / self.setting.shape.channels * min(1.0, self.steps / RISE)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.SUM)
        return mean.item() / dist.get_world_size()


def train(setting: Setting, progress: Callable[[str], None]) -> dict[str, Any]:
    """All steps; the loss of each in nats per token, and the seconds of each."""
    trainer = LongTrainer(setting)
    source = text.load()
    losses, seconds = [], []
    for step in range(setting.steps):
        pieces = text.pieces(source, setting.batch, setting.context + 1, setting.seed * 1_000_003 + step)
        start = time.perf_counter()
        losses.append(trainer.step(pieces))
        seconds.append(time.perf_counter() - start)
        rate = setting.batch * setting.context / seconds[-1]
        progress(f"step {step + 1:4} of {setting.steps}  loss {losses[-1]:.4f}  {rate:9.0f} tokens/s")
    peak = torch.cuda.max_memory_allocated() if setting.device == "cuda" else None
    return {"losses": losses, "seconds": seconds, "peak_bytes": peak, "scheme": trainer.explain()}
