"""A plan's candidates and what narrowing keeps of them: never the future, always the suffix, in any batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.blend.prompts import assert_counts_add_up, recomputed_positions, tiny_prompt
from tests.engine.compare import assert_logprobs_match
from tests.engine.engines import engine, greedy, hf_model, tiny_model
from vllm_blend.attention.context import NewKV
from vllm_blend.attention.metadata import AttentionMetadata, LayerStep
from vllm_blend.blend.plan import BlendPlan, Segment, make_plan
from vllm_blend.blend.selectors import LooksAt, make_selector
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.ops.paged_kv import PagedKV
from vllm_blend.worker.hooks import NarrowingHook

CPU = torch.device("cpu")
LAYERS = 4
RULES = ["value_deviation"]


@st.composite
def plans(draw: st.DrawFn, rules: list[str]) -> BlendPlan:
    """Segments with holes between them, the first ones exact; a suffix of at least one token."""
    segments, position = [], draw(st.integers(0, 2))
    exact_left = draw(st.integers(0, 2))
    for _ in range(draw(st.integers(0, 4))):
        length = draw(st.integers(1, 8))
        kv = torch.randn(LAYERS, length, 2, 4, generator=torch.Generator().manual_seed(position))
        segments.append(Segment(position, ChunkKV(kv, -kv), exact=exact_left > 0))
        exact_left -= 1
        position += length + draw(st.integers(0, 3))
    suffix = draw(st.integers(1, 4))
    tokens = draw(st.lists(st.integers(0, 9), min_size=position + suffix, max_size=position + suffix))
    selector = make_selector(draw(st.sampled_from(rules)))
    check_layers = draw(st.sampled_from([[1], [2], [1, 2], [1, 2, 3]]))
    ratio = draw(st.floats(0, 1))
    ratios = None
    if selector.looks_at is LooksAt.LAYERS and draw(st.booleans()):
        ratios = sorted(draw(st.lists(st.floats(0, 1), min_size=len(check_layers), max_size=len(check_layers))))[::-1]
    return make_plan(segments, tokens, position, selector, ratio, check_layers, ratios, LAYERS)


@pytest.mark.cpu_only
@given(plan=plans([*RULES, "question_attention", "first_tokens", "random"]))
def test_positions_are_exact_candidates_holes_or_suffix(plan: BlendPlan) -> None:
    covered = {p for segment in plan.segments for p in range(segment.start, segment.stop)}
    exact = {p for segment in plan.segments if segment.exact for p in range(segment.start, segment.stop)}
    candidates, holes = set(plan.candidates.tolist()), set(plan.holes.tolist())
    context = set(range(plan.suffix_start))
    assert candidates == covered & context - exact
    assert holes == context - covered
    assert plan.suffix_start - len(plan.candidates) - len(plan.holes) == len(exact & context)
    assert plan.candidates.tolist() == sorted(candidates)
    for segment in plan.segments:
        assert plan.chunk_offsets[segment.start : segment.stop].tolist() == list(range(segment.kv.num_tokens))
    assert 0 <= plan.final_budget <= len(candidates)
    assert plan.final_budget <= plan.ratio * plan.suffix_start + 1e-6
    budgets = [plan.budget(share) for share in plan.shares]
    assert budgets == sorted(budgets, reverse=True)
    suffix = plan.num_prompt_tokens - plan.suffix_start
    assert len(holes) + suffix <= plan.num_scheduled_tokens <= len(candidates) + len(holes) + suffix
    if plan.final_budget in (0, len(candidates)):
        assert plan.looks_at is LooksAt.POSITIONS, "nothing to choose, so nothing to look at"
        assert plan.mean_shift == 0 and plan.is_divisible
    else:
        assert plan.mean_shift == plan.selector.mean_shift
        assert plan.is_divisible == (plan.looks_at is not LooksAt.LAYERS and not plan.mean_shift)


@pytest.mark.cpu_only
@given(plan=plans(["random"]), other=plans(["random"]))
def test_the_random_choice_depends_on_the_context_alone(plan: BlendPlan, other: BlendPlan) -> None:
    assert plan.content_seed == replace(plan, ratio=0.5, segments=()).content_seed
    asked = (*plan.prompt_token_ids[: plan.suffix_start], *other.prompt_token_ids)
    assert plan.content_seed == replace(plan, prompt_token_ids=asked).content_seed, "whatever the question"
    contexts = [each.prompt_token_ids[: each.suffix_start] for each in (plan, other)]
    assert (plan.content_seed == other.content_seed) == (contexts[0] == contexts[1])


@pytest.mark.cpu_only
@pytest.mark.parametrize(("ratio", "context", "budget"), [(0.29, 100, 29), (0.15, 20, 3), (0.15, 19, 2), (1 / 3, 3, 1)])
def test_a_budget_is_rounded_down_but_not_by_floating_point(ratio: float, context: int, budget: int) -> None:
    kv = torch.zeros(LAYERS, context, 1, 1)
    tokens = [0] * (context + 1)
    selector = make_selector("value_deviation")
    plan = make_plan([Segment(0, ChunkKV(kv, kv))], tokens, context, selector, ratio, [1], None, LAYERS)
    assert plan.final_budget == budget


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("ratio", "context", "suffix", "rows"),
    [
        (0.15, 4064, 32, 640),  # not 641
        (0.08, 4064, 32, 357),  # 256 would be too few
        (0.15, 700, 24, 128),  # 129: one of the 105 is left out
        (0.15, 690, 27, 130),  # two of 103 would be more than 1%
        (0.5, 190, 34, 129),  # one of 95 would be more than 1%
        (1.0, 1000, 30, 1030),  # all is all
    ],
)
def test_a_step_just_over_a_tile_of_rows_is_cut_to_it(ratio: float, context: int, suffix: int, rows: int) -> None:
    kv = torch.zeros(LAYERS, context, 1, 1)
    segments = [Segment(0, ChunkKV(kv, kv))]
    plan = make_plan(segments, [0] * (context + suffix), context, make_selector("random"), ratio, [1], None, LAYERS)
    assert plan.num_scheduled_tokens == rows


@pytest.mark.cpu_only
def test_a_suffix_is_needed() -> None:
    with pytest.raises(ValueError, match="suffix must hold at least the last"):
        make_plan([], [1, 2], 2, make_selector("full"), None, [1], None, LAYERS)


@dataclass(frozen=True)
class Member:
    """A request of a step: blended or plain, with some generated tokens, and its K and V per layer."""

    plan: BlendPlan | None
    positions: torch.Tensor
    fresh: torch.Tensor  # [layers, 2, tokens, 2, 4]
    stored: torch.Tensor  # [layers, 2, tokens, 2, 4], what the cache holds for these rows


@st.composite
def members(draw: st.DrawFn) -> Member:
    plan = draw(st.one_of(st.none(), plans(RULES)))
    if plan is not None and plan.looks_at is not LooksAt.LAYERS:
        plan = None  # the narrowing has nothing to do with it
    if plan is None:
        positions = torch.arange(draw(st.integers(0, 6)), 7)
    else:
        end = plan.num_prompt_tokens + draw(st.integers(0, 3))
        rest = torch.arange(plan.suffix_start, end)
        positions = torch.cat([plan.candidates, plan.holes, rest]).sort().values
    random = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    values = torch.randint(-3, 4, (2, LAYERS, 2, len(positions), 2, 4), generator=random).float()  # ties are common
    return Member(plan, positions, values[0], values[1])


def narrowed(step: list[Member]) -> list[list[list[int]]]:
    """The positions that each request keeps, layer by layer."""
    offsets = [0]
    for member in step:
        offsets.append(offsets[-1] + len(member.positions))
    metadata = AttentionMetadata(
        torch.cat([member.positions for member in step]),
        torch.arange(offsets[-1]),
        torch.zeros(len(step), 1, dtype=torch.int32),
        offsets,
        [99] * len(step),
    )
    hook = NarrowingHook({i: (m.plan, m.positions) for i, m in enumerate(step) if m.plan is not None}, CPU)
    kept: list[list[list[int]]] = [[] for _ in step]
    for layer in range(LAYERS):
        rows = metadata.slot_mapping  # a row's slot is the row it had in the first layer
        fresh, stored = (torch.cat([getattr(m, name)[layer] for m in step], 1) for name in ("fresh", "stored"))
        cache = PagedKV(stored[0].unsqueeze(1), stored[1].unsqueeze(1))
        before = metadata
        k, v = fresh[0][rows], fresh[1][rows]
        result = hook.on_kv(LayerStep(k, cache, metadata, 1.0, None, layer), NewKV(k, k, v))
        if result is not None:
            assert result.query_start_loc is not None
            assert result.rows.tolist() == sorted(set(result.rows.tolist()))
            metadata = metadata.narrow(result.rows, result.query_start_loc)
            assert metadata.num_tokens == len(result.rows)
        for request, history in enumerate(kept):
            history.append(metadata.positions[metadata.rows(request)].tolist())
            assert set(history[-1]) <= set(before.positions[before.rows(request)].tolist())
    assert hook.errors == {}
    return kept


@pytest.mark.cpu_only
@settings(max_examples=80, deadline=None)
@given(step=st.lists(members(), min_size=1, max_size=4).filter(lambda step: any(member.plan for member in step)))
def test_narrowing(step: list[Member]) -> None:
    for member, history in zip(step, narrowed(step), strict=True):
        if member.plan is None:
            assert all(each == member.positions.tolist() for each in history)
            continue
        plan = member.plan
        needed = set(member.positions.tolist()) - set(plan.candidates.tolist())
        for layer, positions in enumerate(history):
            passed = [plan.shares[i] for i, check in enumerate(plan.check_layers) if check <= layer]
            budget = plan.budget(passed[-1]) if passed else len(plan.candidates)
            assert needed <= set(positions), "suffix, holes and generated tokens stay"
            assert set(positions) - needed <= set(plan.candidates.tolist()), "and nothing else but reused context"
            assert len(positions) == len(needed) + budget
        assert narrowed([member]) == [history], "the other requests of the step change nothing"


def with_holes(llm: Any, prompt: dict[str, Any], keep: Any, max_tokens: int = 8) -> Any:
    """Run a chunked prompt some of whose stored segments are lost just before it runs."""
    inner = llm.llm_engine
    llm.generate(prompt, greedy(1), use_tqdm=False)  # the chunks are known from here on
    inner.add_request("holes", prompt, greedy(max_tokens, logprobs=2, ignore_eos=True))
    [request] = inner.scheduler.waiting
    request.blend = replace(
        request.blend, segments=tuple(s for i, s in enumerate(request.blend.segments) if keep(i, s))
    )
    while inner.has_unfinished_requests():
        [output] = inner.step()
    return output, request.blend


TINY = {name: tiny_model(name) for name in ("llama", "qwen3")}


@pytest.mark.parametrize("model", TINY)
@pytest.mark.parametrize("rule", [*RULES, "question_attention", "none"])
def test_a_context_of_exact_pieces_and_holes_is_full_prefill(rule: str, model: str) -> None:
    with engine(TINY[model], enable_blending=True) as llm:
        prompt = tiny_prompt(blend_selector=rule)
        output, plan = with_holes(llm, prompt, lambda _, segment: segment.exact)
        assert len(plan.holes) > 0
        assert_logprobs_match(output, hf_model(TINY[model]))
        assert_counts_add_up(output)
        assert recomputed_positions(llm, len(prompt["suffix"])).tolist() == plan.holes.tolist()


@pytest.mark.parametrize("rule", [*RULES, "question_attention", "first_tokens"])
def test_holes_are_computed_beside_what_is_chosen(rule: str) -> None:
    with engine(TINY["llama"], enable_blending=True) as llm:
        prompt = tiny_prompt(blend_selector=rule, blend_recompute_ratio=0.2)
        output, plan = with_holes(llm, prompt, lambda index, _: index % 2 == 0)
        computed = recomputed_positions(llm, len(prompt["suffix"])).tolist()
        assert set(plan.holes.tolist()) <= set(computed)
        assert len(computed) == len(plan.holes) + int(0.2 * plan.suffix_start)
        assert set(computed) <= set(plan.holes.tolist()) | set(plan.candidates.tolist())
        assert_counts_add_up(output)


def test_ratio_1_with_holes_is_full_prefill() -> None:
    with engine(TINY["llama"], enable_blending=True) as llm:
        prompt = tiny_prompt(blend_selector="value_deviation", blend_recompute_ratio=1.0)
        output, plan = with_holes(llm, prompt, lambda index, _: index % 2 == 0)
        assert len(plan.holes) > 0
        assert_logprobs_match(output, hf_model(TINY["llama"]))
