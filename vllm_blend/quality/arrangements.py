"""Arrange a prompt's passages: their order, which one continues which, and what each is encoded after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_blend.inputs import ChunkedPrompt
from vllm_blend.pipeline.bm25 import BM25Retrieval
from vllm_blend.pipeline.config import RetrievalConfig
from vllm_blend.pipeline.datasets import Sample
from vllm_blend.pipeline.retriever import Collection


def with_pages(sample: Sample, prompt: ChunkedPrompt) -> ChunkedPrompt:
    """Return the prompt with `continues`: which passage each one continues on its page, if the data set knows pages."""
    return prompt | {"continues": page_predecessors(sample)}


def with_chunks(prompt: ChunkedPrompt, kept: Sequence[int]) -> ChunkedPrompt:
    """Return the pieces of a prompt with some of its chunks alone, in the order of `kept`."""
    chunks: Sequence[Any] = prompt["chunks"]
    return {"prefix": prompt["prefix"], "chunks": [chunks[index] for index in kept], "suffix": prompt["suffix"]}


def relevant_first(sample: Sample, prompt: ChunkedPrompt) -> ChunkedPrompt:
    """Return the prompt with the pages first that BM25 ranks first.

    The first passages are exact without any recompute: they were encoded after exactly what precedes them. The passages
    that a retriever ranks first are the most likely to hold the answer, so they belong there.
    """
    order = relevant_pages_first(sample)
    chunks: list[str] = [prompt["chunks"][index] for index in order]  # type: ignore[misc]
    return prompt | {"chunks": chunks, "continues": page_predecessors(sample, order)}


def nearest_passage(sample: Sample, prompt: ChunkedPrompt) -> ChunkedPrompt:
    """Return the prompt with each passage encoded after the other passage that BM25 finds nearest to it (FusionRAG)."""
    if len(sample.passages) == 1:
        return prompt
    collection = Collection(sample.sample_id, sample.passages)
    retriever = BM25Retrieval(RetrievalConfig())
    index = retriever.build_index(collection)
    nearest: list[str | list[int]] = []
    for number, passage in enumerate(sample.passages):
        ranking = retriever.rank(index, collection, passage.searchable)
        nearest.append(prompt["chunks"][next(other for other, _ in ranking if other != number)])
    return prompt | {"encode_after": nearest}


def page_predecessors(sample: Sample, passages: Sequence[int] | None = None) -> list[int | None]:
    """Return the `continues` of a prompt: for each passage, the place in the prompt of the one that it continues.

    That is the last passage before it in the prompt that also stands before it on its page; None if there is none, or
    if the data set does not say which page the passage is from. `passages` are indices into the sample, in the prompt's
    order; None stands for all.
    """
    chosen = range(len(sample.passages)) if passages is None else passages
    found: list[int | None] = []
    for place, index in enumerate(chosen):
        page = sample.passages[index].page_id
        before = [
            earlier
            for earlier in range(place)
            if page is not None and sample.passages[chosen[earlier]].page_id == page and chosen[earlier] < index
        ]
        found.append(before[-1] if before else None)
    return found


def relevant_pages_first(sample: Sample) -> list[int]:
    """Return the indices of all passages, ordered by page: the page first whose best passage BM25 ranks first.

    Passages of one page keep their order, as do pages of equal rank.
    """
    collection = Collection(sample.sample_id, sample.passages)
    retriever = BM25Retrieval(RetrievalConfig())
    ranking = dict(retriever.rank(retriever.build_index(collection), collection, sample.question))
    pages: dict[str, list[int]] = {}
    for index in range(len(sample.passages)):
        pages.setdefault(collection.page(index) or f"passage {index}", []).append(index)
    best = sorted(pages.values(), key=lambda page: -max(ranking[index] for index in page))
    return [index for page in best for index in page]
