"""KeyDiff's metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from vllm_blend.features.kv_compress.metrics.base import EvictionMetric, LayerView, held


@dataclass(frozen=True)
class KeyDiff(EvictionMetric):
    """How little a key resembles the others of its head (Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction
    for Long-Context LLM Inference in Resource-Constrained Environments, arXiv:2504.15364, section 3).

    Minus the cosine between the key and the mean direction of all keys. It looks at no query.
    """

    name: ClassVar[str] = "keydiff"
    magnitude: ClassVar[float] = 1.0  # a cosine of 0 is rounded as one of 1 is

    def score(self, view: LayerView) -> torch.Tensor:
        directions = F.normalize(held(view.keys, view.valid), dim=-1)
        anchor = F.normalize(directions.sum(1, keepdim=True), dim=-1)  # of the mean, which has its direction
        return -(directions * anchor).sum(-1)
