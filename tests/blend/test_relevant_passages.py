"""The selector relevant_passages in an engine: what it computes, what it costs, and what it falls back on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.blend.prompts import assert_counts_add_up, plain, recomputed_positions, tiny_prompt
from tests.blend.relevance.texts import CONTINUES, PASSAGES, groups_of, prompt_of
from tests.blend.rules import selectors_restored
from tests.engine.compare import assert_logprobs_match, assert_same_logprobs, blend_of
from tests.engine.engines import TINY_VOCABULARY, engine, greedy, hf_model, run, tiny_model
from vllm_blend import LLM, Evidence, Selector, register_selector
from vllm_blend.blend.relevance.passages import PromptPassages, Span
from vllm_blend.blend.relevance.words import PassageWords
from vllm_blend.blend.selectors import SELECTORS, make_selector
from vllm_blend.blend.selectors.relevant_passages import RelevantPassages

TINY = tiny_model("llama")
PARAMS = greedy(6, logprobs=2, ignore_eos=True)
SUFFIX = 6  # tokens of `tiny_prompt`'s suffix; without a tokenizer, tokens are words, and a passage is one sentence
CHUNKS = [(5, 17), (17, 20), (20, 41), (41, 53)]


def positions(llm: LLM, **options: Any) -> list[int]:
    """The context positions that a prompt computes."""
    [output] = run(llm, tiny_prompt(**{"blend_selector": "relevant_passages"} | options), PARAMS)
    assert_counts_add_up(output)
    return recomputed_positions(llm, SUFFIX).tolist()


def test_the_most_relevant_passages_are_computed_whole_where_they_stand() -> None:
    """All that fit the budget, 0.5 of 53 tokens; the first chunk is exact behind the prefix and costs nothing."""
    with engine(TINY, enable_blending=True, skip_tokenizer_init=True) as llm:
        options = {"blend_recompute_ratio": 0.5}
        assert positions(llm, relevance=[0, 0, 1, 0], **options) == list(range(17, 41))
        assert positions(llm, relevance=[0, 0, 0, 1], **options) == [*range(17, 20), *range(41, 53)]
        assert positions(llm, relevance=[[0, 0, 0, 1], [0, 0, 0, 9]], **options) == [*range(17, 20), *range(41, 53)]
        assert positions(llm, relevance=torch.tensor([[0, 0, 1.5, 0]]), **options) == list(range(17, 41))
        assert positions(llm, relevance=[None, None, -3, None], **options) == list(range(17, 41))  # None comes last
        prompt = tiny_prompt()
        words = [*prompt["chunks"][2][4:7], *prompt["suffix"][3:]]  # three words of the third chunk
        spends_all = options | {"blend_selector": "relevant_passages(spend=budget)"}
        assert positions(llm, suffix=words, **spends_all) == list(range(17, 41))
        assert positions(llm, suffix=words, **options) == list(range(20, 41))  # more than 18 tokens, for the best one


def test_of_a_passage_too_long_for_the_budget_the_beginning_is_computed() -> None:
    with engine(TINY, enable_blending=True, skip_tokenizer_init=True) as llm:
        options = {"relevance": [0, 0, 1, 0], "blend_recompute_ratio": 0.04}  # 2 of 53 tokens
        assert positions(llm, **options) == [20, 21]


def test_the_beginning_is_that_of_the_first_sentence_that_costs_anything() -> None:
    passages, _ = prompt_of(PASSAGES, "Whom did Ada Brix marry?", CONTINUES)
    groups = groups_of(passages)
    (exact, first, *_), *_ = groups
    rule = RelevantPassages(spend="budget")
    for budget, expected in ((8, [first]), (9, [exact, first])):
        chosen = rule.choose_spans(passages, lambda span: 9 * (span != exact), budget)
        assert chosen is not None and chosen.tolist() == list(map(list, expected))


@pytest.mark.parametrize(
    ("question", "relevance", "count"),
    [
        ("Whom did Ada Brix marry?", (), 3),
        ("Who is director of the company founded by Ada Brix?", (), 5),  # that is about two pages
        ("Whom did Ada Brix marry?", [[0.0, 0.0, 1.0, 0.0, 0.0]], 5),  # scores do not say how many
    ],
)
def test_a_question_about_one_page_gets_less_of_the_budget(question: str, relevance: Any, count: int) -> None:
    """70% of 50 tokens are three sentences of 10 and not five."""
    passages, _ = prompt_of(PASSAGES, question, CONTINUES, relevance)
    groups = groups_of(passages)
    ranked = [span for group in groups for span in group]

    def chosen(spend: str, budget: int) -> list[Span]:
        spans = RelevantPassages(spend=spend).choose_spans(passages, lambda span: 10, budget)
        assert spans is not None
        return [(start, stop) for start, stop in spans.tolist()]

    assert chosen("budget", 50) == ranked[:5]
    assert chosen("needed", 50) == ranked[:count]
    assert chosen("needed", 1) == chosen("budget", 1) == ranked[:1]  # of which the beginning fits


def test_a_page_that_is_exact_costs_nothing() -> None:
    """Nothing of it is computed, so that all of the budget, 15 tokens, is left for others."""
    with engine(TINY, enable_blending=True, skip_tokenizer_init=True) as llm:
        found = positions(llm, relevance=[9, 0, 0, 0], blend_recompute_ratio=0.3)
        assert found == [*range(17, 20), *range(41, 53)]


def test_what_it_computes_is_what_prefill_computes_there() -> None:
    """The same positions as holes: chunks that are computed in place. What is passed over is not damped."""
    with engine(TINY, enable_blending=True) as llm:
        rule = "relevant_passages(damping=1)"
        [chosen] = run(llm, tiny_prompt(blend_selector=rule, relevance=[0, 0, 1, 0], blend_recompute_ratio=0.4), PARAMS)
        assert recomputed_positions(llm, SUFFIX).tolist() == list(range(20, 41))
    with engine(TINY, enable_blending=True) as llm:
        run(llm, tiny_prompt(chunks=[tiny_prompt()["chunks"][i] for i in (0, 1, 3)], blend_selector="none"), PARAMS)
        [in_place] = run(llm, tiny_prompt(blend_selector="none", in_place_chunks=[2]), PARAMS)
    assert_same_logprobs(chosen, in_place)


def test_without_a_signal_the_question_looks() -> None:
    with engine(TINY, enable_blending=True, skip_tokenizer_init=True) as llm:
        for options in ({}, {"relevance": [2.5] * 4}):
            seen = {token for chunk in tiny_prompt()["chunks"] for token in chunk}
            suffix = [token for token in range(TINY_VOCABULARY) if token not in seen][:SUFFIX]
            found = positions(llm, suffix=suffix, **options)
            assert found == positions(llm, suffix=suffix, blend_selector="question_attention")
            assert found


def test_other_requests_of_the_step_change_nothing() -> None:
    prompts = [
        tiny_prompt(blend_selector="relevant_passages", relevance=[0, 0, 1, 0], blend_recompute_ratio=0.4),
        tiny_prompt(blend_selector="question_attention"),
        tiny_prompt(blend_selector="relevant_passages+mean_shift", relevance=[0, 1, 0, 1], blend_recompute_ratio=0.3),
        tiny_prompt(blend_selector="value_deviation"),
    ]
    with engine(TINY, enable_blending=True) as llm:
        alone = [run(llm, prompt, PARAMS)[0] for prompt in prompts]
        for output, own in zip(run(llm, prompts, PARAMS), alone, strict=True):
            assert_same_logprobs(output, own)
            assert blend_of(output) == blend_of(own)


def raising_spans() -> Iterator[Span]:
    yield 17, 20
    raise RuntimeError("no more pages")


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        (lambda: SELECTORS["no such page"], "KeyError("),
        (raising_spans, "RuntimeError('no more pages')"),
        (lambda: 5, "TypeError("),
        (lambda: [(41, 20)], "choose_spans() returned (41, 20): return (start, stop) with 0 <= start <= stop <= 53"),
        (lambda: [(-30, -5)], "choose_spans() returned (-30, -5)"),
        (lambda: [(20, 54)], "choose_spans() returned (20, 54)"),
        (lambda: [(17.5, 20)], "choose_spans() returned (17.5, 20)"),
        (lambda: np.array([(17, 20), (41, 20)]), "choose_spans() returned (41, 20)"),
        (lambda: np.array([(17, 18, 19)]), "choose_spans() returned array([17, 18, 19])"),
        (lambda: [(17, 18, 19)], "choose_spans() returned (17, 18, 19)"),
    ],
)
def test_a_rule_of_passages_that_fails_costs_its_own_request(spans: Callable[[], Any], message: str) -> None:
    with selectors_restored():

        @register_selector
        @dataclass(frozen=True)
        class Broken(Selector):
            name: ClassVar[str] = "broken_passages"
            chooses_passages: ClassVar[bool] = True

            def choose_spans(
                self, passages: PromptPassages, cost: Callable[[Span], int], budget: int
            ) -> list[Span] | None:
                found: list[Span] = spans()
                return found

            def score(self, evidence: Evidence) -> torch.Tensor:
                raise AssertionError("it has failed already")

        with engine(TINY, enable_blending=True) as llm:
            [alone] = run(llm, tiny_prompt(), PARAMS)
            broken, good = run(llm, [tiny_prompt(blend_selector="broken_passages"), tiny_prompt()], PARAMS)
            assert broken.error is not None and "the selector 'broken_passages' failed: " in broken.error
            assert message in broken.error
            assert (
                broken.blend is not None and broken.blend.num_recomputed_tokens == SUFFIX
            )  # no more work than it asked for
            assert_same_logprobs(good, alone)


def test_spans_that_overlap_are_computed_once() -> None:
    with selectors_restored():

        @register_selector
        @dataclass(frozen=True)
        class Overlapping(Selector):
            name: ClassVar[str] = "overlapping_passages"
            chooses_passages: ClassVar[bool] = True

            def choose_spans(
                self, passages: PromptPassages, cost: Callable[[Span], int], budget: int
            ) -> list[Span] | None:
                return [(30, 41), (25, 35), (0, 53)]

            def score(self, evidence: Evidence) -> torch.Tensor:
                raise AssertionError("it has chosen already")

        with engine(TINY, enable_blending=True) as llm:
            options = {"blend_selector": "overlapping_passages", "blend_recompute_ratio": 0.2}
            assert positions(llm, **options) == list(range(17, 27))  # the budget, from the first candidate on


@pytest.mark.cpu_only
def test_levers_that_change_scores_are_refused() -> None:
    assert make_selector("relevant_passages + mean_shift(strength=0.5)").mean_shift() == 0.5
    with pytest.raises(
        ValueError, match="chooses spans such as sentences, not tokens by their scores, which smoothing changes: leave"
    ):
        make_selector("relevant_passages+smoothing")


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("damping=0", r"damping=0.* must be in \(0, 1\]; 1 turns it off"),
        ("damping=-0.9", r"damping=-0.9 must be in \(0, 1\]"),
        ("damping=1.5", r"damping=1.5 must be in \(0, 1\]"),
        ("damping=nan", "damping=nan must be a number, such as 0.9"),
        ("damping=x", "damping=x must be a number, such as 0.9"),
        ("spend=all", "spend='all' is unknown: use 'budget' or 'needed'"),
    ],
)
def test_bad_settings_are_refused(given: str, message: str) -> None:
    text = f"relevant_passages({given})"
    with pytest.raises(ValueError, match=rf"blend_selector='relevant_passages\(.*\)': {message}"):
        make_selector(text)
    with pytest.raises(ValueError, match=message):
        LLM(TINY, enable_blending=True, blend_selector=text)
    with engine(TINY, enable_blending=True) as llm, pytest.raises(ValueError, match=message):
        run(llm, tiny_prompt(blend_selector=text), PARAMS)


@pytest.mark.parametrize(
    ("relevance", "message"),
    [
        ([0.1, 0.2], "relevance has 2 scores for 4 chunks: give one for each chunk"),
        ([], "relevance has 0 scores for 4 chunks"),
        ([1, 2, 3, "4"], r"relevance\[3\] is '4': give a score, a number"),
        ([None] * 4, "relevance has no score but None: leave it out"),
        ([1, 2, 3, True], r"relevance\[3\] is True: give a score, a number"),
        ([1, 2, 3, 10**400], r"relevance\[3\] is 10+: scores must be finite"),
        ([torch.tensor(1.0)] * 4, r"relevance\[0\] is tensor\(1.\): give a score, a number"),
        ({1, 2, 3, 4}, "relevance must be a list with a score for each chunk, not set"),
        ([1, 2, 3, float("nan")], r"relevance\[3\] is nan: scores must be finite"),
        ([[1, 2, 3, 4], [1, 2]], r"relevance\[1\] has 2 scores for 4 chunks"),
        ([[1, 2, 3, 4], 5, 6, 7], r"relevance\[0\] is \[1, 2, 3, 4\]: give a score"),
        ("0.1", "relevance must be a list with a score for each chunk, not str"),
        ({0: 1.0}, "relevance must be a list with a score for each chunk, not dict"),
        (0.5, "relevance must be a list with a score for each chunk, not float"),
    ],
)
def test_bad_relevance_is_refused(relevance: Any, message: str) -> None:
    with engine(TINY, enable_blending=True) as llm, pytest.raises((TypeError, ValueError), match=message):
        run(llm, tiny_prompt(relevance=relevance), PARAMS)


def test_a_free_order_puts_the_relevant_passages_first() -> None:
    """There the first is exact, and the budget computes from the next one on."""
    options: dict[str, Any] = {"order": "free", "relevance": [0, 2, 3, 1], "in_place_chunks": [1]}
    prompt = tiny_prompt(blend_recompute_ratio=0.2, **options)
    first = [prompt["chunks"][index] for index in (2, 1, 3, 0)]
    with engine(TINY, enable_blending=True) as llm:
        [output] = run(llm, prompt | {"blend_selector": "relevant_passages"}, PARAMS)
        assert recomputed_positions(llm, SUFFIX).tolist() == list(range(26, 26 + 3 + 10))  # a hole, and the budget
        run(llm, prompt | {"blend_selector": "relevant_passages", "blend_recompute_ratio": 0.3}, PARAMS)
        assert recomputed_positions(llm, SUFFIX).tolist() == list(range(26, 26 + 3 + 15))  # on into the next passage
        [given] = run(llm, tiny_prompt(chunks=first, blend_recompute_ratio=0.2, in_place_chunks=[1]), PARAMS)
        assert output.prompt_token_ids == given.prompt_token_ids
        [full] = run(llm, prompt | {"blend_recompute_ratio": 1.0}, PARAMS)
        assert_logprobs_match(full, hf_model(TINY))
        [none] = run(llm, tiny_prompt(blend_selector="none", **options), PARAMS)
        assert none.blend is not None and none.blend.num_exact_tokens == 5 + 21


def test_pages_stay_whole_in_a_free_order() -> None:
    prompt = tiny_prompt(order="free", relevance=[0, 1, 0, 2], continues=[None, None, 0, 1])
    with engine(TINY, enable_blending=True, blend_encoding_context="page") as llm:
        output, again = (run(llm, prompt | {"blend_selector": "none"}, PARAMS)[0] for _ in range(2))
        chunks = [prompt["chunks"][index] for index in (1, 3, 0, 2)]
        assert output.prompt_token_ids == [
            *prompt["prefix"],
            *(t for chunk in chunks for t in chunk),
            *prompt["suffix"],
        ]
        assert again.blend is not None and again.blend.num_exact_tokens == 5 + 3 + 12  # the first page, whole


def test_the_order_is_kept_where_nothing_says_another() -> None:
    with engine(TINY, enable_blending=True) as llm:
        for options in ({"order": "given", "relevance": [0, 1, 2, 3]}, {"order": "free", "relevance": [1] * 4}):
            [output] = run(llm, tiny_prompt(blend_selector="none", **options), PARAMS)
            assert output.prompt_token_ids == plain(tiny_prompt())["prompt_token_ids"]
        with pytest.raises(ValueError, match="order is 'best': use 'given', or 'free' if chunks may be put"):
            run(llm, tiny_prompt(order="best"), PARAMS)
    with engine(TINY) as llm:  # one that does not blend computes the prompt as it is
        [output] = run(llm, tiny_prompt(order="free", relevance=[0, 1, 2, 3]), PARAMS)
        assert output.prompt_token_ids == plain(tiny_prompt())["prompt_token_ids"]


@pytest.mark.cpu_only
def test_only_prompts_that_are_accepted_are_read() -> None:
    """Reading takes time, while other requests wait."""
    with engine(TINY, enable_blending=True) as llm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.llm_engine.planner.words, "read", lambda token_ids: pytest.fail("a passage was read"))
        with pytest.raises(ValueError, match="the prompt has 106 tokens, but max_model_len=96 must hold it"):
            run(llm, tiny_prompt(order="free", suffix=[5] * 53), PARAMS)


@pytest.mark.cpu_only
def test_a_tokenizer_that_cannot_read_a_prompt_refuses_it() -> None:
    with engine(TINY, enable_blending=True) as llm, pytest.MonkeyPatch.context() as patch:

        def decode(*arguments: Any, **options: Any) -> str:
            raise KeyError("no such token")

        [alone] = run(llm, tiny_prompt(), PARAMS)
        with patch.context() as broken:
            broken.setattr(llm.get_tokenizer(), "decode", decode)
            with pytest.raises(ValueError, match="passages cannot be ranked: the tokenizer raised KeyError"):
                prompt: Any = tiny_prompt(order="free", cache_salt="unread")
                llm.llm_engine.add_request("broken", prompt, PARAMS)
        [again] = run(llm, tiny_prompt(), PARAMS)
        assert_same_logprobs(again, alone)


@pytest.mark.cpu_only
def test_each_passage_is_read_once() -> None:
    """Also one that is computed in place, and is not stored; other salts read their own."""
    with engine(TINY, enable_blending=True, enable_prefix_caching=False) as llm, pytest.MonkeyPatch.context() as patch:
        words, num_read = llm.llm_engine.planner.words, 0
        words.set_tokenizer(llm.get_tokenizer())
        read = words.read

        def counted(token_ids: Sequence[int]) -> PassageWords:
            nonlocal num_read
            num_read += 1
            return read(token_ids)

        patch.setattr(words, "read", counted)
        options: dict[str, Any] = {"blend_selector": "relevant_passages", "in_place_chunks": [1]}
        for salt, count in (({}, 3), ({}, 3), ({"cache_salt": "other"}, 6), ({}, 6)):
            run(llm, tiny_prompt(**options, **salt), PARAMS)
            assert num_read == count
