"""Choose what the question looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.blend.selectors.base import Evidence, LooksAt, Selector


@dataclass(frozen=True)
class QuestionAttention(Selector):
    """Attention that the suffix pays to each context token over the reused cache, mean over layers and heads, summed
    over the suffix (ProphetKV). Chosen before the forward, so no layer is computed whole."""

    name: ClassVar[str] = "question_attention"
    looks_at: ClassVar[LooksAt] = LooksAt.QUESTION

    def score(self, evidence: Evidence) -> torch.Tensor:
        assert evidence.question_mass is not None
        return evidence.question_mass
