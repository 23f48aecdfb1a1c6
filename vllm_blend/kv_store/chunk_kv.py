"""The KV cache of one chunk, as it is stored: canonical, before RoPE, layer-major."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch

from vllm_blend.kv_store.keys import ChunkId
from vllm_blend.ops import HostKV


class ChunkLost(Exception):
    """A chunk that was on its way from a store has not arrived, and will not: it has to be computed again."""


class Arriving(Protocol):
    """A chunk that other threads fill, layer by layer."""

    @property
    def is_whole(self) -> bool:
        """Whether every layer has arrived. Never waits."""

    @property
    def is_lost(self) -> bool:
        """Whether some layer will not arrive. Never waits."""

    @property
    def bytes_left(self) -> int:
        """Of KV, that have not arrived. Never waits."""

    def wait_layer(self, layer: int) -> None:
        """Return when a layer has arrived; raises ChunkLost, among others when a deadline has passed."""


@dataclass(frozen=True)
class ChunkKV:
    """K before RoPE and V of a chunk, each [layers, tokens, kv_heads, head_dim].

    Of a compressed chunk of `length` tokens, every head has only as many KVs as `positions` [layers, KVs, kv_heads]
    int32 names, and K and V are [layers, KVs, kv_heads, head_dim]: which tokens of the chunk they are of, ascending for
    each head. These are on the host, wherever K and V are.

    `written` is set where a GPU fills the tensors in the background: a stream that reads them waits for it, and the
    host calls `wait` before it looks. `arriving` is set where other threads fill them from a disk: whoever reads a
    layer asks it first. `content` says which chunk it is, where somebody knows: keys are digests, and whoever exports
    a store needs the tokens.
    """

    k: torch.Tensor
    v: torch.Tensor
    written: torch.cuda.Event | None = None
    arriving: Arriving | None = None
    content: ChunkId | None = None
    positions: torch.Tensor | None = None  # None: of all tokens, in order
    length: int | None = None  # given with `positions`
    loaded_from: str | None = None  # the tier that a store has just loaded it from; what the store keeps does not say

    def __post_init__(self) -> None:
        if self.k.dim() != 4 or self.k.shape != self.v.shape:
            raise ValueError(
                f"chunk K {list(self.k.shape)} and V {list(self.v.shape)} must both be "
                "[layers, tokens, kv_heads, head_dim]"
            )
        if (self.positions is None) != (self.length is None):
            raise ValueError("positions and length of a compressed chunk must both be given, or neither")
        if self.positions is not None and (
            self.positions.shape != self.k.shape[:3]
            or self.positions.dtype != torch.int32
            or self.positions.device.type != "cpu"
        ):
            raise ValueError(
                f"positions {self.positions.dtype} {list(self.positions.shape)} on {self.positions.device} must be "
                f"int32 {list(self.k.shape[:3])} [layers, KVs, kv_heads] on the host, as K and V are"
            )

    @cached_property
    def on_host(self) -> HostKV | None:
        """What copying to a GPU needs to know; None where the tensors cannot be copied layer by layer from the host."""
        return HostKV.of(self.k, self.v)

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk; a compressed one has fewer KVs."""
        return self.k.shape[1] if self.length is None else self.length

    @property
    def num_kvs(self) -> int:
        """KVs of each head."""
        return self.k.shape[1]

    @cached_property
    def is_sound(self) -> bool:
        """Whether `positions` are ascending positions of the chunk, for each head."""
        if self.positions is None or self.length is None:
            return True
        inside = int(self.positions.min()) >= 0 and int(self.positions.max()) < self.length
        return inside and bool((self.positions.diff(dim=1) > 0).all())

    def wait(self) -> None:
        """Return when the tensors are filled. Raises ChunkLost where they will not be."""
        if self.written is not None:
            self.written.synchronize()
        if self.arriving is not None:
            for layer in range(self.k.shape[0]):
                self.arriving.wait_layer(layer)

    def copy(self) -> ChunkKV:
        """The same KV in memory of its own."""
        self.wait()
        contiguous = torch.contiguous_format
        k, v = (t.clone(memory_format=contiguous) for t in (self.k, self.v))
        return self.moved(k, v)

    def moved(self, k: torch.Tensor, v: torch.Tensor, written: torch.cuda.Event | None = None) -> ChunkKV:
        """The same KV, whose K and V are elsewhere."""
        positions = None if self.positions is None else self.positions.clone()
        return replace(self, k=k, v=v, written=written, arriving=None, positions=positions)

    def of(self, content: ChunkId) -> ChunkKV:
        """The same KV, known to be that of `content`."""
        return replace(self, content=content)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes + (0 if self.positions is None else self.positions.nbytes)
