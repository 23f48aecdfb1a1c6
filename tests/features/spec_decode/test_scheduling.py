"""What the scheduler does with drafts: never at the cost of anything else."""

from __future__ import annotations

from vllm_blend.core.block_manager import BlockManager
from vllm_blend.core.scheduler import Scheduler
from vllm_blend.core.step import ScheduledRequest
from vllm_blend.outputs import RequestMetrics
from vllm_blend.request import Request
from vllm_blend.sampling_params import SamplingParams

SIZE = 4


def decoding(scheduler: Scheduler, *prompts: list[int], max_num_tokens: int | None = None) -> list[Request]:
    """Requests that have drawn their first token, 50."""
    requests = []
    for index, prompt in enumerate(prompts):
        metrics = RequestMetrics(arrival_time=0.0)
        requests.append(Request(str(index), prompt, SamplingParams(), metrics, max_num_tokens=max_num_tokens))
        scheduler.add(requests[-1])
    scheduler.advance(scheduler.schedule())
    for request in requests:
        assert request.num_computed_tokens == request.num_prompt_tokens
        request.output_token_ids.append(50)
    return requests


def test_drafts_are_computed_behind_the_last_token() -> None:
    scheduler = Scheduler(BlockManager(40, SIZE), 4, 64)
    [request] = decoding(scheduler, [1, 2, 3])
    request.drafts = [51, 52]
    output = scheduler.schedule()
    [item] = output.scheduled
    assert (item.request, item.start, item.num_tokens, item.drafts) == (request, 3, 3, (51, 52))
    assert not item.is_blend and item.part is None
    assert (item.known_stop, item.stop) == (4, 6)
    assert item.samples
    assert not item.is_decode
    assert len(request.block_table) == 2
    scheduler.advance(output)
    assert request.num_computed_tokens == 4


def test_the_budget_leaves_a_token_to_everybody() -> None:
    scheduler = Scheduler(BlockManager(40, SIZE), 4, 9)
    requests = decoding(scheduler, [1, 2], [3, 4], [5, 6])
    for request in requests:
        request.drafts = [7, 7, 7, 7]
    items = scheduler.schedule().scheduled
    assert [item.num_tokens for item in items] == [5, 3, 1]
    assert sum(item.num_tokens for item in items) == 9


def test_drafts_preempt_no_request() -> None:
    scheduler = Scheduler(BlockManager(3, SIZE), 4, 64)
    requests = decoding(scheduler, [1, 2], [3, 4])
    for request in requests:
        request.drafts = [7] * 6
    output = scheduler.schedule()
    assert not output.preempted
    assert [item.num_tokens for item in output.scheduled] == [2, 2], "as far as the page goes that they have"


def test_drafts_stop_before_the_last_token() -> None:
    scheduler = Scheduler(BlockManager(40, SIZE), 4, 64)
    [request] = decoding(scheduler, [1, 2, 3], max_num_tokens=6)
    request.drafts = [7] * 5
    [item] = scheduler.schedule().scheduled
    assert item.drafts == (7,), "tokens 5 and 6 are drawn, and nothing follows"


def test_what_is_prefilled_or_blended_again_brings_no_drafts() -> None:
    scheduler = Scheduler(BlockManager(40, SIZE), 4, 4)
    [request] = decoding(scheduler, [1, 2, 3])
    request.output_token_ids += [51, 52, 53]
    request.drafts = [7]
    assert scheduler.schedule().scheduled[0].drafts == ()


def test_accepted_drafts_are_published_and_rejected_ones_never() -> None:
    scheduler = Scheduler(BlockManager(40, SIZE), 4, 64)
    [request] = decoding(scheduler, [1, 2, 3])
    request.drafts = [51, 52, 53, 54, 55, 99, 99, 99]
    output = scheduler.schedule()
    scheduler.advance(output)
    scheduler.settle(output)
    request.output_token_ids += [51, 52, 53, 54, 55, 60]  # five are right
    scheduler.accept(output.scheduled[0], 5)
    assert request.num_computed_tokens == 9
    assert request.num_tokens == 10
    scheduler.finish(request)
    # token 60 is not computed, and what is in the third page is not all right
    wanted = [1, 2, 3, 50, 51, 52, 53, 54, 55, 99, 99, 99, 8]
    other = Request("other", wanted, SamplingParams(), RequestMetrics(arrival_time=0.0))
    scheduler.add(other)
    [item] = scheduler.schedule().scheduled
    assert item.start == 8
    assert other.num_cached_tokens == 8


def test_a_long_blend_may_run_beside_drafts_as_beside_decodes() -> None:
    scheduler = Scheduler(BlockManager(40, SIZE), 4, 64)
    [request] = decoding(scheduler, [1, 2, 3])
    request.drafts = [7, 8]
    [item] = scheduler.schedule().scheduled
    assert not item.is_prefill
    assert ScheduledRequest(request, 0, 3).is_prefill
