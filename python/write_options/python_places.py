"""The options in Python and in the C code of the JAX adapter: signatures, classes of types, attributes of XLA calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from option_groups import Groups, owners
from text_edits import Edit, after, keywords, lines_between, python_literal, run_of_lines


def types(groups: Groups) -> dict[str, list[Edit]]:
    """The option classes (TypedDict). backend and kernel, out and lse have classes of their own; stream and seed differ."""
    of_scores = [x for x in groups.all if set(groups.list.SCORES) <= set(x.operations) or x.name == "causal"]
    others = {"backend", "kernel", "stream", "seed", "return_lse", "out", "lse"}
    known = {x.name for x in of_scores} | others
    of_attention = [x for x in groups.of("attention") if groups.is_common(x) and x.adapters != () and x.name not in known]
    of_decode = [x for x in groups.of("decode") if x.name not in known]
    by_class = {
        "ScoreOptions": {x.name: x for x in of_scores if x.name not in others}.values(),
        "AttentionOptions": of_attention,
        "DecodeOptions": of_decode,
    }
    member = r"    \w+: .*"
    return {
        "_option_types.py": [
            run_of_lines(f"class {name}(", member, [f"    {x.name}: {stub_type(x)}" for x in options])
            for name, options in by_class.items()
        ]
    }


def stub_type(option: Any) -> str:
    named = {"causal_align": "Align", "layout": "Layout", "cache_dtype": "CacheDtype"}
    text = option.type if not option.choices else named[option.name] + (" | None" if option.default is None else "")
    return "Window" if option.kind.type == "Window" else re.sub(r"\bArray\b", "A", text)


def jax(groups: Groups) -> dict[str, list[Edit]]:
    def signature(function: str) -> Edit:
        options = groups.of_adapter(function, "jax")
        return keywords(function, [f"    {x.name}: {jax_type(x)} = {python_literal(x.default)}," for x in options])

    return {"jax.py": [signature("attention")], "_jax_cache.py": [signature("decode")], **attributes(groups)}


def attributes(groups: Groups) -> dict[str, list[Edit]]:
    """Of a custom call of XLA: in Python, in C, and in the table that says which option structs have them."""
    found = groups.attributes()
    integers, reals = ([name for name, (kind, _) in found.items() if kind == wanted] for wanted in ("INTEGER", "REAL"))
    static = {"INTEGER": "int = 0", "REAL": "float = 0.0", "TEXT": 'str = ""'}
    fields = [f"    {name}: {static[kind]}" for name, (kind, _) in found.items()]
    rows = [f"    OF_{owners(operations)}({name}, {kind})," for name, (kind, operations) in found.items()]
    return {
        "_jax_calls.py": [lines_between('    layout: str = "bshd"\n', "    head_dim_v: int", fields)],
        "../jax_ffi/request.h": [
            after("    int64_t num_threads, ", integers, ";"),
            after("    double ", reals, ";"),
        ],
        "../jax_ffi/attributes.c": [lines_between("    OF_ALL(num_threads, INTEGER),\n", "    {NULL,", rows)],
    }


def jax_type(option: Any) -> str:
    pair, triple = "tuple[int | None, int | None]", "tuple[int, int, int]"
    if option.choices:
        return "str | None" if option.default is None else "str"
    return str(option.type).replace("Window", pair).replace("Shard", triple).replace(" | BlockMask", "")


def context_parallel(groups: Groups) -> dict[str, list[Edit]]:
    """The numbers that change scores, in the signatures of context_parallel_attention."""
    options = groups.numbers_of_scores()
    line = "    (?:" + "|".join(["softmax_scale", *groups.list.SCORE_NUMBERS]) + "): .* = .*,"

    def signature(kind: Callable[[Any], str]) -> list[Edit]:
        lines = [f"    {x.name}: {kind(x)} = {python_literal(x.default)}," for x in options]
        return [run_of_lines("\ndef context_parallel_attention(", line, lines)]

    return {
        "_jax_context.py": signature(jax_type),
        "_torch_context.py": signature(lambda x: "float" if x.default is not None else "float | None"),
    }
