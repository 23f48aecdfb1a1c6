"""Oracles that spend a budget sentence by sentence, for budgets that do not hold the gold passages or hold more.

The gold passages come with those that their page continues from. A budget that ends inside a sentence computes its
beginning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from vllm_blend.blend.relevance.words import WordIndex, lower_words, split_words
from vllm_blend.inputs import ChunkedPrompt
from vllm_blend.pipeline.datasets import Sample
from vllm_blend.quality.oracles import gold_passages, rank_gold_names
from vllm_blend.quality.questions import place_pieces
from vllm_blend.quality.session import Session


@dataclass(frozen=True)
class _Placed:
    """A sentence of a passage, and where it stands in the prompt."""

    passage: int
    page: str
    start: int
    stop: int
    is_first: bool  # of its passage
    begins_page: bool
    holds_answer: bool
    words: frozenset[str]
    head_names: frozenset[str]  # of its passage's first sentence


def rank_gold_sentences(session: Session, sample: Sample, prompt: ChunkedPrompt) -> torch.Tensor:
    """Rank the tokens of the gold passages' pages, sentence by sentence.

    In this order: how each gold page begins, the one with the answer first; the sentences of gold passages that hold
    the answer; those that name what another gold page is about (the bridge of two hops), or have words of the
    question; the rest of the gold passages; the rest of their pages.
    """
    placed = _sentences(session, sample, prompt)
    gold = gold_passages(sample)
    own = [each for index in gold for each in placed if each.passage == index]
    pages = dict.fromkeys(each.page for each in own)
    subjects = {each.page: each.head_names for each in own if each.begins_page}
    question = set(WordIndex(session.engine.get_tokenizer()).question(place_pieces(session.engine, prompt)[-1][1]))

    def links(each: _Placed) -> bool:
        others = [names for page, names in subjects.items() if page != each.page]
        return any(not each.words.isdisjoint(names) for names in others)

    order = [each for each in own if each.begins_page]
    order += [each for each in own if each.holds_answer]
    order += [each for each in own if links(each)]
    order += sorted((e for e in own if e.words & question), key=lambda each: -len(each.words & question))
    order += own
    order += [each for page in pages for each in placed if each.page == page]
    return _tokens(order)


def rank_gold_names_then_sentences(session: Session, sample: Sample, prompt: ChunkedPrompt) -> torch.Tensor:
    """Rank the tokens of names, numbers and the answer in the gold passages, then the others of `rank_gold_sentences`
    in its order."""
    names, others = rank_gold_names(session, sample, prompt), rank_gold_sentences(session, sample, prompt)
    return torch.cat([names, others[~torch.isin(others, names)]])


def rank_gold_first_sentences(session: Session, sample: Sample, prompt: ChunkedPrompt) -> torch.Tensor:
    """Rank the tokens of the gold passages' first sentences, those first of passages that hold the answer."""
    placed = _sentences(session, sample, prompt)
    return _tokens(
        each for index in gold_passages(sample) for each in placed if each.passage == index and each.is_first
    )


def _sentences(session: Session, sample: Sample, prompt: ChunkedPrompt) -> list[_Placed]:
    """Return the sentences of all passages, in the order of the prompt."""
    tokenizer = session.engine.get_tokenizer()
    words = WordIndex(tokenizer)
    answers = [answer.casefold() for answer in sample.answers]
    found: list[_Placed] = []
    seen: set[str] = set()
    for index, (begin, ids) in enumerate(place_pieces(session.engine, prompt)[:-1]):
        page = sample.passages[index].page_id or f"passage {index}"
        stops = words.read(ids).stops.tolist()
        bounds = list(zip([0, *stops], stops, strict=False))
        texts = [str(tokenizer.decode(list(ids[start:stop]))) for start, stop in bounds]
        lower = {word for text in texts for word in lower_words(text)}
        head_names = frozenset(split_words(texts[0])) - lower
        for number, ((start, stop), text) in enumerate(zip(bounds, texts, strict=True)):
            found.append(
                _Placed(
                    index,
                    page,
                    begin + start,
                    begin + stop,
                    number == 0,
                    number == 0 and page not in seen,
                    any(answer in text.casefold() for answer in answers),
                    frozenset(split_words(text)),
                    head_names,
                )
            )
        seen.add(page)
    return found


def _tokens(sentences: Iterable[_Placed]) -> torch.Tensor:
    """Return the positions of sentences, [n] int64, each sentence once."""
    spans = dict.fromkeys((each.start, each.stop) for each in sentences)
    return torch.cat([torch.arange(start, stop) for start, stop in spans])
