"""A small set of combinations in which every pair of values of every two factors occurs."""

from __future__ import annotations

import itertools
import random


def pairwise(factors: dict[str, list], seed: int = 0) -> list[dict]:
    """Greedy: each new combination starts from an uncovered pair and takes, factor by factor, the value that covers most
    pairs.
    """
    rng = random.Random(seed)
    names = list(factors)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    combinations = []
    while missing:
        chosen = dict(min(missing))
        for name in rng.sample(names, len(names)):
            if name not in chosen:
                options = list(range(len(factors[name])))
                rng.shuffle(options)
                chosen[name] = max(options, key=lambda i: len(missing & set(pairs_with(name, i, chosen, names))))
        missing -= {pair for name in names for pair in pairs_with(name, chosen[name], chosen, names)}
        combinations.append({name: factors[name][chosen[name]] for name in names})
    return combinations


def pairs_with(name: str, index: int, chosen: dict[str, int], names: list[str]) -> list[tuple]:
    """The pairs of `index` for `name` with the values chosen so far, in the order of `names`."""
    me = (name, index)
    return [
        (me, (other, i)) if names.index(name) < names.index(other) else ((other, i), me)
        for other, i in chosen.items()
        if other != name
    ]
