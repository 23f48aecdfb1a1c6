"""Tokens that are not computed again are moved as those that are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_blend.blend.selectors.levers.base import Lever


@dataclass(frozen=True)
class MeanShift(Lever):
    """The mean change of K and V of the tokens of a chunk that are computed again is added to its other tokens, times
    `strength` (AgentKVShift). The choice stays as it is; `worker/mean_shift.py` does it, layer by layer."""

    name: ClassVar[str] = "mean_shift"
    strength: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.strength <= 1:
            raise ValueError(f"mean_shift: strength={self.strength} must be in (0, 1]")

    def mean_shift(self) -> float:
        return self.strength
