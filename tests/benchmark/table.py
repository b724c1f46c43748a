"""Tables of RESULTS.md: the CPU tables from the JSON of cpu_attention.py and cpu_derivatives.py, the conformance table from that
of the conformance kit.

python tests/benchmark/table.py cpu*.json conformance/*.json                            print them
python tests/benchmark/table.py cpu*.json conformance/*.json --into RESULTS.md          write each between its markers
python tests/benchmark/table.py cpu*.json conformance/*.json --into RESULTS.md --check  exit code 1 if the file says anything else
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

import _conformance_table
import _derivatives_table

NAME = "cpu-table"
NAMES = {"float32": "fp32", "bfloat16": "bf16"}


def table(data: dict) -> str:
    """Markdown: a line on how it was measured, a line per problem, a summary."""
    return "\n".join([caption(data["setting"]), "", *entries(data["cells"]), "", conclusion(data["summary"])])


def caption(setting: dict) -> str:
    return (
        f"GFLOP/s on {setting['cpu']} ({setting['isa']}), {setting['threads']} threads, against PyTorch {setting['torch']} "
        f"(`scaled_dot_product_attention`) in the same process; medians of {setting['rounds']} rounds in turn, {setting['date']}."
    )


def entries(cells: list[dict]) -> list[str]:
    head = ["| type | head_dim | seqlen | causal | forward: PyTorch | libflash | ratio | backward: PyTorch | libflash | ratio |"]
    head.append("|---|" + "---:|" * 2 + "---|" + "---:|" * 6)
    pairs: dict[tuple, dict[str, dict]] = {}
    for cell in cells:
        pairs.setdefault((cell["dtype"], cell["head_dim"], cell["seqlen"], cell["causal"]), {})[cell["direction"]] = cell
    return head + [entry(key, pair) for key, pair in pairs.items()]


def entry(key: tuple, pair: dict[str, dict]) -> str:
    dtype, head_dim, seqlen, causal = key
    texts = [NAMES[dtype], str(head_dim), str(seqlen), "yes" if causal else "no"]
    for direction in ("forward", "backward"):
        cell = pair.get(direction)
        texts += [f"{cell['torch_gflops']:.0f}", f"{cell['libflash_gflops']:.0f}", f"{cell['ratio']:.2f}"] if cell else ["-"] * 3
    return "| " + " | ".join(texts) + " |"


def conclusion(summary: dict) -> str:
    means = summary["geometric_mean"]
    parts = ", ".join(f"{short(name)} {mean:.2f}" for name, mean in means.items() if name != "all")
    return f"Geometric mean of the ratios: {means['all']:.2f} ({parts}). Smallest: {summary['worst']['ratio']:.2f}."


def short(name: str) -> str:
    return " ".join(NAMES.get(word, word) for word in name.split())


def replaced(document: str, content: str, name: str = NAME) -> str:
    """The document with `content` between the markers of that name; both must be there, once, in order."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if document.count(begin) != 1 or document.count(end) != 1 or document.index(end) < document.index(begin):
        raise ValueError(f"expected {begin} and then {end}, each once")
    before, rest = document.split(begin)
    return f"{before}{begin}\n{content}\n{end}{rest.split(end)[1]}"


def write(document: pathlib.Path, contents: dict[str, str], check: bool) -> list[str]:
    """Write each table between the markers of its name; with `check` change nothing. Returns the names of the tables that
    differed.
    """
    old = text = document.read_text()
    outdated = []
    for name, content in contents.items():
        new = replaced(text, content, name)
        outdated += [name] * (new != text)
        text = new
    if text != old and not check:
        document.write_text(text)
    return outdated


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    wrote = "what cpu_attention.py, cpu_derivatives.py or python -m libflash conformance wrote with --json"
    parser.add_argument("json", type=pathlib.Path, nargs="+", help=wrote)
    parser.add_argument("--into", type=pathlib.Path, metavar="RESULTS.md", help="the file with the markers")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if --into differs from the JSON")
    options = parser.parse_args()
    contents = tables([json.loads(path.read_text()) for path in options.json])
    if options.into is None:
        print("\n\n".join(contents.values()))
        return 0
    try:
        outdated = write(options.into, contents, options.check)
    except ValueError as wrong:
        sys.exit(f"{options.into}: {wrong}")
    if options.check and outdated:
        files = " ".join(map(str, options.json))
        print(
            f"{options.into}: {' and '.join(outdated)}: not those of {files}; run {parser.prog} without --check", file=sys.stderr
        )
        return 1
    return 0


def tables(files: list[dict]) -> dict[str, str]:
    """Each table by the name of its markers."""
    runs = [data for data in files if "conformance" in data]
    contents = {}
    for data in files:
        if _derivatives_table.is_run(data):
            contents[_derivatives_table.NAME] = _derivatives_table.table(data)
        elif "conformance" not in data:
            contents[NAME] = table(data)
    if runs:
        contents[_conformance_table.NAME] = _conformance_table.table(runs)
    return contents


if __name__ == "__main__":
    sys.exit(main())
