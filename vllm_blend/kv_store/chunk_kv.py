"""The KV cache of one chunk, as it is stored: canonical, before RoPE, layer-major."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_blend.ops import HostKV


@dataclass(frozen=True)
class ChunkKV:
    """K before RoPE and V of a chunk, each [layers, tokens, kv_heads, head_dim].

    `written` is set where a GPU fills the tensors in the background: a stream that reads them waits for it, and the
    host calls `wait` before it looks.
    """

    k: torch.Tensor
    v: torch.Tensor
    written: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        if self.k.dim() != 4 or self.k.shape != self.v.shape:
            raise ValueError(
                f"chunk K {list(self.k.shape)} and V {list(self.v.shape)} must both be "
                "[layers, tokens, kv_heads, head_dim]"
            )

    @cached_property
    def on_host(self) -> HostKV | None:
        """What copying to a GPU needs to know; None where the tensors cannot be copied layer by layer from the host."""
        return HostKV.of(self.k, self.v)

    @property
    def num_tokens(self) -> int:
        return self.k.shape[1]

    def wait(self) -> None:
        """Return when the tensors are filled."""
        if self.written is not None:
            self.written.synchronize()

    def copy(self) -> ChunkKV:
        """The same KV in memory of its own."""
        self.wait()
        contiguous = torch.contiguous_format
        return ChunkKV(self.k.clone(memory_format=contiguous), self.v.clone(memory_format=contiguous))

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes
