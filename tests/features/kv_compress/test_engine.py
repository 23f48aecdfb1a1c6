"""Engines that evict: what they answer, what they keep, and that every page comes back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.blend.prompts import plain, tiny_prompt
from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import (
    BLOCK_SIZE,
    TINY_VOCABULARY,
    engine,
    feature,
    greedy,
    pages_for,
    run,
    sampled,
    tiny_model,
)
from vllm_blend import LLM, RequestOutput
from vllm_blend.features.kv_compress import engine as engine_module
from vllm_blend.features.kv_compress.evictions import Evictions, schedule_evictions
from vllm_blend.features.kv_compress.extension import KVCompression
from vllm_blend.features.kv_compress.metrics import METRICS, EvictionMetric, LayerView, register_metric
from vllm_blend.features.kv_compress.state import COMPRESSION

TINY = tiny_model("llama")
SMALL: dict[str, Any] = {  # of prompts that a tiny model can read
    "enable_kvc": True,
    "protected_window_size": 6,
    "num_sinks": 1,
    "kvc_interval": 4,
    "prefill_metric_collection_window_size": 8,
    "block_size": BLOCK_SIZE,
}
PARAMS = greedy(20, logprobs=2, ignore_eos=True)


def prompt(length: int, start: int = 0) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(7 * i * i + 3 * i + start) % TINY_VOCABULARY for i in range(length)]}


def counted(llm: LLM, name: str) -> float:
    return next(metric.value for metric in llm.get_metrics() if metric.name == f"vllm_blend:{name}")


def expected(prompts: Any, params: Any = PARAMS) -> list[RequestOutput]:
    """Return the answers of an engine that does not compress."""
    with engine(TINY, block_size=BLOCK_SIZE) as llm:
        return run(llm, prompts, params)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_all_same(left: list[RequestOutput], right: list[RequestOutput]) -> None:
    for one, other in zip(left, right, strict=True):
        assert_same_logprobs(one, other)


def held_by(llm: LLM, request_id: str) -> np.ndarray | None:
    """Return how many KVs each head of a running request holds, [layers, kv_heads], once it is in head pages."""
    compression = feature(llm.llm_engine, KVCompression)
    for request in llm.llm_engine.scheduler.running:
        state = COMPRESSION.get(request)
        if request.request_id == request_id and state is not None:
            index = state.index
            return None if index is None else compression.tables.lengths[index].copy()
    return None


def steps(llm: LLM, prompts: list[Any], params: Any) -> Iterator[dict[str, RequestOutput]]:
    """Yield what has finished, after every step."""
    inner = llm.llm_engine
    for index, one in enumerate(prompts):
        inner.add_request(str(index), one, params)
    done: dict[str, RequestOutput] = {}
    while inner.has_unfinished_requests():
        done |= {output.request_id: output for output in inner.step() if output.finished}
        yield done


@pytest.mark.parametrize("settings", [{}, {"target_compression_rate": 1.0}, {"max_cache_tokens": 60}])
def test_what_fits_is_left_as_it_is(settings: dict[str, Any]) -> None:
    prompts = [prompt(40), prompt(17, 5)]
    with engine(TINY, **SMALL, **settings) as llm:
        before = counted(llm, "kv_compressions")
        for _ in steps(llm, prompts, PARAMS):
            assert held_by(llm, "0") is None
            assert held_by(llm, "1") is None
        assert_all_same(run(llm, prompts, PARAMS), expected(prompts))
        assert counted(llm, "kv_compressions") == before


def test_head_pages_hold_what_blocks_did() -> None:
    """A budget that the pages of it exceed by a little: the request moves, and nothing is evicted."""
    params = greedy(14, logprobs=2, ignore_eos=True, max_cache_tokens=50)
    done: dict[str, RequestOutput] = {}
    with engine(TINY, **SMALL) as llm:
        before = counted(llm, "kvs_evicted")
        in_head_pages = 0
        for done in steps(llm, [prompt(40), prompt(40, 5)], params):  # noqa: B007
            lengths = held_by(llm, "1")
            in_head_pages += lengths is not None
            assert lengths is None or (lengths == lengths.max()).all()
        assert in_head_pages == 12
        assert counted(llm, "kvs_evicted") == before
    assert_all_same(
        [done["0"], done["1"]], expected([prompt(40), prompt(40, 5)], greedy(14, logprobs=2, ignore_eos=True))
    )


@pytest.mark.parametrize("allocation", ["global", "layer", "head"])
@pytest.mark.parametrize("metric", sorted(METRICS))
def test_every_metric_keeps_to_its_budget(metric: str, allocation: str) -> None:
    prompts = [prompt(60), prompt(33, 5)]
    with engine(TINY, **SMALL, kvc_metric=metric, kvc_allocation=allocation, max_cache_tokens=16) as llm:
        heads = feature(llm.llm_engine, KVCompression).tables.num_heads
        budget = heads * -(-16 // BLOCK_SIZE)
        layers = llm.llm_engine.model_executor.driver_worker.num_layers
        left_over = {"global": 0, "layer": layers - 1, "head": heads - 1}[allocation]  # what all cannot free alike
        done: dict[str, RequestOutput] = {}
        for done in steps(llm, prompts, PARAMS):  # noqa: B007
            for name in "01":
                lengths = held_by(llm, name)
                if lengths is not None:
                    grown = SMALL["kvc_interval"] + 1  # tokens since it was last compressed, at most
                    most = budget + heads * -(-grown // BLOCK_SIZE) + left_over
                    assert (-(-lengths // BLOCK_SIZE)).sum() <= most
                    if allocation == "head":
                        assert (lengths == lengths.max()).all()
        assert all(len(done[name].outputs[0].token_ids) == 20 for name in "01")


@pytest.mark.parametrize("metric", ["kv_compress", "keydiff", "snapkv"])
def test_what_a_request_answers_does_not_depend_on_others(metric: str) -> None:
    prompts = [prompt(length, start) for length, start in ((60, 0), (33, 5), (9, 2), (50, 8), (41, 1))]
    arguments = {**SMALL, "kvc_metric": metric, "max_cache_tokens": 16, "enable_prefix_caching": False}
    with engine(TINY, **arguments) as llm:
        alone = [run(llm, one, PARAMS)[0] for one in prompts]
        before = counted(llm, "kvs_evicted")
        assert_all_same(run(llm, prompts, PARAMS), alone)
        assert counted(llm, "kvs_evicted") > before
        assert tokens(alone) != tokens(expected(prompts)), "it would show if nothing had been evicted"


def test_a_metric_of_what_answers_attend_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own, which knows nothing of a prompt and adds up what decode steps pay."""

    @dataclass(frozen=True)
    class Since(EvictionMetric):
        name: ClassVar[str] = "since"
        accumulates: ClassVar[bool] = True

        def score(self, view: LayerView) -> torch.Tensor:
            return torch.zeros(view.positions.shape)

    seen: list[torch.Tensor] = []

    def noting(rank: torch.Tensor, *others: Any) -> Evictions:
        seen.append(rank)
        return schedule_evictions(rank, *others)

    monkeypatch.setattr(engine_module, "schedule_evictions", noting)
    register_metric(Since)
    try:
        with engine(TINY, **SMALL, kvc_metric="since", max_cache_tokens=16) as llm:
            run(llm, prompt(40), PARAMS)
    finally:
        del METRICS["since"]
    assert (seen[0] == 0).all()
    paid = seen[1].sum(-1)  # by each of the two query heads of a KV head, in every step
    torch.testing.assert_close(paid, torch.full_like(paid, 2.0 * SMALL["kvc_interval"]))


def test_chunked_prefill_sees_the_same_window() -> None:
    prompts = [prompt(60), prompt(45, 5)]
    arguments = {**SMALL, "max_cache_tokens": 16, "enable_prefix_caching": False}
    with engine(TINY, **arguments) as llm:
        whole = run(llm, prompts, PARAMS)
    for tokens_of_a_step in (5, 11, 64):  # a window of 8 comes in two steps or three
        with engine(TINY, **arguments, max_num_seqs=4, max_num_batched_tokens=tokens_of_a_step) as llm:
            assert_all_same(run(llm, prompts, PARAMS), whole)


def test_steps_queued_ahead_answer_the_same() -> None:
    prompts = [prompt(60), prompt(33, 5), prompt(50, 8)]
    arguments = {**SMALL, "max_cache_tokens": 16}
    with engine(TINY, **arguments) as llm:
        wanted = run(llm, prompts, PARAMS)
    with engine(TINY, **arguments, async_scheduling=True) as llm:
        assert_all_same(run(llm, prompts, PARAMS), wanted)


def test_shared_pages_stay_what_they_are() -> None:
    """A prompt whose pages are cached is compressed by one request; others still find them whole."""
    short = greedy(6, logprobs=2, ignore_eos=True)
    one = prompt(60)
    with engine(TINY, **SMALL) as llm:
        [wanted] = expected([one], short)
        compressed = greedy(20, logprobs=2, ignore_eos=True, max_cache_tokens=16)
        [first] = run(llm, one, compressed)
        [whole] = run(llm, one, short)
        assert whole.num_cached_tokens
        assert_same_logprobs(whole, wanted)
        [second] = run(llm, one, compressed)
        assert second.num_cached_tokens
        assert second.num_cached_tokens <= 60 - SMALL["prefill_metric_collection_window_size"]
        assert_same_logprobs(second, first)


def test_blends_are_compressed_when_they_are_fused() -> None:
    """At ratio 1.0 a blend is a prefill, so it keeps what that keeps; its chunks in the store stay whole."""
    arguments = {**SMALL, "max_cache_tokens": 24, "enable_blending": True, "enable_prefix_caching": False}
    blend = tiny_prompt(blend_selector="random", blend_recompute_ratio=1.0)
    with engine(TINY, **arguments) as llm:
        [whole] = run(llm, plain(blend), PARAMS)
        for _ in range(2):  # from an empty store, then from a full one
            [blended] = run(llm, blend, PARAMS)
            assert blended.blend is not None
            assert_window_differs_only(blended, whole)
        before = counted(llm, "kvs_evicted")
        few = tiny_prompt(blend_selector="question_attention", blend_recompute_ratio=0.2)
        [first], [second] = run(llm, few, PARAMS), run(llm, few, PARAMS)
        assert_same_logprobs(first, second)
        assert counted(llm, "kvs_evicted") > before


def assert_window_differs_only(blended: RequestOutput, whole: RequestOutput) -> None:
    """The prompt's own log-probabilities agree; what is evicted may not, as a blend's window is its suffix."""
    left, right = (output.outputs[0].logprobs[0] for output in (blended, whole))  # type: ignore[index]
    assert left.keys() == right.keys()
    assert all(abs(left[token].logprob - right[token].logprob) < 1e-3 for token in left)


def test_when_pages_run_short_compression_comes_before_preemption() -> None:
    prompts = [prompt(40, start) for start in range(6)]
    arguments = {**SMALL, "kvc_interval": 1000, "enable_prefix_caching": False, "max_num_seqs": 6}
    params = greedy(40, logprobs=2, ignore_eos=True, max_cache_tokens=24)
    with engine(TINY, **{**arguments, **pages_for(6 * 40)}) as llm:
        before = counted(llm, "head_pages_freed")
        outputs = run(llm, prompts, params)
        assert counted(llm, "head_pages_freed") > before
        assert llm.llm_engine.scheduler.num_preemptions == 0
        assert [len(output.outputs[0].token_ids) for output in outputs] == [40] * 6


def test_others_are_compressed_before_a_plain_request_starts_again() -> None:
    """It needs a block, and the requests in head pages hold more than they keep."""
    arguments = {**SMALL, "kvc_interval": 1000, "enable_prefix_caching": False, "max_num_seqs": 6}
    kept = greedy(50, ignore_eos=True, max_cache_tokens=24)
    with engine(TINY, **{**arguments, **pages_for(160)}) as llm:
        before = counted(llm, "head_pages_freed")
        run(llm, [prompt(40), prompt(40, 1), prompt(20, 2)], [kept, kept, greedy(40, ignore_eos=True)])
        assert counted(llm, "head_pages_freed") > before
        assert llm.llm_engine.scheduler.num_preemptions == 0


def test_everybody_has_a_turn_where_few_are_sorted_at_a_time() -> None:
    """Each gives its excess back in the steps after the limit, not the first one again and again."""
    arguments = {"kvc_interval": 1000, "new_token_limit": 36, "max_kv_per_compression": 1, "max_cache_tokens": 16}
    with engine(TINY, **{**SMALL, **arguments}) as llm:
        times: dict[str, int] = {}
        for _ in steps(llm, [prompt(30, start) for start in range(3)], greedy(18, ignore_eos=True)):
            for request in llm.llm_engine.scheduler.running:
                times[request.request_id] = COMPRESSION.require(request).num_compressions
        assert times == dict.fromkeys("012", 2), "at the end of the prompt, and when all had grown by the limit"


def test_requests_that_give_their_pages_back_finish() -> None:
    prompts = [prompt(20, start) for start in range(6)]
    with engine(TINY, **{**SMALL, **pages_for(96)}, max_cache_tokens=34, max_num_seqs=6) as llm:
        outputs = run(llm, prompts, PARAMS)
        assert llm.llm_engine.scheduler.num_preemptions > 0
        assert [len(output.outputs[0].token_ids) for output in outputs] == [20] * 6


@pytest.mark.parametrize("metric", ["kv_compress", "keydiff"])
def test_starting_again_a_token_short_of_the_end_of_a_step(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """33 tokens in steps of 16: before the last, which looks like a decode, nothing is known of the window."""

    class Graphs:
        def run(self, *_: Any) -> None:
            raise AssertionError("a graph looks at no query")

    def answer(tokens_of_a_step: int) -> RequestOutput:
        arguments = {"kvc_metric": metric, "max_cache_tokens": 16, "enable_prefix_caching": False, "max_num_seqs": 4}
        with engine(TINY, **SMALL, **arguments, max_num_batched_tokens=tokens_of_a_step) as llm:
            if metric == "kv_compress":
                monkeypatch.setattr(
                    llm.llm_engine.model_executor.driver_worker.model_runner.block_pass, "decode_graphs", Graphs()
                )
            scheduler, started_again = llm.llm_engine.scheduler, False
            done: dict[str, RequestOutput] = {}
            for done in steps(llm, [prompt(30)], PARAMS):  # noqa: B007
                if not started_again and len(scheduler.running[0].output_token_ids) == 3:
                    scheduler.preempt_last()
                    started_again = True
            monkeypatch.undo()
            return done["0"]

    short, whole = answer(16), answer(64)
    if metric == "kv_compress":  # any other leaves its blocks when all but the newest token is there: a token earlier
        assert_same_logprobs(short, whole)
    assert len(short.outputs[0].token_ids) == 20


def test_compress_once() -> None:
    """Short prompts too, when they have grown; and then no more."""
    params = greedy(40, ignore_eos=True, max_cache_tokens=16, compress_once=True)
    with engine(TINY, **SMALL) as llm:
        times: dict[str, list[int]] = {"0": [], "1": []}
        for _ in steps(llm, [prompt(50), prompt(9, 5)], params):
            for request in llm.llm_engine.scheduler.running:
                times[request.request_id].append(COMPRESSION.require(request).num_compressions)
        assert times["0"] == [0] + [1] * 38
        first = times["1"].index(1)
        assert 16 - 9 <= first <= 16 - 9 + SMALL["kvc_interval"]
        assert set(times["1"][first:]) == {1}


def test_settings_of_its_own() -> None:
    prompts = [prompt(60), prompt(60, 5)]
    with engine(TINY, **SMALL, max_cache_tokens=40) as llm:
        llm.llm_engine.add_request("plain", prompts[0], greedy(8, ignore_eos=True, target_compression_rate=1.0))  # type: ignore[arg-type]
        llm.llm_engine.add_request("own", prompts[1], greedy(8, ignore_eos=True, target_compression_rate=0.2))  # type: ignore[arg-type]
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            assert held_by(llm, "plain") is None
            lengths = held_by(llm, "own")
            assert lengths is None or lengths.mean() <= 24


def test_several_completions() -> None:
    params = sampled(12, n=3, seed=4, ignore_eos=True, logprobs=1, max_cache_tokens=16)
    with engine(TINY, **SMALL) as llm:
        first, second = run(llm, prompt(50), params)[0], run(llm, prompt(50), params)[0]
        assert len({tuple(completion.token_ids) for completion in first.outputs}) == 3
        assert_same_logprobs(first, second)


def test_a_step_that_fails_leaves_no_slot_without_a_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(TINY, **SMALL, max_cache_tokens=16) as llm:
        [wanted] = run(llm, prompt(50), PARAMS)
        executor = llm.llm_engine.model_executor
        execute, calls = executor.execute_model, 0

        def failing(scheduled: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % 3 == 0:
                raise RuntimeError("the device is gone for a moment")
            return execute(scheduled)

        monkeypatch.setattr(executor, "execute_model", failing)
        llm.llm_engine.add_request("0", prompt(50), PARAMS)  # type: ignore[arg-type]
        finished = []
        while llm.llm_engine.has_unfinished_requests():
            try:
                finished += [output for output in llm.llm_engine.step() if output.finished]
            except RuntimeError as error:
                assert "gone for a moment" in str(error)
        assert calls > 20
        assert_same_logprobs(finished[0], wanted)


@pytest.mark.parametrize("failing", ["draw", "settle"])
def test_the_last_step_of_a_prompt_can_be_done_again(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metric looks at the same queries then, of which an earlier step has computed some."""
    options = SMALL | {"max_num_batched_tokens": 27, "max_num_seqs": 2, "enable_prefix_caching": False}
    with engine(TINY, **options, max_cache_tokens=16) as llm:  # the window is that of positions 22 to 29
        [wanted] = run(llm, prompt(30), PARAMS)
        executor = llm.llm_engine.model_executor
        work, calls = getattr(executor, failing), 0

        def fail_once(result: Any) -> None:
            nonlocal calls
            calls += bool(result.sampled)
            if calls == 1:
                calls += 1
                raise RuntimeError("the device is gone for a moment")
            work(result)

        monkeypatch.setattr(executor, failing, fail_once)
        llm.llm_engine.add_request("0", prompt(30), PARAMS)  # type: ignore[arg-type]
        llm.llm_engine.step()
        with pytest.raises(RuntimeError, match="gone for a moment"):
            llm.llm_engine.step()
        finished = []
        while llm.llm_engine.has_unfinished_requests():
            finished += [output for output in llm.llm_engine.step() if output.finished]
        assert_same_logprobs(finished[0], wanted)


@pytest.mark.cpu_only  # a recomputed prompt is rounded otherwise than decode steps of another shape
@pytest.mark.parametrize("metric", ["kv_compress", "knorm"])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("failing", ["draw", "settle"])
def test_a_step_that_fails_counts_no_attention_twice(
    failing: str, ahead: bool, metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose step has failed behind the model starts again, so that the rest of its answer is that of a new
    request with the tokens so far in its prompt. Where steps change no sums, a failed draw costs nothing."""
    options = SMALL | {"kvc_metric": metric, "async_scheduling": ahead, "enable_prefix_caching": False}
    if metric == "knorm":
        del options["prefill_metric_collection_window_size"]
    first, asked = prompt(50), greedy(20, ignore_eos=True, max_cache_tokens=16)
    with engine(TINY, **options) as llm:
        inner = llm.llm_engine
        executor, work = inner.model_executor, getattr(inner.model_executor, failing)
        [undisturbed] = tokens(run(llm, first, asked))
        for failing_call in range(2, 14, 3):
            calls = 0
            known: list[int] = []

            def fail_once(result: Any) -> None:
                nonlocal calls
                calls += failing == "settle" or result.logits is not None  # else nothing is left to be drawn
                if calls != failing_call:  # noqa: B023 - it is called within the loop's turn
                    work(result)
                    return
                calls += 1
                [request] = inner.scheduler.running
                unread = request.num_in_flight if failing == "draw" else 0  # of the step before, which stays
                known.append(len(request.output_token_ids) + unread)  # noqa: B023
                raise RuntimeError("the device is gone for a moment")

            monkeypatch.setattr(executor, failing, fail_once)
            inner.add_request("0", first, asked)  # type: ignore[arg-type]
            done: list[RequestOutput] = []
            while inner.has_unfinished_requests():
                try:
                    done += [output for output in inner.step() if output.finished]
                except RuntimeError as error:
                    assert "gone for a moment" in str(error)
            monkeypatch.undo()
            [answer] = tokens(done)
            [count] = known
            if metric == "knorm" and failing == "draw":
                assert answer == undisturbed
                continue
            so_far = {"prompt_token_ids": first["prompt_token_ids"] + answer[:count]}
            rest = greedy(20 - count, ignore_eos=True, max_cache_tokens=16)
            assert answer == undisturbed[:count] + tokens(run(llm, so_far, rest))[0]
