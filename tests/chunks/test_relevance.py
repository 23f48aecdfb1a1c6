"""Scores of context chunks: which of them a composition computes, and that a system prompt is none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from tests.blend.prompts import recomputed_positions
from tests.blend.rules import selectors_restored
from tests.chunks.llms import chunked_llm, random_ids
from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import greedy
from vllm_blend import ChunkedLLM, Evidence, RequestOutput, Selector, register_selector
from vllm_blend.blend.relevance.passages import PromptPassages, Span
from vllm_blend.chunks.chunk import Chunk
from vllm_blend.chunks.composition import ChunkComposition

PARAMS = greedy(4, logprobs=1, ignore_eos=True)
LENGTHS = (9, 4, 12)
QUESTION = random_ids(5, 9)


@dataclass(frozen=True)
class Case:
    """An engine, a composition's chunks, and where those of the context stand."""

    chunked: ChunkedLLM
    system: Chunk | None
    contexts: list[Chunk]
    places: tuple[Span, ...] = ()

    def compose(self, **options: Any) -> ChunkComposition:
        return self.chunked.compose(self.system, self.contexts, query=QUESTION, **options)

    def run(self, **options: Any) -> RequestOutput:
        return self.chunked.batch_generate_from_chunks([self.compose(**options)], PARAMS)[0]

    def computed(self, **options: Any) -> list[int]:
        """Answer the composition, and return which positions before the question are computed."""
        self.run(**{"selector": "relevant_passages", "recompute_ratio": 0.5} | options)
        return recomputed_positions(self.chunked.llm, len(QUESTION)).tolist()


@pytest.fixture(params=[None, 6], ids=["no system", "system"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    with chunked_llm() as chunked:
        system = None
        if request.param is not None:
            system = chunked.register_chunk(random_ids(request.param, 5), "system_prompt")
        made = Case(chunked, system, [chunked.register_chunk(random_ids(length, length)) for length in LENGTHS])
        placed = [each for each in made.compose().placed() if each.part.role == "context"]
        yield replace(made, places=tuple((each.start, each.stop) for each in placed))


def test_the_chunks_with_the_best_scores_are_computed(case: Case) -> None:
    _, second, third = (list(range(*place)) for place in case.places)
    ratio = 12 / case.places[-1][1] + 0.01  # the third chunk's share of the context; the second is shorter
    assert case.computed(relevance=[0, 0, 7], recompute_ratio=ratio) == third
    assert case.computed(relevance=[[0, None, 7], [0.1, 0.2, 0.3]], recompute_ratio=ratio) == third
    assert case.computed(relevance=[None, -3, None], recompute_ratio=ratio) == second


def test_scores_change_nothing_for_rules_that_do_not_go_by_them(case: Case) -> None:
    settings: list[dict[str, Any]] = [{"mode": "exact"}, {"mode": "reuse"}, {"selector": "question_attention"}]
    for options in settings:
        assert_same_logprobs(case.run(**options, relevance=[3, 1, 2]), case.run(**options))


def test_a_rule_sees_the_context_and_its_scores(case: Case) -> None:
    """The system prompt is no passage, so that it cannot be the one which the question's words find."""
    seen: list[PromptPassages] = []
    with selectors_restored():

        @register_selector
        @dataclass(frozen=True)
        class Watching(Selector):
            name: ClassVar[str] = "watching"
            chooses_passages: ClassVar[bool] = True

            def choose_spans(
                self, passages: PromptPassages, cost: Callable[[Span], int], budget: int
            ) -> list[Span] | None:
                seen.append(passages)
                return [passages.bounds[-1]]

            def score(self, evidence: Evidence) -> torch.Tensor:
                raise AssertionError("it has chosen already")

        case.computed(selector="watching", relevance=[0.5, None, 2])
        case.computed(selector="watching")
    scored, plain = seen[-2:]
    assert scored.bounds == plain.bounds == case.places
    assert scored.relevance == ((0.5, float("-inf"), 2.0),) and plain.relevance == ()
    assert len(plain.read_words()[0]) == len(case.places)


def test_a_system_prompt_alone_has_nothing_to_rank() -> None:
    with chunked_llm() as chunked:
        system = chunked.register_chunk(random_ids(20, 5), "system_prompt")
        options: dict[str, Any] = {"selector": "relevant_passages", "recompute_ratio": 0.5}
        [output] = chunked.batch_generate_from_chunks([chunked.compose(system, query=QUESTION, **options)], PARAMS)
        assert output.error is None and output.blend is not None and output.blend.num_exact_tokens == 20


def test_scores_that_cannot_be(case: Case) -> None:
    wrong: list[tuple[Any, str]] = [
        ([1, 2], "relevance has 2 scores for 3 chunks"),
        ([1, 2, "3"], r"relevance\[2\] is '3'"),
    ]
    for given, message in wrong:
        with pytest.raises((TypeError, ValueError), match=message):
            case.compose(relevance=given)
    parts = case.compose().parts
    with pytest.raises(ValueError, match="relevance has 2 scores for 3 context parts: give one for each"):
        ChunkComposition(parts, relevance=((1.0, 2.0),))
