"""The results of a step, which the host has not read yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from vllm_blend.blend.plan import BlendPlan
from vllm_blend.core.step import ScheduledRequest
from vllm_blend.layers.sampler import PendingSample
from vllm_blend.ops.host_copy import HostCopy
from vllm_blend.outputs import Logprob
from vllm_blend.request import Request


@dataclass
class BlendResult:
    """The result of a blended prefill: positions before the suffix that the last layer computed, and every slot."""

    plan: BlendPlan
    computed: torch.Tensor  # [n] int64, ascending, holes included
    all_slots: torch.Tensor  # [tokens] int64, of the rows active in the first layer
    computed_slots: torch.Tensor  # [m] int64, of the rows whose K and V the last layer computed
    # `computed` on its way to the host, queued with the step: counting it must not wait for a later one.
    computed_on_host: HostCopy = field(init=False)

    def __post_init__(self) -> None:
        self.computed_on_host = HostCopy(self.computed)

    def computed_with_suffix(self) -> torch.Tensor:
        """Return the ascending positions of the prompt that were computed in the last layer, int64."""
        suffix = torch.arange(self.plan.suffix_start, self.plan.num_prompt_tokens, device=self.computed.device)
        return torch.cat([self.computed, suffix])


@dataclass
class RunnerOutput:
    """Results of a step, by request. The tokens may still be on their way: reading them waits."""

    drawing: list[ScheduledRequest] = field(default_factory=list)  # one row each, and one more for each of its drafts
    logits: torch.Tensor | None = None  # [rows, vocab], until tokens are drawn from them; only rank 0 has some
    tokens: PendingSample | None = None  # one a row
    prompt_logprobs: dict[Request, list[dict[int, Logprob]]] = field(default_factory=dict)
    blends: dict[Request, BlendResult] = field(default_factory=dict)
    errors: dict[Request, str] = field(default_factory=dict)

    @cached_property
    def sampled(self) -> list[Request]:
        """Return the requests that draw, in the order of their rows."""
        return [item.request for item in self.drawing]
