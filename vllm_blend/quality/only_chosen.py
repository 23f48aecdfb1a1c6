"""A prompt without the passages that a rule passes over, computed in full: what competes with damping them.

Nothing is reused, and positions close up. The cost is that of the shorter prompt, its instruction and question
included. Pages are kept whole, since a later passage says little without those that it continues. A question in which
words find nothing keeps all passages, and costs what full prefill does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_blend.blend.relevance.passages import PromptPassages
from vllm_blend.blend.relevance.words import WordIndex
from vllm_blend.blend.selectors.relevant_passages import RelevantPassages
from vllm_blend.inputs import ChunkedPrompt
from vllm_blend.pipeline.datasets import Sample
from vllm_blend.quality.oracles import gold_passages
from vllm_blend.quality.questions import place_pieces
from vllm_blend.quality.session import Session


def keep_chosen_pages(session: Session, sample: Sample, prompt: ChunkedPrompt, ratio: float) -> Sequence[int]:
    """Keep the pages of which `relevant_passages` would compute anything at this ratio, if nothing were exact."""
    passages, budget = _passages(session, prompt, ratio)
    spans = RelevantPassages().choose_spans(passages, lambda span: span[1] - span[0], budget)
    if spans is None:
        return range(len(passages.bounds))
    pages = passages.pages
    chosen = [page for page in pages if any(_meets(passages.bounds[i], spans) for i in page)]
    return sorted(index for page in chosen for index in page)


def keep_ranked_pages(session: Session, sample: Sample, prompt: ChunkedPrompt, ratio: float) -> Sequence[int]:
    """Keep pages as `relevant_passages` ranks them, as many as fit this share of the context, and at least the best
    one."""
    passages, budget = _passages(session, prompt, ratio)
    ranked = passages.ranked_pages()
    if ranked is None:
        return range(len(passages.bounds))
    kept: list[int] = []
    for number in ranked:
        page = passages.pages[number]
        budget -= sum(stop - start for start, stop in (passages.bounds[index] for index in page))
        if kept and budget < 0:
            break
        kept += page
    return sorted(kept)


def keep_gold_passages(session: Session, sample: Sample, prompt: ChunkedPrompt, ratio: float) -> Sequence[int]:
    """Keep the gold passages, and those that their pages continue from, at any ratio: an oracle."""
    return sorted(gold_passages(sample))


def _passages(session: Session, prompt: ChunkedPrompt, ratio: float) -> tuple[PromptPassages, int]:
    """Return the passages of a prompt as a selector sees them, and the tokens that a ratio buys."""
    *pieces, (end, question) = place_pieces(session.engine, prompt)
    words = WordIndex(session.engine.get_tokenizer())
    bounds = tuple((start, start + len(ids)) for start, ids in pieces)
    continues = tuple(prompt.get("continues") or ())
    passages = PromptPassages(
        bounds, continues, (), lambda: ([words.read(ids) for _, ids in pieces], words.question(question))
    )
    return passages, int(ratio * end + 1e-9)


def _meets(bounds: tuple[int, int], spans: Iterable[tuple[int, int]]) -> bool:
    return any(start < bounds[1] and bounds[0] < stop for start, stop in spans)
