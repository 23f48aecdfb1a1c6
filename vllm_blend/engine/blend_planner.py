"""The plan of a blended prompt, from the prompt's options, the engine's settings and the controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_blend.blend.controller import LoadingController
from vllm_blend.blend.plan import BlendPlan, Segment, make_plan
from vllm_blend.blend.selectors import make_selector
from vllm_blend.checks import check_ratio
from vllm_blend.config import BlendConfig
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.kv_store.tiers import DISK, MEMORY


def check_settings(config: BlendConfig, num_layers: int) -> None:
    """Raise ValueError for a rule that does not exist and, where prompts are blended, for settings that exclude each
    other or name layers that the model does not have."""
    selector = make_selector(config.selector)
    if config.enable_blending:
        ratios = (config.recompute_ratio, config.check_layers, config.recompute_ratios)
        make_plan((), (0,), 0, selector, *ratios, num_layers)


@dataclass(frozen=True)
class BlendPlanner:
    """Plans blends, by settings that have passed `check_settings`. `rounds`: whether stored KV may come back with fewer
    bits than it was computed with."""

    config: BlendConfig
    num_layers: int
    bytes_per_token: int
    controller: LoadingController | None = None
    rounds: bool = False

    def blends(self, parsed: ParsedPrompt) -> bool:
        """Return whether a prompt is blended. Without chunks, or with a context below `min_tokens`, it is not."""
        bounds = parsed.chunk_bounds
        return self.config.enable_blending and bool(bounds) and bounds[-1][1] >= self.config.min_tokens

    def plan_stored(self, parsed: ParsedPrompt, segments: Sequence[Segment]) -> BlendPlan:
        """Return the plan of a prompt whose stored pieces are `segments`."""
        plan = self._with_controlled_ratio(self.plan(parsed, segments), parsed)
        if self.rounds and plan.ratio >= 1:  # a prefix that stands where it was encoded is exact but for its bits
            plan = replace(plan, segments=tuple(replace(segment, exact=False) for segment in plan.segments))
        return plan

    def plan_after(self, segments: Sequence[Segment], token_ids: Sequence[int]) -> BlendPlan:
        """Return the plan that computes all of `token_ids` but exact segments at their beginning: how a chunk is
        encoded after its prefix and its company."""
        stop = segments[-1].start + segments[-1].kv.num_tokens
        selector = make_selector("none")
        return make_plan(segments, token_ids, stop, selector, None, self.config.check_layers, None, self.num_layers)

    def plan(self, parsed: ParsedPrompt, segments: Sequence[Segment] = ()) -> BlendPlan:
        """Return the plan that a prompt asks for, which reuses `segments`. Raises ValueError if that cannot be."""
        check_ratio("blend_recompute_ratio", parsed.blend_recompute_ratio)
        selector = make_selector(self.config.selector if parsed.blend_selector is None else parsed.blend_selector)
        ratio, ratios = parsed.blend_recompute_ratio, None
        if ratio is None and parsed.blend_selector is None:  # the engine's ratios are meant for its own selector
            ratio, ratios = self.config.recompute_ratio, self.config.recompute_ratios
        return make_plan(
            segments,
            parsed.token_ids,
            parsed.chunk_bounds[-1][1],
            selector,
            ratio,
            self.config.check_layers,
            ratios,
            self.num_layers,
        )

    def _with_controlled_ratio(self, plan: BlendPlan, parsed: ParsedPrompt) -> BlendPlan:
        """Return the plan with the ratio that the controller chooses, if the one it has is a floor."""
        fixed = plan.selector.fixed_ratio is not None or self.config.recompute_ratios is not None
        if self.controller is None or fixed or parsed.blend_recompute_ratio is not None:
            return plan
        loads = {MEMORY: 0, DISK: 0}
        for segment in plan.segments:
            arriving = segment.kv.arriving
            if arriving is not None:
                loads[DISK] += arriving.bytes_left
            else:
                loads[MEMORY] += segment.kv.num_tokens * self.bytes_per_token
        choice = self.controller.choose_ratio(plan.ratio, loads, plan.suffix_start)
        shares = (choice.ratio,) * len(plan.shares)
        return replace(plan, ratio=choice.ratio, shares=shares) if choice.ratio > plan.ratio else plan
