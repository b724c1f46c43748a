"""The PyTorch functions and operators agree with the list of options, and pass every option on."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from libflash._option_list import OPTIONS, Option
from stated_options import POSITIONAL, Types, adapter_cases, adapter_options, alternatives, defaults, sample

import libflash
from libflash import _option_list

FIRST_ARGUMENTS = {  # compiled graphs identify arguments by their position
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
TORCH_CASES = adapter_cases("torch")


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
    before, of_gradients = (
        _option_list.operator_arguments("decode"),
        _option_list.operator_arguments("attention", "bool need=False"),
    )
    assert "str? kernel_name=None, Tensor? k_scale=None" in before
    rank = 1 + max(option.rank for option in OPTIONS)
    new = Option("score_scale", _option_list.NUMBER, 1.0, _option_list.SCORES, rank=rank)
    monkeypatch.setattr(_option_list, "OPTIONS", (new, *OPTIONS))
    assert _option_list.operator_arguments("decode") == f"{before}, Scalar score_scale=1.0"
    assert "kernel_name=None, bool need=False" in of_gradients
    assert _option_list.operator_arguments("attention", "bool need=False") == f"{of_gradients}, Scalar score_scale=1.0"


@pytest.mark.parametrize(("function", "option"), [case for case in TORCH_CASES if case.values[1].arguments])
def test_torch_passes_every_option_on(function: str, option: Option, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    import libflash.torch as adapter

    seen: dict[str, Any] = {}
    results = torch.zeros(1, 2, 1, 8), torch.zeros(1, 1, 2)

    def record(*_: Any, **options: Any) -> Any:
        seen.update(options)
        return results

    monkeypatch.setattr(adapter._core, "call_directly", lambda *_: NotImplemented)
    monkeypatch.setattr(adapter, "eager", lambda *_: False)
    monkeypatch.setattr(adapter.ops, "OPERATORS", {function: record})
    x = torch.zeros(1, 2, 1, 8)
    value = sample(option, torch.zeros(2))
    more = {"dropout_p": 0.5, "seed": 1} if option.name in ("seed", "offset") else {}
    arguments = ([x], [results[1]]) if function == "merge" else (x, x, x)
    getattr(adapter, function)(*arguments, **{**more, option.name: value})
    got = seen["kernel_name" if option.name == "kernel" else option.name]
    assert got is value or got == (list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize(("function", "option"), [case for case in TORCH_CASES if case.values[0] != "merge"])
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


@pytest.mark.parametrize(("function", "option"), [case for case in TORCH_CASES if case.values[0] in case.values[1].operations])
def test_libflash_passes_every_option_to_the_adapter(function: str, option: Option, monkeypatch: pytest.MonkeyPatch) -> None:
    """If PyTorch records gradients."""
    torch = pytest.importorskip("torch")
    import libflash.torch as adapter

    seen: dict[str, Any] = {}
    for target in ("attention_with_pytorch", "record_plain") if function == "attention" else (function,):
        monkeypatch.setattr(adapter, target, lambda *_, **options: seen.update(options))
    x = torch.zeros(1, 2, 1, 8, requires_grad=True)
    value = sample(option, torch.zeros(2))
    getattr(libflash, function)(*(([x], [x]) if function == "merge" else (x, x, x)), **{option.name: value})
    assert seen.pop(option.name) is value
    assert seen == {}


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
