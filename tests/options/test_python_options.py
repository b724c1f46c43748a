"""The signatures and stubs of Python agree with the list of options; wrong types are refused by name."""

from __future__ import annotations

import ast
import inspect
import re

import numpy as np
import pytest
from harness import qkv
from libflash._option_list import Option, options_of
from stated_options import POSITIONAL, Types, alternatives, defaults

import libflash
from libflash import _option_list


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


@pytest.mark.parametrize("operation", ["attention", "decode", "cache_write"])
def test_docstrings_say_that_int64_is_converted(operation: str) -> None:
    for option in options_of(operation):
        if option.kind is _option_list.LENGTHS:
            stated = rf"\b{option.name}\b[\w, ]* : \(.*int64 on the CPU: converted"
            assert re.search(stated, getattr(libflash, operation).__doc__), option.name


INTEGERS = [(op, o.name) for op in POSITIONAL for o in options_of(op) if o.kind.error == "must be an integer"]


@pytest.mark.parametrize(("operation", "name"), INTEGERS)
def test_bools_are_no_integers(operation: str, name: str) -> None:
    """In Python they are."""
    values = ((True, "True"), (False, "False"), (np.True_, "True"), (np.array(True), r"bool, shape \(\)"))
    for given, shown in values:
        with pytest.raises(TypeError, match=rf"^{name} must be an integer, not {type(given).__name__} \({shown}\)$"):
            getattr(libflash, operation)(*arguments_for(operation), **{name: given})


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
