"""The KV cache of one chunk, as it is stored: canonical, before RoPE, layer-major; and whether it is the right one.

A checksum says that bytes are those that were written, not that they are KV of this model and of these tokens. KV of
another layout would be read past its end, or written to pages of other requests, so every way into an engine asks
`find_mismatch` first: disk and server as soon as they know what a chunk says of itself, before they take memory for it,
and folders, the memory and the caller's own KV before it is used. What differs is foreign: a miss.

KV with numbers that are not finite has the right layout, and fails every prompt that uses it: it is damaged, and
`is_finite` finds it where KV comes from outside of the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Protocol

import numpy as np
import torch

from vllm_blend.distributed.parts import ChunkParts
from vllm_blend.kv_store.keys import ChunkId, ModelFingerprint
from vllm_blend.kv_store.owners import ANYONE, Owner
from vllm_blend.ops import HostKV
from vllm_blend.ops.e4m3 import E4M3

STORED_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": E4M3,  # in the units of the engine's `KVScales`, which are part of the model's fingerprint
}


class ChunkLost(Exception):
    """A chunk that was on its way from a store has not arrived, and will not: it has to be computed again."""


class Arriving(Protocol):
    """A chunk that other threads fill, layer by layer. Only `wait_layer` waits."""

    @property
    def is_whole(self) -> bool:
        """Return whether every layer has arrived."""

    @property
    def is_lost(self) -> bool:
        """Return whether some layer will not arrive."""

    @property
    def bytes_left(self) -> int:
        """Return the bytes of KV that have not arrived."""

    def wait_layer(self, layer: int) -> None:
        """Return when a layer has arrived. Raises ChunkLost, for example when a deadline has passed."""


@dataclass(frozen=True)
class ChunkKV:
    """K before RoPE and V of a chunk, each [layers, tokens, kv_heads, head_dim].

    `written` is set where a GPU fills the tensors in the background: a stream that reads them waits for it, and the
    host calls `wait` before it looks. `arriving` is set where other threads fill them from a disk: code that reads a
    layer asks it first. `content` says which chunk it is, where that is known: keys are digests, and an export needs
    the tokens. `loaded_from` is the tier that a store has just loaded the chunk from; it is not set on what the store
    keeps. `owner` is whose space it takes. Where ranks share the model, K and V have this rank's heads, and `parts`
    keeps those of the others.
    """

    k: torch.Tensor
    v: torch.Tensor
    written: torch.cuda.Event | None = None
    arriving: Arriving | None = None
    content: ChunkId | None = None
    loaded_from: str | None = None
    parts: ChunkParts | None = None
    owner: Owner = ANYONE

    def __post_init__(self) -> None:
        if self.k.dim() != 4 or self.k.shape != self.v.shape:
            raise ValueError(
                f"chunk K {list(self.k.shape)} and V {list(self.v.shape)} must both be "
                "[layers, tokens, kv_heads, head_dim]"
            )

    @classmethod
    def collected(cls, kv: torch.Tensor) -> ChunkKV:
        """Return the KV that a request has collected, [2, layers, tokens, kv_heads, head_dim]."""
        k, v = kv.unbind(0)
        return cls(k.contiguous(), v.contiguous())

    @cached_property
    def on_host(self) -> HostKV | None:
        """Return what a copy to a GPU needs to know, or None if the host's tensors cannot be copied layer by layer."""
        return HostKV.from_tensors(self.k, self.v)

    @property
    def num_tokens(self) -> int:
        return self.k.shape[1]

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def wait(self) -> None:
        """Return when the tensors are filled. Raises ChunkLost where they will not be."""
        if self.written is not None:
            self.written.synchronize()
        if self.arriving is not None:
            for layer in range(self.k.shape[0]):
                self.arriving.wait_layer(layer)

    def copy(self) -> ChunkKV:
        """Return the same KV in memory of its own."""
        self.wait()
        contiguous = torch.contiguous_format
        k, v = (t.clone(memory_format=contiguous) for t in (self.k, self.v))
        return self.moved(k, v)

    def moved(self, k: torch.Tensor, v: torch.Tensor) -> ChunkKV:
        """Return the same KV, whose K and V are elsewhere."""
        return replace(self, k=k, v=v, written=None, arriving=None)

    def with_content(self, content: ChunkId) -> ChunkKV:
        """Return the same KV, known to be that of `content`."""
        return replace(self, content=content)

    def owned_by(self, owner: Owner) -> ChunkKV:
        """Return the same KV, which takes the space of an owner."""
        return replace(self, owner=owner)


@dataclass(frozen=True)
class ExpectedChunk:
    """A chunk of a model, as the prompt that asks for it needs it."""

    model: ModelFingerprint
    chunk: ChunkId

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return the shape of K and of V: [layers, tokens, kv_heads, head_dim]."""
        model = self.model
        return model.num_layers, len(self.chunk.token_ids), model.num_kv_heads, model.head_dim

    @property
    def num_bytes(self) -> int:
        """Return the bytes of K and V."""
        return 2 * prod(self.shape) * STORED_DTYPES[self.model.dtype].itemsize


def find_mismatch(
    expected: ExpectedChunk, shape: Sequence[int], dtype: torch.dtype, token_ids: Sequence[int] | None = None
) -> str | None:
    """Return how KV differs from what is expected, in words; None if it does not.

    `shape` and `dtype` are those of K and of V. `token_ids` are those that were stored with the KV, None if none
    were.
    """
    tokens = len(expected.chunk.token_ids)
    if token_ids is not None and tuple(token_ids) != expected.chunk.token_ids:
        return f"it was stored for {len(token_ids)} other tokens than the {tokens} asked for"
    name = str(dtype).removeprefix("torch.")
    if tuple(shape) != expected.shape or name != expected.model.dtype:
        return (
            f"it is {name} {list(shape)}, but this model's is {expected.model.dtype} {list(expected.shape)} "
            "[layers, tokens, kv_heads, head_dim]"
        )
    return None


def find_kv_mismatch(expected: ExpectedChunk, kv: ChunkKV) -> str | None:
    """Return how KV that is in memory differs from what is expected, in words; None if it does not."""
    token_ids = None if kv.content is None else kv.content.token_ids
    mismatch = find_mismatch(expected, kv.k.shape, kv.k.dtype, token_ids)
    if mismatch is None and kv.v.dtype != kv.k.dtype:
        mismatch = f"its K is {kv.k.dtype} and its V {kv.v.dtype}"
    return mismatch


def is_finite(kv: torch.Tensor) -> bool:
    """Return whether no number of K or V is infinite or NaN."""
    if kv.dtype is E4M3:  # which has no infinities, and two NaNs
        return bool(kv.detach().view(torch.uint8).bitwise_and(0x7F).max() < 0x7F)
    if kv.device.type != "cpu":
        return bool(kv.isfinite().all())
    # What is not finite is as large as infinity or larger if its bits are taken for an integer: a signed one without
    # the sign, an unsigned one with it. On a CPU with AVX-512 this was twice as fast as torch.isfinite
    # for ten thousand numbers, and 24 times or more for two million; a disk would wait for that one.
    signed, unsigned = (torch.int16, np.uint16) if kv.itemsize == 2 else (torch.int32, np.uint32)
    bits = kv.detach().view(signed).numpy()
    infinity, minus_infinity = torch.tensor([torch.inf, -torch.inf], dtype=kv.dtype).view(signed).numpy().view(unsigned)
    return bool(bits.max() < infinity and bits.view(unsigned).max() < minus_infinity)
