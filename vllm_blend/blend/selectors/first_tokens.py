"""The first tokens of every chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.blend.selectors.base import Evidence, Selector


@dataclass(frozen=True)
class FirstTokens(Selector):
    """Recompute the same number of leading tokens of each chunk (EPIC, arXiv:2410.15332, LegoLink): a chunk that was
    encoded alone has its attention sink there."""

    name: ClassVar[str] = "first_tokens"

    def score(self, evidence: Evidence) -> torch.Tensor:
        return -evidence.chunk_offsets.float()
