"""Merge against the float64 oracle: every mix of types, odd sizes, all kinds of strides, 1 to 1680 parts, parts without a key.

The same cases run on the CPU and on a GPU, if there is one.
"""

import numpy as np
import pytest
import reference_decode

import libflash

torch = pytest.importorskip("torch")

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
SMALLEST = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133, torch.float32: 2.0**-149}


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(11)


def parts(generator, device, dtypes, shape=(2, 9, 3, 32), spread=3.0):
    """Outputs of the given types, one per part, and LSEs that differ by a few units."""
    *batch, rows, heads, _ = shape
    outs = [torch.randn(shape, generator=generator).to(dtype).to(device) for dtype in dtypes]
    lses = [(spread * torch.randn((*batch, heads, rows), generator=generator)).to(device) for _ in dtypes]
    return outs, lses


def float64(x):
    return x.detach().to("cpu", torch.float64).numpy()


def check(outs, lses, out, lse):
    """Within the rounding of the result, of a weight (an exponential and a quotient) and of the sum."""
    wanted, wanted_lse = reference_decode.merge(np.stack([float64(o) for o in outs]), np.stack([float64(x) for x in lses]))
    weights, _ = reference_decode.merge_weights(np.stack([float64(x) for x in lses]))
    shares = np.swapaxes(weights, -1, -2)[..., None]
    reach = float(np.abs(np.where(np.isfinite(wanted_lse), wanted_lse, 0)).max(initial=0))
    largest = max((float(x[torch.isfinite(x)].abs().max()) for x in lses if torch.isfinite(x).any()), default=0.0)
    size = reference_decode.weighted(shares, np.abs(np.stack([float64(o) for o in outs]))).sum(axis=0)
    bound = ROUNDING[out.dtype] * np.abs(wanted) + SMALLEST[out.dtype] + (len(outs) + 16 + 2 * largest) * 2.0**-24 * size
    error = np.abs(float64(out) - wanted)
    assert np.all(error <= bound), f"largest error {error.max()}, {(error / bound).max():.2f} of the bound"
    if lse is not None:
        got = float64(lse)
        assert np.array_equal(np.isneginf(got), np.isneginf(wanted_lse))
        finite = np.isfinite(wanted_lse)
        assert np.all(np.abs(got[finite] - wanted_lse[finite]) <= 2.0**-22 * (reach + largest + len(outs) ** 0.5 + 1))


def merged(outs, lses, dtype=None, **options):
    """Merge into outputs that contain NaN."""
    out = torch.full(outs[0].shape, torch.nan, dtype=dtype or outs[0].dtype, device=outs[0].device)
    lse = torch.full(lses[0].shape, torch.nan, device=outs[0].device)
    libflash.merge(outs, lses, out=out, lse=lse, **options)
    return out, lse


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("part_dtypes", [("f16",), ("bf16",), ("f32",), ("f16", "bf16"), ("f32", "bf16"), ("bf16", "f16", "f32")])
def test_types(device, generator, part_dtypes, out_dtype):
    dtypes = [DTYPES[part_dtypes[n % len(part_dtypes)]] for n in range(6)]
    outs, lses = parts(generator, device, dtypes)
    check(outs, lses, *merged(outs, lses, DTYPES[out_dtype]))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 31, 33, 64, 65, 200, 1000])
@pytest.mark.parametrize("head_dim", [1, 8, 64, 128])
def test_counts(device, generator, count, head_dim):
    outs, lses = parts(generator, device, [torch.bfloat16] * count, (1, 33, 2, head_dim))
    check(outs, lses, *merged(outs, lses))


@pytest.mark.parametrize("count", [65, 200, 1000, 1680])
@pytest.mark.parametrize("part_dtypes", [("f32",), ("f16",), ("f16", "bf16"), ("bf16", "f16", "f32")])
def test_types_of_many_parts(device, generator, part_dtypes, count):
    """The first and last part have no key in some rows, and hold NaN there."""
    outs, lses = parts(generator, device, [DTYPES[part_dtypes[n % len(part_dtypes)]] for n in range(count)], (2, 5, 3, 40))
    for n in (0, count - 1):
        lses[n][:, 1] = -torch.inf
        outs[n][:, :, 1] = torch.nan
    check(outs, lses, *merged(outs, lses, torch.float32))


@pytest.mark.parametrize("count", [65, 300])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_strides_of_many_parts(device, generator, dtype, count):
    outs, lses = parts(generator, device, [DTYPES[dtype]] * count, (3, 7, 4, 16))
    for n, layout in enumerate((*LAYOUTS, *LAYOUTS)):
        outs[4 * n] = LAYOUTS[layout](outs[4 * n])
        lses[4 * n + n % 2] = lses[4 * n + n % 2].transpose(1, 2).contiguous().transpose(1, 2)
    lses[-1] = torch.stack([lses[-1], lses[-1]], -1)[..., 0]
    check(outs, lses, *merged(outs, lses))


@pytest.mark.parametrize("count", [3, 64])
def test_many_parts_without_keys_change_no_bit(device, generator, count):
    """Many parts: the same arithmetic as with few."""
    outs, lses = parts(generator, device, [torch.bfloat16] * count, (2, 9, 3, 128))
    wanted = merged(outs, lses)
    nothing = torch.full_like(outs[0], torch.nan), torch.full_like(lses[0], -torch.inf)
    got = merged([*outs, *[nothing[0]] * 65], [*lses, *[nothing[1]] * 65])
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("head_dim", [1, 2, 3, 4, 7, 8, 12, 20, 31, 40, 100, 127, 192, 256, 260, 264, 512])
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_head_dims(device, generator, head_dim, dtype):
    outs, lses = parts(generator, device, [DTYPES[dtype]] * 3, (2, 5, 3, head_dim))
    check(outs, lses, *merged(outs, lses))


def bhsd(x):
    """The same numbers, laid out (batch, heads, rows, channels)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def inside(x, before, after):
    """The same values in the middle of longer rows, with addresses and strides that allow only some vector loads, or none."""
    wide = torch.full((*x.shape[:-1], before + x.shape[-1] + after), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., before : before + x.shape[-1]] = x
    return wide[..., before : before + x.shape[-1]]


LAYOUTS = {
    "bhsd": bhsd,
    "odd start": lambda x: inside(x, 1, 0),
    "odd stride": lambda x: inside(x, 0, 3),
    "start of 4": lambda x: inside(x, 4, 0),
    "start of 8": lambda x: inside(x, 8, 8),
    "repeated batch": lambda x: x[:1].expand_as(x),
    "repeated heads": lambda x: x[:, :, :1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", ["first part", "all parts"])
def test_strides(device, generator, layout, dtype, where):
    outs, lses = parts(generator, device, [DTYPES[dtype]] * 3, (3, 7, 4, 64))
    for n in range(1 if where == "first part" else 3):
        outs[n] = LAYOUTS[layout](outs[n])
    lses[1] = lses[1].transpose(1, 2).contiguous().transpose(1, 2)
    check(outs, lses, *merged(outs, lses))


@pytest.mark.parametrize("layout", ["bhsd", "odd start", "odd stride", "start of 4"])
def test_strides_of_the_result(device, generator, layout):
    outs, lses = parts(generator, device, [torch.float16] * 3, (2, 7, 4, 64))
    out = LAYOUTS[layout](torch.full_like(outs[0], torch.nan))
    lse = torch.full((2, 4, 20), torch.nan, device=device)[:, :, ::2][:, :, :7]
    around = out.as_strided((out.untyped_storage().nbytes() // 2,), (1,), 0)
    before = around.clone()
    libflash.merge(outs, lses, out=out, lse=lse)
    check(outs, lses, out, lse)
    written = torch.zeros_like(around, dtype=torch.bool)
    written.as_strided(out.shape, out.stride(), out.storage_offset())[:] = True
    assert torch.equal(around[~written].isnan(), before[~written].isnan()), "written outside the result"


def test_packed(device, generator):
    outs, lses = parts(generator, device, [torch.bfloat16] * 4, (101, 3, 40))
    check(outs, lses, *merged(outs, lses))


@pytest.mark.parametrize("holds", [0.0, torch.nan, torch.inf])
def test_parts_without_keys_count_for_nothing(device, generator, holds):
    outs, lses = parts(generator, device, [torch.float16] * 5)
    for n in (0, 3):
        lses[n][:, 1:, ::2] = -torch.inf
        outs[n][:, ::2, 1:] = holds
    out, lse = merged(outs, lses)
    check(outs, lses, out, lse)
    assert torch.isfinite(out).all()


def test_no_keys_at_all(device, generator):
    outs, lses = parts(generator, device, [torch.bfloat16] * 3)
    for n in range(3):
        lses[n][0, 1] = -torch.inf
        outs[n][0, :, 1] = torch.nan
    out, lse = merged(outs, lses)
    assert torch.equal(out[0, :, 1], torch.zeros_like(out[0, :, 1]))
    assert torch.isneginf(lse[0, 1]).all()
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_added_is_the_identity(device, generator, dtype):
    """A part (0, -inf), first or second, does not change the bits."""
    outs, lses = parts(generator, device, [DTYPES[dtype]])
    nothing = (torch.zeros_like(outs[0]), torch.full_like(lses[0], -torch.inf))
    for order in (1, -1):
        both = [(outs[0], lses[0]), nothing][::order]
        out, lse = merged([o for o, _ in both], [x for _, x in both])
        assert torch.equal(out, outs[0])
        assert torch.equal(lse, lses[0])


def test_twice_the_same_adds_log_2(device, generator):
    outs, lses = parts(generator, device, [torch.float32])
    out, lse = merged(outs * 2, lses * 2)
    torch.testing.assert_close(out, outs[0], rtol=0, atol=2.0**-21)
    torch.testing.assert_close(lse, lses[0] + np.log(2), rtol=0, atol=2.0**-20)


def test_far_apart(device, generator):
    """The weight of one part exceeds the others' by more than the range of float, in both orders."""
    outs, lses = parts(generator, device, [torch.float32] * 3)
    lses[0] += 500
    lses[2] -= 30000
    check(outs, lses, *merged(outs, lses))


def test_nan_stays_in_its_row(device, generator):
    outs, lses = parts(generator, device, [torch.float32] * 3)
    lses[1][0, 2, 4] = torch.nan
    out, lse = merged(outs, lses)
    bad = torch.zeros_like(out, dtype=torch.bool)
    bad[0, 4, 2] = True
    assert torch.equal(out.isnan(), bad)
    assert lse.isnan().sum() == 1


def test_same_bits_again(device, generator):
    outs, lses = parts(generator, device, [torch.bfloat16] * 9, (3, 50, 4, 96))
    first, second = merged(outs, lses), merged(outs, lses)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (2, 0, 2, 8), (2, 4, 0, 8)])
def test_nothing_to_do(device, generator, shape):
    outs, lses = parts(generator, device, [torch.float32] * 2, shape)
    out, lse = libflash.merge(outs, lses)
    assert tuple(out.shape) == shape
    assert lse.numel() == 0


def test_without_lse(device, generator):
    outs, lses = parts(generator, device, [torch.bfloat16] * 2)
    out = libflash.merge(outs, lses, return_lse=False)
    check(outs, lses, out, None)


def test_many_rows(device, generator):
    """More rows than one wave of thread blocks."""
    outs, lses = parts(generator, device, [torch.bfloat16] * 2, (4, 4099, 5, 16))
    check(outs, lses, *merged(outs, lses))


# Only on a GPU.


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def test_backends_and_names(cuda, generator):
    outs, lses = parts(generator, "cuda", [torch.float16] * 2)
    wanted = merged(outs, lses)[0]
    for options in ({"backend": "sm80"}, {"backend": "sm90"}, {"kernel": "merge_any"}):
        assert torch.equal(merged(outs, lses, **options)[0], wanted)
    with pytest.raises(libflash.Error, match="cpu"):
        merged(outs, lses, backend="cpu")


def test_float64_is_refused_in_words(cuda, generator):
    outs, lses = parts(generator, "cuda", [torch.float64] * 2)
    with pytest.raises(libflash.Error, match="float64"):
        libflash.merge(outs, [x.double() for x in lses])


def test_more_parts_than_kernel_parameters_hold_are_refused_in_words(cuda, generator):
    outs, lses = parts(generator, "cuda", [torch.float16], (1, 3, 2, 8))
    out = torch.zeros_like(outs[0])
    with pytest.raises(libflash.UnsupportedError, match=r"count: must be at most 1680 on CUDA \(1681\)"):
        libflash.merge(outs * 1681, lses * 1681, out=out)
    assert not out.any()


def test_many_parts_of_too_many_layouts_are_refused_in_words(cuda, generator):
    """64 different strides of many parts are accepted; few parts may all differ."""
    outs, lses = parts(generator, "cuda", [torch.float16] * 66, (1, 3, 2, 8))
    different = [inside(x, 0, n) for n, x in enumerate(outs)]
    check(different[:64], lses[:64], *merged(different[:64], lses[:64]))
    accepted = [*different[:64], *outs[64:]]
    check(accepted, lses, *merged(accepted, lses))
    out = torch.zeros_like(outs[0])
    with pytest.raises(libflash.UnsupportedError, match=r"outs: .* at most 64 different .* dtype and strides.* \(66 parts"):
        libflash.merge(different, lses, out=out)
    assert not out.any()


def test_current_stream(cuda, generator):
    outs, lses = parts(generator, "cuda", [torch.float16] * 2, (1, 2048, 16, 128))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        outs[0].mul_(2)
        out, lse = merged(outs, lses)
    stream.synchronize()
    check(outs, lses, out, lse)


def test_cuda_graph(cuda, generator):
    outs, lses = parts(generator, "cuda", [torch.bfloat16] * 3)
    out, lse = merged(outs, lses)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        libflash.merge(outs, lses, out=out, lse=lse)
    for x in (*outs, *lses):
        x.copy_(torch.randn(x.shape, generator=generator).to(x.dtype))
    graph.replay()
    torch.cuda.synchronize()
    check(outs, lses, out, lse)


def test_kernel_is_listed_and_usable(cuda):
    rows = {kernel["name"]: kernel for kernel in libflash.info()["kernels"]}
    assert rows["merge_any"]["usable"], rows["merge_any"]["why_not"]
