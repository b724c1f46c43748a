"""The scheme that context parallel attention chooses for shards, without processes."""

from __future__ import annotations

import pytest
from libflash._context_choice import Sizes, choose

CAUSAL, WINDOW = (-1, 0), (300, 0)


def sizes(ranks: tuple[int, ...], tokens: int = 16384, heads_q: int = 32, heads_k: int = 8) -> Sizes:
    return Sizes(tokens, heads_q, heads_k, 256, 256, 2, ranks)


@pytest.mark.parametrize(
    ("given", "order", "window", "scheme"),
    [
        (sizes((1,)), "zigzag", CAUSAL, "ring"),
        (sizes((2,)), "zigzag", CAUSAL, "ring"),
        (sizes((2,), tokens=512), "zigzag", CAUSAL, "heads"),  # too few tokens to hide the keys
        (sizes((2,), tokens=512, heads_q=3, heads_k=3), "zigzag", CAUSAL, "ring"),
        (sizes((4,)), "zigzag", CAUSAL, "heads"),
        (sizes((4,)), "contiguous", (-1, -1), "heads"),
        (sizes((8,), tokens=131072), "zigzag", CAUSAL, "heads"),
        (sizes((8,), heads_k=4), "zigzag", CAUSAL, "ring"),  # each key head would be sent twice
        (sizes((4,), heads_q=6, heads_k=6), "zigzag", CAUSAL, "ring"),
        (sizes((16,), heads_k=32), "zigzag", CAUSAL, "ring"),  # more than a host has
        (sizes((4,)), "contiguous", WINDOW, "halo"),
        (sizes((4,)), "zigzag", WINDOW, "ring"),  # which skips keys that nobody sees
        (sizes((2, 2)), "zigzag", CAUSAL, "heads_ring"),
    ],
)
def test_auto(given: Sizes, order: str, window: tuple[int, int], scheme: str) -> None:
    chosen, why = choose(given, order, window)
    assert chosen == scheme
    assert why


@pytest.mark.parametrize(
    ("ranks", "tokens", "scheme"), [(2, 65536, "ring"), (4, 65536, "ring"), (8, 65536, "ring"), (4, 512, "heads")]
)
def test_forward_alone_of_gpus(ranks: int, tokens: int, scheme: str) -> None:
    assert choose(sizes((ranks,), tokens=tokens), "zigzag", CAUSAL, copied_forward=True)[0] == scheme
