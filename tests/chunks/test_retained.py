"""The pages of a blended context serve the next question over it, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import settings
from tests.chunks.llms import chunked_llm, random_ids
from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import BLOCK_SIZE, greedy
from vllm_blend import ChunkedLLM, RequestOutput
from vllm_blend.blend.selectors import SELECTORS, Selector
from vllm_blend.blend.selectors.base import Evidence

PARAMS = greedy(8, logprobs=1, ignore_eos=True)
RULE: dict[str, Any] = {"selector": "first_tokens"}  # does not look at the question: its choice is the same each time


def ask(chunked: ChunkedLLM, chunks: list[str], seed: int, length: int = 5, **options: Any) -> RequestOutput:
    options = RULE | {"sampling_params": PARAMS} | options
    output: RequestOutput = chunked.generate_from_chunks(None, chunks, query=random_ids(length, seed), **options)
    return output


def registered(chunked: ChunkedLLM, *lengths: int) -> list[str]:
    return [chunked.register_chunk(random_ids(n, n)).id for n in lengths]


@pytest.mark.parametrize("backend", settings.current().backends)
@pytest.mark.parametrize("context", [2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 3 * BLOCK_SIZE - 1, 5])
@pytest.mark.parametrize("question", [1, 5, BLOCK_SIZE + 3])
def test_the_second_question_computes_itself_alone(context: int, question: int, backend: str) -> None:
    """The context ends within a page, at its end, or in its first page, and questions share the page with
    it or go beyond."""
    with chunked_llm(attention_backend=backend) as chunked:
        chunks = registered(chunked, context // 3, context - context // 3)
        fresh = [ask(chunked, chunks, seed, question, retain=False) for seed in (1, 2, 3)]
        retained = [ask(chunked, chunks, seed, question) for seed in (1, 2, 3)]
        for old, new in zip(fresh, retained, strict=True):
            assert_same_logprobs(old, new)
            assert old.blend is not None and not old.blend.retained
        assert [out.blend.retained for out in retained if out.blend is not None] == [False, True, True]
        for output in retained[1:]:
            assert output.blend is not None
            assert output.blend.num_recomputed_tokens == question and output.num_cached_tokens == context
        [tables, _] = [chunked.get_chunk(chunk).page_tables for chunk in chunks]
        assert len(tables) == 1


@pytest.mark.parametrize("rule", [RULE, {"selector": "random"}], ids=lambda rule: rule["selector"])
def test_requests_of_a_batch_share_one_blend(rule: dict[str, Any]) -> None:
    """Different questions over one context, all at once: one blends, the others wait a step and share its pages, while
    each writes its own question and answer."""
    with chunked_llm() as chunked:
        chunks = registered(chunked, 9, 14)
        alone = [ask(chunked, chunks, seed, 4, retain=False, **rule) for seed in range(6)]
        made = [chunked.compose(None, chunks, query=random_ids(4, seed), **rule) for seed in range(6)]
        outputs = chunked.batch_generate_from_chunks(made, PARAMS)
        for old, new in zip(alone, outputs, strict=True):
            assert_same_logprobs(old, new)
        assert [out.blend.retained for out in outputs if out.blend is not None] == [False] + 5 * [True]
        [several] = chunked.batch_generate_from_chunks(
            made[:1], greedy(4, n=3, temperature=1.0, seed=1, ignore_eos=True)
        )
        assert len(several.outputs) == 3 and several.blend is not None and several.blend.retained


def test_other_settings_are_another_composition() -> None:
    with chunked_llm() as chunked:
        chunks = registered(chunked, 9, 14)
        system = chunked.register_chunk(random_ids(3, 3), "system_prompt").id
        variants: list[dict[str, Any]] = [
            {},
            {"recompute_ratio": 0.5},
            {"selector": "random"},
            {"selector": None, "mode": "reuse"},
        ]
        for options in variants:
            assert not chunked.preview_composition(None, chunks, query=[5], **(RULE | options)).is_retained
            first = ask(chunked, chunks, 1, **options)
            assert first.blend is not None and not first.blend.retained
            assert chunked.preview_composition(None, chunks, query=[5], **(RULE | options)).is_retained
        assert len(chunked.llm_engine.blocks.retained) == len(variants)
        for other in (
            ask(chunked, chunks[::-1], 1),
            chunked.generate_from_chunks(system, chunks, query=[5], sampling_params=PARAMS, **RULE),
        ):
            assert other.blend is not None and not other.blend.retained


def test_what_was_repaired_for_one_question_serves_another_only_if_asked() -> None:
    with chunked_llm() as chunked:
        chunks = registered(chunked, 9, 14)
        rule: dict[str, Any] = {"selector": "question_attention", "recompute_ratio": 0.3}
        alone = [ask(chunked, chunks, seed, **rule, retain=False) for seed in (1, 2)]
        for seed, expected in zip((1, 2), alone, strict=True):
            output = ask(chunked, chunks, seed, **rule)
            assert output.blend is not None and not output.blend.retained
            assert_same_logprobs(output, expected)
        assert not chunked.llm_engine.blocks.retained
        assert_same_logprobs(ask(chunked, chunks, 1, **rule, retain=True), alone[0])
        second = ask(chunked, chunks, 2, **rule, retain=True)
        assert second.blend is not None and second.blend.retained
        everything = RULE | {"selector": "question_attention", "recompute_ratio": 1.0}  # nothing to choose
        for seed, retained in ((1, False), (2, True)):
            output = ask(chunked, chunks, seed, **everything)
            assert output.blend is not None and output.blend.retained is retained


def test_retained_pages_are_no_exact_prefix() -> None:
    """The same ids as a plain prompt, or in mode "exact", find nothing of a blend, nor the other way round."""
    with chunked_llm() as chunked:
        chunks = registered(chunked, 12, 20)
        blended = ask(chunked, chunks, 1, selector="none", mode="blend")
        exact = ask(chunked, chunks, 1, mode="exact", selector=None)
        assert exact.num_cached_tokens == 0
        plain = chunked.llm.generate({"prompt_token_ids": blended.prompt_token_ids}, PARAMS, use_tqdm=False)[0]
        assert_same_logprobs(plain, exact)
        assert (plain.num_cached_tokens or 0) > 0  # of the exact one's pages
        again = ask(chunked, chunks, 1, selector="none", mode="blend")
        assert_same_logprobs(again, blended)


def test_pages_are_given_up_when_they_are_needed() -> None:
    """Retained pages are free pages: other requests get them, least recently used first, and then the context is
    blended again, also for a request that had counted on them."""
    with chunked_llm(num_gpu_blocks_override=2 * 96 // BLOCK_SIZE + 1, max_num_seqs=4) as chunked:
        blocks = chunked.llm_engine.blocks
        chunks = registered(chunked, 20, 21)
        expected = ask(chunked, chunks, 1, retain=False)
        assert_same_logprobs(ask(chunked, chunks, 1), expected)
        assert blocks.num_free_blocks == blocks.num_usable_blocks and len(blocks.retained) == 1
        big = random_ids(85, 9)
        waiting = chunked.generate_from_chunks(
            None, chunks, query=random_ids(5, 1), sampling_params=PARAMS, stream=True, **RULE
        )
        for index in range(3):  # ahead of it in the queue, and of its pages
            chunked.llm_engine.add_request(str(index), big, greedy(8, ignore_eos=True))
            scheduler = chunked.llm_engine.scheduler
            last = list(scheduler.waiting)[-1]
            scheduler.waiting.remove(last)
            scheduler.add_first(last)
        *_, output = waiting
        assert_same_logprobs(output, expected)
        assert output.blend is not None and not output.blend.retained
        while chunked.llm_engine.has_unfinished_requests():
            chunked.llm_engine.step()


def test_preempted_requests_come_back() -> None:
    with chunked_llm(num_gpu_blocks_override=96 // BLOCK_SIZE + 5, max_num_seqs=6) as chunked:
        chunks = registered(chunked, 20, 13)
        params = greedy(30, logprobs=1, ignore_eos=True)
        made = [chunked.compose(None, chunks, query=random_ids(4, seed), **RULE) for seed in range(6)]
        outputs = chunked.batch_generate_from_chunks(made, params)
        assert chunked.llm_engine.scheduler.num_preemptions > 0
        for seed, output in enumerate(outputs):
            assert_same_logprobs(output, ask(chunked, chunks, seed, 4, retain=False, sampling_params=params))


def test_a_step_that_fails_before_it_runs_copies_its_pages_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with chunked_llm() as chunked:
        chunks = registered(chunked, BLOCK_SIZE, 3)
        expected = ask(chunked, chunks, 2, retain=False)
        ask(chunked, chunks, 1)
        executor = chunked.llm_engine.model_executor
        stream = chunked.llm_engine.generate_from_chunks(
            chunked.compose(None, chunks, query=random_ids(5, 2), **RULE), PARAMS, "again"
        )
        with monkeypatch.context() as patch:

            def fail(_: Any) -> Any:
                raise RuntimeError("no device")

            patch.setattr(executor, "execute_model", fail)
            with pytest.raises(RuntimeError, match="no device"):
                chunked.llm_engine.step()
        *_, output = stream
        assert_same_logprobs(output, expected)
        assert output.blend is not None and output.blend.retained


class FailingOnce(Selector):
    name = "failing_once"
    calls = 0

    def score(self, evidence: Evidence) -> torch.Tensor:
        FailingOnce.calls += 1
        if FailingOnce.calls == 1:
            raise ZeroDivisionError("on purpose")
        return -evidence.positions.float()


@pytest.mark.parametrize("divided", [{}, {"max_num_batched_tokens": 9, "max_num_seqs": 4}], ids=["whole", "divided"])
def test_a_failed_blend_serves_no_other_question(divided: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SELECTORS, "failing_once", FailingOnce)
    monkeypatch.setattr(FailingOnce, "calls", 0)
    rule: dict[str, Any] = {"selector": "failing_once", "recompute_ratio": 0.2}
    with chunked_llm(**divided, async_scheduling=True) as chunked:  # what follows is queued before the error is read
        chunks = registered(chunked, 20, 14)
        first = ask(chunked, chunks, 1, **rule)
        assert first.error is not None and "on purpose" in first.error
        assert not chunked.llm_engine.blocks.retained
        second, third = (ask(chunked, chunks, seed, **rule) for seed in (2, 3))
        assert second.blend is not None and not second.blend.retained
        assert third.blend is not None and third.blend.retained


def test_deleting_a_chunk_forgets_what_it_stands_in() -> None:
    with chunked_llm() as chunked:
        a, b, c = registered(chunked, 9, 14, 5)
        ask(chunked, [a, b], 1)
        ask(chunked, [b, c], 1)
        chunked.delete_chunk(a)
        assert len(chunked.llm_engine.blocks.retained) == 1
        metrics = {metric.name: metric for metric in chunked.llm.get_metrics()}
        assert metrics["vllm_blend:chunks_registered"].value == 2
        assert metrics["vllm_blend:compositions_retained"].value == 1
        output = ask(chunked, [b, c], 2)
        assert output.blend is not None and output.blend.retained
