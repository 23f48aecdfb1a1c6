"""What a prompt of the sweep says beside its pieces, where that depends on the sample."""

from __future__ import annotations

from vllm_blend.inputs import ChunkedPrompt
from vllm_blend.pipeline.bm25 import BM25Retrieval
from vllm_blend.pipeline.config import RetrievalConfig
from vllm_blend.pipeline.datasets import Sample
from vllm_blend.pipeline.ordering import page_predecessors, relevant_pages_first
from vllm_blend.pipeline.retriever import Collection


def pages(sample: Sample, prompt: ChunkedPrompt) -> ChunkedPrompt:
    """Which passage goes on from which on its page, where the data set knows pages."""
    return prompt | {"continues": page_predecessors(sample)}


def relevant_first(sample: Sample, prompt: ChunkedPrompt) -> ChunkedPrompt:
    """The pages first that BM25 ranks first: what stands first is exact without any recompute."""
    order = relevant_pages_first(sample)
    chunks: list[str] = [prompt["chunks"][index] for index in order]  # type: ignore[misc]
    return prompt | {"chunks": chunks, "continues": page_predecessors(sample, order)}


def nearest_passage(sample: Sample, prompt: ChunkedPrompt) -> ChunkedPrompt:
    """Each passage is encoded after the one of the others that BM25 finds nearest to it (FusionRAG)."""
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
