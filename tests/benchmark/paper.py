"""The claims of the FlashAttention papers, measured on this GPU: tables and charts like theirs.

speed      TFLOP/s by sequence length, forward, backward and both: standard attention and FlashAttention-1 from baselines/,
           PyTorch's, and libflash's FlashAttention-2 (the sm80 kernels)
traffic    operations, memory traffic and time: standard attention against FlashAttention
memory     bytes against length
blocks     time against the density of a block mask
decode     one query against a growing cache, split or not

    python tests/benchmark/paper.py --json paper.json --charts charts     everything, less than three minutes
    python tests/benchmark/paper.py --quick                               a few small cells
    python tests/benchmark/paper.py --only memory blocks
    python tests/benchmark/paper.py --from paper.json --charts charts     only draw the charts again
    python tests/benchmark/paper.py --from paper.json --into RESULTS.md   write the section of RESULTS.md; --check: only compare

Device time by CUDA graphs, contenders in turn in one process, medians; every result is compared before it is timed. The kernels
of tests/benchmark/baselines are compiled by nvcc when they are first needed.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib
import json
import pathlib
import sys
import time

from _paper_report import section, sections
from table import write

SECTIONS = ("speed", "traffic", "memory", "blocks", "decode")
FOLDER = pathlib.Path(__file__).parent
MARKER = "paper-tables"
CHARTS = "charts"  # as RESULTS.md links to them


def measured(wanted: list[str], quick: bool) -> dict:
    """All results, as they are written to JSON; an empty list for a section that was not selected or is not possible."""
    import torch

    import libflash

    if not torch.cuda.is_available():
        sys.exit("no GPU")
    import _baselines

    try:
        _baselines.library()
    except (_baselines.NoCompiler, RuntimeError) as missing:
        sys.exit(str(missing))
    modules = {name: importlib.import_module(f"_paper_{name}") for name in SECTIONS}
    gc.freeze()  # every capture of a graph collects garbage; imported objects shall not be searched
    shape = modules["traffic"].cell("forward", quick)
    data: dict = {
        "setting": {
            "date": datetime.date.today().isoformat(),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "libflash": libflash.__version__,
            "quick": quick,
            "traffic_shape": f"batch {shape.batch}, seqlen {shape.seqlen}, {shape.heads} heads of {shape.head_dim}",
        }
    }
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
        for name in SECTIONS:
            started = time.perf_counter()
            data[name] = list(modules[name].measure(quick)) if name in wanted else []
            if name in wanted:
                print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    return data


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="these sections")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller problems: a look, not a figure to quote")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results")
    parser.add_argument("--charts", type=pathlib.Path, metavar="FOLDER", help="draw them there, as PNG; needs matplotlib")
    parser.add_argument("--from", type=pathlib.Path, metavar="FILE", dest="source", help="measure nothing: results of --json")
    parser.add_argument("--into", type=pathlib.Path, metavar="RESULTS.md", help="write the section between its markers")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if --into says anything else")
    return parser.parse_args()


def main() -> int:
    options = parse()
    data = json.loads(options.source.read_text()) if options.source else measured(options.only, options.quick)
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    if options.charts:
        import _paper_charts

        for path in _paper_charts.draw(data, options.charts):
            print(f"drawn: {path}", file=sys.stderr)
    if options.into is None:
        print("\n\n".join(f"{name}\n\n{text}" for name, text in sections(data).items()))
        return 0
    try:
        outdated = write(options.into, {MARKER: section(data, CHARTS)}, options.check)
    except ValueError as wrong:
        sys.exit(f"{options.into}: {wrong}")
    if options.check and outdated:
        print(f"{options.into}: not what {options.source} says; run without --check", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
