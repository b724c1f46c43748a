"""The library with its float64 kernels on the host, through the C interface: the cases of the CPU kernels against the same
reference. Shows that plans and parameters are those that the kernels need; see emulated_runs.py for what it does not show.
"""

from __future__ import annotations

import ctypes as c
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import abi
import cases
import numpy as np
import pytest
import tangent_bounds
import tangent_cases
from abi import block_lists
from case import Case
from convert import owned
from described import CUDA, ROOT, compiled_sources, depends_on_table, sources, write_generated
from empty_problems import NONE
from kernels_on_host import CUDA_HEADERS, CXX, HERE, for_the_host
from made_once import made_once
from reference_statistics import statistics
from tangent_cases import TangentCase, tangents_of
from tangent_problem import backward_by, c_options, forward_by, lse_like, out_like

OPERATIONS = ("forward", "backward", "forward_tangent", "backward_tangent")
# A NaN reaches other rows of its tile, because the matrix instruction multiplies it by 0.
CASES = [case for case in cases.quick() if case.dtype == "fp64" and case.poison in (None, "unused")]
TANGENT_CASES = [t for t in tangent_cases.quick() if t.case.dtype == "fp64" and t.case.poison in (None, "unused")]
pytestmark = pytest.mark.early


def compile_with(*arguments: str | Path) -> None:
    done = subprocess.run([CXX or "", "-std=c++17", "-fPIC", "-w", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]


def build(folder: Path, objects: list[Path]) -> None:
    write_generated(folder)
    kernels = folder / "cuda_kernels.inc"
    kernels.write_text("".join(line for line in kernels.read_text().splitlines(keepends=True) if "_f64_" in line))
    names = [
        "attention/start_head_maxima",
        *(f"sm80/{code}_f64" for code in (*OPERATIONS, "forward_statistics", "forward_statistics_rows")),
    ]
    for name in (f"{name}.cuh" for name in names):
        (folder / "cuda" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "cuda" / name).write_text(for_the_host((CUDA / name).read_text()))
    includes = [f"-I{path}" for path in (folder, HERE, ROOT / "libflash", ROOT / "include", CUDA_HEADERS)]
    of_kernels = ("-O1", "-fno-strict-aliasing", "-fpermissive", "-D__CUDA_ARCH__=900", *includes)
    compile_with(*of_kernels, "-c", HERE / "kernels_f64.cpp", "-o", folder / "kernels.o")
    launches = ["plan/launch.cpp", *(f"cuda/host/{operation}.cpp" for operation in OPERATIONS)]
    names = [*filter(depends_on_table, sources()), *launches]
    of_host = [HERE / "library_f64.cpp", HERE / "machine.cpp"]
    files = [*of_host, *(ROOT / "libflash" / name for name in names), folder / "kernels.o", *objects]
    compile_with("-O0", *includes, "-shared", "-fsanitize=undefined", *files, "-o", folder / "library.so")


@pytest.fixture(scope="module", autouse=True)
def on_host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The functions of abi call this library, with every array as a tensor of the GPU."""
    if CXX is None or CUDA_HEADERS is None:
        pytest.skip("no g++ or no CUDA headers")
    objects = compiled_sources(request, tmp_path_factory)
    folder = made_once(request, tmp_path_factory, "library", lambda folder: build(folder, objects))
    library = c.CDLL(str(folder / "library.so"))
    of_attention = rf"flash_attention_({'|'.join(OPERATIONS)})(_workspace_size)?|flash_last_error"
    for name, (result, arguments) in abi.PROTOTYPES.items():
        if re.fullmatch(of_attention, name):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    view_of = abi.tensor

    def on_gpu(array: np.ndarray | None) -> abi.Tensor | None:
        view = view_of(array)
        if view is not None:
            view.device_type = abi.CUDA_DEVICE
        return view

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(abi, "lib", library)
        patch.setattr(abi, "tensor", on_gpu)
        patch.setattr(abi, "status_name", str)
        yield


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case) -> None:
    x = case.inputs()
    o, lse, options = out_like(x), lse_like(x), c_options(x)
    abi.forward(x.q, x.k, x.v, o, lse, **options)
    made = {f"d{name}": np.full_like(getattr(x, name), np.nan) for name in "qkv"}
    written = {
        name: x.options[given] for name, given in {"dbias": "bias", "dsink": "learnable_sink"}.items() if given in x.options
    }
    written = {name: np.full_like(like, np.nan) for name, like in written.items()}
    abi.backward(x.dout, x.q, x.k, x.v, o, lse, *made.values(), **options, **written, dlse=x.dlse)
    case.check(o=o, lse=lse, **made, **written)


@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_statistics(case: Case) -> None:
    x = case.inputs()
    rows, largest, entropy = statistics(x.q, x.k, x.v, **x.options)
    o, lse, options = out_like(x), lse_like(x), c_options(x)
    made = [lse_like(x), lse_like(x), np.full(x.q.shape[-2], np.nan)]
    abi.forward(x.q, x.k, x.v, o, lse, max_logit=made[0], entropy=made[1], **options)
    case.check(o=o, lse=lse)
    abi.forward(x.q, x.k, x.v, o, lse, max_logit=made[2], **options)
    for got, wanted in zip(made[:2], (rows, entropy), strict=True):
        np.testing.assert_allclose(*(owned(case, {"lse": a})["lse"] for a in (got, wanted)), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(made[2], largest, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tangent", TANGENT_CASES[::3], ids=str)
def test_tangents(tangent: TangentCase) -> None:
    x, t = tangent.problem()
    forward = forward_by(abi.forward_tangent, x, t, None, delta=tangent.number % 2 == 0)
    tangent.case.check(o=forward["o"], lse=forward["lse"])
    tangent_bounds.check(forward, tangent.expected(), str(tangent))
    made = backward_by(abi.backward_tangent, x, t, None, forward, gradients=tangent.number % 3 == 0)
    tangent_bounds.check({name: a for name, a in made.items() if name.startswith("t")}, tangent.expected(), str(tangent))


@pytest.mark.parametrize("dims", [(20, 30), (100, 100), (200, 250), (509, 512)], ids=str)
def test_scores_are_those_of_forward(dims: tuple[int, int]) -> None:
    """Bit for bit: the probability of a single key is 1, so that the tangent of dv is that of dout."""
    case = Case("one key", "fp64", batch=20, seqlen_q=1, seqlen_k=1, head_dim=dims[0], head_dim_v=dims[1])
    x = case.inputs()
    x.q *= 1e8  # a rounding error of the score would change the probability
    t = tangents_of(case, x)
    forward = forward_by(abi.forward_tangent, x, t, None)
    made = backward_by(abi.backward_tangent, x, t, None, forward)
    assert np.array_equal(made["tdv"], t.dout)


@pytest.mark.parametrize("letters", ["bhqk", "hqk", "qk", "hk", "bq", ""])
def test_tangent_of_dbias(letters: str) -> None:
    """Of a bias that is broadcast over any dimensions."""
    sizes = {"heads_q": 4, "head_dim": 20, "causal": True, "softcap": 5.0, "mask": "qk"}
    for lengths in ({"batch": 2, "seqlen_q": 37, "seqlen_k": 50}, {"seqlen_q": (21, 0, 33), "seqlen_k": (40, 3, 29)}):
        case = Case(f"dbias-{letters}", "fp64", bias=letters, **sizes, **lengths)
        x = case.inputs()
        t = tangents_of(case, x)
        forward = forward_by(abi.forward_tangent, x, t, None)
        made = backward_by(abi.backward_tangent, x, t, None, forward)
        tangent_bounds.check(made, tangent_bounds.expect(x.q, x.k, x.v, t, dout=x.dout, **x.options), str(case))


@pytest.mark.parametrize("form", ["mask", "lists", "packed"])
@pytest.mark.parametrize("what", NONE)
def test_nothing(what: str, form: str) -> None:
    """Every gradient and every tangent is zero, or with FLASH_FLAG_ADD as it was, and written where there are elements."""
    batch, queries, heads, keys, heads_k = NONE[what]
    q, k = np.ones((batch, queries, heads, 20)), np.ones((batch, keys, heads_k, 20))
    out = np.zeros_like(q)
    rows, sink, slopes = np.zeros((batch, heads, queries)), np.full(heads, 0.5), np.full((batch, heads), 0.1)
    blocks = np.ones((1, heads, -(-queries // 128), -(-keys // 128)), bool)
    of_blocks, kept = block_lists(blocks.shape)
    for array in kept:
        array[:] = 0
    options = {"block_lists": of_blocks} if form == "lists" else {"block_mask": blocks}
    if form == "packed":
        q, k, out = (x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in (q, k, out))
        rows = rows.reshape(heads, batch * queries)
        starts = np.arange(batch + 1, dtype=np.int32)
        options |= {"cu_seqlens_q": starts * queries, "cu_seqlens_k": starts * keys}
        options |= {"max_seqlen_q": queries, "max_seqlen_k": keys}
    options |= {"learnable_sink": sink, "alibi_slopes": slopes, "softcap": 5.0}
    for axes in ("hqk", "qk", "hk", "bq", ""):
        sizes = {"b": batch, "h": heads, "q": queries, "k": keys}
        bias = np.zeros([size if name in axes else 1 for name, size in sizes.items()])
        options["bias"] = bias
        start = {"dq": q, "dk": k, "dv": k, "dbias": bias, "dsink": sink}
        for flags, before in ((0, np.nan), (abi.ADD, 3.0)):
            made = {name: np.full_like(x, before if len(name) == 2 else np.nan) for name, x in start.items()}
            abi.backward(q, q, k, k, out, rows, **made, flags=flags, **options)
            for name, x in made.items():
                assert (x == (before if flags and len(name) == 2 else 0)).all(), (name, axes)
        made, gradients = ({name: np.full_like(x, np.nan) for name, x in start.items()} for _ in range(2))
        directions = {"q": q, "k": k, "v": k, "bias": bias, "learnable_sink": sink, "out": out, "lse": rows, "dout": q}
        written = {name: gradients.pop(name) for name in ("dbias", "dsink")}
        abi.backward_tangent(q, q, k, k, out, rows, tuple(gradients.values()), directions | made, **written, **options)
        for name, x in [*made.items(), *gradients.items(), *written.items()]:
            assert (x == 0).all(), (name, axes)
