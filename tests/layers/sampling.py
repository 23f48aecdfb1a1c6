"""Helpers of the sampler's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_blend import ops
from vllm_blend.layers.sampling_state import SamplingState
from vllm_blend.ops.sampling import DrawSettings
from vllm_blend.sampling_params import SamplingParams

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def state(prompt: list[int] | None = None, output: list[int] | None = None, **settings: Any) -> SamplingState:
    """A sequence with end of sequence 0; `bad_words` are token sequences here."""
    bad_words = settings.pop("bad_words", ())
    return SamplingState(SamplingParams(**settings), prompt or [1], list(output or ()), (0,), bad_words)


def random_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def draw_settings(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> DrawSettings:
    values = np.array([SamplingState(p, [1], []).draw_settings for p in params])
    return DrawSettings.make(values, vocab_size, device)


def draw(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens [rows] of logits [rows, vocabulary] at these numbers in [0, 1), by `ops.sample_tokens`."""
    settings = draw_settings(params, logits.shape[-1], logits.device)
    return ops.sample_tokens(logits, settings, uniforms.to(logits.device))
