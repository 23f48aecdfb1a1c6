"""The pages themselves: one tensor of K and one of V for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from vllm_blend.attention.metadata import LayerCache


@dataclass(frozen=True)
class KVCache:
    """K (after RoPE) and V, each [layers, num_blocks, block_size, kv_heads, head_dim]."""

    key: torch.Tensor
    value: torch.Tensor

    @cached_property
    def layers(self) -> tuple[LayerCache, ...]:
        return tuple(LayerCache(k, v) for k, v in zip(self.key, self.value, strict=True))

    @property
    def num_blocks(self) -> int:
        return self.key.shape[1]

    @property
    def block_size(self) -> int:
        return self.key.shape[2]

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        shape = (num_layers, num_blocks, block_size, kv_heads, head_dim)
        return cls(zeros(shape, dtype, device), zeros(shape, dtype, device))


def bytes_per_block(num_layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """K and V of one block in all layers."""
    return 2 * num_layers * block_size * kv_heads * head_dim * dtype.itemsize


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As torch.zeros, but on the host what is never written takes no memory."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # calloc: the operating system gives pages when they are first written, so an unused pool costs no memory.
    count = int(np.prod(shape))
    return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype).view(shape)
