"""A small serving engine: continuous batching, prompts in chunks, shared beginnings, speculative trees; greedy.

A step is one call of the model with rows of many requests: one row, or a tree of drafted tokens, of each request that generates,
and chunks of the prompts of others, up to a number of rows. All keys are in one paged cache.

Every step has the same number of rows, the last ones padding, as in a captured graph: a row of a matrix product has other bits in
a product of another number of rows. With rows of attention that are invariant, a text then has the same bits in any batch. Only a
drafted token whose ancestors are not the nodes right before it sees its keys at other places, and adds them in another order.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from itertools import accumulate

import torch

from .draft import Tree, draft
from .groups import groups_of
from .model import GPT
from .paged import PagedCache, Rows
from .pages import Pages

TILE = 16  # rows


@dataclasses.dataclass
class Request:
    prompt: list[int]
    new: int
    text: list[int] = dataclasses.field(default_factory=list)
    best: list[float] = dataclasses.field(default_factory=list)  # the logit of each new token
    gaps: list[float] = dataclasses.field(default_factory=list)  # the same minus the next best one
    pages: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0  # tokens of the text whose keys are in the cache
    named: int = 0  # pages that are full and known

    @property
    def done(self) -> bool:
        return len(self.gaps) >= self.new

    @property
    def reads(self) -> bool:
        """Whether more than the last token of the text has no keys yet."""
        return len(self.text) - self.cached > 1


@dataclasses.dataclass
class Counts:
    steps: int = 0
    rows: int = 0
    generated: int = 0
    shared: int = 0  # tokens of prompts whose keys were there already
    drafted: int = 0
    accepted: int = 0


@dataclasses.dataclass(frozen=True)
class Settings:
    batch: int = 8  # most requests at a time
    budget: int = 64  # most rows of a step
    pages: int = 256
    page_size: int = 16
    share: bool = True
    nodes: int = 8  # of a tree with its root; 1: no speculation
    depth: int = 4
    cache: str = "same"
    invariant: bool = True  # rows of attention

    @property
    def rows(self) -> int:
        """Of every step: full tiles, so that no row is in a remainder that is computed in another way."""
        return -(-self.budget // TILE) * TILE


class Engine:
    def __init__(self, model: GPT, settings: Settings, dtype: torch.dtype) -> None:
        self.model, self.settings = model, settings
        self.cache = PagedCache(model.shape, settings.pages, settings.page_size, settings.cache, dtype, settings.invariant)
        self.pages = Pages(settings.pages, settings.page_size, settings.share)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counts = Counts()

    def add(self, prompt: list[int], new: int) -> Request:
        most = min(self.model.shape.context, self.settings.pages * self.settings.page_size)
        if len(prompt) + new > most:
            raise ValueError(f"{len(prompt)} + {new} tokens; there is room for {most}")
        request = Request(prompt, new, list(prompt))
        self.waiting.append(request)
        return request

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    # -- requests and pages

    def admit(self) -> None:
        """Requests get all pages that they may need, so that none has to stop. A tree has no more nodes than tokens are left."""
        while self.waiting and len(self.running) < self.settings.batch:
            request = self.waiting[0]
            shared = self.pages.beginning(request.text)
            needed = self.pages.needed(len(request.prompt) + request.new) - len(shared)
            for page in shared:
                self.pages.use(page)
            if needed > self.pages.available:
                for page in shared:
                    self.pages.leave(page)
                return
            self.waiting.popleft()
            request.pages = shared + [self.pages.new() for _ in range(needed)]
            request.named = len(shared)
            request.cached = len(shared) * self.pages.size
            self.counts.shared += request.cached
            self.running.append(request)

    def name_full_pages(self, request: Request) -> None:
        while (request.named + 1) * self.pages.size <= request.cached:
            request.named += 1
            self.pages.name(request.pages[request.named - 1], request.text[: request.named * self.pages.size])

    def finish(self, request: Request) -> None:
        for page in request.pages:
            self.pages.leave(page)
        self.running.remove(request)

    # -- a step

    def plan(self) -> list[tuple[Request, Tree | list[int]]]:
        """Requests that generate get their rows first, then chunks of prompts in the order of their arrival."""
        room = self.settings.budget
        planned: list[tuple[Request, Tree | list[int]]] = []
        for request in sorted(self.running, key=lambda one: one.reads):
            if room == 0:
                break
            if request.reads:
                rows: Tree | list[int] = request.text[request.cached : request.cached + room]
                room -= len(rows)
            else:
                left = request.new - len(request.gaps)
                rows = draft(request.text, min(self.settings.nodes, room, left), self.settings.depth)
                room -= len(rows.tokens)
            planned.append((request, rows))
        return sorted(planned, key=lambda one: one[0].pages[0])  # those that share their first pages are neighbours

    def rows_of(self, planned: list[tuple[Request, Tree | list[int]]]) -> tuple[torch.Tensor, Rows]:
        tokens: list[int] = []
        positions: list[int] = []
        masks: list[int] = []
        counts, mask_counts = [0], [0]
        for request, rows in planned:
            if isinstance(rows, Tree):
                tokens += rows.tokens
                positions += [request.cached + depth for depth in rows.depths]
                masks += rows.words()
                mask_counts.append(len(rows.tokens))
            else:
                tokens += rows
                positions += range(request.cached, request.cached + len(rows))
                mask_counts.append(0)
            counts.append(len(tokens) - sum(counts))
        padding = [0] * (self.settings.rows - len(tokens))
        pages, cached = [request.pages for request, _ in planned], [request.cached for request, _ in planned]
        columns = max(map(len, pages))
        table = [own + [-1] * (columns - len(own)) for own in pages]

        def integers(values: object) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        trees = (integers(masks)[:, None], integers(list(accumulate(mask_counts)))) if masks else (None, None)
        groups = (integers(hint) for hint in groups_of(pages, cached, self.pages.size))
        rows = Rows(
            integers(cached), integers(table), integers(list(accumulate(counts))), integers(positions + padding), *trees, *groups
        )
        return torch.tensor(tokens + padding)[None], rows

    def step(self) -> None:
        self.admit()
        planned = self.plan()
        tokens, self.cache.rows = self.rows_of(planned)
        two = self.model(tokens, self.cache.rows.positions[None].long(), self.cache)[0].float().topk(2)
        best, second = two.values.unbind(1)
        choices = list(zip(two.indices[:, 0].tolist(), best.tolist(), (best - second).tolist(), strict=True))
        self.counts.steps += 1
        self.counts.rows += int(self.cache.rows.cu_seqlens_q[-1])
        for (request, rows), start in zip(planned, self.cache.rows.cu_seqlens_q.tolist(), strict=False):
            if isinstance(rows, Tree):
                self.follow(request, rows, choices[start:])
            else:
                request.cached += len(rows)
                if request.cached == len(request.text):  # the prompt's last row
                    self.append(request, *choices[start + len(rows) - 1])
            self.name_full_pages(request)
            if request.done:
                self.finish(request)

    def append(self, request: Request, token: int, best: float, gap: float) -> None:
        request.text.append(token)
        request.best.append(best)
        request.gaps.append(gap)
        self.counts.generated += 1

    def follow(self, request: Request, tree: Tree, choices: list[tuple[int, float, float]]) -> None:
        """Go down the tree as long as it has the model's own choice, and keep the keys of that path alone."""
        path = [0]
        self.append(request, *choices[0])
        while not request.done and (node := tree.child(path[-1], choices[path[-1]][0])) is not None:
            path.append(node)
            self.append(request, *choices[node])
        self.counts.drafted += len(tree.tokens) - 1
        self.counts.accepted += len(path) - 1
        moved = [(node, place) for place, node in enumerate(path) if node != place]
        if moved:
            self.cache.move(*([self.place(request, request.cached + at) for at in side] for side in zip(*moved, strict=True)))
        request.cached += len(path)

    def place(self, request: Request, number: int) -> int:
        """The row of the cache that holds this token of the request."""
        return request.pages[number // self.pages.size] * self.pages.size + number % self.pages.size
