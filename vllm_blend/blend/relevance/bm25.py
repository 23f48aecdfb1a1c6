"""BM25 of a question over the texts of one prompt (Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009;
the variant of Lucene).

A library would index all words of all texts for each prompt. Here only the words that question and text share are
counted, in counts that are kept from prompt to prompt, as a step waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

K1, B = 1.5, 0.75  # the usual constants: how soon a repeated word counts no more, and how much long texts pay


def bm25_scores(counts: np.ndarray, norms: np.ndarray, weights: np.ndarray) -> list[float]:
    """Return a score for each text: larger is more relevant, 0 if it has none of the words.

    `counts` [texts, words] says how often each text has each word of the question, `norms` are the `length_norms` of
    the texts, and `weights` the rarities of the words. The order of the words changes nothing, not even the rounding.
    """
    return row_sums(weights * counts / (counts + norms[:, None]))


def length_norms(lengths: np.ndarray) -> np.ndarray:
    """Return what the lengths of texts, in words, add to a count in the divisor of its word's score, [texts]."""
    mean = float(lengths.sum()) / max(1, len(lengths))
    return K1 * (1 - B + B * lengths / (mean or 1))


def rarities(num_with: Iterable[int], num_texts: int) -> list[float]:
    """Return the weights of words, of each of which so many of the texts have it."""
    return [rarity(num, num_texts) for num in num_with]


def rarity(num_with: int, num_texts: int) -> float:
    """Return the weight of a word that stands in `num_with` of the texts: positive, larger for rare words."""
    return math.log(1 + (num_texts - num_with + 0.5) / (num_with + 0.5))


def row_sums(parts: np.ndarray) -> list[float]:
    """Return the sum of each row, exact but for the last rounding."""
    return [math.fsum(row) for row in parts.tolist()]
