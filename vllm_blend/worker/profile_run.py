"""The largest steps an engine may be asked for, run once on a cache of a few pages: what they take is then measured.

Which KV those pages hold does not matter, so every request of these steps reads and writes the same few. Nothing else
of the engine takes part: no scheduler, no block manager, no sampler whose state a later draw would see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_blend.blend.plan import Segment, make_plan
from vllm_blend.blend.selectors.value_deviation import ValueDeviation
from vllm_blend.config import BlendConfig
from vllm_blend.core.step import ScheduledRequest, SchedulerOutput
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.layers.sampling_state import SamplingState
from vllm_blend.outputs import RequestMetrics
from vllm_blend.request import Request
from vllm_blend.sampling_params import SamplingParams
from vllm_blend.worker.block_pass import BlockPass
from vllm_blend.worker.device_parts import DeviceParts
from vllm_blend.worker.memory import Usage
from vllm_blend.worker.model_runner import ModelRunner

NUM_BLOCKS = 2  # of the cache that the steps run on
_SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "logprobs": 5}


@dataclass(frozen=True)
class StepLimits:
    """The bounds of a step."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    blend: BlendConfig


def run_largest_steps(runner: ModelRunner, limits: StepLimits) -> None:
    """Run the largest steps one after another and wait for their tokens. The runner's cache has at least `NUM_BLOCKS`
    blocks."""
    steps = [largest_prefill(limits, runner.cache.block_size), longest_context(limits, runner.cache.block_size)]
    if limits.blend.enable_blending:
        steps += largest_blend(limits, runner)
    for step in steps:
        result = runner.execute(SchedulerOutput(step))
        runner.draw(result)
        if runner.parts.heads.ranks.leads:
            assert result.tokens is not None
            result.tokens.result()
        for item in step:
            if item.request.collected:
                item.request.collected_kv()  # joining the pieces of a chunk copies them


def largest_prefill(limits: StepLimits, block_size: int) -> list[ScheduledRequest]:
    """Return as many requests as fit, all of which draw a token with every sampling setting in use, and as many tokens:
    single ones, as decoding has them, and long prompts. With blending, these are chunks being encoded."""
    lengths = [1] * min(limits.max_num_seqs, limits.max_num_batched_tokens)
    rest = limits.max_num_batched_tokens - len(lengths)
    for index in reversed(range(len(lengths))):
        more = min(rest, limits.max_model_len - 1)
        lengths[index] += more
        rest -= more
    items = []
    for length in lengths:
        request = _request(length, limits.max_model_len, block_size)
        if length > 1 and limits.blend.enable_blending:
            request.collect_from = 0
        items.append(ScheduledRequest(request, 0, length))
    return items


def longest_context(limits: StepLimits, block_size: int) -> list[ScheduledRequest]:
    """Return the end of the longest request: some backends copy the keys that it sees. Few rows tell, and take little
    time."""
    n = limits.max_model_len
    rows = min(1024, limits.max_num_batched_tokens, n)
    return [ScheduledRequest(_request(n, n, block_size), n - rows, rows)]


def largest_blend(limits: StepLimits, runner: ModelRunner) -> list[list[ScheduledRequest]]:
    """Return a request as long as any, computed whole up to the check layer, where V is compared; nothing if the model
    has no such layer."""
    n, check_layers = limits.max_model_len, limits.blend.check_layers
    layers, _, _, *heads = runner.cache.key.shape
    if max(check_layers) >= layers or n < 3:
        return []
    request = _request(n, n, runner.cache.block_size)
    stored = torch.zeros(1, 1, *heads, dtype=runner.cache.key.dtype, device=runner.cache.key.device)
    stored = stored.expand(layers, n - 1, *heads)  # the chunk store's memory is accounted for elsewhere
    segment = Segment(0, ChunkKV(stored, stored))
    ratio = max(0.01, 1 / (n - 1))  # something to choose; what comes after the check layer is small
    request.blend = make_plan(
        [segment], request.prompt_token_ids, n - 1, ValueDeviation(), ratio, check_layers, None, num_layers=layers
    )
    return [[ScheduledRequest(request, 0, n, is_blend=True)]]


def _request(num_tokens: int, max_model_len: int, block_size: int) -> Request:
    """Return a prompt of so many tokens, with pages for a request of the greatest length."""
    params = SamplingParams(**_SAMPLING)
    request = Request("profile", [0] * num_tokens, params, RequestMetrics(arrival_time=0.0))
    request.sampling = SamplingState(params, request.prompt_token_ids, request.output_token_ids)
    request.block_table = [block % NUM_BLOCKS for block in range(-(-max_model_len // block_size))]
    return request


def measure_activations(parts: DeviceParts, limits: StepLimits) -> int:
    """Return the bytes of a GPU that the largest steps need beside weights and pages, as torch's allocator takes them
    from the device. The cache has `NUM_BLOCKS` blocks; the backend is for this alone, as backends remember things of a
    step."""
    device = parts.device
    before = Usage.settled(device)
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_steps(ModelRunner(BlockPass(parts), seed=0), limits)
    return torch.cuda.max_memory_reserved(device) - before.reserved
