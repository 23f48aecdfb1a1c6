"""BM25 of a question over the texts of one prompt (Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009;
the variant of Lucene).

A library would index all words of all texts for each prompt. Here only the words that question and text share are
counted, in counts that are kept from prompt to prompt, as a step waits for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

K1, B = 1.5, 0.75  # the usual constants: how soon a repeated word counts no more, and how much long texts pay


def bm25_scores(counts: Sequence[Mapping[str, int]], lengths: Sequence[int]) -> list[float]:
    """Return a score for each text: larger is more relevant, 0 if it has none of the words.

    `counts` has, for each text, how often it has each word of the question that it has at all; `lengths` are those of
    the texts, in words. The order of the words changes nothing, not even the rounding.
    """
    mean = sum(lengths) / max(1, len(lengths))
    weights = {word: rarity(count, len(counts)) for word, count in Counter(chain.from_iterable(counts)).items()}
    scores = []
    for own, length in zip(counts, lengths, strict=True):
        norm = K1 * (1 - B + B * length / mean) if own else 0.0
        scores.append(math.fsum(weights[word] * count / (count + norm) for word, count in own.items()))
    return scores


def rarity(num_with: int, num_texts: int) -> float:
    """Return the weight of a word that stands in `num_with` of the texts: positive, larger for rare words."""
    return math.log(1 + (num_texts - num_with + 0.5) / (num_with + 0.5))
