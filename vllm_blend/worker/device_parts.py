"""The parts that every forward pass of a worker needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_blend.attention.metadata import AttentionBackend
from vllm_blend.models.causal_lm import CausalLM
from vllm_blend.worker.kv_cache import KVCache
from vllm_blend.worker.shared_heads import ALL_HEADS, SharedHeads


@dataclass(frozen=True)
class DeviceParts:
    """A model, the cache that it writes to and the backend that attends there, on one device."""

    model: CausalLM
    cache: KVCache
    backend: AttentionBackend
    heads: SharedHeads = ALL_HEADS

    @property
    def device(self) -> torch.device:
        return self.cache.key.device
