"""What a forward pass carries besides its activations. The only global of the package (see `forward_context`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerCache


@dataclass(frozen=True)
class Kept:
    """The rows of a step that stay active, and their offsets per request.

    A hook that knows the offsets on the host saves the device a synchronisation.
    """

    rows: torch.Tensor  # [n] int64, ascending
    query_start_loc: list[int] | None = None


class LayerHook:
    """What a step may watch, or narrow, inside each layer. Blending lives behind this; models know nothing else of
    it."""

    def wants_kv(self, layer_idx: int) -> bool:
        """Whether `on_kv` has anything to do at this layer: without it, rotation and cache write are one pass."""
        return type(self).on_kv is not LayerHook.on_kv

    def on_kv(
        self,
        layer_idx: int,
        k_unrotated: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
    ) -> Kept | None:
        """Called with this step's K and V [tokens, kv_heads, head_dim] before they are written to the cache.

        Returning `Kept` rows drops every other row from this layer's queries on: K and V of all rows are
        still written, attention and everything after it run for the returned rows only.
        """
        return None

    def on_query(
        self,
        layer_idx: int,
        q: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> None:
        """Called with the rotated queries [tokens, heads, head_dim] after K and V are in the cache."""


@dataclass
class ForwardContext:
    """State of the forward pass in flight; `metadata` is replaced when the active token set shrinks."""

    metadata: AttentionMetadata
    caches: Sequence[LayerCache]
    backend: AttentionBackend
    hooks: Sequence[LayerHook] = field(default_factory=tuple)

    def narrow(self, kept: Kept) -> None:
        """Go on with the kept rows only."""
        offsets = kept.query_start_loc
        if offsets is None:
            bounds = torch.tensor(self.metadata.query_start_loc, device=kept.rows.device)
            offsets = torch.searchsorted(kept.rows, bounds).tolist()
        self.metadata = self.metadata.narrow(kept.rows, offsets)


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
