"""Move the tokens that are not recomputed as those that are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_blend.blend.selectors.levers.base import Lever


@dataclass(frozen=True)
class MeanShift(Lever):
    """Add the mean change of K and V of a chunk's recomputed tokens, times `strength`, to its other tokens
    (AgentKVShift). The choice stays as it is; `worker/mean_shift.py` adds it, layer by layer."""

    name: ClassVar[str] = "mean_shift"
    strength: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.strength <= 1:
            raise ValueError(f"mean_shift: strength={self.strength} must be in (0, 1]")

    def mean_shift(self) -> float:
        return self.strength
