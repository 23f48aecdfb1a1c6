"""The question's attention in the last third of the layers, where it reads the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_blend.blend.selectors.question_attention import QuestionAttention


@dataclass(frozen=True)
class LateAttention(QuestionAttention):
    """Score as `QuestionAttention`, over the last third of the layers only. A model first works out what is asked and
    then looks for it: in the demo model (12 layers), attention singles out the passages with the answer in layers 8, 9
    and 11, counted from 0.

    The question passes all layers before anything is chosen, whereas `QuestionAttention` stops at three quarters. On
    the demo model that pays off together with `mean_shift`; benchmarks/results/selection_tables.md compares both on
    three models.
    """

    name: ClassVar[str] = "late_attention"
    layer_share: float = 1.0
    first_layer: float = 0.667
