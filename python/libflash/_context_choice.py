"""The choice of a scheme: bytes that a rank sends against the time of its computation.

ring: the keys of the next step are sent during the computation of a step. The transfer is hidden if a rank has at least
`HIDDEN_TOKENS * heads_k / heads_q` tokens: a step computes n^2 heads_q (D + Dv) operations, as half of the keys are visible, and
moves n heads_k (D + Dv) elements of 2 bytes, at 700 TFLOP/s and 360 GB/s, the rates of a Hopper GPU on NVLink. heads: transfers
are never hidden, but fewer bytes are sent, and a rank makes one call for all keys. On four H200s with NVLink and 64k to 1M
tokens, forward and backward together took 1 to 9 % less time than with a ring of messages, forward between 9 % less and 3 % more.
On four H100s whose ring uses symmetric memory, with 64k to 256k tokens, both together took 0 to 4 % less time than with the ring,
forward 1 to 12 % more. On two GPUs the ring is as fast or faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from ._arguments import one_of
from ._errors import InvalidError

SCHEMES = ("auto", "ring", "halo", "all_gather", "heads", "heads_ring")
HIDDEN_TOKENS = 4096
HEADS_FROM, MOST_OF_A_HOST = 4, 8  # ranks: "heads" where the ring makes many calls and all links are fast


@dataclass(frozen=True)
class Sizes:
    """Of one rank: tokens, heads, channels of K and V together, bytes per element. `mesh`: the ranks of each dimension."""

    tokens: int
    heads_q: int
    heads_k: int
    channels_q: int
    channels_k: int
    element: int
    mesh: tuple[int, ...]
    batch: int = 1


def check_scheme(scheme: str, sizes: Sizes, order: str, window: tuple[int, int]) -> None:
    one_of(scheme, SCHEMES, "scheme")
    if len(sizes.mesh) == 2 and scheme not in ("auto", "heads_ring"):
        raise InvalidError(f"scheme is {scheme!r}; a mesh of two dimensions, (heads, ring), needs 'heads_ring' or 'auto'")
    if len(sizes.mesh) == 1 and scheme == "heads_ring":
        raise InvalidError("scheme is 'heads_ring'; it needs a mesh of two dimensions, (heads, ring)")
    if scheme == "halo" and (order != "contiguous" or min(window) < 0):
        raise InvalidError("scheme is 'halo'; it needs order='contiguous' and a window (or causal) that is bounded on both sides")


def key_heads_repeated(heads_q: int, heads_k: int, ranks: int, scheme: str = "heads") -> int:
    """How often each key head is repeated so that every rank gets the key heads of its query heads. Refuses other numbers.
    `scheme` is the caller's; with "auto", heads are shared only on a mesh of two dimensions."""
    needing = f"scheme {scheme!r}" if scheme != "auto" else "a mesh of two dimensions, (heads, ring),"
    if heads_q % ranks != 0:
        raise InvalidError(f"q has {heads_q} heads; {needing} needs a multiple of the {ranks} ranks that share them")
    if heads_k % ranks == 0:
        return 1
    if ranks % heads_k != 0:
        raise InvalidError(f"k has {heads_k} heads; {needing} needs a multiple or a divisor of the {ranks} ranks that share them")
    return ranks // heads_k


def can_share_heads(sizes: Sizes) -> bool:
    """Whether scheme "heads" can divide the heads among the ranks of the first dimension."""
    ranks = sizes.mesh[0]
    return sizes.heads_q % ranks == 0 and (sizes.heads_k % ranks == 0 or ranks % sizes.heads_k == 0)


def choose(sizes: Sizes, order: str, window: tuple[int, int], copied_forward: bool = False) -> tuple[str, str]:
    """The scheme for 'auto', and the reason. copied_forward: no gradients, and GPUs may copy the keys of a ring directly."""
    if len(sizes.mesh) == 2:
        return "heads_ring", "the mesh has two dimensions: heads within the first, a ring along the second"
    ranks = sizes.mesh[0]
    if ranks == 1:
        return "ring", "one rank: attention without communication"
    if order == "contiguous" and min(window) >= 0 and max(window) <= sizes.tokens:
        return "halo", f"a row sees at most {max(window)} keys to a side, a rank has {sizes.tokens} tokens: only neighbours send"
    several = HEADS_FROM <= ranks <= MOST_OF_A_HOST and not copied_forward
    if several and min(window) < 0 and can_share_heads(sizes) and sizes.heads_k % ranks == 0:
        return "heads", f"{ranks} ranks, as many as one host may have: one call for all keys is faster than {ranks} of a ring"
    needed = -(-HIDDEN_TOKENS * sizes.heads_k // sizes.heads_q)
    if sizes.tokens >= needed:
        return "ring", f"a rank has {sizes.tokens} tokens; from {needed} on the keys of a step are sent during the computation"
    if can_share_heads(sizes):
        return "heads", f"a rank has {sizes.tokens} tokens, fewer than the {needed} that hide a ring's keys"
    return "ring", f"{ranks} ranks do not divide {sizes.heads_q} query and {sizes.heads_k} key heads"


def bytes_sent(scheme: str, s: Sizes) -> int:
    """Bytes that one rank sends in a forward call. A ring that skips invisible keys sends less."""
    rows = s.batch * s.tokens
    keys = rows * s.heads_k * s.channels_k * s.element
    if scheme in ("ring", "all_gather"):
        return (s.mesh[0] - 1) * keys
    if scheme == "halo":
        return min(2, s.mesh[0] - 1) * keys
    heads = s.mesh[0]
    repeated = max(1, heads // s.heads_k)
    exchanged = (rows * s.heads_q * s.channels_q * s.element + keys * repeated) * (heads - 1) // heads
    return exchanged + ((s.mesh[1] - 1) * keys * repeated if scheme == "heads_ring" else 0)


def explanation(chosen: str, why: str, sizes: Sizes, order: str, transport: tuple[str, str] | None = None) -> str:
    """The text of the choice. `transport`: the transport of keys and the reason, if keys are sent."""
    lines = [f"scheme     {chosen}: {why}", f"ranks      {' x '.join(map(str, sizes.mesh))}, order {order}"]
    lines.append(f"rank       {sizes.tokens} tokens, {sizes.heads_q} query heads, {sizes.heads_k} key heads")
    options = ("heads_ring",) if len(sizes.mesh) == 2 else ("ring", "all_gather", "heads")
    for scheme in dict.fromkeys((chosen, *options)):
        when = "not during the computation" if scheme in ("heads", "all_gather") else "during the computation"
        lines.append(f"bytes      {scheme}: {bytes_sent(scheme, sizes)} sent by a rank in forward, {when}")
    if transport is not None:
        lines.append("transport  {}: {}".format(*transport))
    return "\n".join(lines) + "\n"
