"""The synthetic distribution: pinned draws, and gold passages that really hold the answers."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from vllm_blend.pipeline.prompts import render_passage
from vllm_blend.quality.dialogues import STYLES, summary_episode
from vllm_blend.quality.world_facts import make_world
from vllm_blend.quality.worlds import Episode, question_episode

SEEDS = range(1_000_000, 1_000_040)
DEMO = Path(__file__).parents[2] / "inputs" / "demo-model"


def rendered(episode: Episode) -> str:
    passages = "".join(render_passage(p.title, p.text) for p in episode.passages)
    return episode.instruction + passages + "".join(f"{q.kind}|{q.text}|{q.answer}\n" for q in episode.questions)


def test_the_distribution_is_the_one_the_demo_model_was_trained_on() -> None:
    """Digest of text from the generator that made the training data: any change in wording or order of draws shows."""
    text = "".join(
        rendered(question_episode(Random(s))) + rendered(summary_episode(Random(s))) for s in range(1000, 1060)
    )
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "a83a1e84e0b87aefaf9afdd529d8dfe6776d57cef439d9ca879b902554fa19b9"
    )


def test_a_seed_gives_the_same_episode_again() -> None:
    assert question_episode(Random(1_000_001)) == question_episode(Random(1_000_001))
    assert question_episode(Random(1_000_001)) != question_episode(Random(1_000_002))


@pytest.mark.parametrize("families", [1, 2, 3, 8])
def test_gold_passages_hold_the_answer_and_name_every_subject(families: int) -> None:
    for seed in SEEDS:
        episode = question_episode(Random(seed), families)
        for question in episode.questions:
            gold = [episode.passages[i] for i in episode.gold(question)]
            text = " ".join(p.text for p in gold)
            assert question.answer in text
            for subject in {p.page for p in gold}:
                assert subject in text


def test_two_hop_gold_is_the_bridge_and_the_page_it_leads_to() -> None:
    for seed in SEEDS:
        episode, world = question_episode(Random(seed), 2), make_world(Random(seed), 2)
        person = world.people[0]
        wanted = f"Which river flows through the birthplace of {person.name}?"
        question = next(q for q in episode.questions if q.text == wanted)
        assert {(episode.passages[i].page, episode.passages[i].part) for i in episode.gold(question)} == {
            (p.page, p.part)
            for p in episode.passages
            if (p.page == person.name and p.part == 0) or p.page == person.birthplace.name
        }


def test_kinds_need_as_many_pages_and_passages_as_they_say() -> None:
    for seed in SEEDS:
        episode = question_episode(Random(seed), 2)
        for question in episode.questions:
            gold = [episode.passages[i] for i in episode.gold(question)]
            if question.kind == "1hop":
                assert len(gold) == 1
            if question.kind == "cross":
                assert len({p.page for p in gold}) == 1
                assert len(gold) == sum(p.page == gold[0].page for p in episode.passages)


def test_passages_of_a_page_are_neighbours_in_order() -> None:
    for seed in SEEDS:
        passages = question_episode(Random(seed), 3).passages
        for before, after in pairwise(passages):
            assert after.part == (before.part + 1 if after.page == before.page else 0)


@pytest.mark.parametrize("families", [3, 8])
def test_names_in_a_world_are_unique(families: int) -> None:
    for seed in SEEDS:
        world = make_world(Random(seed), families)
        names = [c.name for c in world.cities] + [c.name for c in world.companies] + [p.name for p in world.people]
        names += [c.mayor for c in world.cities] + [c.director for c in world.companies]
        names += [p.spouse for p in world.people] + [c.river for c in world.cities] + [c.country for c in world.cities]
        assert len(set(names)) == len(names)
        assert {p.company.name for p in world.people} == {c.name for c in world.companies}


@pytest.mark.parametrize("families", [1, 4, 8])
def test_a_question_has_one_answer_in_its_world(families: int) -> None:
    for seed in SEEDS:
        questions = question_episode(Random(seed), families).questions
        assert len({question.text for question in questions}) == len(questions) == 25 * families


def test_eight_families_are_forty_passages_that_fit_a_short_context() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    passages, tokens = [], []
    for seed in SEEDS:
        episode = question_episode(Random(seed), 8, titles=False)
        text = episode.instruction + "".join(render_passage(p.title, p.text) for p in episode.passages)
        passages.append(len(episode.passages))
        tokens.append(len(tokenizer.encode(text).ids))
    assert min(passages) >= 32 and max(passages) <= 48 and 38 < sum(passages) / len(passages) < 42
    assert max(tokens) < 1900 and 1600 < sum(tokens) / len(tokens) < 1850


def test_a_world_without_families_is_refused() -> None:
    with pytest.raises(ValueError, match="a world of 0 families"):
        question_episode(Random(1_000_000), 0)


def test_titles_are_shown_only_when_asked_for() -> None:
    assert {p.title for p in question_episode(Random(1_000_000), 2, titles=False).passages} == {""}
    titled = question_episode(Random(1_000_000), 2, titles=True)
    assert all(p.title == p.page for p in titled.passages)
    assert render_passage("Bou", "A city.") == "Bou\n\nA city.\n\n"
    assert render_passage("", "A city.") == "A city.\n\n"


def test_the_summary_follows_the_style_of_the_examples() -> None:
    for seed in SEEDS:
        episode = summary_episode(Random(seed), examples=4)
        answer = episode.questions[0].answer
        assert len(episode.passages) == 4 and len(STYLES) == 4
        summaries = [p.text.rsplit("Summary: ", 1)[1] for p in episode.passages]
        assert {shape(s) for s in summaries} == {shape(answer)}


def shape(summary: str) -> str:
    """Return which of the four styles a summary has, by its fixed words."""
    marks = [" will be in ", " can not come because ", " stays to ", " brings "]
    found = [mark for mark in marks if mark in summary]
    assert len(found) == 1
    return found[0]
