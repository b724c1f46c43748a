"""The text: Python's own language reference, which every Python carries as `pydoc_data.topics`."""

from __future__ import annotations

import bisect
import dataclasses
import re
from pydoc_data import topics as pydoc_topics

import numpy as np

# A word with the blank before it, or a repeated punctuation mark. The joined words are the text.
WORD = re.compile(r" ?(?:\w+|([^\w\s])\1*)")

# Some passages occur twice in the reference. This one ends a section of `specialnames` and also occurs in the topic
# `sequence-types`, more words earlier than standard attention has memory for.
EARLIER_TOPIC, LATER_TOPIC = "sequence-types", "specialnames"
TAIL = 24  # words that occur at the end of the passage and nowhere else


@dataclasses.dataclass(frozen=True)
class Text:
    words: list[str]
    ids: np.ndarray  # int64, one per word
    vocabulary: list[str]  # of the ids
    topics: list[str]
    starts: list[int]  # where each topic begins, in words
    characters: int

    def topic_at(self, position: int) -> str:
        return self.topics[max(bisect.bisect_right(self.starts, position) - 1, 0)]

    def encode(self, phrase: str) -> np.ndarray:
        """Ids of the phrase's words; words that do not occur in the text are dropped."""
        known = {word: i for i, word in enumerate(self.vocabulary)}
        return np.array([known[word] for word in split(phrase) if word in known], dtype=np.int64)


def split(text: str) -> list[str]:
    """Words of a text; line breaks and indentation count as one blank."""
    return [match.group(0) for match in WORD.finditer(" " + " ".join(text.split()))]


def load() -> Text:
    """The whole reference, topics in alphabetical order."""
    topics = sorted(pydoc_topics.topics)
    words: list[str] = []
    starts = []
    for topic in topics:
        starts.append(len(words))
        words += split(pydoc_topics.topics[topic])
    vocabulary = sorted(set(words))
    number = {word: i for i, word in enumerate(vocabulary)}
    ids = np.array([number[word] for word in words], dtype=np.int64)
    return Text(words, ids, vocabulary, topics, starts, sum(len(pydoc_topics.topics[t]) for t in topics))


def passage(text: Text) -> tuple[int, int | None]:
    """(end of the passage, number of words between its first occurrence and it).

    If this Python's reference has no such passage: the end of the text, and None.
    """
    if EARLIER_TOPIC in text.topics and LATER_TOPIC in text.topics:
        first = text.topics.index(EARLIER_TOPIC)
        first_end = text.starts[first + 1]
        tail = text.words[first_end - TAIL : first_end]
        later = text.topics.index(LATER_TOPIC)
        for end in range(text.starts[later] + TAIL, text.starts[later + 1]):
            if text.words[end - TAIL : end] == tail:
                return end, end - first_end
    return len(text.words), None
