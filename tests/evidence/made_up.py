"""Evidence made up for the tests."""

from __future__ import annotations

import record


def evidence(**changes: object) -> dict:
    stages = {name: {"status": "passed", "seconds": 1.0, "date": "2026-01-01", "driver": "1"} for name in record.STAGES}
    cell = {"direction": "forward", "dtype": "bfloat16", "head_dim": 64, "seqlen": 512, "causal": True}
    cell |= {"tflops": {"libflash": 300.4, "fa2": 150.2}, "ratio": {"fa2": 2.0}}
    backward = [
        cell | {"direction": "backward", "tflops": {"libflash": 200.4}, "ratio": {"fa2": 1.0, "cudnn": 0.5}},
        cell | {"direction": "backward", "tflops": {"libflash": 100.4}, "ratio": {"fa2": 4.0}, "seqlen": 1024},
        cell | {"direction": "backward", "tflops": {"libflash": 50.4}, "ratio": {}, "seqlen": 1024, "dtype": "float16"},
    ]
    held = {"fa2": 250.2, "libflash": 600.4, "libflash sm80": 275.4}  # libflash's choice is no sm80 kernel
    float32 = cell | {"dtype": "float32", "tflops": {"efficient": 20.04, "libflash": 30.06}, "ratio": {"efficient": 1.5}}
    forward = [
        cell,
        cell | {"head_dim": 128, "tflops": held, "ratio": {"fa2": 1.1, "cudnn": 1.2}},
        float32,
        float32 | {"causal": False, "tflops": {"libflash": 40.0}, "ratio": {}},
        float32 | {"direction": "backward", "tflops": {"efficient": 10.0, "libflash": 12.5}, "ratio": {"efficient": 1.25}},
    ]
    us = {"libflash": 12.5, "lengths": 12.9, "paged": 13.1, "append": 14.2, "cudnn": 14.0}
    decode = {"heads_q": 32, "heads_k": 8, "batch": 1, "seqlen": 8192, "us": us}
    decode |= {"tb_per_s": {"libflash": 3.1}, "ratio": {"fa2": 2.0, "cudnn": 0.9}}
    shapes = [
        {"name": f"d={head_dim}", "ratio": {"fp16": ratio, "fp16 product": 1.05}} for head_dim, ratio in ((64, 0.5), (128, 2.0))
    ]
    serving = [
        {"kind": "tree", "name": f"nodes={nodes}", "us": {"call": 11.5, "one row": 10.0}, "target": "<= 1.05", "figure": figure}
        for nodes, figure in ((8, 1.0), (64, 1.21))
    ]
    serving.append({"kind": "chunk", "name": "rows=512", "failed": {"call": "refused"}})
    ring = {"tokens": 32768, "heads": [32, 8], "causal": True, "backward": True, "ranks": 2}
    ring |= {"ms": {"one rank": 10.0, "auto": 5.0, "ring": 5.0, "heads": 8.0}, "predicted_ms": {"2": 5.25, "16": 1.0}}
    over_four = ring | {"causal": False, "backward": False, "ranks": 4, "predicted_ms": {"4": 2.5}}
    over_four |= {"memory": {"ring": {"bytes": 105, "model": 100}, "PyTorch": {"bytes": 300}}}
    over_four |= {"ms": {"one rank": 10.0, "auto": 2.5, "ring": 2.5, "heads_ring": 5.0}}
    kind = {"dtype": "bf16", "fill": "randn"}
    gradients = {name: {"t1": t1, "rms": 3e-3, "t2": 0.5} for name, t1 in (("dq", 0.6), ("dk", 0.7), ("dv", 0.8))}
    derived = [
        {"max_logit": {"t1": 0.125, "rms": 1e-8}, "entropy": {"t1": 0.25, "rms": 1e-7}},
        {"to": {"t1": 0.375, "rms": 4e-3}, "tlse": {"t1": 0.5, "rms": 1e-3}},
    ]
    data = {
        "gpu": "NVIDIA H200",
        "sources": "aaa",
        "quick": False,
        "setting": {"toolkit": "13.0", "driver": "1"},
        "stages": stages,
        "tests": {"passed": 3, "failed": 0, "skipped": 1},
        "accuracy": {
            "entries": [
                kind | {"o": {"t1": 0.5, "rms": 2e-3}, "lse": {"t1": 0.25}},
                kind | gradients,
                *(kind | x for x in derived),
            ]
        },
        "repeats": {"repeats": 1000, "kernels": [{"kernel": "f", "differing": {"o": 0}}]},
        "sanitizer": {"runs": {"memcheck": {"status": "clean"}, "racecheck": {"status": "found"}}},
        "benchmark": {
            "setting": {"torch": "2", "cudnn": 9, "rounds": 5},
            "summary": {"fa2": {"geometric_mean": {"all": 2.0}, "worst": {"ratio": 2.0}}},
            "cells": [*forward, *backward],
        },
        "decode": {"setting": {"torch": "2", "cudnn": 9, "rounds": 5, "read_tb_per_s": 4.4}, "cells": [decode]},
        "serving": {"setting": {"rounds": 5}, "cells": serving},
        "context": {"setting": {"torch": "2", "rounds": 3, "head_dim": 128}, "cells": [ring]},
        "context_all": {"setting": {"torch": "2", "rounds": 2, "head_dim": 128, "window_ms": 250}, "cells": [over_four]},
        "shapes": {"setting": {"rounds": 5}, "cells": [*shapes, {"name": "S=2048 mask", "ratio": {"forward mask": 1.234}}]},
    }
    return data | changes
