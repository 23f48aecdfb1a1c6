"""Models that are wrong in one way each, all with the demo model's weights."""

from __future__ import annotations

from typing import Any

import torch

from vllm_blend.layers.rotary import RotaryEmbedding
from vllm_blend.models.causal_lm import attention_layers
from vllm_blend.models.llama import LlamaForCausalLM


class Noisy(LlamaForCausalLM):
    """A model whose dropout was left on."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(super().forward(input_ids), 0.5, training=True)


class _StepRotary(RotaryEmbedding):
    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos_sin(positions - positions.min())


class StepPositions(LlamaForCausalLM):
    """Positions count from the smallest one of the step: right as long as a prompt is computed at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _swap(self, _StepRotary)


class _OtherRotary(RotaryEmbedding):
    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = super().cos_sin(positions)
        return cos, -sin


class OtherRope(LlamaForCausalLM):
    """The forward pass rotates otherwise than the tables that chunks are placed with say."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _swap(self, _OtherRotary)


def _swap(model: LlamaForCausalLM, kind: type[RotaryEmbedding]) -> None:
    for attention in attention_layers(model):
        attention.rotary.__class__ = kind
