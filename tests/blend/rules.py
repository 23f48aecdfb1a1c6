"""Selectors that are registered for the time of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend import Evidence, LooksAt, Selector
from vllm_blend.blend.selectors import SELECTORS
from vllm_blend.blend.selectors.random import RandomTokens


@dataclass(frozen=True)
class KeyDeviation(Selector):
    """A rule of a user's own: the change of K at the check layer, as LMCache's blender has it."""

    name: ClassVar[str] = "key_deviation"
    looks_at: ClassVar[LooksAt] = LooksAt.LAYERS
    mean_shift: float = 0.0

    def score(self, evidence: Evidence) -> torch.Tensor:
        return evidence.k_deviation()


@dataclass(frozen=True)
class ShiftingRandom(RandomTokens):
    """A rule of a user's own that looks at nothing and shifts."""

    name: ClassVar[str] = "shifting_random"
    mean_shift: float = 1.0


@contextmanager
def selectors_restored() -> Iterator[None]:
    """Forget at the end which selectors were registered meanwhile."""
    before = dict(SELECTORS)
    try:
        yield
    finally:
        SELECTORS.clear()
        SELECTORS.update(before)
