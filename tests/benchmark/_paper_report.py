"""The paper benchmark's results as tables: Markdown, which a terminal shows well too."""

from __future__ import annotations

import statistics

NAMES = {
    "standard": "standard attention",
    "torch_plain": "standard attention in PyTorch",
    "flash1": "FlashAttention-1",
    "flash1_split": "FlashAttention-1, heads shared",
    "fa2": "FlashAttention-2 in PyTorch",
    "libflash": "libflash",
}
DIRECTIONS = ("forward", "backward", "forward + backward")
TARGET_RATIO, TARGET_SEQLEN = 1.7, 2048


def table(head: list[str], entries: list[list[str]]) -> str:
    """Columns of figures are right-aligned; the first column is text."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(entry) + " |" for entry in entries)])


def gflop(cell: dict) -> float:
    """Counted as in the papers (_cells.py)."""
    forward = 4 * cell["batch"] * cell["heads"] * cell["seqlen"] ** 2 * cell["head_dim"] * (0.5 if cell["causal"] else 1) / 1e9
    return forward * (2.5 if cell["direction"] == "backward" else 1)


def problem_of(cell: dict) -> tuple[int, bool, int]:
    return cell["head_dim"], cell["causal"], cell["seqlen"]


def tflops(speed: list[dict], direction: str) -> dict[tuple[int, bool, int], dict[str, float]]:
    """Problem -> method -> TFLOP/s. For both passes together the times are added."""
    wanted = ("forward", "backward") if "+" in direction else (direction,)
    work: dict[tuple, dict[str, list[tuple[float, float]]]] = {}
    for cell in speed:
        if cell["direction"] in wanted:
            for method, ms in cell["ms"].items():
                work.setdefault(problem_of(cell), {}).setdefault(method, []).append((gflop(cell), ms))
    return {
        problem: {
            method: sum(w for w, _ in parts) / sum(ms for _, ms in parts)
            for method, parts in methods.items()
            if len(parts) == len(wanted)
        }
        for problem, methods in work.items()
    }


def ratios(speed: list[dict], direction: str, peer: str) -> dict[tuple[int, bool, int], float]:
    """Speed of libflash divided by that of a peer."""
    found = tflops(speed, direction)
    return {problem: methods["libflash"] / methods[peer] for problem, methods in found.items() if peer in methods}


def speed_tables(speed: list[dict]) -> str:
    """One table per direction: a line for each head_dim, mask and method, a column for each length."""
    texts = []
    for direction in DIRECTIONS:
        found = tflops(speed, direction)
        seqlens = sorted({problem[2] for problem in found})
        entries = []
        for head_dim, causal in dict.fromkeys(problem[:2] for problem in found):
            for method, name in NAMES.items():
                values = [found.get((head_dim, causal, seqlen), {}).get(method) for seqlen in seqlens]
                if any(values):
                    figures = ["-" if value is None else f"{value:.0f}" for value in values]
                    entries.append([f"d = {head_dim}{', causal' if causal else ''}: {name}", *figures])
        head = [f"{direction}, TFLOP/s", *(f"S = {seqlen}" for seqlen in seqlens)]
        texts.append(table(head, entries))
    return "\n\n".join(texts)


def ratio_table(speed: list[dict]) -> str:
    """Speed of libflash over the peer's, by length: smallest and largest over head_dim and mask."""
    seqlens = sorted({cell["seqlen"] for cell in speed})
    entries = []
    for direction in DIRECTIONS:
        for peer in ("standard", "torch_plain", "flash1", "flash1_split", "fa2"):
            found = ratios(speed, direction, peer)
            texts = []
            for seqlen in seqlens:
                values = [ratio for problem, ratio in found.items() if problem[2] == seqlen]
                texts.append(f"{min(values):.1f} to {max(values):.1f}" if values else "-")
            entries.append([f"{direction}, against {NAMES[peer]}", *texts])
    return table(["libflash is as many times as fast", *(f"S = {seqlen}" for seqlen in seqlens)], entries)


def verdict(speed: list[dict]) -> str:
    """The papers' claims and the measured ratios; of the two FlashAttention-1 the faster one in each cell."""
    lines = []
    for direction in DIRECTIONS:
        sides = [ratios(speed, direction, peer) for peer in ("flash1", "flash1_split")]
        best = {problem: min(side[problem] for side in sides) for problem in sides[0] if problem[2] >= TARGET_SEQLEN}
        if best:
            reached = sum(ratio >= TARGET_RATIO for ratio in best.values())
            mean = statistics.geometric_mean(best.values())
            lines.append(
                f"{direction}: {mean:.2f} times as fast as the faster FlashAttention-1 in the mean, {min(best.values()):.2f} at "
                f"least, {TARGET_RATIO} or more in {reached} of {len(best)} cells with S >= {TARGET_SEQLEN}"
            )
    return ".  \n".join(lines) + "."


def traffic_table(entries: list[dict], setting: dict) -> str:
    standard = entries[0]["ms"]
    texts = [
        [
            NAMES[entry["method"]],
            f"{entry['gflop']:.0f}",
            f"{entry['gb_counted']:.1f}",
            "-" if entry["gb_measured"] is None else f"{entry['gb_measured']:.1f}",
            f"{entry['ms']:.2f}",
            f"{standard / entry['ms']:.1f}",
        ]
        for entry in entries
    ]
    head = f"forward + backward, {setting['traffic_shape']}"
    return table([head, "GFLOP", "GB requested", "GB of DRAM traffic", "ms", "speedup"], texts)


def memory_table(entries: list[dict]) -> str:
    methods = [name for name in NAMES if any(name in entry["bytes"] for entry in entries)]
    texts = [
        [str(entry["seqlen"]), *(f"{entry['bytes'][name] / 1e6:.0f}" if name in entry["bytes"] else "-" for name in methods)]
        for entry in entries
    ]
    return table(["S", *(f"{NAMES[name]}, MB" for name in methods)], texts)


def is_linear(entries: list[dict], method: str = "libflash", slack: float = 1.1) -> bool:
    """Whether the bytes per token are about the same at all lengths."""
    per_token = [entry["bytes"][method] / entry["seqlen"] for entry in entries if method in entry["bytes"]]
    return max(per_token) <= slack * min(per_token)


def block_table(entries: list[dict]) -> str:
    dense = {entry["direction"]: entry["ms"] for entry in entries if entry["density"] is None}
    densities = sorted({entry["density"] for entry in entries if entry["density"] is not None})
    ms = {(entry["direction"], entry["density"]): entry["ms"] for entry in entries}
    texts = [
        [
            direction,
            *(f"{ms[direction, x]:.2f} ({dense[direction] / ms[direction, x]:.1f}x)" for x in densities),
            f"{dense[direction]:.2f}",
        ]
        for direction in dense
    ]
    return table(["block mask, ms", *(f"{100 * x:.0f} %" for x in densities), "no mask"], texts)


def decode_table(entries: list[dict]) -> str:
    texts = [
        [
            str(entry["seqlen"]),
            f"{entry['us']['unsplit']:.1f}",
            f"{entry['us']['split']:.1f}",
            f"{entry['us']['unsplit'] / entry['us']['split']:.1f}",
            str(entry["gb_per_s"]["split"]),
        ]
        for entry in entries
    ]
    return table(["keys in the cache", "unsplit, us", "split, us", "speedup", "GB/s"], texts)


def sections(data: dict) -> dict[str, str]:
    """Name -> text of what was measured."""
    made = {}
    if data["speed"]:
        made["speed"] = "\n\n".join([speed_tables(data["speed"]), ratio_table(data["speed"]), verdict(data["speed"])])
    if data["traffic"]:
        made["traffic"] = traffic_table(data["traffic"], data["setting"])
    if data["memory"]:
        linear = "linear in S" if is_linear(data["memory"]) else "NOT linear in S"
        made["memory"] = f"{memory_table(data['memory'])}\n\nlibflash's memory is {linear}."
    if data["blocks"]:
        made["blocks"] = block_table(data["blocks"])
    if data["decode"]:
        made["decode"] = decode_table(data["decode"])
    return made


def section(data: dict, charts: str) -> str:
    """The section of RESULTS.md: how it was measured, ratios, small tables, and links to the charts' folder."""
    setting = data["setting"]
    intro = (
        f"On {setting['gpu']}, bf16, {setting['date']}: libflash's FlashAttention-2 (its sm80 kernel) against kernels of our own "
        "for standard attention (Algorithm 0 of the FlashAttention paper) and FlashAttention-1 (its Algorithms 1 and 4, split-K "
        "warps; one thread block a head, and with heads shared among thread blocks where they do not fill the GPU). "
        "batch * seqlen = 16384, heads * head_dim = 2048, head_dim 64 and 128, causal or not; device time, medians of 3 rounds "
        "in turn."
    )
    parts = [intro]
    if data["speed"]:
        parts += [
            ratio_table(data["speed"]),
            verdict(data["speed"]),
            image(charts, "speed-forward-backward", "TFLOP/s by length"),
        ]
    if data["traffic"]:
        parts.append(traffic_table(data["traffic"], setting))
    if data["memory"]:
        linear = "linear" if is_linear(data["memory"]) else "not linear"
        parts.append(f"Memory of libflash is {linear} in the length; time falls with the density of a block mask:")
        names = [("memory", "memory against length"), ("blocks", "time against density")]
        parts.append(" ".join(image(charts, name, text) for name, text in names if data[name]))
    if data["decode"]:
        parts.append(image(charts, "decode", "decode against the length of the cache"))
    return "\n\n".join(parts)


def image(charts: str, name: str, text: str) -> str:
    return f"![{text}]({charts}/{name}.png)"
