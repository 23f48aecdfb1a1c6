"""Choose what the question looks at where it reads: in the last third of the layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_blend.blend.selectors.question_attention import QuestionAttention


@dataclass(frozen=True)
class LateAttention(QuestionAttention):
    """Question attention over the last third of the layers alone, the mean as there. A model first works out what is
    asked and then looks for it: on the demo model (12 layers) attention singles out the passages with the answer in
    layers 8, 9 and 11, counted from 0.

    The question passes all layers before anything is chosen, where `QuestionAttention` stops at three quarters. That is
    worth it together with `mean_shift`, on the demo model: docs/selection.md compares them at equal cost on three.
    """

    name: ClassVar[str] = "late_attention"
    layer_share: float = 1.0
    first_layer: float = 0.667
