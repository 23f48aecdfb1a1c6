"""Blocks of KV on the host, which hold the chunks that have left the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_blend.kv_store.host_memory import pinned_buffer
from vllm_blend.ops.paged_kv import PagedKV


class HostBlockPool:
    """Host memory for `num_blocks` blocks of all layers, with K (after RoPE) and V as they lie in the device's pages:
    `data` [num_blocks, 2, layers, block_size, kv_heads, head_dim]. A block is contiguous, so it moves in one copy.

    With `pinned` the memory is page-locked, for a GPU; otherwise the operating system provides pages when they are
    first written. Raises ValueError naming the setting if `budget_bytes` is below one block or cannot be pinned.
    """

    def __init__(
        self,
        budget_bytes: int,
        num_layers: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        pinned: bool = False,
    ) -> None:
        shape = (2, num_layers, block_size, kv_heads, head_dim)
        self.block_bytes = int(np.prod(shape)) * dtype.itemsize
        self.num_blocks = budget_bytes // self.block_bytes
        if self.num_blocks < 1:
            raise ValueError(
                f"offload_host_gib allows {budget_bytes} bytes, but one block of KV takes {self.block_bytes}: raise it"
            )
        size = self.num_blocks * self.block_bytes
        buffer = pinned_buffer(size, "offload_host_gib") if pinned else np.zeros(size, np.uint8)
        self.data = torch.from_numpy(buffer).view(dtype).view(self.num_blocks, *shape)
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._used = [False] * self.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks of undefined content; return None, with nothing taken, if fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._used[block] = True
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Return blocks to the pool. Raises RuntimeError for a block that is free."""
        for block in blocks:
            if not self._used[block]:
                raise RuntimeError(f"host block {block} was released, but it is free")
            self._used[block] = False
            self._free.append(block)

    def layer(self, layer: int) -> PagedKV:
        """Return K and V of a layer, views whose blocks are not next to one another."""
        return PagedKV(self.data[:, 0, layer], self.data[:, 1, layer])
