"""What all retrievers share: collections of passages, places for neighbours, and the keys written to a sample.

A backend is a subclass of `Retrieval` with two methods: `build_index` and `rank`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tqdm.auto import tqdm

from vllm_blend.pipeline.config import RetrievalConfig
from vllm_blend.pipeline.datasets import Sample, SamplePassage, normalize_sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Collection:
    """Passages that are searched together, in order. Neighbours are adjacent passages of one page."""

    name: str
    passages: tuple[SamplePassage, ...]

    @cached_property
    def texts(self) -> list[str]:
        return [p.searchable for p in self.passages]

    def page(self, index: int) -> str | None:
        """Return the passage's page. Passages without a page id share a page if they share a title."""
        return self.passages[index].page_id or self.passages[index].title or None

    def neighbors(self, index: int) -> list[int]:
        page = self.page(index)
        beside = (index - 1, index + 1)
        return [i for i in beside if page is not None and 0 <= i < len(self.passages) and self.page(i) == page]


@dataclass(frozen=True)
class Hit:
    """A retrieved passage. One that only stands beside a hit has that hit's score, and its index in `neighbor_of`."""

    index: int
    score: float
    neighbor_of: int | None = None


class Retrieval(ABC):
    """The base of all backends: `prepare(samples)`, then `retrieve(samples)`; or `find_sample_top_k(sample)` for
    one."""

    index_on_disk = False  # whether an index is a path, to be noted in the sample

    def __init__(self, config: RetrievalConfig | dict[str, Any]) -> None:
        self.config = RetrievalConfig(**config) if isinstance(config, dict) else config
        self._indexes: dict[tuple[SamplePassage, ...], Any] = {}
        self._corpus: Collection | None = None

    @abstractmethod
    def build_index(self, collection: Collection) -> Any:
        """Return what `rank` needs to search the collection."""

    @abstractmethod
    def rank(self, index: Any, collection: Collection, question: str) -> list[tuple[int, float]]:
        """Return (passage, score) for the collection, best first. Passages without a score may be missing."""

    def prepare(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Index what the samples will be searched in. Collections with the same passages are indexed once."""
        views = [self._view(sample, i) for i, sample in enumerate(samples)]
        if self.config.scope == "corpus":
            # dict.fromkeys drops repeated passages and keeps the order, so that neighbours stay neighbours.
            passages = tuple(dict.fromkeys(p for view in views for p in view.passages))
            self._corpus = Collection(f"{self.config.dataset_name}-corpus", passages)
        if self.config.include_neighbors and not any(p.page_id or p.title for view in views for p in view.passages):
            logger.warning("no passage names its page: --include-neighbors has nothing to include")
        for i, sample in enumerate(tqdm(samples, desc="index", unit="sample", disable=None)):
            index = self._index_of(self._collection(sample, i))
            if self.index_on_disk:
                sample[self.config.r_text_index_key] = index
        return samples

    def retrieve(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Write `retrieved`, and indices and scores under the configured keys, into each sample; return the samples."""
        key = self.config.retrieved_key
        for i, sample in enumerate(tqdm(samples, desc="retrieve", unit="sample", disable=None)):
            collection, hits = self._search(sample, i)
            sample[key] = [hit.index for hit in hits]
            sample[f"{key}_score"] = [hit.score for hit in hits]
            sample["retrieved"] = [_describe(collection, hit) for hit in hits]
        return samples

    def find_sample_top_k(self, sample: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Return (indices, scores) of a sample's best passages; indices into its `ctxs`, or into the corpus in that
        scope."""
        _, hits = self._search(sample, 0)
        return [hit.index for hit in hits], [hit.score for hit in hits]

    def _search(self, sample: dict[str, Any], position: int) -> tuple[Collection, list[Hit]]:
        collection = self._collection(sample, position)
        question = sample.get(self.config.question_key)
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"sample {position}: {self.config.question_key} must be a non-empty string to search with")
        ranking = self.rank(self._index_of(collection), collection, question)
        allowed = sample.get(self.config.page_id_key)
        if isinstance(allowed, list):
            if self.config.scope == "corpus":
                raise ValueError(
                    f"sample {position}: {self.config.page_id_key} works in scope sample only: use "
                    "that scope, or drop the key"
                )
            ranking = [(index, score) for index, score in ranking if index in allowed]
        return collection, fill_places(collection, ranking, self.config.top_k, self.config.include_neighbors)

    def _view(self, sample: dict[str, Any], position: int) -> Sample:
        return normalize_sample(sample, position, self.config.page_id_key)

    def _collection(self, sample: dict[str, Any], position: int) -> Collection:
        if self.config.scope == "corpus":
            if self._corpus is None:
                raise RuntimeError("scope corpus searches the passages of all samples: call prepare(samples) first")
            return self._corpus
        view = self._view(sample, position)
        name = sample.get(self.config.doc_key) or view.sample_id
        return Collection(f"{self.config.dataset_name}-{name}", view.passages)

    def _index_of(self, collection: Collection) -> Any:
        if collection.passages not in self._indexes:
            self._indexes[collection.passages] = self.build_index(collection)
        return self._indexes[collection.passages]


def fill_places(collection: Collection, ranking: list[tuple[int, float]], k: int, include_neighbors: bool) -> list[Hit]:
    """Return at most k hits in the order of the ranking. With neighbours, those of a hit take the places right after
    it."""
    chosen: dict[int, Hit] = {}
    for index, score in ranking:
        if len(chosen) >= k:
            break
        chosen.setdefault(index, Hit(index, score))
        for neighbor in collection.neighbors(index) if include_neighbors else []:
            chosen.setdefault(neighbor, Hit(neighbor, score, neighbor_of=index))
    return list(chosen.values())[:k]


def _describe(collection: Collection, hit: Hit) -> dict[str, Any]:
    passage = collection.passages[hit.index]
    return {
        "index": hit.index,
        "title": passage.title,
        "text": passage.text,
        "page_id": collection.page(hit.index),
        "score": hit.score,
        "neighbor_of": hit.neighbor_of,
    }
