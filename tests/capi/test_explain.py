"""explain: a readable text that describes what the call then does."""

from __future__ import annotations

import ctypes as c
from typing import Any

import abi
import numpy as np
import pytest
from bad_cases import TANGENTS, Case, build, explain, floats, null, on_cuda, options_of, query, tangents_of

INPUTS = {"forward": ("q", "k", "v"), "backward": ("q", "k", "v"), "decode": ("q", "k_cache", "v_cache")}
INPUTS |= dict.fromkeys(TANGENTS, ("q", "k", "v"))


def text_of(case: Case) -> str:
    arrays = tuple(case.tensors[name] for name in INPUTS[case.function])
    return abi.explain(f"flash_attention_{case.function}_explain", arrays, *tangents_of(case), options_of(case))


def lines_of(case: Case) -> dict[str, str]:
    """First line of each label."""
    found: dict[str, str] = {}
    for line in text_of(case).splitlines():
        found.setdefault(line[:12].strip(), line[12:])
    return found


@pytest.mark.parametrize("function", INPUTS)
def test_names_kernel_and_workspace(function: str) -> None:
    case = build(function, "dense")
    found = lines_of(case)
    names = [k.name.decode() for k in abi.kernels() if k.operation.decode() == function and k.backend == b"cpu"]
    usable = [k.name.decode() for k in abi.kernels() if k.name.decode() in names and k.usable]
    assert found["operation"] == function
    assert found["kernel"] == f"{usable[0]}, backend cpu"
    assert found["workspace"] == f"{query(case, options_of(case))[1]} bytes"
    assert all(name in text_of(case) for name in names), "every other kernel has a line"


@pytest.mark.parametrize("function", TANGENTS)
def test_tangents(function: str) -> None:
    """The text says which inputs have a tangent, by default q, k and v."""
    case = build(function, "dense")
    ending = "; with out and lse" if function == "forward_tangent" else ""
    assert lines_of(case)["tangents"] == "q, k, v, bias, sink, dout, dlse" + ending
    case.tangents = {"k": case.tangents["k"]}
    assert lines_of(case)["tangents"] == "k" + ending
    null("tangents")(case)
    assert lines_of(case)["tangents"] == "q, k, v" + ending


@pytest.mark.skipif(abi.lib.flash_device_count() > 0, reason="there is a GPU")
@pytest.mark.parametrize("function", TANGENTS)
def test_tangents_on_a_gpu_are_explained_without_one(function: str) -> None:
    """The text names what is missing: a GPU if the build has kernels for one, otherwise the kernels."""
    case = build(function, "dense")
    case.options = {}
    null("tangents")(case)
    for name in case.tensors:
        on_cuda(name)(case)
    found = lines_of(case)
    assert found["kernel"] == "none: UNSUPPORTED"
    names = [k.name.decode() for k in abi.kernels() if k.operation.decode() == function and k.backend != b"cpu"]
    if names:
        assert found["because"].startswith("device: no usable GPU (")
        assert found["because"].endswith(f") [{', '.join(names)}]")
    else:
        assert found["because"] == f"operation: runs on the CPU only in this build ({function} of tensors on cuda:0)"


@pytest.mark.parametrize("function", INPUTS)
def test_a_requested_kernel(function: str) -> None:
    case = build(function, "dense")
    case.options["kernel"] = f"{function}_cpu_scalar".encode()
    assert lines_of(case)["kernel"] == f"{function}_cpu_scalar, backend cpu"
    assert "another kernel or backend was requested" in text_of(case)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"flags": abi.CAUSAL}, "causal"),
        ({"flags": abi.CAUSAL | abi.TOP_LEFT}, "causal top-left"),
        ({"flags": abi.WINDOW, "window_left": 3, "window_right": -1}, "window (3, -1)"),
        ({"flags": abi.WINDOW | abi.CAUSAL, "window_left": 3}, "window (3, 0)"),
        ({"flags": abi.SCALE, "softmax_scale": 0.75}, "softmax_scale 0.75"),
        ({"softcap": 30.0}, "softcap 30"),
        ({"dropout_p": 0.1}, "dropout 0.1"),
        ({"flags": abi.DETERMINISTIC}, "deterministic"),
        ({"alibi_slopes": floats(4)}, "alibi"),
        ({"learnable_sink": floats(4)}, "sink"),
        ({"bias": floats(5, 7)}, "bias (1, 1, 5, 7)"),
        ({"mask": np.ones((4, 1, 7), np.bool_)}, "mask (1, 4, 1, 7)"),
        ({"block_mask": np.ones((1, 1, 1, 1), np.bool_)}, "block mask 1 x 1 (dense)"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("function", ["forward", "backward"])
def test_options_are_named(function: str, options: dict[str, Any], found: str) -> None:
    case = build(function, "dense")
    case.options.update(options)
    assert found in lines_of(case)["options"]


def test_gradients_are_named() -> None:
    case = build("backward", "dense")
    case.option("bias", floats(5, 7))
    case.option("dbias", floats(5, 7))
    case.option("learnable_sink", floats(4))
    case.option("dsink", floats(4))
    assert "dbias, dsink" in lines_of(case)["options"]


def test_packed_lengths_and_lists() -> None:
    case = build("forward", "packed")
    case.options["max_seqlen_q"] = 3
    case.option("seqused_k", np.array([1, 2], np.int32))
    text = text_of(case)
    assert "queries packed 6 rows, at most 3 per sequence, keys packed 9 rows, used lengths given" in text
    assert "block mask 1 x 1 (lists)" in text_of(build("forward", "blocks"))


def test_decode_options_are_named() -> None:
    found = lines_of(build("decode", "paged"))["options"]
    assert "pages of 4, appends 2, rotary embedding of 6 channels" in found


@pytest.mark.parametrize("function", INPUTS)
def test_unsupported_is_explained(function: str) -> None:
    case = build(function, "dense")
    case.options["kernel"] = b"forward_sm70"
    found = lines_of(case)
    assert found["kernel"] == "none: UNSUPPORTED"
    names = [k.name.decode() for k in abi.kernels() if k.operation.decode() == function and k.backend == b"cpu"]
    rule = f"kernel: must be one of the kernels for {function} on the CPU in this build: {', '.join(names)}"
    assert found["because"] == f'{rule} ("forward_sm70")'


def test_head_dim_is_explained() -> None:
    shape = (1, 2, 1, 520)
    arrays = (floats(*shape), floats(*shape), floats(*shape))
    text = abi.explain("flash_attention_forward_explain", arrays)
    assert "head_dim: must be at most 512 on the CPU (520)" in text
    assert "forward_cpu_scalar" in text


@pytest.mark.skipif(abi.lib.flash_device_count() > 0, reason="there is a GPU")
def test_gpu_tensors_are_explained_without_a_gpu() -> None:
    """The text names what is missing: a GPU if the build has kernels for one, otherwise the kernels."""
    case = build("forward", "dense")
    for view in case.tensors.values():
        view.device_type, view.device_id = abi.CUDA_DEVICE, 63
    found = lines_of(case)
    assert found["kernel"] == "none: UNSUPPORTED"
    reasons = "no usable GPU", "a CPU kernel needs tensors on the CPU (they are on cuda:63)"
    assert sum(reason in found["because"] for reason in reasons) == 1
    assert found["cuda"] == abi.lib.flash_cuda_state().decode()


@pytest.mark.parametrize("capacity", [0, 1, 2, 40])
def test_short_buffers_get_the_start(capacity: int) -> None:
    case = build("forward", "dense")
    whole = text_of(case)
    block = c.create_string_buffer(b"\xff" * 64, 64)
    needed = c.c_size_t()
    views = [abi.pointer(case.tensors[name]) for name in INPUTS["forward"]]
    text = block if capacity else None
    assert abi.lib.flash_attention_forward_explain(*views, None, text, capacity, c.byref(needed)) == abi.OK
    assert needed.value == len(whole) + 1
    if capacity:
        assert block.raw[:capacity] == whole[: capacity - 1].encode() + b"\0"
    assert block.raw[capacity:] == b"\xff" * (64 - capacity)


def test_text_is_for_reading() -> None:
    for function in INPUTS:
        text = text_of(build(function, "dense"))
        assert text.endswith("\n")
        assert max(map(len, text.splitlines())) <= 160
        case = build(function, "dense")
        case.no_options()
        assert explain(case, None) == abi.OK
