"""StreamingLLM as a metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.features.kv_compress.metrics.base import EvictionMetric, LayerView


@dataclass(frozen=True)
class StreamingLLM(EvictionMetric):
    """The latest tokens, beside the first ones (Xiao et al., Efficient Streaming Language Models with Attention Sinks,
    arXiv:2309.17453, section 3.2).

    The score is the position; the engine's `num_sinks` keeps the first tokens. Unlike in the paper, RoPE keeps the
    positions of the text.
    """

    name: ClassVar[str] = "streaming_llm"

    def score(self, view: LayerView) -> torch.Tensor:
        return view.positions.to(torch.float32)  # exact below 2^24
