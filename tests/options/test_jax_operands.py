"""The JAX functions, their operands and attributes agree with the list of options, and pass every option on."""

from __future__ import annotations

import re
from typing import Any

import pytest
from libflash._option_list import Option, options_of
from stated_options import ROOT, STRUCTS, adapter_cases, adapter_options, defaults, sample

from libflash import _option_list


@pytest.mark.parametrize("function", ["attention", "decode", "merge", "cache_write"])
def test_jax_signature(function: str) -> None:
    pytest.importorskip("jax")
    import libflash.jax

    wanted = {option.name: option.default for option in adapter_options(function, "jax")}
    assert defaults(getattr(libflash.jax, function)) == wanted


def test_jax_operands_and_attributes() -> None:
    """In Python, in the order of the bits in C, and in the C structs."""
    pytest.importorskip("jax")
    from libflash import _jax_calls

    text = (ROOT / "python/jax_ffi/request.c").read_text()
    rows = (ROOT / "python/jax_ffi/attributes.c").read_text()
    table = {name: macro for macro, name in re.findall(r"^    OF_(\w+)\((\w+)", rows, re.M)}
    of_results = {"need_dbias", "need_tangents", "wide", "statistics"}  # in Python alone
    attributes = {"flags", "layout", "head_dim_v", *of_results}
    of_shards = {"row_positions", "column_positions", "head_begin", "heads_total"}  # context_parallel_attention gives them
    tangents = {*_jax_calls.DIRECTION.values(), *_jax_calls.SECOND_DIRECTION.values(), "tdout", "tdlse"}
    for operation, names in (("attention", _jax_calls.ATTENTION_OPERANDS), ("decode", _jax_calls.DECODE_OPERANDS)):
        options = [*options_of(operation), *(options_of("attention_backward") if operation == "attention" else ())]
        options = [option for option in options if option.jax or option.name in of_shards]
        given = [name for name in names if operation == "decode" or name not in tangents]
        assert set(given) == {option.name for option in options if option.kind.array}
        fields = [next(option.fields[0] for option in options if option.name == name) for name in given]
        struct = STRUCTS[operation][0]
        assert re.findall(rf"offsetof\({struct}, (\w+)\)", text) == fields
        numbers = [
            option for option in options if not option.kind.array and option.kind.c and option.kind is not _option_list.OUTPUT
        ]
        fields = {name for option in numbers for name in option.fields if name != "rng_state"}
        in_table = {name for name, macro in table.items() if macro in ("BOTH", "ALL", operation.upper())}
        assert in_table == fields | {"flags", "num_threads"}
        attributes |= fields
    assert set(_jax_calls.Options._fields) == attributes
    assert set(table) == attributes - of_results | {"operands", "num_threads"}


def test_jax_operands_of_cache_write() -> None:
    pytest.importorskip("jax")
    from libflash import _jax_calls

    options = {option.name: option for option in options_of("cache_write") if option.kind.array}
    names = [name for name in _jax_calls.CACHE_WRITE_OPERANDS if name not in ("v", "v_cache")]
    assert set(names) == set(options)
    text = (ROOT / "python/jax_ffi/request.c").read_text()
    assert re.findall(r"offsetof\(flash_cache_write_options_t, (\w+)\)", text) == [options[name].fields[0] for name in names]


@pytest.mark.parametrize(("function", "option"), [case for case in adapter_cases("jax") if case.values[0] != "merge"])
def test_jax_passes_every_option_on(function: str, option: Option, monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")
    import libflash.jax as adapter

    from libflash import _jax_cache

    x = jax.numpy.zeros((1, 2, 1, 8))
    seen: list[Any] = []

    def record(options: Any, *arrays: Any) -> Any:
        seen[:] = [options, arrays[-1]]
        return x, x, *(x for _ in getattr(options, "statistics", ()))

    monkeypatch.setattr(*((adapter, "_compiled") if function == "attention" else (_jax_cache, "_decode")), record)
    if option.name == "return_lse":
        assert isinstance(getattr(adapter, function)(x, x, x, return_lse=True), tuple)
        return
    value = sample(option, jax.numpy.zeros(2, jax.numpy.int32))
    more: dict[str, Any] = {"dropout_p": 0.5} if option.name in ("seed", "offset") else {}
    more |= {"k": x, "v": x} if option.name in ("k", "v") else {}
    more |= {"rotary_cos": x} if option.name == "rotary_interleaved" else {}
    getattr(adapter, function)(x, x, x, **more)
    before = list(seen)
    arrays = (x, x) if option.name == "head_dim_v" else (x, x, x)  # without v_cache
    getattr(adapter, function)(*arrays, **{**more, option.name: value})
    options, operands = seen
    if option.kind.array:
        assert option.name in operands
    else:
        changed = {name for name in options._fields if getattr(options, name) != getattr(before[0], name)}
        fields = set(option.fields) - {"rng_state"} or {option.name} & {"layout", "head_dim_v"}
        fields |= {"statistics"} if option.name == "return_stats" else set()
        fields |= {"wide"} if option.name == "shard" else set()  # a part of the keys has a result of float32
        assert changed == fields | ({"flags"} if option.flag else set())
