"""A small attention model that continues a text from what it has read. Nothing is trained: the weights are random and fixed.

One layer, four heads. A query of head n describes the last n words read, the key of a word describes the n words before *it*,
and its value is the word. So each head finds earlier places with the same last words, and returns the word that came next there
(an induction head: Olsson et al., "In-context Learning and Induction Heads", arXiv 2209.11895). There is one right
key among tens of thousands of wrong ones: attention that skips keys would miss it.
"""

from __future__ import annotations

import numpy as np

HEADS = 4
HEAD_DIM = 64
SHARPNESS = 12.0  # softmax_scale: one more word in common is worth a factor e^12
HEAD_WEIGHTS = np.array([1, 2, 4, 8], dtype=np.float32)  # heads that compare more words count more


class Model:
    def __init__(self, vocabulary_size: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        embedding = rng.standard_normal((vocabulary_size, HEAD_DIM), dtype=np.float32)
        self.embedding = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
        # A word n words back is described by its embedding with its channels in the n-th order, so that word order counts.
        self.orders = [rng.permutation(HEAD_DIM) for _ in range(HEADS)]

    def contexts(self, ids: np.ndarray) -> np.ndarray:
        """(len(ids), HEADS, HEAD_DIM): head n has the sum over the last n + 1 words, each in the order for its distance."""
        embedded = self.embedding[ids]
        out = np.zeros((len(ids), HEADS, HEAD_DIM), dtype=np.float32)
        for distance, order in enumerate(self.orders):
            out[distance:, distance:] += embedded[: max(len(ids) - distance, 0), None, order]
        return out

    def queries_keys_values(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k, v of shape (1, len(ids), HEADS, HEAD_DIM), for causal attention: query i looks for what follows word i."""
        q = self.contexts(ids)
        k = np.zeros_like(q)
        k[1:] = q[:-1]
        v = np.repeat(self.embedding[ids][:, None], HEADS, axis=1)
        return q[None], k[None], v[None]

    def next_word(self, out: np.ndarray) -> np.ndarray:
        """Ids of the likeliest next words, from attention's output rows (n, HEADS, HEAD_DIM)."""
        combined = np.einsum("nhd,h->nd", out, HEAD_WEIGHTS)
        best: np.ndarray = np.argmax(combined @ self.embedding.T, axis=1)
        return best
