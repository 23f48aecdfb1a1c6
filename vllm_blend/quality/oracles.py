"""Rankings of tokens by what no rule can know: the passages that hold the answer, or the attention of full prefill.

They say what a rule could reach at best with a budget. Their cost counts the question and the tokens that they name,
and not how these were found. Passages come in the order of the prompt, those that hold the answer before those that
lead to it, and a budget that ends inside a passage computes its beginning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import cast

import torch

from vllm_blend.inputs import ChunkedPrompt
from vllm_blend.pipeline.datasets import Sample
from vllm_blend.quality.arrangements import page_predecessors
from vllm_blend.quality.questions import place_pieces
from vllm_blend.quality.session import Session
from vllm_blend.quality.true_attention import true_attention

_WORD = re.compile(r"\w[\w'-]*")
_SENTENCE_END = re.compile(r"(?:^|[.!?]\s+|\n\s*)$")


def rank_answer_passages(session: Session, sample: Sample, prompt: ChunkedPrompt) -> torch.Tensor:
    """Rank the tokens of the passages that hold the answer, and of those that their page continues from."""
    return tokens_of(place_pieces(session.engine, prompt), answer_passages(sample))


def rank_gold_passages(session: Session, sample: Sample, prompt: ChunkedPrompt) -> torch.Tensor:
    """Rank the tokens of all gold passages: also of those that lead to the answer's (the bridge of two hops)."""
    return tokens_of(place_pieces(session.engine, prompt), gold_passages(sample))


def rank_gold_names(session: Session, sample: Sample, prompt: ChunkedPrompt) -> torch.Tensor:
    """Rank the tokens of names, numbers and the answer itself in all gold passages."""
    pieces, tokenizer = place_pieces(session.engine, prompt), session.engine.get_tokenizer()
    within = names_in(" ".join(passage.searchable for passage in sample.passages))
    found: list[torch.Tensor] = []
    for index in gold_passages(sample):
        (start, ids), text = pieces[index], str(prompt["chunks"][index])
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        if encoded["input_ids"] != list(ids):
            raise ValueError("the tokenizer alone gives a passage other tokens than the engine: names cannot be found")
        spans = [match.span() for match in _WORD.finditer(text) if match[0] in within or match[0][0].isdigit()]
        for answer in sample.answers:
            spans += [match.span() for match in re.finditer(re.escape(answer), text, re.IGNORECASE)]
        for place, (first, last) in enumerate(encoded["offset_mapping"]):
            if any(first < stop and last > begin for begin, stop in spans):
                found.append(torch.tensor([start + place]))
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


def rank_true_attention(session: Session, sample: Sample, prompt: ChunkedPrompt) -> torch.Tensor:
    """Rank all tokens of passages by the question's attention in full prefill, on the layers that
    `question_attention` looks on."""
    mass, bounds = _attention(session, prompt)
    first, stop = bounds[0][0], bounds[-1][1]
    return first + torch.sort(mass[first:stop], descending=True, stable=True).indices


def rank_attended_passages(session: Session, sample: Sample, prompt: ChunkedPrompt) -> torch.Tensor:
    """Rank the tokens of whole passages, those first to which full prefill's question pays most attention in all."""
    mass, bounds = _attention(session, prompt)
    totals = torch.stack([mass[start:stop].sum() for start, stop in bounds])
    order = torch.sort(totals, descending=True, stable=True).indices.tolist()
    return torch.cat([torch.arange(*bounds[index]) for index in order])


def rank_gold_then_attention(session: Session, sample: Sample, prompt: ChunkedPrompt) -> torch.Tensor:
    """Rank the tokens of all gold passages, then the others by the question's attention in full prefill."""
    gold = rank_gold_passages(session, sample, prompt)
    others = rank_true_attention(session, sample, prompt)
    return torch.cat([gold, others[~torch.isin(others, gold)]])


def gold_relevance(sample: Sample, prompt: ChunkedPrompt) -> ChunkedPrompt:
    """Return the prompt with `relevance`: 1 for the gold passages and 0 for the others."""
    gold = gold_passages(sample)
    relevance = {"relevance": [float(index in gold) for index in range(len(sample.passages))]}
    return cast(ChunkedPrompt, {**prompt, **relevance})


def gold_passages(sample: Sample) -> list[int]:
    """Return the indices of the gold passages and of those that their page continues from, those first that hold the
    answer."""
    first = answer_passages(sample)
    return [*first, *(index for index in with_predecessors(sample, _gold(sample)) if index not in first)]


def answer_passages(sample: Sample) -> list[int]:
    """Return the indices, ascending, of the gold passages in which an answer stands word for word, and of those that
    their page continues from; all gold passages if it stands in none."""
    gold = _gold(sample)
    answers = [answer.casefold() for answer in sample.answers]
    holding = [i for i in gold if any(answer in sample.passages[i].text.casefold() for answer in answers)]
    return with_predecessors(sample, holding or gold)


def names_in(text: str) -> set[str]:
    """Return the capitalised words of a text, apart from those that only ever begin a sentence and are followed by a
    word in lower case."""
    names: set[str] = set()
    words = list(_WORD.finditer(text))
    for word, following in zip(words, [*words[1:], None], strict=True):
        begins = _SENTENCE_END.search(text, 0, word.start()) is not None
        followed = following is not None and following[0][0].isupper() and text[word.end() : following.start()] == " "
        if word[0][0].isupper() and (not begins or followed):
            names.add(word[0])
    return names


def _gold(sample: Sample) -> Sequence[int]:
    if not sample.gold:
        raise ValueError(f"{sample.sample_id} does not say which passages are gold: an oracle needs its 'gold'")
    return sample.gold


def with_predecessors(sample: Sample, passages: Iterable[int]) -> list[int]:
    """Return the indices, ascending, of passages and of those that their pages continue from."""
    before = page_predecessors(sample)
    found: set[int] = set()
    for index in passages:
        at: int | None = index
        while at is not None:
            found.add(at)
            at = before[at]
    return sorted(found)


def tokens_of(pieces: Sequence[tuple[int, tuple[int, ...]]], passages: Sequence[int]) -> torch.Tensor:
    """Return the positions of passages, [n] int64, passage after passage as they are given."""
    return torch.cat([torch.arange(pieces[i][0], pieces[i][0] + len(pieces[i][1])) for i in passages])


def _attention(session: Session, prompt: ChunkedPrompt) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Return the attention of a prompt's question in full prefill, [tokens], and the bounds of its chunks."""
    pieces = place_pieces(session.engine, prompt)
    prefix, _ = session.engine.identify_chunks(prompt["prefix"], [])
    token_ids = [*(prefix.token_ids if prefix is not None else ()), *(token for _, ids in pieces for token in ids)]
    mass = true_attention(session, token_ids, num_suffix=len(pieces[-1][1]))
    return mass, [(start, start + len(ids)) for start, ids in pieces[:-1]]
