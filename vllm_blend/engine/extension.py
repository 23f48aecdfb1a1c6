"""How a feature takes part in the engine's steps: what the step loop calls, and what a feature is built from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pkgutil import resolve_name

from transformers import PreTrainedTokenizerBase

from vllm_blend.config import EngineConfig
from vllm_blend.core.scheduler import Scheduler
from vllm_blend.core.step import SchedulerOutput
from vllm_blend.engine.metrics import Metric
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.request import Request
from vllm_blend.sampling_params import SamplingParams
from vllm_blend.worker.runner_output import RunnerOutput
from vllm_blend.worker.worker import Worker


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine that a feature may work on. `runs_ahead`: whether the engine queues a step before it has
    read the last one. The tokenizer and the tokens that end an answer may change; `lock` is held to read them outside
    the hooks that the engine calls under it."""

    config: EngineConfig
    worker: Worker
    scheduler: Scheduler
    runs_ahead: bool
    lock: AbstractContextManager[None]
    get_tokenizer: Callable[[], PreTrainedTokenizerBase | None]
    eos_token_ids: AbstractSet[int]


@dataclass(frozen=True)
class Step:
    """A step that was queued on the device."""

    scheduled: SchedulerOutput
    result: RunnerOutput
    launched: float | None  # time.perf_counter; None if an earlier step was still on the device

    @property
    def is_abandoned(self) -> bool:
        """Return whether every request of the step has finished in the meantime."""
        return all(item.request.finished for item in self.scheduled.scheduled)


class Extension:
    """A feature of the engine. The step loop calls these hooks, each at its place; those of this class do nothing."""

    def needs_preparation(self, params: SamplingParams) -> bool:
        """Return, without delay, whether `prepare` would take long."""
        return False

    def prepare(self, params: SamplingParams) -> None:
        """Do what takes long for a new request, before the others are asked. It is called without the engine's lock,
        while steps go on, and not for every request: `check` may be the first to see one. It raises nothing for bad
        input."""

    def check(self, parsed: ParsedPrompt, params: SamplingParams) -> None:
        """Raise ValueError or TypeError if a new request asks for what the feature cannot do. Nothing has changed
        yet."""

    def begin(self, requests: Sequence[Request], parsed: ParsedPrompt, params: SamplingParams) -> None:
        """Prepare new requests, the completions of one prompt, which passed `check`."""

    def before_schedule(self, running: Sequence[Request], ahead: bool) -> None:
        """Prepare the choice of the next step. `ahead`: the last one is still on the device, and its tokens are
        unknown."""

    def may_run_ahead(self, step: Step, running: Sequence[Request]) -> bool:
        """Return whether the step after `step` may be chosen before the tokens of `step` are known."""
        return True

    def launched(self, step: Step) -> None:
        """Take note of a step that has been queued on the device."""

    def verify(self, request: Request, drafts: Sequence[int], drawn: Sequence[int]) -> int:
        """Return how many of the tokens that were drawn for a request count, from the first on, at least 1. `drawn` has
        one for each of its `drafts` and one more."""
        return len(drawn)

    def released(self, request: Request) -> None:
        """Let go of what is kept of a request that is about to give its pages back."""

    def idle(self) -> None:
        """Let go of what no request needs: none is left."""

    def close(self) -> None:
        """Let go of what lives outside the engine, which is being shut down. It is called once, or not at all if the
        engine is dropped without `shutdown`."""

    def gauges(self) -> list[Metric]:
        """Return what the feature counts."""
        return []


def make_extensions(parts: EngineParts) -> list[Extension]:
    """Return what the features of an engine's configuration add, in its order: the step loop calls them in this order.

    Raises ValueError naming the setting for what the engine cannot do.
    """
    named = [(feature, feature.extension) for feature in parts.config.features if feature.extension is not None]
    return [resolve_name(name)(feature, parts) for feature, name in named]
