"""Oracles: the tokens that they name are computed, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engine.engines import hf_model, tiny_model
from vllm_blend.blend.selectors import SELECTORS, Evidence, choose, make_selector
from vllm_blend.pipeline import normalize_sample
from vllm_blend.pipeline.prompts import PromptStyle
from vllm_blend.quality.given_tokens import given_tokens
from vllm_blend.quality.oracles import (
    answer_passages,
    gold_passages,
    gold_relevance,
    names_in,
    rank_attended_passages,
    rank_gold_names,
    rank_gold_passages,
    rank_gold_then_attention,
    rank_true_attention,
)
from vllm_blend.quality.questions import Questions, joined_ids
from vllm_blend.quality.session import Session
from vllm_blend.quality.settings import Run, Setting
from vllm_blend.quality.sweep import blended_answers
from vllm_blend.quality.true_attention import true_attention

TEXTS = ("Rain.", "Ann Bo saw 7.", "Later a boat.", "She met Cy.")
STYLE = PromptStyle("musique", "Q ", max_tokens=2, metric="f1")
MODEL = tiny_model("llama", max_position_embeddings=320)


def sample_of(gold: list[int], answer: str = "Cy") -> Any:
    pages = ("r", "a", "b", "a")
    ctxs = [{"title": "", "text": text, "page_id": page} for text, page in zip(TEXTS, pages, strict=True)]
    return normalize_sample({"ctxs": ctxs, "question": "Who?", "answers": [answer], "gold": gold})


def prompt_of() -> Any:
    return {"prefix": "Q ", "chunks": list(TEXTS), "suffix": "Who?"}


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(MODEL, batch=2, device="cpu", dtype="float32") as session:
        yield session


def test_given_tokens_are_chosen_in_their_order_as_far_as_the_budget_goes() -> None:
    evidence = Evidence(torch.arange(3, 9), torch.zeros(6, dtype=torch.int64), seed=0)
    with given_tokens([torch.tensor([8, 1, 4, 5]), torch.empty(0, dtype=torch.int64)]) as (some, none):
        chosen = [choose(make_selector(some), evidence, budget).tolist() for budget in (0, 1, 2, 6)]
        assert chosen == [[], [5], [1, 5], [1, 2, 5]]  # of the candidates 3 to 8; what is exact takes no budget
        assert choose(make_selector(none), evidence, 6).tolist() == []
    with given_tokens([torch.tensor([8])], "+mean_shift") as [shifted]:
        assert make_selector(shifted).mean_shift() == 1
        assert choose(make_selector(shifted), evidence, 6).tolist() == [5]
    assert "given_tokens" not in SELECTORS


def test_passages_of_the_answer_come_before_those_that_lead_to_it() -> None:
    sample = sample_of([2, 3])
    assert answer_passages(sample) == [1, 3] and gold_passages(sample) == [1, 3, 2]
    assert answer_passages(sample_of([2], answer="Zoe")) == [2]  # yes or no stand in no passage
    assert answer_passages(sample_of([2], answer="Bo")) == [2]  # a passage that holds the word is not gold for that
    assert gold_passages(sample_of([2, 3], answer="boat")) == [2, 1, 3]  # and what its page continues from
    assert dict(gold_relevance(sample, prompt_of()))["relevance"] == [0.0, 1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="does not say which passages are gold"):
        gold_passages(sample_of([]))


def test_names_are_not_what_begins_a_sentence_in_front_of_a_plain_word() -> None:
    text = "Later Bo came. The firm of Ann Bo closed. Rain fell. In May it rained"
    assert names_in(text) == {"Later", "Bo", "Ann", "In", "May"}


def test_ranked_tokens_are_those_of_the_text(session: Session) -> None:
    sample, prompt = sample_of([1]), prompt_of()
    ids = joined_ids(session.engine, prompt)
    tokenizer = session.engine.get_tokenizer()

    def text(ranking: torch.Tensor) -> str:
        return str(tokenizer.decode([ids[position] for position in ranking.tolist()]))

    assert text(rank_gold_passages(session, sample_of([1, 2], answer="Bo"), prompt)) == TEXTS[1] + TEXTS[2]
    named = text(rank_gold_names(session, sample, prompt))
    assert named == "AnnBo7"
    assert text(rank_gold_names(session, sample_of([2], answer="boat"), prompt)).strip() == "boat"


def test_true_attention_is_that_of_the_whole_model(session: Session) -> None:
    ids, suffix = joined_ids(session.engine, prompt_of()), 4
    model = hf_model(MODEL)
    model.set_attn_implementation("eager")
    attentions = model(torch.tensor([ids]), output_attentions=True).attentions
    layers = torch.stack(attentions)[:, 0]  # [layers, heads, tokens, tokens]
    found = true_attention(session, ids, suffix)
    looked = layers[: make_selector("question_attention").look(len(layers)).stop]
    expected = looked[:, :, -suffix:].sum(2).mean((0, 1))
    assert torch.allclose(found / found.sum(), expected / expected.sum(), atol=1e-4)


def test_attention_ranks_tokens_and_passages(session: Session) -> None:
    sample, prompt = sample_of([1]), prompt_of()
    _, pieces = session.engine.identify_chunks("Q ", [*TEXTS, "Who?"])
    sizes = [len(piece.token_ids) for piece in pieces]
    ids = joined_ids(session.engine, prompt)
    first = len(ids) - sum(sizes)
    mass = true_attention(session, ids, sizes[-1])
    tokens, passages = (rank(session, sample, prompt) for rank in (rank_true_attention, rank_attended_passages))
    for ranking in (tokens, passages):  # all of the passages, and nothing else
        assert sorted(ranking.tolist()) == list(range(first, len(ids) - sizes[-1]))
    assert (mass[tokens].diff() <= 0).all()
    gold = rank_gold_passages(session, sample, prompt).tolist()
    both = rank_gold_then_attention(session, sample, prompt).tolist()
    assert both == gold + [position for position in tokens.tolist() if position not in gold]
    totals = [part.sum() for part in mass[first : -sizes[-1]].split(sizes[:-1])]
    bounds = [(first + sum(sizes[:index]), first + sum(sizes[: index + 1])) for index in range(len(totals))]
    order = sorted(range(len(totals)), key=totals.__getitem__, reverse=True)
    assert passages.tolist() == [position for index in order for position in range(*bounds[index])]


def test_a_run_computes_the_tokens_that_its_oracle_names(session: Session) -> None:
    questions = Questions("worlds", STYLE, (sample_of([1, 3]),))
    reuse = blended_answers(session, questions, questions.samples, Run(Setting("reuse"), 0.0))
    costs = []
    for ratio in (0.1, 0.5, 0.7):
        oracle = Setting("oracle", rank=rank_gold_passages)
        answers = blended_answers(session, questions, questions.samples, Run(oracle, ratio))
        costs.append(answers.token_layers - reuse.token_layers)
    assert 0 < costs[0] < costs[1] == costs[2]  # no more than the gold passages
