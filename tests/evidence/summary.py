"""The README's table of performance: best, typical and worst ratio to each peer, from all evidence and the CPU's figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

NAME = "performance-table"
PEERS = {
    "fa3": "FlashAttention-3",
    "cudnn": "cuDNN",
    "fa2": "FlashAttention-2 of PyTorch",
    "efficient": "memory-efficient attention of PyTorch",
}
TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
HEAD = [
    "| times as fast as | | cells | best | typical | worst |",
    "|---|---|---:|---|---:|---|",
]

Ratios = list[tuple[float, str]]  # ratio, name of the cell


def attention_cell(cell: dict) -> str:
    mask = "causal" if cell["causal"] else "full"
    return f"{TYPES[cell['dtype']]}, d={cell['head_dim']}, S={cell['seqlen']}, {mask}"


def decode_cell(cell: dict) -> str:
    return f"{cell['heads_q']}/{cell['heads_k']} heads, {cell['batch']} x {cell['seqlen']} keys"


def against(cells: Iterable[dict], peer: str, rate: str, name: Callable[[dict], str]) -> Ratios:
    """Rate of libflash's choice divided by that of `peer`; `rate` is the field of a cell with the rate of each contender."""
    return [(cell[rate]["libflash"] / cell[rate][peer], name(cell)) for cell in cells if peer in cell[rate]]


def line(what: str, peer: str, ratios: Ratios) -> list[str]:
    if not ratios:
        return []
    (best, where_best), (worst, where_worst) = max(ratios), min(ratios)
    typical = statistics.geometric_mean(ratio for ratio, _ in ratios)
    return [f"| {what} | {peer} | {len(ratios)} | {best:.2f} ({where_best}) | {typical:.2f} | {worst:.2f} ({where_worst}) |"]


def gpu_lines(data: dict) -> list[str]:
    cells = data.get("benchmark", {}).get("cells", [])
    found = []
    for direction in ("forward", "backward"):
        for floats, peers in ((False, ("fa3", "cudnn", "fa2")), (True, ("efficient",))):
            some = [cell for cell in cells if cell["direction"] == direction and (cell["dtype"] == "float32") == floats]
            kind = "fp32" if floats else "fp16, bf16"
            for peer in peers:
                found += line(f"{data['gpu']}: {direction}, {kind}", PEERS[peer], against(some, peer, "tflops", attention_cell))
    for peer in ("cudnn", "fa2"):
        decode = inverted(data.get("decode", {}).get("cells", []))
        found += line(f"{data['gpu']}: decode, bf16", PEERS[peer], against(decode, peer, "rate", decode_cell))
    return found


def inverted(cells: list[dict]) -> list[dict]:
    """Cells of decode hold microseconds; a rate is their inverse."""
    return [cell | {"rate": {name: 1 / us for name, us in cell["us"].items()}} for cell in cells]


def cpu_lines(data: dict) -> list[str]:
    found = []
    for direction in ("forward", "backward"):
        cells = [cell for cell in data["cells"] if cell["direction"] == direction]
        ratios = [(cell["libflash_gflops"] / cell["torch_gflops"], attention_cell(cell)) for cell in cells]
        found += line(f"{data['setting']['cpu']}: {direction}, fp32, bf16", f"PyTorch {data['setting']['torch']}", ratios)
    return found


def table(gpus: Iterable[dict], cpu: dict) -> str:
    """Markdown."""
    lines = [text for data in gpus for text in gpu_lines(data)]
    return "\n".join([*HEAD, *lines, *cpu_lines(cpu)])
