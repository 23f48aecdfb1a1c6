"""Choose what the question looks at where it reads: in the last third of the layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_blend.blend.selectors.question_attention import QuestionAttention


@dataclass(frozen=True)
class LateAttention(QuestionAttention):
    """Question attention over the last third of the layers alone, the mean as there. A model first works out what is
    asked and then looks for it: on the demo model (12 layers) attention singles out the passages with the answer in
    layers 8, 9 and 11, counted from 0, and taking earlier layers into the mean hides that.

    The question goes through all layers once more than by `QuestionAttention`'s default, which stops at three quarters;
    the blend itself is the same. docs/selection.md compares the two at equal cost, on three models.
    """

    name: ClassVar[str] = "late_attention"
    layer_share: float = 1.0
    first_layer: float = 0.667
