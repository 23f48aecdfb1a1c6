"""The part of a step that only blended requests need: let the question look, say what to compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from vllm_blend.attention.context import ForwardContext, LayerHook, forward_context
from vllm_blend.attention.metadata import AttentionBackend
from vllm_blend.blend.plan import BlendPlan
from vllm_blend.blend.selectors import Evidence, choose
from vllm_blend.request import Request
from vllm_blend.worker.batch import Span, build_batch
from vllm_blend.worker.hooks import QuestionMassHook
from vllm_blend.worker.kv_cache import KVCache
from vllm_blend.worker.question_graphs import QuestionGraphs


def first_positions(
    requests: Sequence[Request],
    model: nn.Module,
    cache: KVCache,
    backend: AttentionBackend,
    arriving: Sequence[LayerHook] = (),
    graphs: QuestionGraphs | None = None,
) -> tuple[list[torch.Tensor], dict[int, torch.Tensor], dict[int, str]]:
    """The ascending positions ([n] int64) each blended request starts its forward with, the mass ([tokens] float32)
    of those whose question has looked, until the next step, and which selectors failed.

    The stored KV must be in place, or be put there by the hooks `arriving`. Requests whose selector looks at the
    question share one pass of their suffixes, and their positions stay on the device: the blend's forward is queued
    behind that pass without waiting for it.
    """
    plans = [_plan(request) for request in requests]
    asking = [i for i, plan in enumerate(plans) if plan.looks_at.asks]
    masses: list[torch.Tensor] = []
    if graphs is not None and len(asking) == 1 and not arriving:
        masses = _replayed_mass(requests[asking[0]], graphs)
    if asking and not masses:
        masses = question_mass([requests[i] for i in asking], model, cache, backend, arriving)
    mass_of = dict(zip(asking, masses, strict=True))
    errors: dict[int, str] = {}
    repaired: dict[int, torch.Tensor] = {}  # what a request chose that looks twice: computed before its second look
    for index in asking:
        count = int(plans[index].selector.first_share() * plans[index].final_budget)
        if count and not plans[index].looks_at.checks:
            try:
                repaired[index] = choose_positions(plans[index], mass_of[index], count)
            except Exception as error:
                errors[index] = failure(plans[index], error)
    if repaired:
        again = question_mass([requests[i] for i in repaired], model, cache, backend, arriving, list(repaired.values()))
        mass_of |= zip(repaired, again, strict=True)
    result = []
    for index, (request, plan) in enumerate(zip(requests, plans, strict=True)):
        chosen = plan.candidates
        if not plan.looks_at.checks and plan.final_budget < len(chosen):
            try:
                chosen = choose_positions(plan, mass_of.get(index), plan.final_budget, repaired.get(index))
            except Exception as error:  # a user's selector may raise anything; it may only cost its own request
                errors[index] = failure(plan, error)
        rest = torch.cat([plan.holes, torch.arange(plan.suffix_start, request.num_tokens)])
        result.append(torch.cat([chosen, rest.to(chosen.device, non_blocking=True)]).sort().values)
    return result, mass_of, errors


def question_mass(
    requests: Sequence[Request],
    model: nn.Module,
    cache: KVCache,
    backend: AttentionBackend,
    arriving: Sequence[LayerHook] = (),
    beside: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """Attention mass of each request's question on its positions: one forward of the suffixes (and holes) alone, or of
    the ascending positions `beside` ([n] int64 of each request) too, which the question then sees as computed.

    What the pass writes to their slots is overwritten by the blend itself. Tokens generated before a preemption are no
    part of the question: the choice is the same as the first time.
    """
    spans, suffixes, looks = [], [], []
    for index, request in enumerate(requests):
        plan = _plan(request)
        looks.append(plan.selector.look(len(cache.layers)))
        positions, num_suffix = question_positions(plan)
        if beside:
            rest = positions.to(beside[index].device, non_blocking=True)
            positions = torch.cat([beside[index], rest]).sort().values
        spans.append(Span(request, 0, plan.num_prompt_tokens, positions))
        suffixes.append(num_suffix)
    batch = build_batch(spans, cache.block_size, cache.key.device)
    hook = QuestionMassHook(backend, suffixes, looks)
    caches = cache.layers[: max(look.stop for look in looks)]
    with forward_context(ForwardContext(batch.metadata, caches, backend, (*arriving, hook), [0] * len(spans))):
        model(batch.input_ids)
    return hook.masses()


def _replayed_mass(request: Request, graphs: QuestionGraphs) -> list[torch.Tensor]:
    """As `question_mass` for one request, empty where no graph is of its size."""
    plan = _plan(request)
    if plan.selector.look(len(graphs.cache.layers)) != graphs.look:
        return []
    positions, num_suffix = question_positions(plan)
    mass = graphs.run(request, positions.numpy(), num_suffix)
    return [] if mass is None else [mass[: plan.num_prompt_tokens]]


def question_positions(plan: BlendPlan) -> tuple[torch.Tensor, int]:
    """What the question's pass computes, holes first: positions [n] int64, and how many of them are the question."""
    suffix = torch.arange(plan.suffix_start, plan.num_prompt_tokens)
    return torch.cat([plan.holes, suffix]) if len(plan.holes) else suffix, len(suffix)


def choose_positions(
    plan: BlendPlan, mass: torch.Tensor | None, count: int, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """The `count` positions a selector picks, those `kept` among them, on the device of what it looked at."""
    if count == 0:
        return plan.candidates[:0]
    device = torch.device("cpu") if mass is None else mass.device
    candidates = plan.candidates.to(device, non_blocking=True)
    if kept is not None:
        candidates = candidates[~torch.isin(candidates, kept)]
        count -= len(kept)
    evidence = Evidence(
        positions=candidates.clone(),  # the plan keeps its own: a selector may do with this what it wants
        chunk_offsets=plan.chunk_offsets.to(device, non_blocking=True)[candidates],
        seed=plan.content_seed,
        question_mass=None if mass is None else mass[candidates],
    )
    chosen = candidates[choose(plan.selector, evidence, count)]
    return chosen if kept is None else torch.cat([kept, chosen])


def failure(plan: BlendPlan, error: Exception) -> str:
    return f"the selector {plan.selector.name!r} failed: {error!r}"


def _plan(request: Request) -> BlendPlan:
    assert request.blend is not None
    return request.blend
