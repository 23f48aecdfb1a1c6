"""The options of a feature that tests add: it notes which hooks the step loop calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_blend.config import FeatureConfig
from vllm_blend.options import option


@dataclass(frozen=True)
class HookLogConfig(FeatureConfig):
    """A log of the hooks that the step loop calls."""

    title: ClassVar[str] = "Hook log"
    name: ClassVar[str] = "log_hooks"
    extension: ClassVar[str | None] = "tests.features.hook_log.extension:make_hook_log"
    worker_extension: ClassVar[str | None] = "tests.features.hook_log.passes:HookLogPasses"

    log_hooks: bool = option(False, "note which hooks the step loop calls")

    @property
    def is_on(self) -> bool:
        return self.log_hooks
