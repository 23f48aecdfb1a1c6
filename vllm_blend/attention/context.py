"""What a forward pass carries besides its activations. The only global of the package (see `forward_context`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerStep
from vllm_blend.ops.host_copy import to_device
from vllm_blend.ops.paged_kv import PagedKV


@dataclass(frozen=True)
class Kept:
    """The rows of a step that stay active, and their offsets per request.

    A hook that knows the offsets on the host saves the device a synchronisation.
    """

    rows: torch.Tensor  # [n] int64, ascending
    query_start_loc: list[int] | None = None


class NewKV(NamedTuple):
    """K and V that a layer has computed in a step, each [tokens, kv_heads, head_dim]."""

    k_unrotated: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class LayerHook:
    """What a step may watch, or narrow, inside each layer. Models know no more of blending and of features."""

    def before_layer(self, layer_idx: int) -> None:
        """Prepare the layer's cache, before anything of it is read or written."""

    def wants_kv(self, layer_idx: int) -> bool:
        """Return whether `on_kv` has anything to do here; where none has, rotation and cache write are one pass."""
        return type(self).on_kv is not LayerHook.on_kv

    def on_kv(self, step: LayerStep, new: NewKV) -> Kept | None:
        """Look at this step's K and V before they are written to the cache.

        Returning `Kept` rows drops every other row from this layer's queries on: K and V of all rows are
        still written, attention and everything after it run for the returned rows only.
        """
        return None

    def wants_unrotated_kv(self) -> bool:
        """Return whether `on_unrotated_kv` has anything to do. The layer then still rotates and writes in one pass."""
        return type(self).on_unrotated_kv is not LayerHook.on_unrotated_kv

    def on_unrotated_kv(
        self, layer_idx: int, kv: PagedKV, metadata: AttentionMetadata, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Look at this step's K before RoPE and V, each [tokens, kv_heads, head_dim], before they are written to the
        layer's cache `kv`, and after every `on_kv`. The hook may write the slots of other tokens."""

    def on_query(self, step: LayerStep) -> None:
        """Look at the rotated queries after K and V are in the cache."""


@dataclass
class ForwardContext:
    """State of the forward pass in flight; `metadata` is replaced when the active token set shrinks.

    `caches` are those of the layers that run, which in a pass that only looks are the model's first ones.
    `num_outputs` says of how many rows per request the hidden states are wanted, the last so many (None: of all). The
    last layer computes K and V of every row and the rest for these: in a prefill, one row instead of thousands.
    """

    metadata: AttentionMetadata
    caches: Sequence[PagedKV]
    backend: AttentionBackend
    hooks: Sequence[LayerHook] = field(default_factory=tuple)
    num_outputs: Sequence[int] | None = None
    by_layer: Sequence[AttentionMetadata] | None = None  # instead of `metadata`, where layers differ; nothing narrows
    computed: AttentionMetadata = field(init=False)  # of the rows whose K and V the last layer computed

    def __post_init__(self) -> None:
        self.computed = self.metadata

    def of_layer(self, layer_idx: int) -> AttentionMetadata:
        """Return what holds in a layer."""
        return self.metadata if self.by_layer is None else self.by_layer[layer_idx]

    def narrow(self, kept: Kept) -> None:
        """Go on with the kept rows only."""
        offsets = kept.query_start_loc
        if offsets is None:
            bounds = torch.tensor(self.metadata.query_start_loc, device=kept.rows.device)
            offsets = torch.searchsorted(kept.rows, bounds).tolist()
        self.metadata = self.computed = self.metadata.narrow(kept.rows, offsets)

    def narrow_to_outputs(self, layer_idx: int) -> torch.Tensor | None:
        """Go on with the rows that are wanted, in the last layer; return which ones ([n] int64), None for all."""
        bounds = self.metadata.query_start_loc
        if self.num_outputs is None or layer_idx < len(self.caches) - 1 or sum(self.num_outputs) == bounds[-1]:
            return None
        device = self.metadata.positions.device
        if any(self.num_outputs):
            pieces = [np.arange(stop - n, stop) for stop, n in zip(bounds[1:], self.num_outputs, strict=True)]
            rows = to_device(np.concatenate(pieces), device)
        else:  # nothing to transfer, also within a graph
            rows = torch.empty(0, dtype=torch.int64, device=device)
        self.metadata = self.metadata.narrow(rows, [0, *accumulate(self.num_outputs)])
        return rows


_current: ContextVar[ForwardContext | None] = ContextVar("forward_context", default=None)  # engines may have threads


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make `context` visible to the attention layers for the duration of one forward pass."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


def current_context() -> ForwardContext:
    context = _current.get()
    if context is None:
        raise RuntimeError(
            "a model's forward needs a forward_context(...) around it: attention has no cache to write to"
        )
    return context
