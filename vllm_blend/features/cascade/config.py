"""The option of cascade attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_blend.config import FeatureConfig
from vllm_blend.options import option


@dataclass(frozen=True)
class CascadeConfig(FeatureConfig):
    """Cascade attention: a step reads blocks that several of its requests share once for all of them."""

    title: ClassVar[str] = "Cascade attention"
    name: ClassVar[str] = "cascade_attention"
    worker_extension: ClassVar[str | None] = "vllm_blend.features.cascade.passes:CascadePasses"
    divides_blends: ClassVar[bool] = False
    works_across_ranks: ClassVar[bool] = True

    cascade_attention: bool = option(
        False, "attend to blocks that several requests of a step share only once, for all of them together"
    )

    @property
    def is_on(self) -> bool:
        return self.cascade_attention
