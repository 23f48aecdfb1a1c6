"""Reused tokens are attended to more sharply, or less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_blend.blend.selectors.levers.base import Lever


@dataclass(frozen=True)
class Temperature(Lever):
    """The scores of tokens that are not computed again are divided by `value`, by whoever attends to them (APE,
    arXiv:2502.05431: chunks encoded apart are attended to too evenly). APE's second parameter, a scale of
    the whole context's weight, is left out: it needs a softmax in two parts. The choice stays as it is;
    `worker/temperature.py` does it."""

    name: ClassVar[str] = "temperature"
    value: float = 0.9

    def __post_init__(self) -> None:
        if not 0.1 <= self.value <= 2:
            raise ValueError(f"temperature: value={self.value} must be in [0.1, 2]")

    def temperature(self) -> float:
        return self.value
