"""BM25 of a question over the texts of one prompt (Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009;
the variant of Lucene).

A library would index all words of all texts for each prompt. Here only the question's few words are looked up, in
counts that are kept from prompt to prompt, as a step waits for it: seven words and a hundred passages take 0.1 ms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

K1, B = 1.5, 0.75  # the usual constants: how soon a repeated word counts no more, and how much long texts pay


def bm25_scores(counts: Iterable[Sequence[int]], lengths: Sequence[int]) -> list[float]:
    """Return a score for each text: larger is more relevant, 0 if it has none of the words.

    `counts` has, for each word, how often it stands in each text; `lengths` are those of the texts, in words.
    """
    scores = [0.0] * len(lengths)
    mean = sum(lengths) / max(1, len(lengths))
    for places in counts:
        weight = rarity(sum(map(bool, places)), len(lengths))
        for index, count in enumerate(places):
            if count:
                scores[index] += weight * count / (count + K1 * (1 - B + B * lengths[index] / mean))
    return scores


def rarity(num_with: int, num_texts: int) -> float:
    """Return the weight of a word that stands in `num_with` of the texts: positive, larger for rare words."""
    return math.log(1 + (num_texts - num_with + 0.5) / (num_with + 0.5))
