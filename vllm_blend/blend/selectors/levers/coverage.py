"""Stop where little is left to repair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.blend.selectors.base import Evidence
from vllm_blend.blend.selectors.levers.base import Lever


@dataclass(frozen=True)
class Coverage(Lever):
    """Choose no more tokens than hold `share` of the question's attention to all candidates, the largest first: the
    ratio becomes an upper bound, and prompts that need less get less. If the question looks twice (`first_round`), each
    look counts the tokens that it may still choose."""

    name: ClassVar[str] = "coverage"
    share: float = 0.6

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"coverage: share={self.share} must be in (0, 1]: it is a share of the attention")

    def count(self, evidence: Evidence, budget: int) -> int:
        if evidence.question_mass is None:
            raise ValueError("coverage needs a selector that looks at the question: question_attention")
        largest = torch.sort(evidence.question_mass, descending=True).values.double().cumsum(0)
        return min(budget, int((largest < self.share * largest[-1]).sum()) + 1)
