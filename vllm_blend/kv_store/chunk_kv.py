"""The KV cache of one chunk, as it is stored: canonical, before RoPE, layer-major."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ChunkKV:
    """K before RoPE and V of a chunk, each [layers, tokens, kv_heads, head_dim]."""

    k: torch.Tensor
    v: torch.Tensor

    def __post_init__(self) -> None:
        if self.k.dim() != 4 or self.k.shape != self.v.shape:
            raise ValueError(
                f"chunk K {list(self.k.shape)} and V {list(self.v.shape)} must both be "
                "[layers, tokens, kv_heads, head_dim]"
            )

    @property
    def num_tokens(self) -> int:
        return self.k.shape[1]

    def copy(self) -> ChunkKV:
        """The same KV in memory of its own."""
        return ChunkKV(self.k.clone(), self.v.clone())

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes
