"""What a check layer shows to selectors, without copying what they do not ask for."""

from __future__ import annotations

from functools import cached_property

import torch

from vllm_blend import ops
from vllm_blend.attention.metadata import AttentionMetadata, LayerCache
from vllm_blend.blend.plan import BlendPlan
from vllm_blend.blend.selectors import Evidence


class LayerEvidence(Evidence):
    """`Evidence` of the rows `rows` ([n] int64) of a step, before a layer's K and V overwrite the reused ones.

    Deviations are computed where K and V lie; the tensors of K and V are copies, made when first read. Valid during
    `Selector.score` only: the cache is written next.
    """

    _plan: BlendPlan
    _rows: torch.Tensor
    _k: torch.Tensor
    _v: torch.Tensor
    _cache: LayerCache
    _slots: torch.Tensor

    def __init__(
        self,
        plan: BlendPlan,
        rows: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        mass: torch.Tensor | None,
    ) -> None:
        """k (rotated), v: [tokens, kv_heads, head_dim] of the whole step; mass: [tokens] of the request."""
        # Into the dictionary, as Evidence is frozen; what it has beside these are the properties below.
        positions = metadata.positions[rows]
        self.__dict__.update(positions=positions, seed=plan.content_seed)
        self.__dict__.update(question_mass=None if mass is None else mass[positions])
        self.__dict__.update(_plan=plan, _rows=rows, _k=k, _v=v, _cache=cache, _slots=metadata.slot_mapping)

    def k_deviation(self) -> torch.Tensor:
        return ops.kv_deviation(self._k, self._cache.key, self._slots, self._rows)

    def v_deviation(self) -> torch.Tensor:
        return ops.kv_deviation(self._v, self._cache.value, self._slots, self._rows)

    @cached_property
    def chunk_offsets(self) -> torch.Tensor:
        return self._plan.chunk_offsets.to(self.positions.device, non_blocking=True)[self.positions]

    @cached_property
    def k_new(self) -> torch.Tensor:
        return self._k[self._rows]

    @cached_property
    def k_old(self) -> torch.Tensor:
        return self._cache.key.flatten(0, 1)[self._slots[self._rows]]

    @cached_property
    def v_new(self) -> torch.Tensor:
        return self._v[self._rows]

    @cached_property
    def v_old(self) -> torch.Tensor:
        return self._cache.value.flatten(0, 1)[self._slots[self._rows]]
