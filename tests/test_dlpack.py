"""DLPack inputs: old and new capsules, everything that they allow, invalid ones; lifetimes; devices and streams."""

from __future__ import annotations

import gc
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from dlpack_producer import Array, OldArray, StandardArray, exchange_array
from harness import BFLOAT16, assert_same_bits, qkv, random

import libflash

DECLARATIONS = pathlib.Path(__file__).parents[1] / "python" / "libflash" / "_dlpack.pxd"


def wrapped(arrays: tuple[np.ndarray, ...], **kind) -> list[Array]:
    return [Array(x, **kind) for x in arrays]


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"legacy": True},
        {"read_only": True},
        {"copied": True},
        {"null_strides": True},
        {"byte_offset": 64},
        {"no_deleter": True},
        {"version": (1, 9)},
    ],
    ids=lambda kind: next(iter(kind), "plain"),
)
def test_capsules(kind: dict) -> None:
    arrays = qkv()
    wanted = libflash.attention(*arrays)
    inputs = wrapped(arrays, **kind)
    out = np.full_like(wanted, np.nan)
    assert libflash.attention(*inputs, out=out) is out
    assert_same_bits(out, wanted)
    for x in inputs:
        assert x.deleted == (0 if "no_deleter" in kind else 1), "every export is released, once"
        assert x.requests == [{"max_version": (1, 3)}], "no stream for the CPU"


def test_producers_before_dlpack_1() -> None:
    arrays = qkv()
    inputs = [OldArray(x) for x in arrays]
    wanted = libflash.attention(*arrays)
    for _ in range(2):  # the second call has the type in its cache
        out = np.full_like(wanted, np.nan)
        libflash.attention(*inputs, out=out)
        assert_same_bits(out, wanted)
    assert [x.deleted for x in inputs] == [2, 2, 2]


@pytest.mark.parametrize("newer_table_first", [False, True])
@pytest.mark.parametrize("borrows", [False, True])
def test_exchange_table(borrows: bool, newer_table_first: bool) -> None:
    """C calls in place of __dlpack__: views borrowed or owned, and the table of version 1 after one of a later version."""
    arrays = qkv()
    kind = exchange_array(borrows=borrows, newer_table_first=newer_table_first)
    inputs = [kind(x) for x in arrays]
    out = np.full_like(arrays[0], np.nan)
    libflash.attention(*inputs, out=out)
    assert_same_bits(out, libflash.attention(*arrays))
    assert kind.calls == ["borrow" if borrows else "own"] * 3  # type: ignore[attr-defined]
    assert [x.deleted for x in inputs] == [int(not borrows)] * 3


def test_exchange_table_says_read_only() -> None:
    q, k, v = qkv()
    kind = exchange_array(borrows=False, read_only=True)
    with pytest.raises(libflash.InvalidError, match="out is read-only"):
        libflash.attention(kind(q), k, v, out=kind(np.empty_like(q)))


def test_exports_are_given_back_after_errors() -> None:
    inputs = wrapped(qkv())
    with pytest.raises(libflash.InvalidError):
        libflash.attention(*inputs, softcap=-1, out=np.empty((1, 40, 4, 16), np.float32))
    with pytest.raises(libflash.InvalidError):
        libflash.attention(*inputs, layout="x")
    with pytest.raises(TypeError, match="mask must be an array"):
        libflash.attention(*inputs, mask=3)
    assert [x.deleted for x in inputs] == [2, 2, 2]
    assert [len(x.requests) for x in inputs] == [2, 2, 2], "a wrong layout is refused before anything is borrowed"


def test_outputs() -> None:
    arrays = qkv()
    wanted = libflash.attention(*arrays)
    out = Array(np.full_like(wanted, np.nan))
    assert libflash.attention(*arrays, out=out) is out
    assert_same_bits(out.array, wanted)
    with pytest.raises(libflash.InvalidError, match="out is read-only"):
        libflash.attention(*arrays, out=Array(np.zeros_like(wanted), read_only=True))
    with pytest.raises(libflash.InvalidError, match="out is exported through DLPack as a copy"):
        libflash.attention(*arrays, out=Array(np.zeros_like(wanted), copied=True))
    frozen = np.zeros_like(wanted)
    frozen.flags.writeable = False
    with pytest.raises(libflash.InvalidError, match="out is read-only"):
        libflash.attention(*arrays, out=frozen)
    with pytest.raises(libflash.InvalidError, match="lse is read-only"):
        libflash.attention(*arrays, lse=np.broadcast_to(np.zeros((1, 4, 40), np.float32), (1, 4, 40)))
    with pytest.raises(TypeError, match="out cannot be allocated: Array has no __array_namespace__; give it as out="):
        libflash.attention(*wrapped(arrays))


def test_outputs_by_the_array_api() -> None:
    arrays = qkv()
    out, lse = libflash.attention(*(StandardArray(x) for x in arrays), return_lse=True)
    wanted, wanted_lse = libflash.attention(*arrays, return_lse=True)
    assert isinstance(out, StandardArray)
    assert isinstance(lse, StandardArray)
    assert_same_bits(out.array, wanted)
    assert_same_bits(lse.array, wanted_lse)
    assert out.deleted == lse.deleted == 1


def test_read_only_inputs() -> None:
    arrays = qkv()
    wanted = libflash.attention(*arrays)
    for x in arrays:
        x.flags.writeable = False
    assert_same_bits(libflash.attention(*arrays), wanted)


def test_numpy_is_read_without_its_dlpack() -> None:
    """NumPy before 2.1 does not export read-only arrays through DLPack, so libflash uses another interface."""

    class Old(np.ndarray):
        def __dlpack__(self, **arguments: object) -> object:
            raise BufferError("Cannot export readonly array since signalling readonly is unsupported by DLPack.")

    arrays = qkv()
    old = [x.view(Old) for x in arrays]
    for x in old:
        x.flags.writeable = False
    assert_same_bits(np.asarray(libflash.attention(*old)), libflash.attention(*arrays))


def test_numpy_strides_that_are_no_elements() -> None:
    """A field of a record: float32 values 6 bytes from each other."""
    records = np.zeros((1, 40, 4, 16), np.dtype([("x", "f4"), ("y", "u2")]))
    with pytest.raises(libflash.InvalidError, match=r"q has a stride of 6 bytes; it must be a multiple of its element's 4"):
        libflash.attention(records["x"], *qkv()[1:])


def test_numpy_memory_outlives_its_array() -> None:
    """A call holds its inputs until it returns, and no longer."""
    q, k, v = qkv()
    wanted = libflash.attention(q, k, v)
    count = sys.getrefcount(q)
    assert_same_bits(libflash.attention(q[:], k[:], v[:]), wanted)
    assert sys.getrefcount(q) == count
    assert q.resize(q.shape, refcheck=True) is None  # no buffer is left open


def test_views() -> None:
    """Offsets, padding, other orders, repeated rows: the bits of a contiguous copy."""
    whole = random(3, 50, 5, 40)
    views = {
        "offset": whole[1:, 3:, 1:, 7:23],
        "padded": whole[:, :, :4, :16],
        "turned": whole[:, :, :4, :16].transpose(1, 0, 2, 3),
        "every other": whole[:, ::2, ::2, :16],
        "repeated": np.broadcast_to(whole[:1, :, :1, :16], (2, 50, 4, 16)),
    }
    for name, x in views.items():
        assert_same_bits(libflash.attention(x, x, x), libflash.attention(*[np.ascontiguousarray(x)] * 3), name)


REFUSED = {
    "lanes": ({"lanes": 4}, libflash.InvalidError, r"q has dtype float32 x 4 lanes"),
    "device": ({"device": (8, 0)}, libflash.UnsupportedError, r"q is on a device of DLPack type 8"),
    "major version": ({"version": (2, 0)}, libflash.UnsupportedError, r"q is exported as DLPack 2\.0"),
    "float8_e4m3fn": ({"code": 10}, libflash.InvalidError, r"q has dtype float8_e4m3fn; float16, bfloat16"),
    "float8_e5m2": ({"code": 12}, libflash.InvalidError, r"q has dtype float8_e5m2;"),
    "float4": ({"code": 17, "lanes": 2}, libflash.InvalidError, r"q has dtype float4_e2m1fn x 2 lanes;"),
    "unknown code": ({"code": 99}, libflash.InvalidError, r"q has dtype DLPack code 99, bits 32;"),
    "no data": ({"null_data": True}, TypeError, r"q has no data"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    kind, error, text = REFUSED[case]
    q, k, v = qkv()
    bad = Array(q, **kind)
    with pytest.raises(error, match=text):
        libflash.attention(bad, k, v)
    assert bad.deleted == len(bad.requests) == 1


def test_capsule_used_twice() -> None:
    q, k, v = qkv()
    once = Array(q, same_capsule=True)
    libflash.attention(once, k, v, out=np.empty_like(q))
    with pytest.raises(
        libflash.InvalidError, match=r"q\.__dlpack__\(\) gave .*used_dltensor_versioned.*; one capsule serves once"
    ):
        libflash.attention(once, k, v, out=np.empty_like(q))
    assert once.deleted == 1


def test_producers_that_fail() -> None:
    q, k, v = qkv()

    class Broken(Array):
        def __dlpack__(self, **arguments: object) -> object:
            raise BufferError("not today\nand a stack trace")

    with pytest.raises(TypeError, match=r"k cannot be exported through DLPack: not today$") as caught:
        libflash.attention(q, Broken(k), v)
    assert isinstance(caught.value.__cause__, BufferError)

    class Odd(Array):
        def __dlpack__(self, **arguments: object) -> object:
            return "a string"

    with pytest.raises(libflash.InvalidError, match=r"v\.__dlpack__\(\) gave 'a string'"):
        libflash.attention(q, k, Odd(v))


def test_other_byte_order() -> None:
    q, k, v = qkv()
    with pytest.raises(libflash.InvalidError, match=r"q has dtype >f4, which is not in this machine's byte order"):
        libflash.attention(q.astype(">f4"), k, v)


def test_misaligned() -> None:
    q, k, v = qkv()
    crooked = Array(q)
    view = crooked.view

    def shifted() -> object:
        made = view()
        made.byte_offset = 1
        return made

    crooked.view = shifted  # type: ignore[method-assign]
    with pytest.raises(libflash.InvalidError, match=r"q: .*align"):
        libflash.attention(crooked, k, v, out=np.empty_like(q))


def test_devices_must_agree() -> None:
    q, k, v = qkv()
    for inputs in ((Array(q, device=(2, 0)), k, v), (q, Array(k, device=(2, 0)), v), (Array(q, device=(13, 1)), k, v)):
        with pytest.raises(libflash.InvalidError, match="device"):
            libflash.attention(*inputs, out=np.empty_like(q))
    pinned = Array(q, device=(3, 0))
    assert_same_bits(libflash.attention(pinned, k, v, out=np.empty_like(q)), libflash.attention(q, k, v))


def test_stream_goes_to_the_producer() -> None:
    """__dlpack__ gets the stream, so that the other library can make it wait; 1 is the legacy default stream."""

    class Stream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 77)

    q, k, v = qkv()
    for stream, number in ((None, 1), (0, 1), (2, 2), (12345, 12345), (Stream(), 77)):
        x = Array(q, device=(2, 0))
        with pytest.raises(libflash.Error):  # refused: k is on the CPU
            libflash.attention(x, k, v, out=np.empty_like(q), stream=stream)
        assert x.requests == [{"max_version": (1, 3), "stream": number}]


def test_int64_on_a_gpu_is_refused() -> None:
    q, k, v = wrapped(qkv(), device=(2, 0))
    with pytest.raises(libflash.InvalidError, match="seqused_k is int64 on a CUDA device"):
        libflash.attention(q, k, v, seqused_k=Array(np.array([3]), device=(2, 0)), out=q)


def test_bfloat16_of_numpy() -> None:
    q, k, v = qkv(dtype="bfloat16")
    out = libflash.attention(q, k, v)
    assert out.dtype == BFLOAT16
    np.testing.assert_allclose(out.astype(np.float32), libflash.attention(*(x.astype(np.float32) for x in (q, k, v))), atol=0.02)
    frozen = q.copy()
    frozen.flags.writeable = False
    assert_same_bits(libflash.attention(frozen, k, v), out)
    assert_same_bits(libflash.attention(Array(q.view(np.uint16), code=4), k, v, out=np.empty_like(q)), out)
    with pytest.raises(libflash.InvalidError, match=r"q has dtype uint16"):
        libflash.attention(q.view(np.uint16), k, v)


def test_nothing_is_kept() -> None:
    """Thousands of calls leave no object behind, and no reference to their arrays."""
    arrays = [*qkv(), *qkv(dtype="bfloat16")]
    options = {"mask": np.ones((40, 56), bool), "seqused_k": np.array([50]), "kernel": "forward_cpu_scalar"}

    def calls(count: int) -> None:
        for _ in range(count):
            libflash.attention(*arrays[:3], return_lse=True, **options)
            libflash.attention(*arrays[3:])
            with pytest.raises(ValueError, match="softcap"):
                libflash.attention(*arrays[:3], softcap=-1)

    calls(20)
    gc.collect()
    before, references = sys.getallocatedblocks(), [sys.getrefcount(x) for x in arrays]
    calls(300)
    gc.collect()
    assert [sys.getrefcount(x) for x in arrays] == references
    assert sys.getallocatedblocks() - before < 200


def test_structs_are_those_of_the_official_header(tmp_path: pathlib.Path) -> None:
    """Sizes and offsets, compared by the C compiler with the DLPack header that PyTorch ships."""
    torch = pytest.importorskip("torch")
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    ours = re.search(r'"""\n(.*?)"""', DECLARATIONS.read_text(), re.S)
    assert ours is not None
    kin = {
        "version_t": ("DLPackVersion", "major minor"),
        "device_t": ("DLDevice", "device_type device_id"),
        "dtype_t": ("DLDataType", "code bits lanes"),
        "tensor_t": ("DLTensor", "data device ndim dtype shape strides byte_offset"),
        "managed_t": ("DLManagedTensor", "dl_tensor manager_ctx deleter"),
        "managed_versioned_t": ("DLManagedTensorVersioned", "version manager_ctx deleter flags dl_tensor"),
        "exchange_header_t": ("DLPackExchangeAPIHeader", "version prev_api"),
        "exchange_t": (
            "DLPackExchangeAPI",
            "header managed_tensor_allocator managed_tensor_from_py_object_no_sync managed_tensor_to_py_object_no_sync "
            "dltensor_from_py_object_no_sync current_work_stream",
        ),
    }
    lines = ["#include <stddef.h>", "#include <ATen/dlpack.h>", ours[1]]
    for mine, (theirs, fields) in kin.items():
        lines.append(f'_Static_assert(sizeof(flash_dl_{mine}) == sizeof({theirs}), "size of {theirs}");')
        for field in fields.split():
            lines.append(
                f'_Static_assert(offsetof(flash_dl_{mine}, {field}) == offsetof({theirs}, {field}), "{theirs}.{field}");'
            )
            sizes = (f"sizeof((({kind} *)0)->{field})" for kind in (f"flash_dl_{mine}", theirs))
            lines.append(f'_Static_assert({" == ".join(sizes)}, "size of {theirs}.{field}");')
    numbers = {"kDLCPU": 1, "kDLCUDA": 2, "kDLCUDAHost": 3, "kDLCUDAManaged": 13, "kDLInt": 0, "kDLUInt": 1, "kDLFloat": 2,
               "kDLBfloat": 4, "kDLBool": 6, "DLPACK_FLAG_BITMASK_READ_ONLY": 1, "DLPACK_MAJOR_VERSION": 1}  # fmt: skip
    lines += [f'_Static_assert({name} == {value}, "{name}");' for name, value in numbers.items()]
    source = tmp_path / "compare.c"
    source.write_text("\n".join(lines))
    include = pathlib.Path(torch.__file__).parent / "include"
    done = subprocess.run([compiler, "-fsyntax-only", f"-I{include}", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
