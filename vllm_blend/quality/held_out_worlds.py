"""Questions about generated worlds of one split: held out from training, and the test's from every choice as well."""

from __future__ import annotations

from random import Random

from vllm_blend.pipeline.datasets import Sample, SamplePassage
from vllm_blend.pipeline.prompts import PROMPT_STYLES
from vllm_blend.quality.questions import Questions
from vllm_blend.quality.splits import Split
from vllm_blend.quality.worlds import Episode, Question, question_episode

KINDS = ("1hop", "cross", "2hop")


def held_out_questions(split: Split, families: int, worlds: range, per_world: int, titles: bool = False) -> Questions:
    """Return `per_world` questions about each of a split's `worlds`, by their numbers in the split, each of `families`
    families. The kinds take turns.

    A sample is called "SEED.NUMBER", after the world's seed and the question's number among all that the world has.
    Raises ValueError for worlds that the split does not have.
    """
    style = PROMPT_STYLES["wikimqa" if titles else "musique"]
    samples = [sample for index in worlds for sample in _ask(split, index, families, per_world, titles)]
    return Questions(cell_name(families, titles), style, tuple(samples))


def cell_name(families: int, titles: bool) -> str:
    return f"{families} {'family' if families == 1 else 'families'}{', titled' if titles else ''}"


def world_of(sample_id: str) -> str:
    """Return the seed of the world that a sample of `held_out_questions` asks about."""
    return sample_id.partition(".")[0]


def _ask(split: Split, index: int, families: int, count: int, titles: bool) -> list[Sample]:
    seed = split.seed(index)
    rng = split.random(index)
    episode = question_episode(rng, families, titles)
    passages = tuple(SamplePassage(p.title, p.text, p.page) for p in episode.passages)
    return [
        Sample(
            sample_id=f"{seed}.{number}",
            question=question.text,
            passages=passages,
            answers=(question.answer,),
            kind=question.kind,
            gold=tuple(episode.gold(question)),
        )
        for number, question in _draw(rng, episode, count, first_kind=index * count)
    ]


def _draw(rng: Random, episode: Episode, count: int, first_kind: int) -> list[tuple[int, Question]]:
    """Return `count` questions and their numbers, no question twice."""
    numbered = list(enumerate(episode.questions))
    drawn: list[tuple[int, Question]] = []
    for turn in range(first_kind, first_kind + count):
        of_kind = [one for one in numbered if one[1].kind == KINDS[turn % len(KINDS)] and one not in drawn]
        if not of_kind:
            raise ValueError(f"a world has too few questions for {count}: ask fewer of each world, and of more worlds")
        drawn.append(rng.choice(of_kind))
    return drawn
