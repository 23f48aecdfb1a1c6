"""The steps whose memory is measured are as large as any that the scheduler makes, and leave nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import settings
from tests.engine.engines import tiny_model
from vllm_blend.attention.registry import make_backend
from vllm_blend.blend.selectors import LooksAt
from vllm_blend.config import BlendConfig
from vllm_blend.core.step import SchedulerOutput
from vllm_blend.models.loader import load_hf_config, load_model
from vllm_blend.worker.block_pass import BlockPass
from vllm_blend.worker.device_parts import DeviceParts
from vllm_blend.worker.kv_cache import CacheShape, KVCache
from vllm_blend.worker.model_runner import ModelRunner
from vllm_blend.worker.profile_run import (
    NUM_BLOCKS,
    StepLimits,
    largest_blend,
    largest_prefill,
    longest_context,
    run_largest_steps,
)
from vllm_blend.worker.runner_output import RunnerOutput

BLEND = BlendConfig(enable_blending=True)


def runner(backend: str = "torch_native", num_layers: int = 2) -> ModelRunner:
    where = settings.current()
    directory = tiny_model("llama", num_hidden_layers=num_layers)
    model: Any = load_model(
        load_hf_config(directory), directory, where.torch_dtype, where.torch_device, max_position=96
    )
    attention = model.model.layers[0].self_attn.attn
    shape = CacheShape(len(model.model.layers), attention.num_kv_heads, attention.head_dim, where.torch_dtype)
    cache = KVCache.allocate(shape, NUM_BLOCKS, where.block_size, where.torch_device)
    made = make_backend(backend, where.torch_device, where.torch_dtype, attention.head_dim)
    return ModelRunner(BlockPass(DeviceParts(model, cache, made)), seed=0)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 30), st.booleans())
def test_the_largest_prefill_fills_the_budget(tokens: int, seqs: int, length: int, blending: bool) -> None:
    limits = StepLimits(max(tokens, seqs), seqs, length, BlendConfig(enable_blending=blending))
    items = largest_prefill(limits, block_size=8)
    assert len(items) == seqs and all(item.samples for item in items)
    assert sum(item.num_tokens for item in items) == min(limits.max_num_batched_tokens, seqs * length)
    for item in items:
        assert 1 <= item.num_tokens == item.stop <= length
        assert len(item.request.block_table) == -(-length // 8)
        assert (item.request.collect_from is not None) is (blending and item.num_tokens > 1)
    assert [item.num_tokens == 1 for item in items] == sorted((i.num_tokens == 1 for i in items), reverse=True)


def test_the_longest_context_is_seen() -> None:
    for tokens, rows in ((4, 4), (5000, 96)):
        [item] = longest_context(StepLimits(tokens, 4, 96, BLEND), block_size=8)
        assert item.samples and (item.stop, item.num_tokens) == (96, rows)


def test_the_largest_blend_is_computed_whole_up_to_the_check_layer() -> None:
    limits = StepLimits(32, 4, 96, BLEND)
    [[item]] = largest_blend(limits, runner())
    plan = item.request.blend
    assert plan is not None and item.is_blend and (item.start, item.num_tokens) == (0, 96)
    assert plan.looks_at is LooksAt.LAYERS and plan.num_scheduled_tokens == 96 and plan.final_budget == 1
    assert len(plan.candidates) == 95
    stored = plan.segments[0].kv
    assert stored.k.untyped_storage().nbytes() < stored.k.nbytes  # the store has memory of its own
    assert largest_blend(limits, runner(num_layers=1)) == []


@pytest.mark.parametrize("backend", settings.current().backends)
@pytest.mark.parametrize(
    "limits", [StepLimits(32, 4, 96, BLEND), StepLimits(4, 4, 96, BLEND), StepLimits(999, 4, 96, BLEND)]
)
def test_the_steps_run(backend: str, limits: StepLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner(backend)
    rng = torch.random.get_rng_state()
    results: list[RunnerOutput] = []
    execute = made.execute

    def noted(output: SchedulerOutput) -> RunnerOutput:
        results.append(execute(output))
        return results[-1]

    monkeypatch.setattr(made, "execute", noted)
    run_largest_steps(made, limits)
    assert [len(result.sampled) for result in results] == [4, 1, 1]
    for result in results:
        assert result.tokens is not None and not result.errors and not result.tokens.result().errors
    [blend] = results[2].blends.values()
    assert len(blend.computed) == 1
    assert torch.equal(rng, torch.random.get_rng_state())
