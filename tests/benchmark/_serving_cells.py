"""The cells of gpu_serving.py: the arrays and calls of each."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import libflash

HEADS_Q, HEADS_K, HEAD_DIM = 32, 8, 128
LATENT, LATENT_V = 576, 512  # head_dim and head_dim_v of multi-head latent attention (MLA)
DEVICE = "cuda"  # the tests of this program put "cpu" here
ROTATED_BYTES = 256 << 20  # of all copies together: several times the L2 cache
FLOAT_CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SDPA = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}

Call = Callable[[], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Sequence:
    rows: int
    keys: int  # with those of the rows


@dataclasses.dataclass(frozen=True)
class Cell:
    kind: str
    name: str
    sequences: tuple[Sequence, ...]
    page: int = 16
    code: str = ""  # of the 8-bit cache
    heads: int = HEADS_Q
    shared: int = 0  # keys that all sequences have in the same pages
    wanted_ms: float = 0.0

    @property
    def bytes(self) -> int:
        """Bytes of K and V in bfloat16, each read once."""
        channels = LATENT if self.kind == "mla" else 2 * HEADS_K * HEAD_DIM
        return 2 * channels * (self.shared + sum(s.keys - self.shared for s in self.sequences))

    @property
    def operations(self) -> int:
        """Floating-point operations of the products with visible keys."""
        seen = sum(s.rows * s.keys - s.rows * (s.rows - 1) // 2 for s in self.sequences)
        channels = LATENT + LATENT_V if self.kind == "mla" else 2 * HEAD_DIM
        return 2 * self.heads * channels * seen


def log_uniform(count: int, low: int, high: int) -> tuple[Sequence, ...]:
    """The quantiles of the distribution, in a random order."""
    lengths = [round(low * math.exp((i + 0.5) / count * math.log(high / low))) for i in range(count)]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    return tuple(Sequence(1, lengths[i]) for i in order)


def decodes(batch: int, keys: int) -> tuple[Sequence, ...]:
    return (Sequence(1, keys),) * batch


# Chunks, rows of a chunk, decodes, keys of every sequence, page size.
MIXED = (
    (4, 2048, 60, 8192, 16),
    (4, 2048, 60, 8192, 64),
    (1, 2048, 60, 8192, 64),
    (4, 512, 120, 4096, 64),
    (2, 4096, 16, 32768, 64),
)
# Page sizes and codes of the caches of chunks that the prefill kernel copies or converts.
COPIED = ((1, ""), (8, ""), (16, "e4m3"), (1, "e4m3"), (16, "e5m2"), (16, "int8"))


def cells() -> list[Cell]:
    chunks = [
        Cell("chunk", f"rows={rows} keys={keys} page={page}", (Sequence(rows, keys),), page)
        for rows, keys, page in itertools.product((512, 2048, 8192), (8192, 65536), (16, 64))
    ]
    chunks += [
        Cell("chunk", f"rows={rows} keys={keys} page={page} {code}".rstrip(), (Sequence(rows, keys),), page, code)
        for (page, code), rows, keys in itertools.product(COPIED, (2048,), (8192, 65536))
    ]
    mixed = [
        Cell(
            "mixed",
            f"chunks={chunks}x{rows} decodes={count} keys={keys} page={page}",
            (Sequence(rows, keys),) * chunks + decodes(count, keys),
            page,
        )
        for chunks, rows, count, keys, page in MIXED
    ]
    trees = [
        Cell("tree", f"nodes={nodes} B={batch} keys={keys}", (Sequence(nodes, keys),) * batch)
        for nodes, (batch, keys) in itertools.product((8, 16, 64), ((8, 8192), (64, 2048)))
    ]
    sizes = ((1, 8192), (1, 65536), (8, 8192), (64, 1024), (64, 8192), (128, 4096))
    codes = [
        Cell("codes", f"{code} B={batch} keys={keys}", decodes(batch, keys), code=code)
        for code, (batch, keys) in itertools.product(("e4m3", "int8"), sizes)
    ]
    lengths = Cell("lengths", "B=256 keys=100..100k", log_uniform(256, 100, 100_000))
    return [*chunks, *mixed, lengths, *trees, *codes, *latent_cells(), *invariant_cells(), *append_cells(), prefix_cell()]


def latent_cells() -> list[Cell]:
    wanted_ms = {128: 0.25, 16: 0.155}
    return [
        Cell("mla", f"H={heads} B=128 keys=4096 page=64", decodes(128, 4096), 64, heads=heads, wanted_ms=ms)
        for heads, ms in wanted_ms.items()
    ]


def invariant_cells() -> list[Cell]:
    sizes = ((1, 1, 8192), (1, 8, 8192), (1, 64, 1024), (1, 64, 8192), (512, 1, 8192), (2048, 1, 8192))
    return [
        Cell("invariant", f"rows={rows} B={batch} keys={keys} page=64", (Sequence(rows, keys),) * batch, 64)
        for rows, batch, keys in sizes
    ]


def append_cells() -> list[Cell]:
    return [
        Cell("append", f"{code or 'bf16'} B={batch} keys=8192", decodes(batch, 8192), code=code)
        for code, batch in itertools.product(("", "e4m3", "int8"), (1, 8, 64))
    ]


def prefix_cell() -> Cell:
    return Cell("prefix", "B=64 keys=8192+64", decodes(64, 8192 + 64), shared=8192)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """The rotary embedding of neighbouring channels."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
    return torch.stack(turned, -1).flatten(-2).to(x.dtype)


def copies_of(cell: Cell) -> int:
    return max(1, min(8, math.ceil(ROTATED_BYTES / cell.bytes)))


@dataclasses.dataclass
class Step:
    """The arrays of a call, with their own pages."""

    cell: Cell
    sequences: tuple[Sequence, ...]
    seed: int

    def __post_init__(self) -> None:
        generator = torch.Generator(DEVICE).manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)

        page = self.cell.page
        pages = self.tables(generator)
        rows = torch.tensor([0] + [s.rows for s in self.sequences])
        self.cu = rows.cumsum(0).int().to(DEVICE)
        self.keys = torch.tensor([s.keys for s in self.sequences], dtype=torch.int32, device=DEVICE)
        if self.cell.kind == "mla":
            self.k, self.v = normal(pages, page, 1, LATENT), None
        else:
            self.k, self.v = (normal(pages, page, HEADS_K, HEAD_DIM) for _ in range(2))
        self.q = normal(int(self.cu[-1]), self.cell.heads, self.k.shape[3])
        self.out = torch.empty_like(self.q[..., : LATENT_V if self.v is None else HEAD_DIM])
        self.new = [normal(len(self.sequences), 1, HEADS_K, HEAD_DIM) for _ in range(2)]

    def tables(self, generator: torch.Generator) -> int:
        """Make the block table, each row of which begins with the pages of the shared keys. Returns the number of pages."""
        page, shared = self.cell.page, self.cell.shared // self.cell.page
        counts = [math.ceil(s.keys / page) - shared for s in self.sequences]
        order = torch.randperm(shared + sum(counts), generator=generator, device=DEVICE).int()
        self.table = torch.zeros(len(counts), shared + max(counts), dtype=torch.int32, device=DEVICE)
        self.table[:, :shared] = order[:shared]
        for row, pages in zip(self.table, order[shared:].split(counts), strict=True):
            row[shared : shared + len(pages)] = pages
        return len(order)

    def call(self, **options: object) -> Call:
        arrays = (self.q, options.pop("k", self.k), options.pop("v", self.v))
        options = {"cache_seqlens": self.keys, "block_table": self.table, "cu_seqlens_q": self.cu, "causal": True} | options
        return lambda: libflash.decode(*arrays, out=self.out, **options)

    def tree(self) -> Call:
        """A random tree for each sequence: a node sees its ancestors."""
        nodes = self.sequences[0].rows
        generator = torch.Generator().manual_seed(self.seed)
        sees = torch.eye(nodes, dtype=torch.bool)
        for i in range(1, nodes):
            sees[i] |= sees[int(torch.randint(i, (), generator=generator))]
        powers = 2 ** torch.arange(32)
        padded = torch.nn.functional.pad(sees, (0, -nodes % 32)).view(nodes, -1, 32)
        words = (padded * powers).sum(-1)
        signed = torch.where(words >= 2**31, words - 2**32, words).int()
        return self.call(tree_mask=signed.repeat(len(self.sequences), 1).to(DEVICE))

    def caches(self, code: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, object]]:
        """K, V and their scales. No code: bfloat16."""
        if not code:
            return self.k, self.v, {}
        if code in FLOAT_CODES:
            scale = torch.full((HEADS_K,), 0.01, device=DEVICE)
            k, v = ((x.float() * 100).clamp(-448, 448).to(FLOAT_CODES[code]) for x in (self.k, self.v))
            return k, v, {"k_scale": scale, "v_scale": scale}
        k_scale, v_scale = (torch.full((*self.k.shape[:2], HEADS_K), 0.03, device=DEVICE) for _ in range(2))
        k, v = ((x.float() / 0.03).round().clamp(-127, 127).to(torch.int8) for x in (self.k, self.v))
        return k, v, {"k_scale": k_scale, "v_scale": v_scale}

    def dense_call(self, k: torch.Tensor, v: torch.Tensor | None, **options: object) -> Call:
        """One row for each sequence, without cu_seqlens_q."""
        q, out = self.q[:, None], self.out[:, None]
        options = {"cache_seqlens": self.keys, "block_table": self.table, "causal": True} | options
        return lambda: libflash.decode(q, k, v, out=out, **options)

    def coded(self, code: str) -> Call:
        k, v, scales = self.caches(code)
        return self.dense_call(k, v, **scales)

    def append(self) -> tuple[Call, Call]:
        """A call that rotates the query and the last key and appends the key; and the plain call with their results, to be made
        later.
        """
        k, v, scales = self.caches(self.cell.code)
        steps = 10000.0 ** -torch.arange(0, 1, 2 / HEAD_DIM, device=DEVICE)
        angles = torch.arange(int(self.keys.max()), device=DEVICE)[:, None] * steps
        q, out, before = self.q[:, None], torch.empty_like(self.out[:, None]), self.keys - 1
        options = {"cache_seqlens": before, "block_table": self.table, "causal": True, "k": self.new[0], "v": self.new[1]}
        options |= scales | {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
        self.q = rotated(self.q, angles[before.long(), None])
        return lambda: libflash.decode(q, k, v, out=out, **options), self.dense_call(k, v, **scales)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """The keys of sequences of equal lengths without pages, (batch, keys, heads, channels)."""
        return x[self.table.long()].flatten(1, 2)[:, : self.sequences[0].keys]

    def chunk(self) -> Call:
        k, v, scales = self.caches(self.cell.code)
        return self.call(k=k, v=v, **scales)

    def forward(self) -> Call:
        """A forward call with the same operations, with the dense keys of the only sequence."""
        k, v, scales = self.caches(self.cell.code)
        if scales:
            k, v = ((x.float() * scales[f"{name}_scale"][..., None]).bfloat16() for name, x in (("k", k), ("v", v)))
        k, v = (self.gathered(x).contiguous() for x in (k, v))
        out = torch.empty_like(self.q)[None]
        return lambda: libflash.attention(self.q[None], k, v, causal=True, out=out)[0]

    def sdpa(self, backend: SDPBackend, k: torch.Tensor) -> Call:
        """The query heads as rows of the one key head."""
        q, v = self.q[:, None], k[..., :LATENT_V]

        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]

        return call


Calls = dict[str, list[Call]]


def chunk_calls(cell: Cell, steps: list[Step]) -> Calls:
    return {"call": [s.chunk() for s in steps], "forward": [s.forward() for s in steps]}


def mixed_calls(cell: Cell, steps: list[Step]) -> Calls:
    parts = {"chunks": [s for s in cell.sequences if s.rows > 1], "decodes": [s for s in cell.sequences if s.rows == 1]}
    alone = {name: [Step(cell, tuple(part), 9).call()] for name, part in parts.items()}
    return {"call": [s.call() for s in steps], **alone}


def tree_calls(cell: Cell, steps: list[Step]) -> Calls:
    one = tuple(Sequence(1, s.keys) for s in cell.sequences)
    return {"call": [s.tree() for s in steps], "one row": [Step(cell, one, s.seed).call() for s in steps]}


def code_calls(cell: Cell, steps: list[Step]) -> Calls:
    return {"call": [s.coded(cell.code) for s in steps], "bf16": [s.dense_call(s.k, s.v) for s in steps]}


def latent_calls(cell: Cell, steps: list[Step]) -> Calls:
    """The values are channels of the keys. PyTorch gets them without pages."""
    dense = [s.gathered(s.k).transpose(1, 2).contiguous() for s in steps]
    peers = {name: [s.sdpa(backend, k) for s, k in zip(steps, dense, strict=True)] for name, backend in SDPA.items()}
    return {"call": [s.dense_call(s.k, None, head_dim_v=LATENT_V) for s in steps], **peers}


def invariant_calls(cell: Cell, steps: list[Step]) -> Calls:
    return {"call": [s.call(invariant=True) for s in steps], "free": [s.call() for s in steps]}


def append_calls(cell: Cell, steps: list[Step]) -> Calls:
    pairs = [s.append() for s in steps]
    return {"call": [append for append, _ in pairs], "plain": [plain for _, plain in pairs]}


def prefix_calls(cell: Cell, steps: list[Step]) -> Calls:
    groups, lens = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, len(cell.sequences)], [cell.shared]))
    hinted = [s.dense_call(s.k, s.v, shared_groups=groups, shared_lens=lens) for s in steps]
    return {"call": hinted, "no hint": [s.dense_call(s.k, s.v) for s in steps]}


CALLS: dict[str, Callable[[Cell, list[Step]], Calls]] = {
    "chunk": chunk_calls,
    "mixed": mixed_calls,
    "lengths": lambda cell, steps: {"call": [s.call() for s in steps]},
    "tree": tree_calls,
    "codes": code_calls,
    "mla": latent_calls,
    "invariant": invariant_calls,
    "append": append_calls,
    "prefix": prefix_calls,
}


def contenders(cell: Cell) -> Calls:
    """For each contender a call for each copy of the inputs. The first one is the call that the cell is about."""
    return CALLS[cell.kind](cell, [Step(cell, cell.sequences, seed) for seed in range(copies_of(cell))])
