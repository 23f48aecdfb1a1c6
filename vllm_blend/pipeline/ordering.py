"""In which order passages stand in a prompt, and which of them go on from one another.

What stands first in a prompt is exact without any recompute: it was encoded after just what precedes it. The passages
that a retriever ranks first are most likely to hold the answer, so they belong there.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_blend.pipeline.bm25 import BM25Retrieval
from vllm_blend.pipeline.config import RetrievalConfig
from vllm_blend.pipeline.datasets import Sample
from vllm_blend.pipeline.retriever import Collection


def page_predecessors(sample: Sample, passages: Sequence[int] | None = None) -> list[int | None]:
    """For each passage of a prompt (indices into the sample, in the prompt's order; None: all), the place in the prompt
    of the one that it goes on from: the last before it in the prompt of those that stand before it on its page. None
    where there is none, or the file does not say which page it is from. It is the prompt's `continues`."""
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
    """All passages, those of the page first that the question ranks first (BM25, by its best passage). Passages of a
    page keep their order, and pages of equal rank theirs."""
    collection = Collection(sample.sample_id, sample.passages)
    retriever = BM25Retrieval(RetrievalConfig())
    ranking = dict(retriever.rank(retriever.build_index(collection), collection, sample.question))
    pages: dict[str, list[int]] = {}
    for index in range(len(sample.passages)):
        pages.setdefault(collection.page(index) or f"passage {index}", []).append(index)
    best = sorted(pages.values(), key=lambda page: -max(ranking[index] for index in page))
    return [index for page in best for index in page]
