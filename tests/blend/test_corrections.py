"""What is done to tokens that are not computed again: moved as those that are, attended to more sharply."""

from __future__ import annotations

import pytest
import torch

from tests.blend.prompts import tiny_prompt
from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import engine, greedy, run, tiny_model
from tests.models.tiny import tiny_hf_model
from vllm_blend.attention.metadata import LayerCache
from vllm_blend.blend.plan import BlendPlan, Segment
from vllm_blend.blend.selectors import make_selector
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.layers.rotary import build_rotary
from vllm_blend.ops import rotary_embedding
from vllm_blend.outputs import RequestMetrics
from vllm_blend.request import Request
from vllm_blend.worker.batch import Span, build_batch
from vllm_blend.worker.corrections import correction_hooks

PARAMS = greedy(6, logprobs=2, ignore_eos=True)
LAYERS, HEADS, DIM, SIZE = 2, 2, 16, 8


@pytest.mark.cpu_only
@pytest.mark.parametrize("strength", [1.0, 0.25])
def test_the_mean_change_of_a_chunk_moves_the_rest_of_it(strength: float) -> None:
    """Chunks at 0 (exact), 3, 8 and 13; all of the last is computed again, and nothing of the first."""
    torch.manual_seed(0)
    chunks = [ChunkKV(torch.randn(LAYERS, n, HEADS, DIM), torch.randn(LAYERS, n, HEADS, DIM)) for n in (3, 5, 5, 2)]
    starts = [0, 3, 8, 13]
    segments = tuple(Segment(s, kv, exact=s == 0) for s, kv in zip(starts, chunks, strict=True))
    selector = make_selector(f"question_attention+mean_shift(strength={strength})")
    plan = BlendPlan(segments, tuple(range(17)), 15, selector, 0.5)
    other = Request("other", [1, 2, 3], None, RequestMetrics(arrival_time=0.0), block_table=[5])
    request = Request("one", list(range(17)), None, RequestMetrics(arrival_time=0.0), blend=plan, block_table=[3, 1, 4])
    positions = [4, 6, 8, 9, 10, 11, 13, 14, 15, 16]
    spans = [Span(other, 0, 3), Span(request, 0, 17, torch.tensor(positions))]
    metadata = build_batch(spans, SIZE, torch.device("cpu")).metadata
    rotary = build_rotary(tiny_hf_model("llama", head_dim=DIM).config, 64)
    [hook] = correction_hooks(spans, [rotary] * LAYERS)
    for layer in range(LAYERS):
        key, value = torch.randn(2, 6, SIZE, HEADS, DIM)
        before = [key.clone(), value.clone()]
        k, v = torch.randn(2, 3 + len(positions), HEADS, DIM)
        hook.on_kv(layer, k, k, v, LayerCache(key, value), metadata)
        moved = {3: 0, 5: 0, 7: 0, 12: 1}  # position -> which chunk
        for position in range(17):
            where = (request.block_table[position // SIZE], position % SIZE)
            if position not in moved:
                assert all(torch.equal(t[where], b[where]) for t, b in zip((key, value), before, strict=True))
                continue
            start = starts[1 + moved[position]]
            kv = chunks[1 + moved[position]]
            fresh = [p for p in positions if start <= p < start + kv.num_tokens]
            rows = [3 + positions.index(p) for p in fresh]
            offsets = [p - start for p in fresh]
            new_k, new_v = (
                old[layer, position - start] + strength * (now[rows] - old[layer, offsets]).mean(0)
                for now, old in ((k, kv.k), (v, kv.v))
            )
            new_k = rotary_embedding(new_k[None], *rotary.cos_sin(torch.tensor([position])))[0]
            torch.testing.assert_close(key[where], new_k)
            torch.testing.assert_close(value[where], new_v)
        assert torch.equal(key[5], before[0][5])  # the other request's


@pytest.mark.cpu_only
def test_a_temperature_divides_the_keys_of_what_is_reused() -> None:
    """And of nothing else: 0 and 1 are exact, 3 and 6 are computed, 7 and 8 are the question."""
    kvs = [ChunkKV(torch.randn(1, n, HEADS, DIM), torch.randn(1, n, HEADS, DIM)) for n in (2, 5)]
    selector = make_selector("question_attention+temperature(value=0.5)")
    plan = BlendPlan((Segment(0, kvs[0], exact=True), Segment(2, kvs[1])), tuple(range(9)), 7, selector, 0.5)
    request = Request("one", list(range(9)), None, RequestMetrics(arrival_time=0.0), blend=plan, block_table=[2, 0])
    spans = [Span(request, 0, 9, torch.tensor([3, 6, 7, 8]))]
    metadata = build_batch(spans, SIZE, torch.device("cpu")).metadata
    [hook] = correction_hooks(spans, [])
    key, value = torch.randn(2, 3, SIZE, HEADS, DIM)
    expected, values = key.clone(), value.clone()
    expected[2, [2, 4, 5]] *= 2
    k = torch.randn(4, HEADS, DIM)
    hook.on_kv(0, k, k, k, LayerCache(key, value), metadata)
    torch.testing.assert_close(key, expected)
    assert torch.equal(value, values)


@pytest.mark.cpu_only
def test_no_hook_where_nobody_asked() -> None:
    plan = BlendPlan((), (1, 2), 1, make_selector("question_attention+smoothing"), 0.5)
    request = Request("one", [1, 2], None, RequestMetrics(arrival_time=0.0), blend=plan, block_table=[0])
    assert correction_hooks([Span(request, 0, 2, torch.tensor([1])), Span(request, 0, 2)], []) == []


@pytest.mark.parametrize(
    "rule",
    [
        "question_attention+mean_shift",
        "value_deviation+mean_shift(strength=0.5)",
        "question_attention+temperature(value=0.8)",
        "question_attention+mean_shift+temperature(value=0.8)",
    ],
)
def test_batch_mates_change_nothing(rule: str) -> None:
    """And what is stored stays as it is: the second time gives the same."""
    rules = [rule, rule.split("+")[0], rule]
    prompts = [tiny_prompt(blend_selector=each, blend_recompute_ratio=0.3) for each in rules]
    with engine(tiny_model("llama"), enable_blending=True) as llm:
        alone = [run(llm, prompt, PARAMS)[0] for prompt in prompts]
        for _ in range(2):
            for output, one in zip(run(llm, prompts, PARAMS), alone, strict=True):
                assert_same_logprobs(output, one)
        (first, *_), (second, *_) = (output.outputs[0].logprobs for output in alone[:2])
        assert first != second  # the correction is there


@pytest.mark.cpu_only
def test_settings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"mean_shift: strength=2 must be in \(0, 1\]"):
        make_selector("question_attention+mean_shift(strength=2)")
    with pytest.raises(ValueError, match=r"temperature: value=0 must be in \[0.1, 2\]"):
        make_selector("question_attention+temperature(value=0)")
