"""BM25 over words, in memory (bm25s, Lucene's variant): no model, and quick enough to index a sample at a time."""

from __future__ import annotations

import logging
import os
from typing import Any

# If JAX is installed, bm25s tries it on import, and JAX would take three quarters of a GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import bm25s
import numpy as np

from vllm_blend.pipeline.retriever import Collection, Retrieval

logging.getLogger(bm25s.__name__).setLevel(logging.WARNING)  # it logs every index at DEBUG


class BM25Retrieval(Retrieval):
    """The default backend. Every passage has a score; ties keep the order of the passages."""

    def build_index(self, collection: Collection) -> Any:
        words = _words(collection.texts)
        if not any(words):
            return None  # only stop words: bm25s cannot index an empty vocabulary
        index = bm25s.BM25()
        index.index(words, show_progress=False)
        return index

    def rank(self, index: Any, collection: Collection, question: str) -> list[tuple[int, float]]:
        words = _words([question])[0]
        known = [word for word in words if index is not None and word in index.vocab_dict]
        scores = index.get_scores(known) if known else np.zeros(len(collection.passages), dtype=np.float32)
        return [(int(i), float(scores[i])) for i in np.argsort(-scores, kind="stable")]


def _words(texts: list[str]) -> list[list[str]]:
    words: list[list[str]] = bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)
    return words
