"""The part of a step that only blended requests need: the question looks, and the selector says what to compute."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from vllm_blend.attention.context import ForwardContext, LayerHook, forward_context
from vllm_blend.blend.plan import BlendPlan
from vllm_blend.blend.selectors import Evidence, LooksAt, choose
from vllm_blend.distributed.ranks import RankLostError
from vllm_blend.request import Request
from vllm_blend.worker.batch import Span, build_batch
from vllm_blend.worker.device_parts import DeviceParts
from vllm_blend.worker.hooks import QuestionMassHook
from vllm_blend.worker.question_graphs import QuestionGraphs
from vllm_blend.worker.shared_heads import agree


def first_positions(
    requests: Sequence[Request],
    parts: DeviceParts,
    arriving: Sequence[LayerHook] = (),
    graphs: QuestionGraphs | None = None,
) -> tuple[list[torch.Tensor], dict[int, str]]:
    """Return the ascending positions ([n] int64) that each blended request starts its forward with, and which selectors
    failed.

    The stored KV must be in place, or be put there by the hooks `arriving`. Requests whose selector looks at the
    question share one pass of their suffixes, and their positions stay on the device: the blend's forward is queued
    behind that pass without waiting for it.
    """
    plans = [_plan(request) for request in requests]
    asking = [i for i, plan in enumerate(plans) if plan.looks_at is LooksAt.QUESTION]
    masses: list[torch.Tensor] = []
    if graphs is not None and len(asking) == 1 and not arriving:
        masses = _replayed_mass(requests[asking[0]], graphs)
    if asking and not masses:
        masses = question_mass([requests[i] for i in asking], parts, arriving)
    mass_of = dict(zip(asking, masses, strict=True))
    errors: dict[int, str] = {}
    result = []
    for index, (request, plan) in enumerate(zip(requests, plans, strict=True)):
        chosen = plan.candidates
        if plan.looks_at is not LooksAt.LAYERS and plan.final_budget < len(chosen):
            try:
                chosen = agree(parts.heads.ranks, partial(choose_positions, plan, mass_of.get(index)), parts.device)
            except RankLostError:
                raise
            except Exception as error:  # a user's selector may raise anything; it may only cost its own request
                errors[index], chosen = f"the selector {plan.selector.name!r} failed: {error!r}", plan.candidates[:0]
        rest = torch.cat([plan.holes, torch.arange(plan.suffix_start, request.num_tokens)])
        result.append(torch.cat([chosen, rest.to(chosen.device, non_blocking=True)]).sort().values)
    return result, errors


def question_mass(
    requests: Sequence[Request], parts: DeviceParts, arriving: Sequence[LayerHook] = ()
) -> list[torch.Tensor]:
    """Return the attention mass of each request's question on its positions: one forward of the suffixes (and holes)
    alone.

    The blend itself overwrites the slots that the pass writes to. Tokens generated before a preemption are no part of
    the question: the choice is the same as the first time.
    """
    spans, suffixes, looks = [], [], []
    for request in requests:
        plan = _plan(request)
        looks.append(plan.selector.look(len(parts.cache.layers)))
        positions, num_suffix = question_positions(plan)
        spans.append(Span(request, 0, plan.num_prompt_tokens, positions))
        suffixes.append(num_suffix)
    batch = build_batch(spans, parts.cache.block_size, parts.device)
    hook = QuestionMassHook(parts.backend, suffixes, looks, heads=parts.heads)
    caches = parts.cache.layers[: max(look.stop for look in looks)]
    with forward_context(ForwardContext(batch.metadata, caches, parts.backend, (*arriving, hook), [0] * len(spans))):
        parts.model(batch.input_ids)
    return hook.masses()


def _replayed_mass(request: Request, graphs: QuestionGraphs) -> list[torch.Tensor]:
    """Return what `question_mass` does for one request, and nothing if no graph is of its look and size."""
    plan = _plan(request)
    look = plan.selector.look(len(graphs.parts.cache.layers))
    positions, num_suffix = question_positions(plan)
    mass = graphs.run(request, look, positions.numpy(), num_suffix)
    return [] if mass is None else [mass[: plan.num_prompt_tokens]]


def question_positions(plan: BlendPlan) -> tuple[torch.Tensor, int]:
    """Return what the question's pass computes, holes first: positions [n] int64, and how many are the question."""
    suffix = torch.arange(plan.suffix_start, plan.num_prompt_tokens)
    return torch.cat([plan.holes, suffix]) if len(plan.holes) else suffix, len(suffix)


def choose_positions(plan: BlendPlan, mass: torch.Tensor | None) -> torch.Tensor:
    """Return the positions that a selector picks, on the device of what it looked at."""
    if plan.final_budget == 0:
        return plan.candidates[:0]
    device = torch.device("cpu") if mass is None else mass.device
    candidates = plan.candidates.to(device, non_blocking=True)
    evidence = Evidence(
        positions=candidates.clone(),  # the plan keeps its own: a selector may do with this what it wants
        chunk_offsets=plan.chunk_offsets.to(device, non_blocking=True)[candidates],
        seed=plan.content_seed,
        question_mass=None if mass is None else mass[candidates],
    )
    return candidates[choose(plan.selector, evidence, plan.final_budget)]


def _plan(request: Request) -> BlendPlan:
    assert request.blend is not None
    return request.blend
