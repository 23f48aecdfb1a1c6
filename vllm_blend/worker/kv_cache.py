"""The pages themselves: one tensor of K and one of V for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from vllm_blend.ops.paged_kv import PagedKV


@dataclass(frozen=True)
class CacheShape:
    """The sizes of the K and V that a model keeps."""

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one token's K and V in all layers."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class KVCache:
    """K (after RoPE) and V, each [layers, num_blocks, block_size, kv_heads, head_dim]."""

    key: torch.Tensor
    value: torch.Tensor

    @cached_property
    def layers(self) -> tuple[PagedKV, ...]:
        return tuple(PagedKV(k, v) for k, v in zip(self.key, self.value, strict=True))

    @property
    def num_blocks(self) -> int:
        return self.key.shape[1]

    @property
    def block_size(self) -> int:
        return self.key.shape[2]

    @classmethod
    def allocate(cls, shape: CacheShape, num_blocks: int, block_size: int, device: torch.device) -> KVCache:
        """Return a cache of so many blocks, all zeros."""
        sizes = (shape.num_layers, num_blocks, block_size, shape.kv_heads, shape.head_dim)
        return cls(zeros(sizes, shape.dtype, device), zeros(sizes, shape.dtype, device))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros as torch.zeros does, but on the host what is never written takes no memory."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # calloc: the operating system gives pages when they are first written, so an unused pool costs no memory.
    count = int(np.prod(shape))
    return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype).view(shape)
