"""Oracles that go sentence by sentence, and prompts of some pages alone: what they name and keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engine.engines import tiny_model
from vllm_blend.pipeline import normalize_sample
from vllm_blend.pipeline.prompts import PromptStyle
from vllm_blend.quality.arrangements import with_chunks, with_pages
from vllm_blend.quality.catalogue import ONLY_CHOSEN, ORACLES
from vllm_blend.quality.only_chosen import keep_chosen_pages, keep_gold_passages, keep_ranked_pages
from vllm_blend.quality.oracle_sentences import (
    rank_gold_first_sentences,
    rank_gold_names_then_sentences,
    rank_gold_sentences,
)
from vllm_blend.quality.oracles import rank_gold_names
from vllm_blend.quality.questions import Questions, joined_ids, place_pieces
from vllm_blend.quality.session import Session
from vllm_blend.quality.settings import Run, Setting, make_runs
from vllm_blend.quality.sweep import blended_answers, full_answers

PASSAGES = (
    ("a", "Ann Bo is a judge. Rain fell. Ann was born in Wes."),
    ("r", "Rolf Tam is a cook. Salt is good."),
    ("w", "Wes is a city. Boats pass by."),
    ("w", "Later it was quiet. It lies on the river Cy. Snow fell."),
    ("w", "Old trees stand there."),
)
QUESTION = "Where lies the town of Ann Bo?"
STYLE = PromptStyle("musique", "Q ", max_tokens=2, metric="f1")


def two_hops(**changes: Any) -> Any:
    """A question that needs Ann's page, and the first two of three passages about Wes."""
    ctxs = [{"title": "", "text": text, "page_id": page} for page, text in PASSAGES]
    return normalize_sample({"ctxs": ctxs, "question": QUESTION, "answers": ["Cy"], "gold": [0, 2, 3]} | changes)


def prompt_of(sample: Any) -> Any:
    return with_pages(
        sample, {"prefix": "Q ", "chunks": [f"{text} " for _, text in PASSAGES], "suffix": f"{sample.question}\n"}
    )


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(tiny_model("llama", max_position_embeddings=512), batch=2, device="cpu", dtype="float32") as session:
        yield session


def texts(session: Session, ranking: torch.Tensor) -> list[str]:
    """The runs of neighbouring positions of a ranking, as texts."""
    ids = joined_ids(session.engine, prompt_of(two_hops()))
    runs: list[list[int]] = []
    for position in ranking.tolist():
        if runs and position == runs[-1][-1] + 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    tokenizer = session.engine.get_tokenizer()
    return [str(tokenizer.decode([ids[position] for position in run])).strip() for run in runs]


def test_sentences_come_in_the_order_in_which_they_matter(session: Session) -> None:
    sample = two_hops()
    found = rank_gold_sentences(session, sample, prompt_of(sample))
    assert texts(session, found) == [
        "Wes is a city.",  # the answer's page begins
        "Ann Bo is a judge.",
        "It lies on the river Cy.",  # the answer
        "Ann was born in Wes.",  # what leads there
        "Boats pass by. Later it was quiet.",
        "Snow fell.",
        "Rain fell.",
        "Old trees stand there.",  # of the page, and not gold
    ]
    assert len(set(found.tolist())) == len(found)
    first = rank_gold_first_sentences(session, sample, prompt_of(sample))
    assert texts(session, first) == ["Wes is a city.", "Later it was quiet.", "Ann Bo is a judge."]


def test_names_come_before_the_rest_of_the_sentences(session: Session) -> None:
    sample = two_hops()
    prompt = prompt_of(sample)
    names = rank_gold_names(session, sample, prompt).tolist()
    both = rank_gold_names_then_sentences(session, sample, prompt).tolist()
    sentences = rank_gold_sentences(session, sample, prompt).tolist()
    assert 0 < len(names) < len(both) and both[: len(names)] == names
    assert both[len(names) :] == [position for position in sentences if position not in names]


def test_every_oracle_of_a_budget_has_a_damped_one() -> None:
    named = {setting.name: setting for setting in ORACLES}
    for name in ("gold passages", "gold sentences", "names in gold passages", "true attention", "attended passages"):
        plain, damped = named[f"oracle: {name}"], named[f"oracle: {name}, others damped"]
        assert plain.rank is damped.rank and plain.damping == 1 > damped.damping > 0.5
    runs = make_runs([*ORACLES, *ONLY_CHOSEN], (0.0, 0.1, 1.0))
    own = [run.key for run in runs if run.ratio == 0.1]
    assert len(set(own)) == len(own) == len(ORACLES) + len(ONLY_CHOSEN)


def test_pages_are_kept_whole(session: Session) -> None:
    sample = two_hops()
    prompt = prompt_of(sample)
    assert keep_gold_passages(session, sample, prompt, 0.1) == [0, 2, 3]
    sizes = [len(ids) for _, ids in place_pieces(session.engine, prompt)]
    context = place_pieces(session.engine, prompt)[-1][0]
    assert list(keep_ranked_pages(session, sample, prompt, 0.01)) == [0]  # the best page at least
    both = (sizes[0] + sum(sizes[2:5])) / context
    assert list(keep_ranked_pages(session, sample, prompt, both - 0.02)) == [0]
    assert list(keep_ranked_pages(session, sample, prompt, both + 0.02)) == [0, 2, 3, 4]
    assert list(keep_chosen_pages(session, sample, prompt, 0.15)) == [0]
    assert list(keep_chosen_pages(session, sample, prompt, 0.6)) == [0, 2, 3, 4]
    lost = two_hops(question="Who?")
    for keep in (keep_chosen_pages, keep_ranked_pages):  # words find nothing
        assert list(keep(session, lost, prompt_of(lost), 0.1)) == [0, 1, 2, 3, 4]


def test_a_run_that_keeps_pages_computes_these_in_full_and_nothing_else(session: Session) -> None:
    sample = two_hops()
    questions = Questions("worlds", STYLE, (sample, two_hops(question="Who?")), pages=True)
    full = full_answers(session, questions, questions.samples)
    runs = make_runs([Setting("only", keep=keep_ranked_pages)], (0.0, 0.01, 1.0))
    costs = {}
    for run in runs:
        answers = blended_answers(session, questions, questions.samples, run)
        costs[run.setting.name, run.ratio] = answers.token_layers
        if run.ratio == 0.01:
            assert answers.answers[1].token_ids == full.answers[1].token_ids  # all passages
    whole = [len(joined_ids(session.engine, questions.prompt(one))) for one in questions.samples]
    kept = len(joined_ids(session.engine, with_chunks(questions.prompt(sample), [0])))
    layers = full.token_layers / sum(whole)
    assert costs["only", 0.01] == pytest.approx(layers * (kept + whole[1]), rel=0.05)
    assert costs["only", 1.0] == costs["recompute all", 1.0] and costs["only", 0.0] == costs["plain reuse", 0.0]
    assert Run(runs[-1].setting, 0.5).key != Run(Setting("only"), 0.5).key


def test_with_chunks_leaves_out_what_belongs_to_the_others() -> None:
    prompt = prompt_of(two_hops())
    kept: Any = with_chunks(prompt, [3, 0])
    assert kept == {"prefix": "Q ", "chunks": [prompt["chunks"][3], prompt["chunks"][0]], "suffix": prompt["suffix"]}
