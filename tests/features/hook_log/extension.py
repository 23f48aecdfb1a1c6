"""A feature for tests: it notes the hooks that the step loop calls, refuses a token, and never runs ahead."""

from __future__ import annotations

from collections.abc import Sequence

from tests.features.hook_log.config import HookLogConfig
from vllm_blend.engine.extension import EngineParts, Extension, Step
from vllm_blend.engine.metrics import Gauge, Metric
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.request import Request, StateKey
from vllm_blend.sampling_params import SamplingParams

REFUSED = 13
STEPS: StateKey[list[int]] = StateKey("hook_log")


class HookLog(Extension):
    """Notes every call of a hook."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def check(self, parsed: ParsedPrompt, params: SamplingParams) -> None:
        self.calls.append("check")
        if REFUSED in parsed.token_ids:
            raise ValueError(f"token {REFUSED} is unlucky: give another one")

    def begin(self, requests: Sequence[Request], parsed: ParsedPrompt, params: SamplingParams) -> None:
        self.calls.append("begin")
        for request in requests:
            STEPS.set(request, [])

    def before_schedule(self, running: Sequence[Request], ahead: bool) -> None:
        self.calls.append("before_schedule ahead" if ahead else "before_schedule")

    def launched(self, step: Step) -> None:
        self.calls.append("launched")
        for item in step.scheduled.scheduled:
            STEPS.require(item.request).append(item.num_tokens)

    def may_run_ahead(self, step: Step, running: Sequence[Request]) -> bool:
        self.calls.append("may_run_ahead")
        return False

    def verify(self, request: Request, drafts: Sequence[int], drawn: Sequence[int]) -> int:
        self.calls.append(f"verify {len(drawn)}")
        return len(drawn)

    def released(self, request: Request) -> None:
        self.calls.append(f"released {STEPS.require(request)}")

    def idle(self) -> None:
        self.calls.append("idle")

    def gauges(self) -> list[Metric]:
        return [Gauge("test:hooks_called", len(self.calls))]


def make_hook_log(config: HookLogConfig, parts: EngineParts) -> Extension:
    """Return the feature as the engine's configuration asks for it."""
    return HookLog() if config.is_on else Extension()
