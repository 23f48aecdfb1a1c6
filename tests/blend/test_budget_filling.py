"""`relevant_passages` chooses the sentences that a plain loop over them chooses."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.blend.relevance.texts import CONTINUES, PASSAGES, groups_of, prompt_of
from vllm_blend.blend.relevance.passages import Span
from vllm_blend.blend.selectors.relevant_passages import NOT_WORTH_FILLING, RelevantPassages

pytestmark = pytest.mark.cpu_only


@given(
    st.sampled_from(["Whom did Ada Brix marry?", "Who is director of the company founded by Ada Brix?", "Wesgro?"]),
    st.lists(st.sampled_from(["all", "nothing", "some"]), min_size=5, max_size=5),
    st.integers(1, 80),
    st.randoms(use_true_random=False),
)
# A later page's first sentence costs more than all of the budget.
@example(
    "Who is director of the company founded by Ada Brix?",
    ["all", "nothing", "nothing", "nothing", "some"],
    9,
    Random(6),
)
# A sentence with one candidate comes behind a group that leaves less of the budget than is worth filling.
@example("Wesgro?", ["all", "some", "all", "nothing", "some"], 28, Random(4))
def test_each_sentence_that_the_budget_holds_is_chosen(
    question: str, reused: list[str], budget: int, rng: Random
) -> None:
    """Whatever is a candidate of the passages, group by group, until hardly anything is left."""
    passages, _ = prompt_of(PASSAGES, question, CONTINUES)
    shares = {"all": 1.0, "nothing": 0.0, "some": 0.5}
    candidates = {
        position
        for bounds, kind in zip(passages.bounds, reused, strict=True)
        for position in range(*bounds)
        if rng.random() < shares[kind]
    }

    def cost(span: Span) -> int:
        return len(candidates.intersection(range(*span)))

    def expected() -> list[Span]:
        found: list[Span] = []
        left = budget
        for group in groups_of(passages):
            for span in group:
                if left == budget and cost(span) > budget:
                    return [span]
                if cost(span) <= left:
                    found.append(span)
                    left -= cost(span)
            if left < NOT_WORTH_FILLING:
                break
        return found

    chosen = RelevantPassages(spend="budget").choose_spans(passages, cost, budget)
    assert chosen is not None and chosen.tolist() == list(map(list, expected()))
