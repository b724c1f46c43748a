"""Everything that names the options agrees with the list of options, and every option of a call reaches the library."""

from __future__ import annotations

import ast
import ctypes
import inspect
import pathlib
import re
from typing import Any

import abi
import numpy as np
import pytest
from harness import qkv
from libflash._option_list import OPTIONS, Option, options_of

import libflash
from libflash import _option_list

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "libflash"
POSITIONAL = {
    "attention": "q k v", "attention_backward": "dout q k v out lse", "decode": "q k_cache v_cache", "merge": "outs lses",
    "cache_write": "k v k_cache v_cache slots",
}  # fmt: skip
STRUCTS = {
    "attention": ("flash_attention_options_t", abi.AttentionOptions),
    "attention_backward": ("flash_attention_options_t", abi.AttentionOptions),
    "decode": ("flash_decode_options_t", abi.DecodeOptions),
    "merge": ("flash_merge_options_t", abi.MergeOptions),
    "cache_write": ("flash_cache_write_options_t", abi.CacheWriteOptions),
}
NOT_OPTIONS = {"struct_size", "flags", "num_threads", "tile_q", "tile_k"}  # fields that Python fills by itself
NOT_OPTIONS |= {"reserved", "reserved2"}
ARRAYS_INSTEAD_OF_NUMBERS = ("rng_state", "row_begins", "column_begins")


def defaults(function: Any) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}


def adapter_options(function: str, adapter: str) -> list[Option]:
    return [option for option in OPTIONS if function in option.functions and getattr(option, adapter)]


# -- Python


@pytest.mark.parametrize("operation", POSITIONAL)
def test_signature(operation: str) -> None:
    parameters = inspect.signature(getattr(libflash, operation)).parameters
    assert [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == POSITIONAL[operation].split()
    assert defaults(getattr(libflash, operation)) == {option.name: option.default for option in options_of(operation)}


def test_no_option_is_stated_twice_for_an_operation() -> None:
    for operation in POSITIONAL:
        names = [option.name for option in options_of(operation)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("op", "operation"), {"forward": "attention", "backward": "attention_backward", "decode": "decode"}.items()
)
def test_explain_takes_the_options_at_their_defaults(op: str, operation: str) -> None:
    q, k, v = qkv()
    given = {option.name: option.default for option in options_of(operation) if option.kind is not _option_list.OUTPUT}
    assert libflash.explain(q, k, v, op=op, **given) == libflash.explain(q, k, v, op=op)
    with pytest.raises(TypeError, match="no_such"):
        libflash.explain(q, k, v, op=op, no_such=None)


def arguments_for(operation: str) -> tuple[np.ndarray, ...]:
    q, k, v = qkv()
    if operation == "attention_backward":
        out, lse = libflash.attention(q, k, v, return_lse=True)
        return q, q, k, v, out, lse
    if operation == "merge":
        out, lse = libflash.attention(q, k, v, return_lse=True)
        return [out], [lse]
    if operation == "cache_write":
        return k[0], v[0], k, v, np.arange(k.shape[1])
    return q, k, v


@pytest.mark.parametrize(
    ("operation", "option"), [(op, option) for op in POSITIONAL for option in options_of(op)], ids=lambda x: getattr(x, "name", x)
)
def test_a_wrong_type_is_refused_by_name(operation: str, option: Option) -> None:
    with pytest.raises((TypeError, libflash.InvalidError)) as refused:
        getattr(libflash, operation)(*arguments_for(operation), **{option.name: object()})
    assert str(refused.value).startswith(option.name)
    assert option.kind.error in str(refused.value)


# -- types


SAME = {
    "_DLPackArray": "Array",
    "A": "Array",
    "Tensor": "Array",
    "_Stream": "Stream",
    "Align": "causal_align",
    "Layout": "layout",
    "CacheDtype": "cache_dtype",
}
CHOICES = {option.name: f"Literal{list(option.choices)!r}" for option in OPTIONS if option.choices}


def alternatives(annotation: str) -> set[str]:
    """The members of a union, with the list's names. The names Window and Stream include None."""
    found = {SAME.get(part, part) for part in annotation.replace('"', "'").split(" | ")}
    found = {CHOICES.get(part, part) for part in found}
    return found - {"None"} if found & {"Window", "Stream"} else found


class Types:
    """The option classes (TypedDict) and functions in some files, read as text."""

    def __init__(self, *names: str) -> None:
        trees = [ast.parse((PACKAGE / name).read_text()) for name in names]
        self.functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
        self.classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}

    def members(self, name: str) -> dict[str, str]:
        found: dict[str, str] = {}
        if name not in self.classes:
            return found
        for base in self.classes[name].bases:
            found |= self.members(ast.unparse(base).partition("[")[0])
        for line in self.classes[name].body:
            if isinstance(line, ast.AnnAssign):
                found[ast.unparse(line.target)] = ast.unparse(line.annotation)
        return found

    def options(self, function: str) -> list[dict[str, str]]:
        """The options of each definition of the function whose options are one class."""
        found = []
        for node in self.functions:
            if node.name != function or node.args.kwarg is None:
                continue
            written = {x.arg: ast.unparse(x.annotation) for x in node.args.kwonlyargs}
            written.pop("return_lse", None)
            if kind := re.fullmatch(r"Unpack\[(\w+)(\[\w+\])?\]", ast.unparse(node.args.kwarg.annotation)):
                found.append(written | self.members(kind.group(1)))
        return found


@pytest.mark.parametrize("operation", POSITIONAL)
def test_stub(operation: str) -> None:
    if operation == "cache_write":  # its options are written out
        node = next(x for x in Types("_core.pyi").functions if x.name == operation)
        found = {x.arg: alternatives(ast.unparse(x.annotation)) for x in node.args.kwonlyargs}
        assert found == {option.name: alternatives(option.type) for option in options_of(operation)}
        return
    wanted = {option.name: alternatives(option.type) for option in options_of(operation) if option.name != "return_lse"}
    found = Types("_core.pyi", "_option_types.py").options(operation)
    assert len(found) == (1 if operation == "attention_backward" else 3)
    for options in found:
        assert {name: alternatives(annotation) for name, annotation in options.items()} == wanted


# -- C


def struct_fields(text: str, name: str) -> dict[str, str]:
    """Name and type of each field, from C or Cython."""
    body = re.search(name + (r" {\n(?s:(.*?))\n}" if "#define" in text else r":\n((?: {8}.*\n)+)"), text).group(1)
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
    return {m[2]: m[1].strip() for m in re.finditer(r"^\s*((?:const )?\w+ \*?)\s*(\w+);?\s*$", body, re.M)}


@pytest.mark.parametrize("path", ["include/libflash.h", "python/libflash/_capi.pxd"])
@pytest.mark.parametrize("struct", sorted({name for name, _ in STRUCTS.values()}))
def test_struct(path: str, struct: str) -> None:
    wanted = {}
    for option in OPTIONS:
        if any(STRUCTS[operation][0] == struct for operation in option.operations):
            wanted |= dict.fromkeys(option.fields, option.kind.c)
    if struct == "flash_attention_options_t":
        wanted |= {"block_lists": "const flash_block_lists_t *"}
        wanted |= dict.fromkeys(ARRAYS_INSTEAD_OF_NUMBERS, "const flash_tensor_t *")
    found = struct_fields((ROOT / path).read_text(), struct)
    assert {name: kind for name, kind in found.items() if name not in NOT_OPTIONS} == wanted


C_TYPES = {"double": ctypes.c_double, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64, "const char *": ctypes.c_char_p}
C_TYPES["int32_t"] = ctypes.c_int32


@pytest.mark.parametrize("operation", POSITIONAL)
def test_abi_table(operation: str) -> None:
    fields = dict(STRUCTS[operation][1]._fields_)
    for option in options_of(operation):
        for name in option.fields:
            pointer = abi.TensorPointer if name != "block_lists" else ctypes.POINTER(abi.BlockLists)
            integer = option.kind is _option_list.SEED and name == "seed"
            wanted = ctypes.c_uint64 if integer else C_TYPES.get(option.kind.c, pointer)
            assert fields[name] is (abi.TensorPointer if name in ARRAYS_INSTEAD_OF_NUMBERS else wanted)


def test_flags() -> None:
    wanted = {option.flag for option in OPTIONS if option.flag} | {"FROM_LSE"}  # of flash_tangents_t
    assert set(re.findall(r"#define FLASH_FLAG_(\w+)", abi.HEADER.read_text())) == wanted
    assert set(re.findall(r"^ +FLASH_FLAG_(\w+)$", (PACKAGE / "_capi.pxd").read_text(), re.M)) == wanted
    assert all(isinstance(getattr(abi, flag), int) for flag in wanted)


# -- PyTorch


SAMPLES: dict[str, Any] = {
    "bool": None, "Literal": None, "float": 0.5, "int": 3, "str": "cpu", "Window": (3, 2), "Shard": (3, 2, 4), "int | Array": 5,
    "tuple[str, ...]": ("entropy",),
}  # fmt: skip


def sample(option: Option, array: Any) -> Any:
    """A value that is not the default."""
    if option.kind.type == "bool":
        return not option.default
    return option.choices[1] if option.choices else SAMPLES.get(option.kind.type, array)


ADAPTER_CASES = {
    adapter: [
        pytest.param(function, option, id=f"{function}-{option.name}")
        for function in ("attention", "decode", "merge")
        for option in adapter_options(function, adapter)
    ]
    for adapter in ("torch", "jax")
}


@pytest.mark.parametrize("function", ["attention", "decode", "merge"])
def test_torch_signature(function: str) -> None:
    pytest.importorskip("torch")
    import libflash.torch

    parameters = inspect.signature(getattr(libflash.torch, function)).parameters
    wanted = {option.name: option for option in adapter_options(function, "torch")}
    found = {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert " ".join(name for name in parameters if name not in found) == POSITIONAL[function]
    assert {name: p.default for name, p in found.items() if name != "seed"} == {
        name: option.default for name, option in wanted.items() if name != "seed"
    }
    assert ("seed" in found) == (function == "attention") == ("seed" in wanted)
    assert function != "attention" or found["seed"].default is None
    typed = Types("torch.py", "_option_types.py").options(function)
    assert len(typed) == 3
    for options in typed:
        assert {name: alternatives(text) - {"None"} for name, text in options.items()} == {
            name: alternatives(option.type) - {"None"} for name, option in wanted.items() if name != "return_lse"
        }


def test_torch_cache_write() -> None:
    """The function, and the arguments of the operator beside the tensors that it writes."""
    torch = pytest.importorskip("torch")
    import libflash.torch

    wanted = {option.name: option.default for option in adapter_options("cache_write", "torch")}
    assert defaults(libflash.torch.cache_write) == wanted
    arguments = torch.ops.libflash.cache_write.default._schema.arguments
    found = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    found["kernel"], found["k_rope_cache"] = found.pop("kernel_name"), None  # written: rope_cache
    assert found == wanted


FIRST_ARGUMENTS = {  # compiled graphs know arguments by their position
    "attention": "q k v num_splits causal causal_align window_size softmax_scale softcap alibi_slopes bias mask learnable_sink "
    "block_mask row_counts row_indices col_counts col_indices dropout_p seed offset rng_state layout cu_seqlens_q cu_seqlens_k "
    "max_seqlen_q max_seqlen_k seqused_q seqused_k deterministic backend kernel_name",
    "decode": "q k_cache v_cache num_splits cache_seqlens block_table cache_batch_idx cache_leftpad rotary_cos rotary_sin "
    "rotary_interleaved causal window_size softmax_scale softcap alibi_slopes learnable_sink split_size backend kernel_name",
    "merge": "outs lses layout backend kernel_name",
}
FIRST_ARGUMENTS |= {
    "attention_out": FIRST_ARGUMENTS["attention"].replace("q k v", "q k v out lse"),
    "attention_backward": FIRST_ARGUMENTS["attention"].replace("q k v", "dout q k v out lse dlse") + " need_dbias need_dsink",
    "decode_append": FIRST_ARGUMENTS["decode"].replace("v_cache", "v_cache k v"),
    "decode_append_parts": FIRST_ARGUMENTS["decode"].replace("v_cache", "v_cache k v row_k_scale row_v_scale rope_cache k_rope"),
}


@pytest.mark.parametrize("operator", FIRST_ARGUMENTS)
def test_operator_schema(operator: str) -> None:
    torch = pytest.importorskip("torch")
    import libflash.torch  # noqa: F401

    arguments = getattr(torch.ops.libflash, operator).default._schema.arguments
    names = [argument.name for argument in arguments]
    first = FIRST_ARGUMENTS[operator].split()
    assert names[: len(first)] == first
    function = operator.partition("_")[0]
    found = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    for option in adapter_options(function, "torch"):
        if option.arguments:
            name = "kernel_name" if option.name == "kernel" else option.name
            assert found[name] == (list(option.default) if isinstance(option.default, tuple) else option.default)


def test_options_added_later_come_last_in_a_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _option_list.operator_arguments("decode")
    assert "str? kernel_name=None, Tensor? k_scale=None" in before
    new = Option("score_scale", _option_list.NUMBER, 1.0, _option_list.SCORES, rank=9)
    monkeypatch.setattr(_option_list, "OPTIONS", (new, *OPTIONS))
    assert _option_list.operator_arguments("decode") == f"{before}, float score_scale=1.0"
    assert _option_list.operator_arguments("attention", "bool need=False").endswith("bool need=False, float score_scale=1.0")


@pytest.mark.parametrize(("function", "option"), [case for case in ADAPTER_CASES["torch"] if case.values[1].arguments])
def test_torch_passes_every_option_on(function: str, option: Option, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    import libflash.torch as adapter

    seen: dict[str, Any] = {}
    results = torch.zeros(1, 2, 1, 8), torch.zeros(1, 1, 2)

    def record(*_: Any, **options: Any) -> Any:
        seen.update(options)
        return results

    monkeypatch.setattr(adapter._core, "call_directly", lambda *_: NotImplemented)
    monkeypatch.setattr(adapter.ops, "eager", lambda *_: False)
    monkeypatch.setattr(adapter.ops, "OPERATORS", {function: record})
    x = torch.zeros(1, 2, 1, 8)
    value = sample(option, torch.zeros(2))
    more = {"dropout_p": 0.5, "seed": 1} if option.name in ("seed", "offset") else {}
    arguments = ([x], [results[1]]) if function == "merge" else (x, x, x)
    getattr(adapter, function)(*arguments, **{**more, option.name: value})
    got = seen["kernel_name" if option.name == "kernel" else option.name]
    assert got is value or got == (list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize(("function", "option"), [case for case in ADAPTER_CASES["torch"] if case.values[0] != "merge"])
def test_torch_passes_every_option_on_directly(function: str, option: Option, monkeypatch: pytest.MonkeyPatch) -> None:
    """To libflash's own function, where PyTorch has nothing to do; but for the options that the adapter treats itself."""
    torch = pytest.importorskip("torch")
    import libflash.torch as adapter
    from libflash._torch_options import NOT_DIRECT

    class DirectError(Exception):
        pass

    class NotDirectError(Exception):
        pass

    def direct(*_: Any, **options: Any) -> Any:
        raise DirectError(options)

    def not_direct(*_: Any, **options: Any) -> Any:
        raise NotDirectError(options)

    monkeypatch.setattr(adapter._core, function, direct)
    monkeypatch.setattr(adapter, f"{function}_with_pytorch", not_direct)
    x = torch.zeros(1, 2, 1, 8)
    value = sample(option, torch.zeros(2))
    if option.name in NOT_DIRECT and (function == "attention" or option.name == "cu_seqlens_q"):
        changes = option.name not in ("seed", "offset")  # which mean nothing without dropout
        with pytest.raises(NotDirectError if changes else DirectError):
            getattr(adapter, function)(x, x, x, **{option.name: value})
        return
    with pytest.raises(DirectError) as seen:
        getattr(adapter, function)(x, x, x, **{option.name: value})
    assert seen.value.args[0] == {option.name: value}


@pytest.mark.parametrize(
    ("function", "option"), [case for case in ADAPTER_CASES["torch"] if case.values[0] in case.values[1].operations]
)
def test_libflash_passes_every_option_to_the_adapter(function: str, option: Option, monkeypatch: pytest.MonkeyPatch) -> None:
    """If PyTorch records gradients."""
    torch = pytest.importorskip("torch")
    import libflash.torch as adapter

    seen: dict[str, Any] = {}
    monkeypatch.setattr(adapter, function, lambda *_, **options: seen.update(options))
    x = torch.zeros(1, 2, 1, 8, requires_grad=True)
    value = sample(option, torch.zeros(2))
    getattr(libflash, function)(*(([x], [x]) if function == "merge" else (x, x, x)), **{option.name: value})
    assert seen.pop(option.name) is value
    assert seen in ({}, {"seed": 0})


def test_torch_refuses_unknown_options() -> None:
    torch = pytest.importorskip("torch")
    import libflash.torch

    x = torch.zeros(1, 2, 1, 8)
    for function in (libflash.torch.attention, libflash.torch.decode):
        with pytest.raises(TypeError, match="unexpected keyword argument 'casual'"):
            function(x, x, x, casual=True)


def test_torch_decode_with_numbers_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers among the options do not require PyTorch's dispatcher."""
    torch = pytest.importorskip("torch")
    import libflash.torch as adapter

    monkeypatch.setattr(adapter.ops, "OPERATORS", {})
    x = torch.randn(1, 2, 1, 8)
    got = adapter.decode(x, x, x, softmax_scale=0.3, num_splits=1, window_size=(1, 0))
    torch.testing.assert_close(got, libflash.decode(x, x, x, softmax_scale=0.3, num_splits=1, window_size=(1, 0)))


# -- JAX


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
    table = {name: macro for macro, name in re.findall(r"^    OF_(\w+)\((\w+)", text, re.M)}
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


@pytest.mark.parametrize(("function", "option"), [case for case in ADAPTER_CASES["jax"] if case.values[0] != "merge"])
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
