"""The feature's part of a worker: it notes the layers that see a pass over blocks."""

from __future__ import annotations

from collections.abc import Sequence

from tests.features.hook_log.config import HookLogConfig
from vllm_blend.attention.context import LayerHook
from vllm_blend.attention.metadata import LayerStep
from vllm_blend.core.step import ScheduledRequest
from vllm_blend.worker.passes import WorkerExtension, WorkerSpec


class LayerLog(LayerHook):
    """Notes the numbers of the layers that it is shown."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def on_query(self, step: LayerStep) -> None:
        self.layers.append(step.layer_idx)


class HookLogPasses(WorkerExtension):
    """Has one hook see every pass over blocks."""

    def __init__(self, config: HookLogConfig, spec: WorkerSpec) -> None:
        self.log = LayerLog()

    def hook(self, items: Sequence[ScheduledRequest]) -> LayerHook | None:
        return self.log
