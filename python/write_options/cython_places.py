"""The options in Cython: signatures, calls, conversions and structs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from option_groups import Groups
from text_edits import Edit, after, python_literal, run_of_lines

HEADER = Path(__file__).resolve().parents[2] / "include/libflash.h"

CONVERSION = r"    made\.\w+ = number\(.*"
STRUCTS = (
    "flash_attention_options_t", "flash_decode_options_t", "flash_merge_options_t", "flash_cache_write_options_t",
    "flash_tangents_t",
)  # fmt: skip


def with_default(options: Iterable[Any]) -> list[str]:
    return [f"{option.name}={python_literal(option.default)}" for option in options]


def by_name(options: Iterable[Any]) -> list[str]:
    return [f"{option.name}={option.name}" for option in options]


def names(options: Iterable[Any]) -> list[str]:
    return [option.name for option in options]


def from_dict(options: Iterable[Any]) -> list[str]:
    return [f'o["{option.name}"]' for option in options]


def cython(groups: Groups) -> dict[str, list[Edit]]:
    return {
        "_core.pyx": forward(groups),
        "_operations.pxi": [
            *backward(groups),
            *decode(groups),
            after("\ndef merge(outs, lses, *, ", with_default(groups.of("merge"))),
            after("given_of(_merge_passed, (\n            ", names(groups.of("merge"))),
        ],
        "_options.pxi": [*filled_attention(groups), *filled_decode(groups)],
        "_capi.pxd": [struct(name) for name in STRUCTS],
    }


def filling(groups: Groups) -> list[Edit]:
    """The calls of attention() and attention_backward() that fill the struct."""
    return [
        after("attention_options(&call, &extras, &options, ", names(groups.in_struct("attention"))),
        after("shard_options(&call, &extras, &options, ", names(groups.of_shards())),
    ]


def forward(groups: Groups) -> list[Edit]:
    to_adapter = [option for option in groups.of("attention") if option.adapters != ()]
    return [
        after("\ndef attention(q, k, v, *, ", with_default(groups.of("attention"))),
        after("given_of(_attention_of_parts, (\n            ", names(groups.of_shards("attention"))),
        after("given_of(_attention_passed, (\n            ", names(to_adapter)),
        *filling(groups),
    ]


def backward(groups: Groups) -> list[Edit]:
    options = groups.of("attention_backward")
    to_operator = [option for option in options if "attention" in option.functions and option.torch]
    return [
        after("\ndef attention_backward(\n        dout, q, k, v, out, lse, *, ", with_default(options)),
        after("refuse_shard_options(dict(\n            ", by_name(groups.of_shards())),
        after("stream=stream),\n            dict(", by_name(to_operator)),
        *filling(groups),
    ]


def decode(groups: Groups) -> list[Edit]:
    options = groups.of("decode")
    documented = [x.name for x in groups.of_scores() if x.name not in ("window_size", "num_splits")]
    return [
        after("\ndef decode(q, k_cache, v_cache=None, *, ", with_default(options)),
        after("valid keys with the new ones).\n    ", [*documented[:-1], documented[-1] + " "], ":"),
        after("given_of(_decode_passed, (\n            ", names(options)),
        after("decode_options(&call, &extras, &options, ", names(groups.in_struct("decode"))),
    ]


def filled_attention(groups: Groups) -> list[Edit]:
    options, of_shards = groups.in_struct("attention"), groups.of_shards()
    made = "Call *call, Extras *extras, flash_attention_options_t *made, "
    return [
        after("attention_options(\n        " + made, names(options)),
        after("return attention_options(\n        call, extras, made, ", from_dict(options)),
        after("shard_options(" + made, names(of_shards)),
        after("return shard_options(call, extras, made, ", from_dict(of_shards)),
        run_of_lines("cdef int attention_options(", CONVERSION, conversions(options)),
    ]


def filled_decode(groups: Groups) -> list[Edit]:
    options = groups.in_struct("decode")
    return [
        after("decode_options(\n        Call *call, Extras *extras, flash_decode_options_t *made, ", names(options)),
        after("return decode_options(\n        call, extras, made, ", from_dict(options)),
        run_of_lines("cdef int decode_options(", CONVERSION, conversions(options)),
    ]


def conversions(options: Iterable[Any]) -> list[str]:
    """Of numbers, but for softmax_scale, which sets a flag."""
    numbers = [option for option in options if option.kind.c == "double" and not option.flag]
    return [
        f'    made.{x.name} = number({x.name}, "{x.name}")' + (f" if {x.name} is not None else 0" if x.nullable else "")
        for x in numbers
    ]


def struct(name: str) -> Edit:
    """From C to Cython, without the comments."""
    body = re.search(rf"typedef struct {name} {{\n(.*?)\n}}", HEADER.read_text(), re.S)
    assert body is not None
    fields = re.findall(r"^ *((?:const )?\w+ \*?\w+);$", re.sub(r" */\*.*?\*/", "", body[1], flags=re.S), re.M)
    return run_of_lines(f"ctypedef struct {name}:", " {8}.*", [f"        {field}" for field in fields])
