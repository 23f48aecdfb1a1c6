"""The question's attention to each token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.blend.selectors.base import Evidence, Look, LooksAt, Selector


@dataclass(frozen=True)
class QuestionAttention(Selector):
    """Score by the attention that the suffix pays to each context token over the reused cache: the mean over layers and
    heads of its sum over the suffix (ProphetKV). Tokens are chosen before the forward pass, so no layer is computed
    whole.

    The question looks on the first `layer_share` of the layers, without the share `first_layer` at their beginning:
    only the later layers tell what the answer needs. `mean_shift` is how much of the mean change of a chunk's
    recomputed tokens is added to its other tokens (AgentKVShift); 0 leaves these as they are stored. docs/selection.md
    has what each setting is worth.
    """

    name: ClassVar[str] = "question_attention"
    looks_at: ClassVar[LooksAt] = LooksAt.QUESTION
    layer_share: float = 0.75
    first_layer: float = 0.5
    mean_shift: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.layer_share <= 1:
            raise ValueError(f"layer_share={self.layer_share} must be in (0, 1]: it is a share of the model's layers")
        if not 0 <= self.first_layer < self.layer_share:
            raise ValueError(f"first_layer={self.first_layer} must be in [0, layer_share={self.layer_share})")
        if not 0 <= self.mean_shift <= 1:
            raise ValueError(f"mean_shift={self.mean_shift} must be in [0, 1]; 0 turns it off")

    def look(self, num_layers: int) -> Look:
        stop = math.ceil(self.layer_share * num_layers - 1e-9)  # 0.7 of 10 is 7, whatever the product rounds to
        return Look(stop, min(math.floor(self.first_layer * num_layers + 1e-9), stop - 1))

    def score(self, evidence: Evidence) -> torch.Tensor:
        assert evidence.question_mass is not None
        return evidence.question_mass
