"""The problems that every backend is tested with. A name gives what is special; everything else is default (see Case).

quick() runs in every test run, long() before a release. Both are lists of Case and always the same; the random cases of
long() depend on their seed alone. For decode see decode_cases.
"""

from __future__ import annotations

import itertools
import random
from functools import cache

from .case import Case
from .pairwise import pairwise
from .structured import KINDS

# Tiles are 64 or 128 rows by 64 to 256 keys on a GPU, smaller on the CPU.
SIZES = [
    *itertools.product((0, 1, 2, 3), (0, 1, 2, 3)),
    *((n, n) for n in (15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 192, 257)),
    *((1, 64), (1, 129), (2, 191), (5, 97), (17, 64), (63, 128), (64, 65), (97, 211), (128, 257), (129, 130)),
    *((64, 1), (129, 2), (97, 13), (65, 64), (128, 63), (130, 129), (211, 97), (257, 128)),
]
HEAD_DIMS = [1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 24, 32, 33, 40, 48, 56, 63, 64, 65, 72, 80, 88, 96, 97, 104, 112]
HEAD_DIMS += [120, 127, 128, 129, 136, 160, 192, 200, 224, 255, 256, 257, 320, 384, 511, 512]
TWO_HEAD_DIMS = [(64, 128), (128, 64), (192, 128), (128, 192), (40, 72), (1, 7), (7, 1), (256, 64), (96, 256), (16, 512)]
HEADS = [(1, 1), (2, 1), (4, 2), (8, 1), (6, 3), (5, 5), (7, 1), (12, 4)]
DTYPES = ["bf16", "fp16", "fp32", "fp64"]
HALF = ["bf16", "fp16"]

FACTORS: dict[str, list[dict]] = {
    "dtype": [{"dtype": dtype} for dtype in DTYPES],
    "visible": [
        {},
        {"causal": True},
        {"causal": True, "causal_align": "top_left"},
        {"window_size": (20, 0)},
        {"window_size": (-1, 7)},
        {"window_size": (9, 30), "causal_align": "top_left"},
        {"causal": True, "window_size": (33, -1)},
        {"window_size": (5, 2)},
    ],
    "lengths": [
        {"seqlen_q": 70, "seqlen_k": 70, "batch": 2},
        {"seqlen_q": 33, "seqlen_k": 140},
        {"seqlen_q": 131, "seqlen_k": 50},
        {"seqlen_q": 60, "seqlen_k": 75, "batch": 3, "used_q": (60, 0, 17), "used_k": (70, 30, 75)},
        {"seqlen_q": (40, 0, 65, 3), "seqlen_k": (20, 9, 80, 0), "slack_rows": 3},
        {"seqlen_q": (30, 45), "seqlen_k": (64, 33), "used_q": (30, 20), "used_k": (50, 33)},
    ],
    "heads": [{"heads_q": q, "heads_k": k} for q, k in ((1, 1), (2, 2), (4, 2), (3, 1))],
    "dims": [{"head_dim": 64}, {"head_dim": 128}, {"head_dim": 40, "head_dim_v": 72}, {"head_dim": 96}, {"head_dim": 17}],
    "scale": [{}, {"softmax_scale": 0.0}, {"softmax_scale": -0.2}, {"softmax_scale": 1.0}],
    "softcap": [{}, {"softcap": 5.0}, {"softcap": 50.0}],
    "alibi": [{}, {"alibi": "h"}, {"alibi": "bh"}],
    "bias": [{}, {"bias": "bhqk"}, {"bias": "hqk"}, {"bias": "bk"}, {"bias": "q"}, {"bias": "bqk"}],
    "mask": [{}, {"mask": "bhqk"}, {"mask": "qk"}, {"mask": "bk"}, {"mask": "hq"}],
    "block_mask": [{}, {"block_mask": ""}, {"block_mask": "bh"}],
    "sink": [{}, {"sink": True}],
    "dropout": [{}, {"dropout_p": 0.25, "seed": 2**40 + 7, "offset": 3}, {"dropout_p": 0.5, "offset": 2**35 + 1}],
    "dlse": [{}, {"dlse": True}],
    "fill": [{}, {"fill": "mean"}, {"fill": "u01"}],
}


@cache
def quick() -> list[Case]:
    """A few hundred small cases."""
    return [*sizes(), *head_dims(), *heads(), *fills(), *singles(), *option_pairs(), *structured_cases(), *poisoned_cases()]


@cache
def shards() -> list[Case]:
    """Calls with a part of a problem: each way to give positions with the options that depend on positions."""
    visible = [{"causal": True}, {"window_size": (20, 0)}, {"window_size": (9, 30)}, {"causal": True, "window_size": (33, -1)}]
    scores = [{"alibi": "h"}, {"dropout_p": 0.25, "seed": 2**40 + 7, "offset": 3}, {"sink": True, "bias": "bhqk"}, {"dlse": True}]
    scores.append({"alibi": "bh", "dropout_p": 0.5, "part_of_dropout": True})
    made = []
    for n, (positions, see, score) in enumerate(itertools.product(("begin", "begins", "rows"), visible, scores)):
        shape = FACTORS["lengths"][n % len(FACTORS["lengths"])] | FACTORS["heads"][n % 4] | {"head_dim": (64, 40)[n % 2]}
        made.append(Case(f"shard-{positions}-{n}", DTYPES[n % len(DTYPES)], positions=positions, **shape, **see, **score))
    return made


@cache
def long() -> list[Case]:
    """Random cases, and large ones: with 2048 keys, errors of a dq accumulated in too low a precision become visible."""
    large = [
        Case(f"large-{dtype}-{fill}-{n}", dtype, 1, n, n, 1, 1, 64, fill=fill, causal=causal)
        for dtype in HALF
        for fill in ("randn", "mean")
        for n, causal in ((2048, False), (2049, True), (3000, True))
    ]
    return [*large, *(random_case(seed) for seed in range(400))]


def by_name(name: str) -> Case:
    """The case of that name, to repeat it."""
    return next(case for case in [*quick(), *long()] if case.name == name)


def sizes() -> list[Case]:
    return [
        Case(f"size-{sq}x{sk}{'-causal' * causal}-{DTYPES[index % 4]}", DTYPES[index % 4], 1, sq, sk, causal=causal)
        for index, ((sq, sk), causal) in enumerate(itertools.product(SIZES, (False, True)))
    ] + [
        Case("size-batch-0", batch=0, seqlen_q=5, seqlen_k=5),
        Case("size-heads-0", heads_q=0, heads_k=0),
        Case("size-packed-0", seqlen_q=(), seqlen_k=()),
        Case("size-packed-empty", seqlen_q=(0, 0, 5), seqlen_k=(0, 4, 0), causal=True),
    ]


def head_dims() -> list[Case]:
    dims = [(d, None) for d in HEAD_DIMS] + TWO_HEAD_DIMS
    return [
        Case(
            f"dim-{d}{f'-{dv}' if dv else ''}-{dtype}{'-causal' * causal}",
            dtype,
            seqlen_q=45,
            seqlen_k=70,
            heads_q=1,
            heads_k=1,
            head_dim=d,
            head_dim_v=dv,
            causal=causal,
        )
        for index, (d, dv) in enumerate(dims)
        for dtype, causal in ((HALF[index % 2], index % 4 < 2), (DTYPES[2 + index % 2], index % 4 > 1))
    ]


def heads() -> list[Case]:
    return [
        Case(f"heads-{q}-{k}-{dtype}", dtype, 2, 37, 50, q, k, 32, causal=q != 5)
        for (q, k), dtype in zip(HEADS, itertools.cycle(DTYPES), strict=False)
    ]


def fills() -> list[Case]:
    return [
        Case(f"fill-{fill}-{dtype}{'-causal' * causal}", dtype, 1, 100, 130, fill=fill, causal=causal)
        for fill in ("randn", "u01", "mean", "outlier", "big", "int")
        for dtype in ("bf16", "fp16", "fp32")
        for causal in (False, True)
    ]


def singles() -> list[Case]:
    """Each option alone, at a size with more than one tile; and extreme values of options."""
    base = {"seqlen_q": 80, "seqlen_k": 150, "heads_q": 4, "heads_k": 2}
    alone = [
        Case(f"only-{factor}-{index}", HALF[index % 2], **{**base, **value})
        for factor, values in FACTORS.items()
        if factor not in ("dtype", "heads", "dims", "fill")
        for index, value in enumerate(values)
        if value
    ]
    far = {
        "scale-tiny": {"softmax_scale": 1e-6},
        "softcap-tiny": {"softcap": 2.0**-10},
        "softcap-huge": {"softcap": 1e30},
        "window-one-left": {"window_size": (1, 0)},
        "window-wide": {"window_size": (1000, 1000)},
        "window-beside": {"window_size": (0, -1)},
        "window-diagonal": {"window_size": (0, 0)},
        "dropout-most": {"dropout_p": 0.9375, "seed": 2**64 - 1, "offset": 2**64 - 1},
        "sink-gqa-causal": {"sink": True, "causal": True, "dlse": True},
        "rows-without-keys": {"seqlen_q": 150, "seqlen_k": 80, "causal": True, "sink": True, "dlse": True},
    }
    return alone + [Case(f"far-{name}-{dtype}", dtype, **{**base, **value}) for name, value in far.items() for dtype in HALF]


def option_pairs() -> list[Case]:
    cases = []
    for index, values in enumerate(pairwise(FACTORS)):
        merged = {key: value for choice in values.values() for key, value in choice.items()}
        cases.append(Case(f"pairs-{index}-{merged['dtype']}", **merged))
    return cases


def structured_cases() -> list[Case]:
    shapes = {
        "square": {"seqlen_q": 100, "seqlen_k": 100, "causal": True},
        "wide": {"seqlen_q": 65, "seqlen_k": 127, "window_size": (40, 3)},
        "tall": {"seqlen_q": 120, "seqlen_k": 70, "causal": True},
        "packed": {"seqlen_q": (33, 0, 70), "seqlen_k": (64, 5, 70), "causal": True},
        "blocks": {"seqlen_q": 150, "seqlen_k": 260, "block_mask": "bh", "mask": "hqk"},
        "long-keys": {"seqlen_q": 5, "seqlen_k": 700, "heads_q": 1, "heads_k": 1},
    }
    return [
        Case(
            f"exact-{kind}-{shape}-{dtype}",
            dtype,
            fill=kind,
            softmax_scale=1.0 if kind == "selection" else None,
            **{"heads_q": 4, "heads_k": 2, **options},
        )
        for kind in KINDS
        for index, (shape, options) in enumerate(shapes.items())
        for dtype in (HALF[index % 2], "fp32")
    ]


def poisoned_cases() -> list[Case]:
    sight = {"seqlen_q": 70, "seqlen_k": 90, "heads_q": 4, "heads_k": 2}
    unused = {
        "dense": {"batch": 3, "used_q": (40, 70, 0), "used_k": (90, 0, 13), **sight},
        "packed": {"seqlen_q": (20, 0, 45), "seqlen_k": (33, 20, 64), "used_k": (33, 5, 40), "slack_rows": 9},
    }
    poisons = ("q_nan", "k_nan", "v_nan", "v_inf", "dout_nan")
    return [
        *(Case(f"poison-{p}-{dtype}", dtype, poison=p, causal=True, **sight) for p in poisons for dtype in ("bf16", "fp32")),
        *(
            Case(f"poison-unused-{name}-{dtype}{'-causal' * causal}", dtype, poison="unused", causal=causal, **options)
            for name, options in unused.items()
            for dtype in ("bf16", "fp32")
            for causal in (False, True)
        ),
    ]


def random_case(seed: int) -> Case:
    """Any combination of options and sizes with at most some ten million multiply-adds per head."""
    rng = random.Random(seed)
    merged: dict = {}
    for values in FACTORS.values():
        merged |= rng.choice(values) if rng.random() < 0.4 else values[0]
    merged["dtype"] = rng.choice(DTYPES)
    merged["fill"] = rng.choice(["randn", "randn", "u01", "mean", "outlier", "big", "int"])
    heads_k = rng.choice([1, 1, 2, 3])
    merged |= {"heads_k": heads_k, "heads_q": heads_k * rng.choice([1, 1, 2, 4])}
    merged |= {"head_dim": rng.choice([rng.randint(1, 256), 64, 128]), "head_dim_v": None}
    if rng.random() < 0.2:
        merged["head_dim_v"] = rng.randint(1, 256)
    if rng.random() < 0.3:
        merged["window_size"] = (rng.choice([-1, 0, rng.randint(1, 300)]), rng.choice([-1, 0, rng.randint(1, 300)]))
    merged |= random_lengths(rng)
    return Case(f"random-{seed}", **merged)


def random_lengths(rng: random.Random) -> dict:
    def length() -> int:
        return rng.choice([rng.randint(0, 20), rng.randint(1, 130), rng.randint(1, 400)])

    count = rng.randint(1, 3)
    if rng.random() < 0.5:
        lengths = {"batch": count, "seqlen_q": length(), "seqlen_k": length(), "slack_rows": 0}
        largest = {"q": [lengths["seqlen_q"]] * count, "k": [lengths["seqlen_k"]] * count}
    else:
        largest = {side: [length() for _ in range(count)] for side in "qk"}
        lengths = {f"seqlen_{side}": tuple(largest[side]) for side in "qk"} | {"slack_rows": rng.choice([0, 0, 5])}
    for side in "qk":
        some = tuple(rng.randint(0, n) for n in largest[side])
        lengths[f"used_{side}"] = some if rng.random() < 0.25 else None
    return lengths
