"""Whether stored KV is that of the chunk that was asked for.

A checksum says that bytes are those that were written, not that they are KV of this model and of these tokens. KV of
another layout would be read past its end, or written to pages of other requests, so every way into an engine asks
`find_mismatch` first: disk and server as soon as they know what a chunk says of itself, before they take memory for it,
and folders, the memory and the caller's own KV before it is used. What differs is foreign: a miss.

KV with numbers that are not finite has the right layout, and fails every prompt that uses it: it is damaged, and
`is_finite` finds it where KV comes from outside of the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.keys import ChunkId, ModelFingerprint


@dataclass(frozen=True)
class ExpectedChunk:
    """A chunk of a model, as the prompt that asks for it needs it."""

    model: ModelFingerprint
    chunk: ChunkId
    num_kvs: int | None = None  # that each head has kept of a compressed chunk; None: the chunk is whole

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return the shape of K and of V: [layers, KVs, kv_heads, head_dim]."""
        model, tokens = self.model, len(self.chunk.token_ids)
        return model.num_layers, tokens if self.num_kvs is None else self.num_kvs, model.num_kv_heads, model.head_dim


def find_mismatch(
    expected: ExpectedChunk,
    shape: Sequence[int],
    dtype: torch.dtype,
    length: int | None,
    token_ids: Sequence[int] | None = None,
) -> str | None:
    """Say how KV differs from what is expected; None where it does not.

    `shape` and `dtype` are those of K and of V, and `length` is the number of tokens of a compressed chunk, None for a
    whole one. `token_ids` are those that were stored with the KV, None where none were.
    """
    tokens = len(expected.chunk.token_ids)
    if token_ids is not None and tuple(token_ids) != expected.chunk.token_ids:
        return f"it was stored for {len(token_ids)} other tokens than the {tokens} asked for"
    if length != (None if expected.num_kvs is None else tokens):
        found, wanted = (
            "whole" if count is None else f"compressed, of {count} tokens"
            for count in (length, None if expected.num_kvs is None else tokens)
        )
        return f"it is {found}, but the chunk asked for is {wanted}"
    name = str(dtype).removeprefix("torch.")
    if tuple(shape) != expected.shape or name != expected.model.dtype:
        return (
            f"it is {name} {list(shape)}, but this model's is {expected.model.dtype} {list(expected.shape)} "
            "[layers, KVs, kv_heads, head_dim]"
        )
    return None


def is_finite(kv: torch.Tensor) -> bool:
    """Return whether no number of K or V is infinite or NaN."""
    if kv.device.type != "cpu":
        return bool(kv.isfinite().all())
    # What is not finite is as large as infinity or larger if its bits are taken for an integer: a signed one without
    # the sign, an unsigned one with it. This is ten times as fast as torch.isfinite, which a disk would wait for.
    signed, unsigned = (torch.int16, np.uint16) if kv.itemsize == 2 else (torch.int32, np.uint32)
    bits = kv.detach().view(signed).numpy()
    infinity, minus_infinity = torch.tensor([torch.inf, -torch.inf], dtype=kv.dtype).view(signed).numpy().view(unsigned)
    return bool(bits.max() < infinity and bits.view(unsigned).max() < minus_infinity)


def find_kv_mismatch(expected: ExpectedChunk, kv: ChunkKV) -> str | None:
    """Say how KV that is in memory differs from what is expected; None where it does not."""
    token_ids = None if kv.content is None else kv.content.token_ids
    mismatch = find_mismatch(expected, kv.k.shape, kv.k.dtype, kv.length, token_ids)
    if mismatch is None and kv.v.dtype != kv.k.dtype:
        mismatch = f"its K is {kv.k.dtype} and its V {kv.v.dtype}"
    if mismatch is None and not kv.is_sound:
        mismatch = "its positions are not ascending positions of the chunk"
    return mismatch
