"""Spread a token's score over its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.blend.selectors.base import Evidence
from vllm_blend.blend.selectors.levers.base import Lever, chunk_starts


@dataclass(frozen=True)
class Smoothing(Lever):
    """Replace each score by the mean of the `window` candidates around it in its chunk (as SnapKV pools its scores,
    arXiv:2404.14469), so that runs of tokens are chosen, which make sense together."""

    name: ClassVar[str] = "smoothing"
    window: int = 7

    def __post_init__(self) -> None:
        if not isinstance(self.window, int) or self.window < 3 or self.window % 2 == 0:
            raise ValueError(f"smoothing: window={self.window} must be an odd number of tokens, at least 3")

    def apply(self, scores: torch.Tensor, evidence: Evidence) -> torch.Tensor:
        starts, n = chunk_starts(evidence), len(scores)
        total, count = scores.clone(), torch.ones_like(scores)
        for shift in range(1, min(self.window // 2, n - 1) + 1):
            same = (starts[shift:] == starts[:-shift]).to(scores.dtype)
            total[shift:] += same * scores[:-shift]
            total[:-shift] += same * scores[shift:]
            count[shift:] += same
            count[:-shift] += same
        return total / count
