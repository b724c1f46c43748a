"""The Python interface: defaults, layouts, given outputs, return values, refusals."""

from __future__ import annotations

import inspect
import pathlib
import pickle
import subprocess
import sys
import weakref

import libflash.__main__ as command_line
import numpy as np
import pytest
from harness import BFLOAT16, assert_same_bits, bits, qkv, random
from reference import forward

import libflash

AXES = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}  # from bshd; each is its own inverse


FIRST = {
    "attention": "q k v causal", "attention_backward": "dout q k v", "decode": "q k_cache v_cache", "merge": "outs lses",
    "compress_block_mask": "block_mask", "explain": "q k v op", "info": "", "set_num_threads": "threads",
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST)
def test_functions_are_ordinary_ones(name: str) -> None:
    """Functions have a name, a signature and a docstring, and support pickle and weak references, which jax.jit needs."""
    function = getattr(libflash, name)
    assert weakref.ref(function)() is function
    assert pickle.loads(pickle.dumps(function)) is function
    assert function.__name__ == name
    assert " ".join(inspect.signature(function).parameters).startswith(FIRST[name])
    assert function.__doc__[0].isupper() or name == "info"


def test_returns() -> None:
    q, k, v = qkv()
    out = libflash.attention(q, k, v)
    assert isinstance(out, np.ndarray)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    both = libflash.attention(q, k, v, return_lse=True)
    assert isinstance(both, tuple)
    assert (both[1].shape, both[1].dtype) == ((1, 4, 40), np.float32)
    assert_same_bits(both[0], out)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64])
def test_dtypes(dtype: np.dtype) -> None:
    q, k, v = (x.astype(dtype) for x in qkv())
    out, lse = libflash.attention(q, k, v, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    np.testing.assert_allclose(out.astype(np.float64), forward(q, k, v)[0], atol=0.02)


@pytest.mark.parametrize("layout", AXES)
def test_layouts(layout: str) -> None:
    """The same bits with another order of axes; lse always has the same order."""
    q, k, v = qkv(batch=3, dv=24)
    dout = random(3, 40, 4, 24, seed=8)
    out, lse = libflash.attention(q, k, v, causal=True, return_lse=True)
    gradients = libflash.attention_backward(dout, q, k, v, out, lse, causal=True)
    axes = AXES[layout]
    for copy in (False, True):  # views of bshd memory, and memory in that order
        tq, tk, tv, tdout, tout = (
            np.ascontiguousarray(x.transpose(axes)) if copy else x.transpose(axes) for x in (q, k, v, dout, out)
        )
        got, got_lse = libflash.attention(tq, tk, tv, causal=True, return_lse=True, layout=layout)
        assert got.shape == tout.shape
        assert got.flags.c_contiguous
        assert_same_bits(got, tout)
        assert_same_bits(got_lse, lse)
        for one, other in zip(
            libflash.attention_backward(tdout, tq, tk, tv, tout, lse, causal=True, layout=layout), gradients, strict=True
        ):
            assert_same_bits(one.transpose(axes), other)


def test_given_outputs_are_written_and_returned() -> None:
    q, k, v = qkv(dtype="bfloat16")
    wanted, wanted_lse = libflash.attention(q, k, v, return_lse=True)
    out, lse = np.full_like(q, np.nan), np.full((1, 4, 40), np.nan, np.float32)
    got = libflash.attention(q, k, v, out=out, lse=lse, return_lse=True)
    assert got[0] is out
    assert got[1] is lse
    assert_same_bits(out, wanted)
    assert_same_bits(lse, wanted_lse)
    lse[:] = np.nan
    assert libflash.attention(q, k, v, out=out, lse=lse) is out
    assert_same_bits(lse, wanted_lse, "written also when it is not returned")
    strided = np.full((1, 40, 7, 16), np.nan, q.dtype)[:, :, 1:5]
    assert libflash.attention(q, k, v, out=strided) is strided
    assert_same_bits(strided, wanted)
    dout, gradients = np.ones_like(q), [np.full_like(x, np.nan) for x in (q, k, v)]
    got = libflash.attention_backward(dout, q, k, v, wanted, wanted_lse, dq=gradients[0], dk=gradients[1], dv=gradients[2])
    assert all(a is b for a, b in zip(got, gradients, strict=True))
    for one, other in zip(gradients, libflash.attention_backward(dout, q, k, v, wanted, wanted_lse), strict=True):
        assert_same_bits(one, other)


def test_packed() -> None:
    q, k, v = (random(n, h, 16, seed=i) for i, (n, h) in enumerate(((70, 4), (90, 2), (90, 2))))
    cu_q, cu_k = np.array([0, 20, 20, 70], np.int32), np.array([0, 30, 50, 90], np.int32)
    out, lse = libflash.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, return_lse=True)
    assert (out.shape, lse.shape) == ((70, 4, 16), (4, 70))
    np.testing.assert_allclose(out, forward(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)[0], atol=1e-5)
    for layout in AXES:  # packed arrays have only one order
        assert_same_bits(libflash.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, layout=layout), out)
    dense_q = random(3, 8, 4, 16)
    mixed = libflash.attention(dense_q, k, v, cu_seqlens_k=cu_k, layout="bhsd" if False else "bshd")
    for b in range(3):
        alone = libflash.attention(dense_q[b : b + 1], k[None, cu_k[b] : cu_k[b + 1]], v[None, cu_k[b] : cu_k[b + 1]])
        np.testing.assert_allclose(mixed[b], alone[0], atol=1e-6)


def test_int64_lengths_are_converted() -> None:
    q, k, v = qkv(batch=2)
    used = np.array([30, 56])
    assert used.dtype == np.int64
    for name in ("seqused_q", "seqused_k"):
        lengths = np.minimum(used, 40) if name == "seqused_q" else used
        wide, narrow = (libflash.attention(q, k, v, **{name: lengths.astype(t)}) for t in (np.int64, np.int32))
        assert_same_bits(wide, narrow)
    strided = np.array([[30, -1], [56, -1]])[:, 0]
    assert_same_bits(libflash.attention(q, k, v, seqused_k=strided), libflash.attention(q, k, v, seqused_k=used.astype(np.int32)))
    with pytest.raises(libflash.InvalidError, match=r"seqused_k holds 4294967296, which does not fit int32"):
        libflash.attention(q, k, v, seqused_k=np.array([1, 2**32]))
    cache = np.zeros((4, 16, 2, 16), np.float32)
    table = np.arange(4).reshape(2, 2)
    step = random(2, 1, 4, 16)
    for x in (table, np.asfortranarray(table)):
        wide = libflash.decode(step, cache, cache, block_table=x, cache_seqlens=np.array([20, 32]))
        assert_same_bits(
            wide, libflash.decode(step, cache, cache, block_table=table.astype("i4"), cache_seqlens=np.array([20, 32], "i4"))
        )


def test_block_mask_forms_agree() -> None:
    q, k, v = qkv(sq=300, sk=500, hq=4)
    mask = np.random.default_rng(0).random((1, 4, 3, 4)) < 0.5
    lists = libflash.compress_block_mask(mask)
    assert isinstance(lists, libflash.BlockMask)
    assert lists.shape == mask.shape
    np.testing.assert_array_equal(lists.row_counts, mask.sum(axis=-1))
    np.testing.assert_array_equal(lists.col_counts, mask.sum(axis=-2))
    for h in range(4):
        for i in range(3):
            kept = lists.row_indices[0, h, i, : lists.row_counts[0, h, i]]
            np.testing.assert_array_equal(kept, np.flatnonzero(mask[0, h, i]))
        for j in range(4):
            kept = lists.col_indices[0, h, j, : lists.col_counts[0, h, j]]
            np.testing.assert_array_equal(kept, np.flatnonzero(mask[0, h, :, j]))
    dense, lse = libflash.attention(q, k, v, block_mask=mask, return_lse=True)
    assert_same_bits(libflash.attention(q, k, v, block_mask=lists), dense)
    element = np.repeat(np.repeat(mask, 128, 2), 128, 3)[:, :, :300, :500]
    np.testing.assert_allclose(dense, libflash.attention(q, k, v, mask=element), atol=1e-5)
    both = [libflash.attention_backward(np.ones_like(q), q, k, v, dense, lse, block_mask=m) for m in (mask, lists)]
    for one, other in zip(*both, strict=True):
        assert_same_bits(one, other)


def test_window_spellings() -> None:
    q, k, v = qkv()
    free = libflash.attention(q, k, v)
    for window in (None, (-1, -1), [-1, -1], (None, None), (None, -1)):
        assert_same_bits(libflash.attention(q, k, v, window_size=window), free)
    assert_same_bits(libflash.attention(q, k, v, window_size=(None, 0)), libflash.attention(q, k, v, window_size=(-1, 0)))


def test_numbers_may_come_from_numpy() -> None:
    q, k, v = qkv()
    wanted = libflash.attention(q, k, v, softmax_scale=0.25, seed=3, dropout_p=0.5, window_size=(3, 4), num_splits=1)
    got = libflash.attention(
        q, k, v, softmax_scale=np.float32(0.25), seed=np.uint64(3), dropout_p=np.float64(0.5), window_size=[3, np.int64(4)],
        num_splits=np.int8(1), causal=np.False_,
    )  # fmt: skip
    assert_same_bits(got, wanted)


def test_exceptions_carry_their_status() -> None:
    names = ["Invalid", "Unsupported", "Version", "Workspace", "NoDevice", "Cuda", "OutOfMemory", "Internal"]
    for status, name in enumerate(names, 1):
        cls = getattr(libflash, name + "Error")
        assert issubclass(cls, libflash.Error)
        assert cls.status == status
        assert cls.status_name.replace("_", "") == name.upper()


def test_info() -> None:
    found = libflash.info()
    assert found["version"] == libflash.__version__ == found["build"]["version"]
    assert found["cpu"]["threads"] >= 1
    kernels = {kernel["name"]: kernel for kernel in found["kernels"]}
    assert kernels["forward_cpu_scalar"]["usable"]
    for kernel in kernels.values():
        assert kernel["usable"] or kernel["why_not"]


def test_explain() -> None:
    q, k, v = qkv()
    for op, options in {
        "forward": {},
        "backward": {"deterministic": True},
        "decode": {"cache_seqlens": np.array([9], "i4")},
    }.items():
        text = libflash.explain(q, k, v, op=op, **options)
        assert f"{op}_cpu_" in text
        assert "workspace" in text
    assert "forward_cpu_scalar" in libflash.explain(q, k, v, kernel="forward_cpu_scalar")
    assert "no_such" in libflash.explain(q, k, v, kernel="no_such")


def test_command_line() -> None:
    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "libflash", *arguments], capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.strip()

    assert run("--version") == libflash.__version__
    information = run("info")
    assert "forward_cpu_scalar" in information
    labels = [line.partition(":")[0].strip() for line in information.splitlines() if ":" in line]
    assert labels.count("cuda") == 1
    assert len(set(labels)) == len(labels)
    assert run() == run("info")
    here = pathlib.Path(libflash.__file__).parent
    if (here / "include").is_dir():  # a wheel, rather than a module put together by hand
        assert (pathlib.Path(run("--include-dir")) / "libflash.h").is_file()
        assert (pathlib.Path(run("--cmake-dir")) / "libflash-config.cmake").is_file()
    assert "cpu_attention" in run("bench", "--help")
    cut_short = subprocess.run(f"{sys.executable} -m libflash | head -1", shell=True, capture_output=True, text=True, check=True)
    assert cut_short.stderr == ""


def test_bench_runs_no_other_projects_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tests" / "benchmark"
    folder.mkdir(parents=True)
    (folder / "theirs.py").write_text("raise SystemExit(77)\n")
    monkeypatch.chdir(tmp_path)
    assert command_line.main(["bench", "theirs"]) == 2
    (tmp_path / "include").mkdir()  # identifies libflash's source tree
    (tmp_path / "include" / "libflash.h").write_text("")
    with pytest.raises(SystemExit) as ended:
        command_line.main(["bench", "theirs"])
    assert ended.value.code == 77


def test_decode_writes_the_cache_in_place() -> None:
    cache_k, cache_v = random(2, 32, 2, 16), random(2, 32, 2, 16, seed=1)
    before = cache_k.copy()
    new = random(2, 3, 2, 16, seed=2)
    lengths = np.array([5, 9], np.int32)
    libflash.decode(random(2, 3, 4, 16), cache_k, cache_v, k=new, v=new, cache_seqlens=lengths)
    for b, n in enumerate(lengths):
        np.testing.assert_array_equal(cache_k[b, n : n + 3], new[b])
        before[b, n : n + 3] = new[b]
    assert_same_bits(cache_k, before)
    frozen = cache_k.copy()
    frozen.flags.writeable = False
    libflash.decode(random(2, 3, 4, 16), frozen, cache_v, cache_seqlens=lengths)
    with pytest.raises(libflash.InvalidError, match="k_cache is read-only"):
        libflash.decode(random(2, 3, 4, 16), frozen, cache_v, k=new, v=new, cache_seqlens=lengths)


def test_merge() -> None:
    q, k, v = qkv(sk=90)
    whole, whole_lse = libflash.attention(q, k, v, return_lse=True)
    parts = [libflash.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 20), (20, 20), (20, 90))]
    outs, lses = zip(*parts, strict=True)
    out, lse = libflash.merge(outs, lses)
    np.testing.assert_allclose(out, whole, atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse, atol=1e-6)
    assert_same_bits(libflash.merge(list(outs), list(lses), return_lse=False), out)
    bhsd, _ = libflash.merge([x.transpose(0, 2, 1, 3) for x in outs], lses, layout="bhsd")
    assert_same_bits(bhsd.transpose(0, 2, 1, 3), out)
    given = np.full_like(out, np.nan)
    assert libflash.merge(outs, lses, out=given)[0] is given
    assert (bits(given) == bits(out)).all()
