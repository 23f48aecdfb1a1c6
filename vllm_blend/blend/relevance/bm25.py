"""BM25 of a question over the texts of one prompt (Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009;
the variant of Lucene).

A library would index all words of all texts for each prompt. Here only the words that question and text share are
counted, in counts that are kept from prompt to prompt, as a step waits for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

K1, B = 1.5, 0.75  # the usual constants: how soon a repeated word counts no more, and how much long texts pay


def bm25_scores(
    counts: Sequence[Mapping[str, int]], lengths: Sequence[int], weights: Mapping[str, float] | None = None
) -> list[float]:
    """Return a score for each text: larger is more relevant, 0 if it has none of the words.

    `counts` has, for each text, how often it has each word of the question that it has at all; `lengths` are those of
    the texts, in words. `weights` are those of the words, if the caller has them: then texts whose score is of no
    interest may have no counts. The order of the words changes nothing, not even the rounding.
    """
    if weights is None:
        weights = rarities(counts, len(counts))
    mean = sum(lengths) / max(1, len(lengths))
    scores = [0.0] * len(lengths)
    for index, own in enumerate(counts):
        if own:
            norm = K1 * (1 - B + B * lengths[index] / mean)
            scores[index] = math.fsum([weights[word] * count / (count + norm) for word, count in own.items()])
    return scores


def rarities(words_of_texts: Iterable[Iterable[str]], num_texts: int) -> dict[str, float]:
    """Return the weight of each word that a text has. Each text gives its different words, or those of interest."""
    num_with = Counter(chain.from_iterable(words_of_texts))
    return {word: rarity(num, num_texts) for word, num in num_with.items()}


def rarity(num_with: int, num_texts: int) -> float:
    """Return the weight of a word that stands in `num_with` of the texts: positive, larger for rare words."""
    return math.log(1 + (num_texts - num_with + 0.5) / (num_with + 0.5))
