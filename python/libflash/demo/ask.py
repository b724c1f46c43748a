"""Continue a phrase, word by word: libflash.decode over a cache that holds the whole text."""

from __future__ import annotations

import collections
import dataclasses
import time

import numpy as np

import libflash
from libflash.demo.model import HEADS, SHARPNESS, Model
from libflash.demo.standard import exact_rows
from libflash.demo.text import Text


@dataclasses.dataclass(frozen=True)
class Answer:
    words: str
    topic: str  # the topic that most of the words come from
    seconds_per_word: float
    error_of_bound: float  # of the last word's attention, as in Measurement


class Reader:
    """A cache of keys and values that holds the text. `spare` more rows are free for a phrase and its continuation."""

    def __init__(self, text: Text, model: Model, spare: int):
        self.text, self.model = text, model
        self.length = len(text.ids)
        _, k, v = model.queries_keys_values(text.ids)
        self.k_cache, self.v_cache = (np.concatenate([x, np.zeros((1, spare, *x.shape[2:]), x.dtype)], axis=1) for x in (k, v))

    def ask(self, phrase: str, count: int) -> Answer:
        """The `count` words that follow the phrase. ValueError if the text contains none of its words."""
        ids = self.text.encode(phrase)
        if len(ids) == 0:
            raise ValueError(f"the text contains none of the words of {phrase!r}")
        words: list[str] = []
        topics: collections.Counter[str] = collections.Counter()
        start = time.perf_counter()
        length, new = self.length, len(ids)  # words in the cache, and words that decode appends
        for _ in range(count):
            q, k, v = (x[:, -new:] for x in self.model.queries_keys_values(ids))
            out = libflash.decode(
                q, self.k_cache, self.v_cache, k=k, v=v, cache_seqlens=np.array([length], np.int32), softmax_scale=SHARPNESS
            )
            length += new
            new = 1
            following = int(self.model.next_word(out[0, -1:])[0])
            words.append(self.text.vocabulary[following])
            ids = np.append(ids, following)
            topics[self.text.topic_at(self.best_match(q[0, -1]))] += 1
        seconds = (time.perf_counter() - start) / count
        return Answer("".join(words), topics.most_common(1)[0][0], seconds, self.check(q, out, length))

    def best_match(self, q: np.ndarray) -> int:
        """The word of the text with the largest score in the last head, which compares most words."""
        return int((self.k_cache[0, : self.length, HEADS - 1] @ q[HEADS - 1]).argmax())

    def check(self, q: np.ndarray, out: np.ndarray, length: int) -> float:
        """Largest difference from float64 in the last row, as a share of the rounding bound of float32."""
        row = np.array([length - 1])
        exact, bound = exact_rows(q[0, -1:], self.k_cache[0, :length], self.v_cache[0, :length], SHARPNESS, row)
        return float((np.abs(out[0, -1:] - exact) / bound).max())
