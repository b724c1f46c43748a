"""Small tensors with strides so large that offsets exceed 2^31 elements: every product must be computed in 64 bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import libflash

torch = pytest.importorskip("torch")
from gpu_case import same_bits  # noqa: E402  (needs torch)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = "cuda"
FAR = 2**31
BATCH, ROWS, KEYS, HEADS, DIM = 2, 40, 50, 2, 64
ROOM = 4 * (FAR + FAR // 256)  # bytes: the extent of lse in float32
AXES = {"rows": ("batch", "row", "head", "channel"), "lse": ("batch", "head", "row"), "scores": ("batch", "head", "row", "key")}


class Arena:
    """One allocation with all tensors of a call: the pieces of each tensor are far apart, those of different tensors interleaved.

    The step is the same number of elements for all tensors, so in bytes one step is a multiple of the other, and pieces do not
    overlap. `entries` along the axis reach beyond FAR."""

    def __init__(self, axis: str, entries: int) -> None:
        self.axis, self.step, self.start = axis, FAR // (entries - 1) // 64 * 64 + 128, 0  # rows aligned for vector loads
        self.memory = torch.empty(ROOM, dtype=torch.uint8, device=DEVICE)

    def place(self, x: torch.Tensor, kind: str = "rows") -> torch.Tensor:
        axes = AXES[kind][4 - x.ndim if kind != "lse" else 3 - x.ndim :]
        strides, step = [0] * x.ndim, 1
        for i in reversed(range(x.ndim)):
            if axes[i] == self.axis:
                strides[i] = self.step
            else:
                strides[i] = step
                step *= x.shape[i]
        size = x.element_size()
        placed = self.memory.view(x.dtype).as_strided(x.shape, strides, self.start // size)
        self.start += -(-step * size // 256) * 256
        return placed.copy_(x)


@pytest.fixture(autouse=True)
def give_back_memory() -> Iterator[None]:
    """Other processes test on the same GPU."""
    yield
    torch.cuda.empty_cache()


def run(arena: Arena | None, inputs: dict, options: dict, kinds: dict) -> dict[str, torch.Tensor]:
    """Forward and backward with all tensors in the arena, or with the tensors themselves."""

    def place(name: str, x: torch.Tensor) -> torch.Tensor:
        return arena.place(x, kinds.get(name, "rows")) if arena and kinds.get(name) != "lengths" else x

    given = {name: place(name, x) for name, x in inputs.items()}
    q, k, v, dout, dlse = (given.pop(name) for name in ("q", "k", "v", "dout", "dlse"))
    lse = torch.full_like(inputs["dlse"], torch.nan)
    empty = {name: torch.full_like(inputs[name[1:]], torch.nan) for name in ("dq", "dk", "dv")}
    empty |= {"dbias": torch.full_like(inputs["bias"], torch.nan)} if "bias" in inputs else {}
    made = {name: place(name, x) for name, x in {"out": torch.full_like(inputs["dout"], torch.nan), "lse": lse, **empty}.items()}
    libflash.attention(q, k, v, out=made["out"], lse=made["lse"], **given, **options)
    gradients = {name: made[name] for name in empty}
    libflash.attention_backward(
        dout, q, k, v, made["out"], made["lse"], dlse=dlse, deterministic=True, **gradients, **given, **options
    )
    return {name: x.contiguous() for name, x in made.items()}


def problem(packed: bool, rare: bool) -> tuple[dict, dict]:
    """The inputs, and the kind of each tensor that has other axes than q."""
    generator = torch.Generator().manual_seed(1)
    lead_q, lead_k = ((BATCH * ROWS,), (BATCH * KEYS,)) if packed else ((BATCH, ROWS), (BATCH, KEYS))
    shapes = {"q": (*lead_q, HEADS, DIM), "k": (*lead_k, HEADS, DIM), "v": (*lead_k, HEADS, DIM), "dout": (*lead_q, HEADS, DIM)}
    kinds = {"lse": "lse", "dlse": "lse"}
    if rare:
        shapes["bias"] = (BATCH, HEADS, ROWS, KEYS)
        kinds |= {"bias": "scores", "dbias": "scores", "mask": "scores"}
    inputs = {name: torch.randn(shape, generator=generator).half() for name, shape in shapes.items()}
    inputs["dlse"] = torch.randn(HEADS, BATCH * ROWS) if packed else torch.randn(BATCH, HEADS, ROWS)
    if rare:
        inputs["mask"] = torch.rand(BATCH, HEADS, ROWS, KEYS) < 0.8
    if packed:
        for name, length in {"cu_seqlens_q": ROWS, "cu_seqlens_k": KEYS}.items():
            inputs[name] = torch.arange(0, (BATCH + 1) * length, length, dtype=torch.int32)
            kinds[name] = "lengths"
    return {name: x.to(DEVICE) for name, x in inputs.items()}, kinds


@pytest.mark.parametrize("axis", ["batch", "row", "head", "packed row", "packed head"])
def test_far_apart(axis: str) -> None:
    """Every tensor at once; the same bits as from tensors without holes."""
    packed = axis.startswith("packed")
    entries = {"batch": BATCH, "row": ROWS, "head": HEADS, "packed row": BATCH * ROWS, "packed head": HEADS}[axis]
    for rare in (False, True) if not packed else (False,):
        inputs, kinds = problem(packed, rare)
        wanted = run(None, inputs, {"causal": True}, kinds)
        arena = Arena(axis.removeprefix("packed "), entries)
        got = run(arena, inputs, {"causal": True}, kinds)
        assert arena.start < 2**22
        for name, x in wanted.items():
            assert same_bits(got[name], x), f"{name}, rare={rare}"
        del arena, got
