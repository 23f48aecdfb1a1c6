"""What a step does to tokens that are reused as they are, where selectors ask for it."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_blend.attention.context import LayerHook
from vllm_blend.layers.rotary import RotaryEmbedding
from vllm_blend.worker.batch import Span
from vllm_blend.worker.mean_shift import MeanShiftHook
from vllm_blend.worker.reused import reused_of
from vllm_blend.worker.temperature import TemperatureHook


def correction_hooks(spans: Sequence[Span], rotaries: Sequence[RotaryEmbedding]) -> list[LayerHook]:
    """The hooks that a step needs, in their order; none for most."""
    selectors = [
        span.request.blend.selector if span.positions is not None and span.request.blend else None for span in spans
    ]
    if all(selector is None for selector in selectors):
        return []
    hooks: list[LayerHook] = []
    shifted = list(reused_of(spans, [0.0 if selector is None else selector.mean_shift() for selector in selectors]))
    if shifted:
        hooks.append(MeanShiftHook(shifted, rotaries))
    sharpened = list(reused_of(spans, [0.0 if selector is None else selector.temperature() for selector in selectors]))
    if sharpened:
        hooks.append(TemperatureHook(sharpened))
    return hooks
