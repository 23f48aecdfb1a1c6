"""How `mean_shift` moves tokens that are not computed again, as those of their chunk that are."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.blend.prompts import recomputed_positions, tiny_prompt
from tests.blend.reference import BlendReference
from tests.blend.rules import KeyDeviation, ShiftingRandom, selectors_restored
from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import engine, greedy, hf_model, run, tiny_model
from tests.models.tiny import tiny_hf_model
from vllm_blend.blend.plan import BlendPlan, Segment
from vllm_blend.blend.selectors import make_selector, register_selector
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.layers.rope_frequencies import rope_spec
from vllm_blend.layers.rotary import RotaryEmbedding
from vllm_blend.ops import rotary_embedding
from vllm_blend.ops.paged_kv import PagedKV
from vllm_blend.outputs import RequestMetrics
from vllm_blend.request import Request
from vllm_blend.worker.batch import Span, build_batch
from vllm_blend.worker.mean_shift import mean_shift_hook

PARAMS = greedy(6, logprobs=2, ignore_eos=True)
LAYERS, HEADS, DIM, SIZE = 2, 2, 16, 8


@pytest.fixture(autouse=True)
def own_rules() -> Iterator[None]:
    with selectors_restored():
        register_selector(KeyDeviation)
        register_selector(ShiftingRandom)
        yield


@pytest.mark.cpu_only
@pytest.mark.parametrize("strength", [1.0, 0.25])
def test_the_mean_change_of_a_chunk_moves_the_rest_of_it(strength: float) -> None:
    """Chunks at 0 (exact), 3, 8 and 13; all of the last is computed again, and nothing of the first."""
    torch.manual_seed(0)
    chunks = [ChunkKV(torch.randn(LAYERS, n, HEADS, DIM), torch.randn(LAYERS, n, HEADS, DIM)) for n in (3, 5, 5, 2)]
    starts = [0, 3, 8, 13]
    segments = tuple(Segment(s, kv, exact=s == 0) for s, kv in zip(starts, chunks, strict=True))
    selector = make_selector(f"question_attention(mean_shift={strength})")
    plan = BlendPlan(segments, tuple(range(17)), 15, selector, 0.5)
    other = Request("other", [1, 2, 3], None, RequestMetrics(arrival_time=0.0), block_table=[5])
    request = Request("one", list(range(17)), None, RequestMetrics(arrival_time=0.0), blend=plan, block_table=[3, 1, 4])
    positions = [4, 6, 8, 9, 10, 11, 13, 14, 15, 16]
    spans = [Span(other, 0, 3), Span(request, 0, 17, torch.tensor(positions))]
    metadata = build_batch(spans, SIZE, torch.device("cpu")).metadata
    rotary = RotaryEmbedding(rope_spec(tiny_hf_model("llama", head_dim=DIM).config, 64), 64)
    hook = mean_shift_hook(spans, [rotary] * LAYERS)
    assert hook is not None
    for layer in range(LAYERS):
        key, value = torch.randn(2, 6, SIZE, HEADS, DIM)
        before = [key.clone(), value.clone()]
        k, v = torch.randn(2, 3 + len(positions), HEADS, DIM)
        hook.on_unrotated_kv(layer, PagedKV(key, value), metadata, k, v)
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
def test_no_hook_where_no_request_asks_for_one() -> None:
    plan = BlendPlan((), (1, 2), 1, make_selector("question_attention(mean_shift=0)"), 0.5)
    request = Request("one", [1, 2], None, RequestMetrics(arrival_time=0.0), blend=plan, block_table=[0])
    assert mean_shift_hook([Span(request, 0, 2, torch.tensor([1])), Span(request, 0, 2)], []) is None


@pytest.mark.parametrize(
    "rule",
    ["question_attention", "key_deviation"],
)
def test_batch_mates_change_nothing(rule: str) -> None:
    """What is stored stays as it is, too: the second time gives the same."""
    rules = [f"{rule}(mean_shift={strength})" for strength in (0.5, 0, 0.5)]
    prompts = [tiny_prompt(blend_selector=each, blend_recompute_ratio=0.3) for each in rules]
    with engine(tiny_model("llama"), enable_blending=True) as llm:
        alone = [run(llm, prompt, PARAMS)[0] for prompt in prompts]
        for _ in range(2):
            for output, one in zip(run(llm, prompts, PARAMS), alone, strict=True):
                assert_same_logprobs(output, one)
        (first, *_), (second, *_) = (output.outputs[0].logprobs or [] for output in alone[:2])
        assert first != second  # the correction is there


def shifted_in_float64(prompt: dict[str, Any], chosen: list[int], strength: float) -> torch.Tensor:
    """Log-probabilities of the first token where `chosen` are computed again and the rest of their chunks is moved."""
    reference = BlendReference(copy.deepcopy(hf_model(tiny_model("llama"))).double())
    context = reference.compose(list(prompt["prefix"]), [list(chunk) for chunk in prompt["chunks"]])
    ids, start = [*context.ids, *prompt["suffix"]], len(context.ids)
    positions, active = torch.arange(len(ids)), torch.tensor([*chosen, *range(start, len(ids))])
    stops = list(itertools.accumulate(map(len, prompt["chunks"]), initial=len(prompt["prefix"])))
    hidden = reference._embed(ids)[active]
    for layer, stored in zip(reference._layers, context.kv, strict=True):
        q, *fresh = reference._project(layer, hidden)
        both = []
        for new, old in zip(fresh, stored, strict=True):
            now = torch.cat([old, new[len(chosen) :]])
            now[chosen] = new[: len(chosen)]
            for first, stop in itertools.pairwise(stops):
                again = [p for p in range(first, stop) if p in chosen]
                kept = [p for p in range(first, stop) if p not in chosen]
                if again:
                    now[kept] += strength * (now[again] - old[again]).mean(0)
            both.append(now)
        keys = reference._rotate(both[0], positions)
        weights = reference._weights(reference._rotate(q, active), keys, active)
        hidden = reference._finish(layer, hidden, weights, both[1])
    logprobs: torch.Tensor = reference.model.lm_head(reference.model.model.norm(hidden[-1])).log_softmax(-1)
    return logprobs


@pytest.mark.cpu_only
@pytest.mark.parametrize("ratio", [0.05, 0.3])
@pytest.mark.parametrize(
    ("rule", "strength"),
    [("auto", 0.5), ("question_attention(mean_shift=1, first_layer=0)", 1.0), ("shifting_random", 1.0)],
)
def test_a_prompt_with_shifts_is_what_float64_makes_of_it(rule: str, strength: float, ratio: float) -> None:
    """The reference has transformers' weights, and only the choice is the engine's. What is stored stays as it is."""
    with engine(tiny_model("llama"), enable_blending=True) as llm:
        prompt = tiny_prompt(blend_selector=rule, blend_recompute_ratio=ratio)
        run(llm, tiny_prompt(blend_selector="none"), PARAMS)
        store = llm.llm_engine.chunk_store
        prefix, chunks = llm.llm_engine.identify_chunks(prompt["prefix"], prompt["chunks"])
        assert prefix is not None
        before: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for piece in (prefix, *chunks):
            kv = store.get(piece.key)
            assert kv is not None
            before[piece.key] = kv.k.clone(), kv.v.clone()
        [output] = run(llm, prompt, greedy(1, logprobs=5, ignore_eos=True))
        chosen = recomputed_positions(llm, len(prompt["suffix"])).tolist()
        with torch.no_grad():
            expected = shifted_in_float64(prompt, chosen, strength)
            unmoved = shifted_in_float64(prompt, chosen, 0.0)
        assert len(chosen) == int(ratio * 53) and (expected - unmoved).abs().max() > 0.1
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        for token, found in logprobs[0].items():
            assert found.logprob == pytest.approx(float(expected[token]), abs=1e-4)
        assert len(before) == 4
        for key, (k, v) in before.items():
            kv = store.get(key)
            assert kv is not None and torch.equal(kv.k, k) and torch.equal(kv.v, v)
