"""Ask what the last token would have looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.offload.predictors.base import Evidence, LooksAt, PromotionPredictor


@dataclass(frozen=True)
class QueryDigest(PromotionPredictor):
    """Attention that the previous step's query would pay to each chunk, bounded by digests of its blocks: neighbouring
    tokens look at much the same. In the manner of Quest (Tang et al., arXiv:2406.10774, section 3.3) with bounds that
    rotate; smoothed over steps by `decay`, as one token is a noisy witness.
    """

    name: ClassVar[str] = "query_digest"
    looks_at: ClassVar[LooksAt] = LooksAt.DIGESTS

    decay: float = 0.5

    def score(self, evidence: Evidence) -> torch.Tensor:
        assert evidence.expected_mass is not None
        return smoothed(evidence.previous, evidence.expected_mass[-1], self.decay)


def smoothed(previous: torch.Tensor | None, now: torch.Tensor, decay: float) -> torch.Tensor:
    """The exponential moving average; what is nan now keeps its value, and is 0 where it never had any."""
    if previous is None:
        return now.nan_to_num(0.0)
    return torch.where(now.isnan(), previous, decay * previous + (1 - decay) * now)
