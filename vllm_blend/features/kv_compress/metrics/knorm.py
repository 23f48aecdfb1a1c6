"""The norm of keys as a metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.features.kv_compress.metrics.base import EvictionMetric, LayerView, held


@dataclass(frozen=True)
class KNorm(EvictionMetric):
    """Minus the norm of a key: those that are attended to most have the smallest (Devoto et al., A Simple and Effective
    L2 Norm-Based Strategy for KV Cache Compression, arXiv:2406.11430, section 3). It looks at no query.
    """

    name: ClassVar[str] = "knorm"

    def score(self, view: LayerView) -> torch.Tensor:
        norms: torch.Tensor = held(view.keys, view.valid).norm(dim=-1)
        return -norms
