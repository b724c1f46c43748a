"""Greedy generation: one token per step after each prompt, step by step or as replays of a CUDA graph."""

from __future__ import annotations

import torch

from .cache import Cache
from .model import GPT


class Generation:
    """`tokens` (batch, prompt + new) holds the prompts and receives the generated tokens."""

    def __init__(self, model: GPT, cache: Cache, prompts: torch.Tensor, new: int) -> None:
        self.model, self.cache, self.new = model, cache, new
        self.prompt = prompts.shape[1]
        self.tokens = torch.cat((prompts, prompts.new_zeros(len(prompts), new)), dim=1)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.read_prompts(prompts)

    def read_prompts(self, prompts: torch.Tensor) -> None:
        """Fill the cache with all tokens of the prompts except the last, which is the input of the first step."""
        positions = torch.arange(self.prompt - 1, device=prompts.device)[None]
        self.model(prompts[:, :-1], positions, self.cache)
        self.cache.restart(self.prompt - 1)

    def step(self) -> torch.Tensor:
        """Logits (batch, vocabulary) for the token after the cache's last; writes the best token. Does not wait for the
        device.
        """
        positions = self.cache.lengths[:, None].long()
        logits = self.model(self.tokens.gather(1, positions), positions, self.cache)[:, -1]
        self.tokens.scatter_(1, positions + 1, logits.argmax(-1, keepdim=True))
        self.cache.advance()
        return logits

    def run(self) -> torch.Tensor:
        """All new tokens, from the prompts on: (batch, new)."""
        self.cache.restart(self.prompt - 1)
        for _ in range(self.new):
            if self.graph is None:
                self.step()
            else:
                self.graph.replay()
        return self.tokens[:, self.prompt :]

    def logits_along(self, new: torch.Tensor) -> torch.Tensor:
        """(batch, new, vocabulary): the logits of every step for these generated tokens."""
        self.cache.restart(self.prompt - 1)
        logits = []
        for number in range(self.new):
            logits.append(self.step())
            self.tokens[:, self.prompt + number] = new[:, number]
        return torch.stack(logits, dim=1)

    def capture(self) -> None:
        """From now on run() replays one step's graph. The cache must keep its lengths on the device."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        self.cache.restart(self.prompt - 1)
        with torch.cuda.stream(side):
            self.step()  # loads and tunes kernels, which a capture does not allow
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self.cache.restart(self.prompt - 1)
        with torch.cuda.graph(graph):
            self.step()
        self.graph = graph
