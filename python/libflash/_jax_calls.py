"""A call of libflash.jax as an XLA custom call: operands and attributes, and the checks while tracing.

The handlers are written in C (jax_ffi/); request.h there lists the order of operands and results. jax.py calls
_jax_primitives.py, whose primitives have rules for derivatives (_jax_derivatives.py) and for vmap (_jax_vmap.py) and are lowered
through _jax_sharding.py to this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _jax_ffi  # type: ignore[attr-defined]
from ._arguments import layout_hint
from ._errors import InvalidError, NoDeviceError, UnsupportedError, from_status
from ._second_order import CPU, computes_out_anew

FORWARD, BACKWARD, DECODE, FORWARD_TANGENT, BACKWARD_TANGENT, CACHE_WRITE = range(6)
TARGETS = (
    "libflash_forward", "libflash_backward", "libflash_decode", "libflash_forward_tangent", "libflash_backward_tangent",
    "libflash_cache_write",
)  # fmt: skip
SECOND_TANGENT = 6  # the tangent of FORWARD_TANGENT: no handler computes it, but it has a transpose

CAUSAL, TOP_LEFT, WINDOW, SCALE, DETERMINISTIC, INTERLEAVED = (1 << bit for bit in range(6))  # FLASH_FLAG_... of libflash.h
POSITIONS, INVARIANT_ROWS = 0x80, 0x400
WITH_RNG, WITH_WORKSPACE, WITH_DBIAS, WITH_FILLED, WITH_TANGENTS = (1 << bit for bit in range(32, 37))
STATISTICS = {"max_logit": 1 << 37, "entropy": 1 << 38}  # in the order of FORWARD's results
WITH_OUT_ANEW = 1 << 39
DIRECTION = {"q": "tq", "k": "tk", "v": "tv", "bias": "tbias"}  # an input's name: that of its tangent
SECOND_DIRECTION = {"q": "uq", "k": "uk", "v": "uv", "bias": "ubias"}  # the second direction of SECOND_TANGENT
ATTENTION_OPERANDS = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
    "alibi_slopes",
    "bias",
    "mask",
    "learnable_sink",
    "block_mask",
    "dlse",
    "row_positions",
    "column_positions",
    *DIRECTION.values(),
    "tdout",
    "tdlse",
    *SECOND_DIRECTION.values(),
)
DECODE_OPERANDS = (
    "cache_seqlens", "block_table", "cache_batch_idx", "cache_leftpad", "k", "v", "rotary_cos", "rotary_sin", "alibi_slopes",
    "learnable_sink", "cu_seqlens_q", "cu_seqlens_new", "q_positions", "tree_mask", "cu_seqlens_tree", "shared_groups",
    "shared_lens", "k_scale", "v_scale", "k_rope_cache", "k_rope",
)  # fmt: skip
CACHE_WRITE_OPERANDS = (
    "v", "v_cache", "k_scale", "v_scale", "k_rope_cache", "k_rope", "rotary_cos", "rotary_sin", "positions",
)  # fmt: skip
OPERANDS = {DECODE: DECODE_OPERANDS, CACHE_WRITE: CACHE_WRITE_OPERANDS}  # of others: ATTENTION_OPERANDS
LAYOUTS = {"bshd": 0, "bhsd": 1, "sbhd": 2}
TYPE_CODES = {"bool": 1, "int32": 4, "float16": 10, "float32": 11, "float64": 12, "bfloat16": 16, "uint32": 8}
TYPE_CODES |= {"int8": 2, "int64": 5, "float8_e5m2": 19, "float8_e4m3fn": 20}

for _name, _platform, _capsule in _jax_ffi.handlers():
    jax.ffi.register_ffi_target(_name, _capsule, platform=_platform)


class Options(NamedTuple):
    """The numbers of a call: static, part of the compiled program. python/write_options writes those of the list of options."""

    flags: int = 0
    layout: str = "bshd"
    window_left: int = 0
    window_right: int = 0
    softmax_scale: float = 0.0
    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: int = 0
    offset: int = 0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    num_splits: int = 0
    split_size: int = 0
    head_begin: int = 0
    heads_total: int = 0
    shard_count: int = 0
    shard_index: int = 0
    shard_keys: int = 0
    backend: str = ""
    kernel: str = ""
    head_dim_v: int = 0  # decode without v_cache
    need_dbias: bool = False
    need_tangents: bool = False  # BACKWARD_TANGENT: results are the tangents of out and lse too
    wide: bool = False  # out of FORWARD and DECODE, and the gradients of BACKWARD, have lse's type: parts of a sum
    statistics: tuple[str, ...] = ()  # FORWARD: further results, in the order of STATISTICS


FIXED = {
    FORWARD: ("q", "k", "v"),
    BACKWARD: ("dout", "q", "k", "v", "out", "lse"),
    DECODE: ("q", "k_cache", "v_cache"),
    CACHE_WRITE: ("k", "k_cache", "slots"),
    FORWARD_TANGENT: ("q", "k", "v", "out", "lse"),
    BACKWARD_TANGENT: ("dout", "q", "k", "v", "out", "lse"),
    SECOND_TANGENT: ("q", "k", "v", "out", "lse"),
}


class Call(NamedTuple):
    """One operation with the names of its optional operands, in their order; the key of what is cached for it."""

    operation: int
    options: Options
    names: tuple[str, ...]  # "rng" last

    @property
    def fixed(self) -> tuple[str, ...]:
        return ("q", "k_cache") if self.options.head_dim_v else FIXED[self.operation]

    @property
    def packed(self) -> bool:
        return "cu_seqlens_q" in self.names or "cu_seqlens_k" in self.names

    def attributes(self, *, workspace: bool = False, out_anew: bool = False) -> dict[str, Any]:
        """The attributes for XLA, without those that are 0."""
        known = OPERANDS.get(self.operation, ATTENTION_OPERANDS)
        bits = sum(1 << known.index(name) for name in self.names if name != "rng")
        bits |= WITH_RNG if "rng" in self.names else 0
        bits |= WITH_WORKSPACE if workspace else 0
        bits |= WITH_DBIAS if self.options.need_dbias else 0
        bits |= WITH_FILLED if self.packed else 0
        bits |= WITH_TANGENTS if self.options.need_tangents else 0
        bits |= WITH_OUT_ANEW if out_anew else 0
        bits |= sum(STATISTICS[name] for name in self.options.statistics)
        numbers = self.options._asdict() | {"operands": bits, "layout": LAYOUTS[self.options.layout]}
        del numbers["need_dbias"], numbers["need_tangents"], numbers["wide"], numbers["statistics"]
        return {name: value for name, value in numbers.items() if value}


def written(call: Call, operands: Sequence[Any]) -> list[str]:
    """The operands that the call writes, in the order of its last results: caches, scales of rows and rope parts."""
    if call.operation != CACHE_WRITE and not (call.operation == DECODE and "k" in call.names):
        return []
    given = dict(zip((*call.fixed, *call.names), operands, strict=True))
    names = ("k_cache", "v_cache", "k_scale", "v_scale", "k_rope_cache")
    return [name for name in names if name in given and (not name.endswith("scale") or len(given[name].shape) > 2)]


Shape = jax.ShapeDtypeStruct
_vary = getattr(jax.lax, "pcast", None)


def varying_axes(arrays: Any) -> tuple[Any, ...]:
    """Inside shard_map, the mesh axes along which the arrays differ from device to device. JAX keeps that in an array's type."""
    found: set[Any] = set()
    for x in jax.tree.leaves(arrays):
        kind = jax.typeof(x)
        found |= set(getattr(getattr(kind, "manual_axis_type", None), "varying", getattr(kind, "vma", ())))
    return tuple(sorted(found, key=str))


def vary(arrays: Any, axes: tuple[Any, ...]) -> Any:
    """The arrays, marked as varying along `axes`, as results of varying operands are. Its gradient is the sum over devices."""

    def one(x: Any) -> Any:
        missing = tuple(axis for axis in axes if axis not in varying_axes(x))
        if not missing:
            return x
        return _vary(x, missing, to="varying") if _vary else jax.lax.pvary(x, missing)  # type: ignore[attr-defined]

    return jax.tree.map(one, arrays) if axes else arrays


def shape_of(x: Any) -> Shape:
    return Shape(x.shape, x.dtype)


def wide_shape(x: Any) -> Shape:
    return Shape(x.shape, lse_dtype(x.dtype))


def lse_dtype(dtype: Any) -> Any:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def lse_shape(q: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """(batch, heads_q, seqlen_q), or (heads_q, total_q) if packed."""
    if len(q) == 3:
        return q[1], q[0]
    return tuple(q[layout.index(axis)] for axis in "bhs")


def as_lse(x: Any, layout: str) -> Any:
    """From out's order of axes, head_dim gone, to lse's."""
    if x.ndim == 2:
        return x.T
    return x.transpose([layout.index(axis) for axis in "bhs"])


def as_out(lse: Any, layout: str) -> Any:
    """lse in out's order of axes, and one more."""
    if lse.ndim == 2:
        return lse.T[..., None]
    return lse.transpose(["bhs".index(axis) for axis in layout if axis != "d"])[..., None]


def of_heads(x: Any, lse: Any) -> Any:
    """A number for each query head, with the axes of lse."""
    return x.astype(lse.dtype).reshape((1,) * (lse.ndim - 2) + (-1, 1))


def result_shapes(call: Call, operands: Sequence[Any]) -> list[Shape]:
    given = dict(zip((*call.fixed, *call.names), operands, strict=True))
    last = [shape_of(given[name]) for name in written(call, operands)]
    if call.operation == CACHE_WRITE:
        return last
    q = given["q"]
    if call.operation in (BACKWARD, BACKWARD_TANGENT):
        results = [wide_shape(given[name]) if call.options.wide else shape_of(given[name]) for name in ("q", "k", "v")]
        results += [shape_of(given["bias"])] if call.options.need_dbias else []
        return [*results, *(shape_of(given[name]) for name in ("out", "lse"))] if call.options.need_tangents else results
    head_dim_v = call.options.head_dim_v or operands[2].shape[-1]  # of v or v_cache
    rows = Shape(lse_shape(q.shape, call.options.layout), lse_dtype(q.dtype))
    out = Shape((*q.shape[:-1], head_dim_v), lse_dtype(q.dtype) if call.options.wide else q.dtype)
    return [out, rows, *(rows for _ in call.options.statistics), *last]


def out_anew(call: Call, operands: Sequence[Any], *, on_gpu: bool) -> bool:
    """Whether BACKWARD_TANGENT computes out again."""
    if call.operation != BACKWARD_TANGENT or operands[1].dtype.itemsize != 2:
        return False
    arch = round(10 * float(jax.local_devices()[0].compute_capability)) if on_gpu else CPU
    numbers = (name for name, value in call.options._asdict().items() if value)
    head_dims = (operands[1].shape[-1], operands[3].shape[-1])  # of q and v
    return computes_out_anew(arch, head_dims, (*call.names, *numbers), call.options.backend)


def workspace_size(call: Call, operands: Sequence[Any], results: Sequence[Shape], device_type: int) -> int:
    """Bytes of scratch memory; raises what is wrong with the call. `device_type` is 0 for the CPU, 1 for CUDA."""

    def described(arrays: Sequence[Any]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        return tuple((TYPE_CODES[x.dtype.name], tuple(x.shape)) for x in arrays)

    status, text, size = _jax_ffi.workspace_size(
        call.operation,
        device_type,
        described(without_rng(call, operands)),
        described(results),
        call.attributes(out_anew=out_anew(call, operands, on_gpu=device_type != 0)),
    )
    if status != 0:
        raise from_status(status, text + hint(call, operands, text))
    return int(size)


def hint(call: Call, operands: Sequence[Any], text: str) -> str:
    """The layouts in which q, k and v would agree, if `text` refuses their shapes."""
    given = dict(zip((*call.fixed, *call.names), operands, strict=True))
    if not {"q", "k", "v"} <= given.keys() or call.operation == DECODE:
        return ""
    return layout_hint(text, call.options.layout, *(tuple(given[name].shape) for name in "qkv"))


def check_types(call: Call, operands: Sequence[Any]) -> None:
    for name, x in zip((*call.fixed, *call.names), operands, strict=True):
        if len(x.shape) > 4 or x.dtype.name not in TYPE_CODES:
            raise InvalidError(
                f"{name} is {x.dtype.name}{list(x.shape)}; arrays have at most 4 dimensions and one of the types "
                + ", ".join(TYPE_CODES)
            )


def check_ranks(call: Call, operands: Sequence[Any]) -> None:
    """Check the ranks, which the shapes of results depend on. The C library checks the rest."""
    if call.operation == CACHE_WRITE:  # its results have the shapes of operands
        return
    packed = {name for name, side in (("q", "q"), ("k", "k"), ("v", "k")) if f"cu_seqlens_{side}" in call.names}
    for name, x in zip(call.fixed, operands, strict=False):
        if name not in ("q", "k", "v", "k_cache", "v_cache") or len(x.shape) == (3 if name in packed else 4):
            continue
        needed = "3, (total, heads, head_dim), with cu_seqlens" if name in packed else "4, (batch, seqlen, heads, head_dim)"
        if name not in packed and call.operation != DECODE:
            needed += " in the order that layout says; 3 only with cu_seqlens"
        raise InvalidError(f"{name} has {len(x.shape)} dimensions; it needs {needed}")


def symbolic(operands: Sequence[Any]) -> bool:
    """True if a dimension is symbolic (jax.export)."""
    return any(not isinstance(size, (int, np.integer)) for x in operands for size in x.shape)


def without_rng(call: Call, operands: Sequence[Any]) -> Sequence[Any]:
    return operands[:-1] if "rng" in call.names else operands


def run(call: Call, *operands: Any) -> list[Any]:
    """The operation on one device: its shapes are checked, then XLA compiles it for its platform."""
    check_types(call, operands)
    check_ranks(call, operands)
    results = result_shapes(call, operands)
    on_gpu = jax.default_backend() == "gpu"
    if symbolic(operands):  # the rest is checked when the program runs
        if on_gpu:
            raise UnsupportedError(
                "symbolic dimensions work on the CPU only: on a GPU the program plans scratch memory when it is compiled; "
                "export with the dimensions that it will run with"
            )
        return on_platform(call, operands, results, None)
    if call.operation in (DECODE, CACHE_WRITE) or not on_gpu:
        workspace_size(call, operands, results, 0)
    if not on_gpu:
        return on_platform(call, operands, results, None)
    try:
        scratch = workspace_size(call, operands, results, 1)
    except (UnsupportedError, NoDeviceError):
        # Not refused here: if JAX has a default device, the program may run on the CPU; and reverse mode traces a tangent only to
        # transpose it. If the program runs on a GPU, the handler refuses it.
        tangent = call.operation in (FORWARD_TANGENT, BACKWARD_TANGENT)
        if jax.config.jax_default_device is None and not tangent:  # type: ignore[attr-defined]
            raise
        workspace_size(call, operands, results, 0)
        scratch = 0
    return jax.lax.platform_dependent(  # type: ignore[no-any-return]
        *operands,
        cpu=lambda *x: on_platform(call, x, results, None),
        cuda=lambda *x: on_platform(call, x, results, scratch),
    )


def on_platform(call: Call, operands: Sequence[Any], results: list[Shape], scratch: int | None) -> list[Any]:
    """`scratch`: bytes of workspace, one more result that XLA allocates; None: the handler allocates it."""
    anew = scratch != 0 and out_anew(call, operands, on_gpu=scratch is not None)  # 0: it is refused when it runs, or empty
    aliases = {}
    without_filled = operands
    if call.packed:  # rows that belong to no sequence are not written: fill the results first, but for caches
        start = len(without_rng(call, operands))
        rows = results[:2] if call.operation == DECODE else results
        aliases = {start + i: i for i in range(len(rows))}
        names_of_rows = ("out", "lse", *call.options.statistics) if call.operation in (FORWARD, DECODE) else ("",) * len(rows)
        filled = [
            jnp.full(x.shape, -jnp.inf if name in ("lse", "max_logit") else 0, x.dtype)
            for name, x in zip(names_of_rows, rows, strict=True)
        ]
        operands = (*operands[:start], *filled, *operands[start:])
    names, outcome = (*call.fixed, *call.names), written(call, without_filled)
    aliases |= {names.index(name): len(results) - len(outcome) + i for i, name in enumerate(outcome)}
    shapes = results if scratch is None else [*results, Shape((scratch,), np.dtype(np.uint8))]
    ffi = jax.ffi.ffi_call(TARGETS[call.operation], shapes, input_output_aliases=aliases)
    attributes = {
        name: np.int64(value) if isinstance(value, int) else value
        for name, value in call.attributes(workspace=scratch is not None, out_anew=anew).items()
    }
    axes = varying_axes(operands)
    return vary(list(ffi(*vary(operands, axes), **attributes))[: len(results)], axes)  # type: ignore[no-any-return]
