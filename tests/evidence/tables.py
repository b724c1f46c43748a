"""The GPU tables of tests/benchmark/RESULTS.md from the evidence files, and the README's summary of them.

python tests/evidence/tables.py            write them between the markers of both files
python tests/evidence/tables.py --check    change nothing; exit code 1 if a file differs
python tests/evidence/tables.py --print    print them
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "benchmark"))

import record
import summary
from record import OF_SEVERAL
from serving_table import serving_table
from table import write

ROOT = pathlib.Path(__file__).resolve().parents[2]
BENCHMARK = ROOT / "tests/benchmark"
RESULTS, README = BENCHMARK / "RESULTS.md", ROOT / "README.md"
NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "f16": "fp16", "f32": "fp32", "f64": "fp64"}
PEERS = {
    "fa2": "FlashAttention-2",
    "fa3": "FlashAttention-3",
    "cudnn": "cuDNN",
    "efficient": "PyTorch's memory-efficient attention",
}
OURS, HELD = "libflash", "libflash sm80"  # as tests/benchmark/_gpu_contenders.py names them
DIRECTIONS = ("forward", "backward")
DECODE_PEERS = ("fa2", "cudnn")
GRADIENTS = ("dq", "dk", "dv")
STATISTICS, TANGENTS = ("max_logit", "entropy"), ("to", "tlse", "tdq", "tdk", "tdv")
TANGENTS_WITH_RMS = ("to", "tdq", "tdk", "tdv")
SHAPES = {  # figures of tests/benchmark/gpu_shapes.py
    "packed": "16 packed sequences of 1 to 8192 rows: TFLOP/s over those of a dense call of as many operations",
    "heads": "eight query heads a key head: time over that of as many key heads",
    "product d=128": "head_dim 128: TFLOP/s over those of a product of 8192 x 8192 matrices",
    "product d=256": "head_dim 256: the same",
    "fp16": "bf16: time over that of fp16",
    "fp16 product": "the product of matrices in bf16: time over that in fp16",
    "blocks": "half of the 128 x 128 blocks left out: time over that of the dense call",
    "forward softcap": 'forward, softcap: time of `backend="sm80"` over that of libflash\'s choice',
    "forward alibi": "forward, ALiBi, causal: the same",
    "forward bias": "forward, bias: the same",
    "forward bias cudnn": "the same: time of cuDNN over libflash's",
    "forward mask": "forward, mask: the same",
    "forward mask cudnn": "the same: time of cuDNN over libflash's",
    "forward dropout": "forward, dropout: the same",
    "forward dropout fa2": "the same: time of FlashAttention-2 over libflash's",
    "forward dropout cudnn": "the same: time of cuDNN over libflash's",
    "backward softcap": "backward, softcap: the same",
    "backward alibi": "backward, ALiBi, causal: the same",
    "backward bias": "backward, bias: the same",
    "backward bias cudnn": "the same: time of cuDNN over libflash's",
    "backward mask": "backward, mask: the same",
    "backward mask cudnn": "the same: time of cuDNN over libflash's",
    "backward dropout": "backward, dropout: the same",
    "backward dropout fa2": "the same: time of FlashAttention-2 over libflash's",
    "backward dropout cudnn": "the same: time of cuDNN over libflash's",
    "shared": "backward of 1024 to 16384 rows, eight query heads a key head: TFLOP/s over those of 16384 rows, a key head each",
    "shared fa3": "the same: time of FlashAttention-3 over libflash's",
    "few forward": "forward of 512 to 2048 rows: time of cuDNN over libflash's",
    "few forward fa3": "the same: time of FlashAttention-3 over libflash's",
    "few backward": "backward of 512 to 2048 rows: time of cuDNN over libflash's",
    "few backward fa3": "the same: time of FlashAttention-3 over libflash's",
}


def timed(data: dict, direction: str, *, floats: bool) -> list[dict]:
    """Cells of the benchmark, of float32 or of the 16-bit types."""
    cells = data.get("benchmark", {}).get("cells", [])
    return [cell for cell in cells if cell["direction"] == direction and (cell["dtype"] == "float32") == floats]


def speed_tables(data: dict, direction: str) -> str:
    """libflash's choice against cuDNN and, where it was timed, FlashAttention-3; then its sm80 kernels against FlashAttention-2,
    which has the same algorithm and instructions.
    """
    cells = timed(data, direction, floats=False)
    if not cells:
        return f"{direction.capitalize()} on {data['gpu']}: not measured."
    setting = data["benchmark"]["setting"]
    own = (
        f"{direction.capitalize()} on {data['gpu']}: TFLOP/s of libflash, and how many times as fast as cuDNN {setting['cudnn']} "
        f"in the same run. {work(data)}"
    )
    raced = [cell for cell in cells if "fa3" in cell["ratio"]]
    third = f"{direction.capitalize()} on {data['gpu']} against FlashAttention-3 in the same run, bf16. {work(data)}"
    beside = [speed_table(third, raced, OURS, "fa3")] if raced else []
    held = (
        f'{direction.capitalize()} held to FlashAttention-2 (`backend="sm80"`), in the same run: TFLOP/s, and how many times as '
        f"fast as PyTorch {setting['torch']}'s FlashAttention-2."
    )
    return "\n\n".join([speed_table(own, cells, OURS, "cudnn"), *beside, speed_table(held, cells, HELD, "fa2")])


def work(data: dict) -> str:
    return (
        "batch * seqlen = 16384, heads * head_dim = 2048; device time, medians of "
        f"{data['benchmark']['setting']['rounds']} rounds in turn, {data['stages']['benchmark']['date']}."
    )


def speed_table(caption: str, cells: list[dict], whose: str, peer: str) -> str:
    """A line for each type, head_dim and mask; a column for each length."""
    seqlens = sorted({cell["seqlen"] for cell in cells})
    lines = [caption, "", "| type | head_dim | causal | " + " | ".join(f"S = {s}" for s in seqlens) + " |"]
    lines.append("|---|---:|---|" + "---:|" * len(seqlens))
    entries: dict[tuple, dict[int, dict]] = {}
    for cell in cells:
        entries.setdefault((cell["dtype"], cell["head_dim"], cell["causal"]), {})[cell["seqlen"]] = cell
    for (dtype, head_dim, causal), entry in entries.items():
        texts = [NAMES[dtype], str(head_dim), "yes" if causal else "no", *(figure(entry.get(s), whose, peer) for s in seqlens)]
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join([*lines, "", *conclusions(cells, peer)])


def figure(cell: dict | None, whose: str, peer: str) -> str:
    """TFLOP/s and ratio. If libflash's choice is an sm80 kernel, it was timed once, under the name of libflash's choice."""
    if cell is None:
        return "-"
    tflops = cell["tflops"].get(whose, cell["tflops"][OURS])
    return f"{tflops:.0f} ({ratio(cell, peer)})"


def ratio(cell: dict, peer: str) -> str:
    return f"{cell['ratio'][peer]:.2f}" if peer in cell["ratio"] else "-"


def conclusions(cells: list[dict], *peers: str) -> list[str]:
    """A line for each peer, over the cells that it supports."""
    found = []
    for peer in peers:
        if ratios := [cell["ratio"][peer] for cell in cells if peer in cell["ratio"]]:
            mean = statistics.geometric_mean(ratios)
            found.append(f"Geometric mean against {PEERS[peer]}: {mean:.2f}, smallest {min(ratios):.2f}.  ")
    return found


def float_table(data: dict) -> str:
    """A line for each problem, with forward and backward."""
    sides = [timed(data, direction, floats=True) for direction in DIRECTIONS]
    if not any(sides):
        return f"float32 on {data['gpu']}: not measured."
    peer = f"PyTorch {data['benchmark']['setting']['torch']}'s memory-efficient attention"
    lines = [
        f"float32 on {data['gpu']}: TFLOP/s of {peer} (TF32 not allowed) and of libflash, and how many times as fast libflash "
        f"is. {work(data)}",
        "",
        "| head_dim | seqlen | causal | forward: PyTorch | libflash | ratio | backward: PyTorch | libflash | ratio |",
        "|---:|---:|---|" + "---:|" * 6,
    ]
    entries: dict[tuple, dict[str, dict]] = {}
    for cell in itertools.chain(*sides):
        entries.setdefault((cell["head_dim"], cell["seqlen"], cell["causal"]), {})[cell["direction"]] = cell
    for (head_dim, seqlen, causal), entry in entries.items():
        texts = [str(head_dim), str(seqlen), "yes" if causal else "no"]
        for direction in DIRECTIONS:
            texts += float_figures(entry[direction]) if direction in entry else ["-"] * 3
        lines.append("| " + " | ".join(texts) + " |")
    said = [
        f"{direction.capitalize()}. {text}"
        for direction, side in zip(DIRECTIONS, sides, strict=True)
        for text in conclusions(side, "efficient")
    ]
    return "\n".join([*lines, "", *said])


def float_figures(cell: dict) -> list[str]:
    peer = cell["tflops"].get("efficient")
    return ["-" if peer is None else f"{peer:.1f}", f"{cell['tflops'][OURS]:.1f}", ratio(cell, "efficient")]


def accuracy_table(data: dict) -> str:
    """The tests, and the largest errors over kernels and head dims, by type and kind of values; gradients below."""
    entries = data.get("accuracy", {}).get("entries", [])
    lines = [tested(data), ""]
    lines += [
        "| type | values | rms error of o | worst / limit: o | lse | statistics | twice-eager rule |",
        "|---|---|" + "---:|" * 5,
    ]
    for kind, group in by_kind(entries, "o"):
        figures = [f"{largest(group, 'rms', 'o'):.1e}", *(f"{largest(group, 't1', x):.2f}" for x in ("o", "lse"))]
        figures += [f"{largest(group, ratio, 'o'):.2f}" for ratio in ("t2", "two_times")]
        lines.append("| " + " | ".join([*kind, *figures]) + " |")
    gradients = by_kind(entries, *GRADIENTS)
    if gradients:
        lines += [
            "",
            "| type | values | rms error of dq | dk | dv | worst / limit: dq | dk | dv | statistics | twice-eager rule |",
            "|---|---|" + "---:|" * 8,
        ]
    for kind, group in gradients:
        figures = [f"{largest(group, 'rms', x):.1e}" for x in GRADIENTS]
        figures += [f"{largest(group, 't1', x):.2f}" for x in GRADIENTS]
        figures += [f"{largest(group, ratio, *GRADIENTS):.2f}" for ratio in ("t2", "two_times")]
        lines.append("| " + " | ".join([*kind, *figures]) + " |")
    return "\n".join([*lines, *derived_table(entries)])


def derived_table(entries: list[dict]) -> list[str]:
    """Statistics of rows and tangents, which have no rule but the limit; nothing if there are none."""
    some = [entry for entry in entries if any(tensor in entry for tensor in STATISTICS + TANGENTS)]
    if not some:
        return []
    named = [f"rms error of {TANGENTS_WITH_RMS[0]}", *TANGENTS_WITH_RMS[1:], f"worst / limit: {STATISTICS[0]}"]
    lines = ["", "| " + " | ".join(["type", "values", *named, *STATISTICS[1:], *TANGENTS]) + " |"]
    lines.append("|---|---|" + "---:|" * len(TANGENTS_WITH_RMS + STATISTICS + TANGENTS))
    for kind, group in by_kind(some):
        figures = [largest_or_none(group, "rms", tensor, ".1e") for tensor in TANGENTS_WITH_RMS]
        figures += [largest_or_none(group, "t1", tensor, ".2f") for tensor in STATISTICS + TANGENTS]
        lines.append("| " + " | ".join([*kind, *figures]) + " |")
    return lines


def largest_or_none(group: list[dict], ratio: str, tensor: str, digits: str) -> str:
    having = [entry for entry in group if tensor in entry]
    return format(largest(having, ratio, tensor), digits) if having else "-"


def by_kind(entries: list[dict], *tensors: str) -> list[tuple[tuple[str, str], list[dict]]]:
    """((type, values), entries) of the kernels that compute these tensors."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for entry in entries:
        if all(tensor in entry for tensor in tensors):
            groups.setdefault((NAMES.get(entry["dtype"], entry["dtype"]), entry["fill"]), []).append(entry)
    return list(groups.items())


def largest(group: list[dict], ratio: str, *tensors: str) -> float:
    return max(entry[tensor].get(ratio, 0.0) for entry in group for tensor in tensors)


def tested(data: dict) -> str:
    """One line on the stages."""
    tests, sanitizer = (data.get(name, {}) for name in ("tests", "sanitizer"))
    clean = [name for name, run in sanitizer.get("runs", {}).items() if run["status"] == "clean"]
    counts = ", ".join(f"{tests.get(kind, 0)} {kind}" for kind in ("passed", "failed", "skipped"))
    return (
        f"{data['gpu']}, driver {data['setting']['driver']}, CUDA {data['setting']['toolkit']}: {counts} in tests/cuda; "
        f"{repeated(data)}; compute-sanitizer clean: {', '.join(clean) or 'nothing shown'}. "
        "Above 1 is a failure, but in the last column."
    )


def repeated(data: dict) -> str:
    if data["stages"].get("repeats", {}).get("status") != "passed":
        return "the same bits again: not shown"
    repeats = data["repeats"]
    text = f"every kernel {repeats['repeats']} times with the same bits"
    backward = any("default" in kernel for kernel in repeats.get("kernels", []))
    return text + " (backward: all with `deterministic=True`, else `dk` and `dv`)" * backward


def decode_table(data: dict) -> str:
    """A line for each cell."""
    cells = data.get("decode", {}).get("cells", [])
    if not cells:
        return f"Decode on {data['gpu']}: not measured."
    setting = data["decode"]["setting"]
    lines = [
        f"Decode on {data['gpu']}, bf16, head_dim 128, one query row a sequence: microseconds, and TB/s of K and V read (the "
        f"card reads {setting['read_tb_per_s']} TB/s; what fits its cache is faster). In turn with PyTorch {setting['torch']}'s "
        f"FlashAttention-2 and cuDNN {setting['cudnn']}; medians of {setting['rounds']} rounds, "
        f"{data['stages']['decode']['date']}.",
        "",
        "| heads q/k | sequences | keys | libflash us | TB/s | times as fast as (FlashAttention-2 / cuDNN) "
        "| with lengths | in pages of 16 | appending |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for cell in cells:
        ratios = " / ".join(ratio(cell, peer) for peer in DECODE_PEERS)
        us = cell["us"]
        texts = [f"{cell['heads_q']}/{cell['heads_k']}", str(cell["batch"]), str(cell["seqlen"]), f"{us['libflash']:.1f}"]
        texts += [f"{cell['tb_per_s']['libflash']:.2f}", ratios, *(f"{us[name]:.1f}" for name in ("lengths", "paged", "append"))]
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join([*lines, "", *conclusions(cells, *DECODE_PEERS)])


def shapes_table(data: dict) -> str:
    """A line for each figure; nothing if they were not measured."""
    cells = data.get("shapes", {}).get("cells", [])
    if not cells:
        return ""
    lines = [
        f"Forward on {data['gpu']}, what the tables above do not show: ratios of two calls of one run, bf16 unless stated, "
        "over cells of several head dims, lengths and masks (`tests/benchmark/gpu_shapes.py`). Device time, medians of "
        f"{data['shapes']['setting']['rounds']} rounds, {data['stages']['shapes']['date']}.",
        "",
        "| ratio | cells | smallest | geometric mean | largest |",
        "|---|" + "---:|" * 4,
    ]
    for figure, said in SHAPES.items():
        if ratios := [cell["ratio"][figure] for cell in cells if figure in cell["ratio"]]:
            values = (min(ratios), statistics.geometric_mean(ratios), max(ratios))
            lines.append("| " + " | ".join([said, str(len(ratios)), *(f"{value:.2f}" for value in values)]) + " |")
    return "\n".join(lines)


def context_table(data: dict) -> str:
    """A table for each number of GPUs; nothing if there was one GPU."""
    return "\n\n".join(filter(None, (*(context_stage_table(data, stage) for stage in OF_SEVERAL), prediction_line(data))))


def prediction_line(data: dict) -> str:
    """The errors of the times that the run on two GPUs predicted for more GPUs, where these were measured, too."""
    names = ("tokens", "heads", "causal", "backward")
    predicted, measured = (
        {str([cell[name] for name in names]): cell for cell in data.get(stage, {}).get("cells", [])} for stage in OF_SEVERAL
    )
    errors = [
        predicted[name]["predicted_ms"][ranks] / cell["ms"]["ring"] - 1
        for name, cell in measured.items()
        if (ranks := str(cell["ranks"])) in predicted.get(name, {}).get("predicted_ms", {})
    ]
    if not errors:
        return ""
    ranks = next(iter(measured.values()))["ranks"]
    return (
        f"The model in the run on 2 GPUs predicted the ring on {ranks} GPUs in {len(errors)} of these cells, with errors of "
        f"{min(errors):+.1%} to {max(errors):+.1%}."
    )


def context_stage_table(data: dict, stage: str) -> str:
    """A line for each cell."""
    cells = data.get(stage, {}).get("cells", [])
    if not cells:
        return ""
    setting = data[stage]["setting"]
    schemes = ("auto", "ring", "heads", "heads_ring", "all_gather", "plain ring", "PyTorch")
    schemes = tuple(scheme for scheme in schemes if any(scheme in cell["ms"] for cell in cells))
    window = setting.get("window_ms")
    sample = f"A time is that of a call among as many back to back as take {window} ms" if window else "Times include the host"
    ranks = cells[0]["ranks"]
    simulated = sorted({int(n) for cell in cells for n in cell["predicted_ms"]} - {ranks})
    columns = " | ".join([*schemes, "error", *(f"{n} GPUs" for n in simulated)])
    lines = [
        f"Attention over {ranks} {data['gpu']}, bf16, head_dim {setting['head_dim']}, zigzag order "
        "(`tests/benchmark/context_parallel.py`): the time of the whole problem on one GPU, divided by the GPUs and by the time "
        "over all of them, so that 1 is a division without cost. `plain ring`: batch_isend_irecv and libflash.merge; PyTorch: "
        f"its own context_parallel ({setting['torch']}). `error`: of the ring that a model predicts from the times of its steps "
        f"and of a transfer between two ranks, for these {ranks} GPUs{said_of_simulated(simulated)}. "
        f"{sample}, medians of at most {setting['rounds']} rounds, {data['stages'][stage]['date']}.",
        "",
        f"| mask | pass | heads q/k | tokens | one GPU ms | {columns} |",
        "|---|---|---|---:|" + "---:|" * (len(schemes) + 2 + len(simulated)),
    ]
    for cell in cells:
        ms, one, predicted = cell["ms"], cell["ms"]["one rank"], cell["predicted_ms"]
        rates = [f"{one / ranks / ms[name]:.3f}" if name in ms else "-" for name in schemes]
        rates.append(f"{predicted[str(ranks)] / ms['ring'] - 1:+.1%}")
        rates += [f"{one / n / predicted[str(n)]:.2f}" if str(n) in predicted else "-" for n in simulated]
        kind = "forward, backward" if cell["backward"] else "forward"
        heads = "/".join(map(str, cell["heads"]))
        mask = "causal" if cell["causal"] else "full"
        lines.append("| " + " | ".join([mask, kind, heads, str(cell["tokens"]), f"{one:.1f}", *rates]) + " |")
    return "\n".join(lines + memory_line(cells, schemes))


def said_of_simulated(ranks: list[int]) -> str:
    if not ranks:
        return ""
    numbers = ", ".join(map(str, ranks))
    return f"; the last columns: the rates that it predicts for {numbers} GPUs with the same link, which are no measurements"


def memory_line(cells: list[dict], schemes: tuple[str, ...]) -> list[str]:
    """The measured memory divided by that of the model, for the schemes that have a model."""
    said = []
    for scheme in schemes:
        found = [cell["memory"][scheme] for cell in cells if "model" in cell.get("memory", {}).get(scheme, {})]
        if ratios := [x["bytes"] / x["model"] for x in found if "bytes" in x]:
            said.append(f"{scheme} {min(ratios):.2f} to {max(ratios):.2f}")
    return ["", f"Peak memory of a GPU beyond q, k and v, over that of its model: {', '.join(said)}."] if said else []


TABLES = {
    "gpu-forward-table": lambda data: speed_tables(data, "forward"),
    "gpu-backward-table": lambda data: speed_tables(data, "backward"),
    "gpu-shapes-table": shapes_table,
    "gpu-float-table": float_table,
    "gpu-decode-table": decode_table,
    "gpu-serving-table": serving_table,
    "gpu-context-table": context_table,
    "gpu-accuracy-table": accuracy_table,
}


def contents(files: dict[str, dict]) -> dict[str, str]:
    """Each table of every GPU, by the name of its markers."""
    if not files:
        return {}
    return {name: "\n\n".join(filter(None, map(made, files.values()))) for name, made in TABLES.items()}


def summed_up(files: dict[str, dict], cpu: pathlib.Path) -> dict[str, str]:
    """The README's table, by the name of its markers: of the last GPU, by name, whose benchmarks ran to the end; else of all."""
    complete = [data for data in files.values() if all(passed(data, stage) for stage in ("benchmark", "decode"))]
    return {summary.NAME: summary.table(complete[-1:] or files.values(), json.loads(cpu.read_text()))} if files else {}


def passed(data: dict, stage: str) -> bool:
    return data.get("stages", {}).get(stage, {}).get("status") == "passed"


def outdated_in(path: pathlib.Path, made: dict[str, str], check: bool) -> list[str]:
    """Write the tables into the file, or with `check` only compare. Returns a message if the file was not current."""
    try:
        outdated = write(path, made, check)
    except ValueError as wrong:
        sys.exit(f"{path}: {wrong}")
    return [f"{path}: not what the evidence says: {', '.join(outdated)}"] * bool(outdated)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--print", action="store_true", dest="show")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, metavar="RESULTS.md", help="the file of all tables")
    parser.add_argument("--readme", type=pathlib.Path, default=README, metavar="README.md", help="the file of the summary")
    parser.add_argument("--evidence", type=pathlib.Path, default=record.FOLDER, metavar="FOLDER", help="where the *.json are")
    parser.add_argument("--cpu", type=pathlib.Path, default=BENCHMARK / "cpu.json", metavar="FILE", help="of cpu_attention.py")
    options = parser.parse_args()
    files = record.read_all(options.evidence)
    made, short = contents(files), summed_up(files, options.cpu)
    if options.show:
        print("\n\n".join([*short.values(), *made.values()]))
        return 0
    said = outdated_in(options.results, made, options.check) + outdated_in(options.readme, short, options.check)
    if options.check and said:
        print("\n".join([*said, f"run {parser.prog}"]), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
