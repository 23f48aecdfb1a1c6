"""The evidence that a check layer shows to selectors: nothing is copied that they do not ask for."""

from __future__ import annotations

from functools import cached_property

import torch

from vllm_blend import ops
from vllm_blend.attention.context import NewKV
from vllm_blend.attention.metadata import LayerStep
from vllm_blend.blend.plan import BlendPlan
from vllm_blend.blend.selectors import Evidence
from vllm_blend.ops.paged_kv import PagedKV


class LayerEvidence(Evidence):
    """`Evidence` of the rows `rows` ([n] int64) of a step, before a layer's K and V overwrite the reused ones.

    Deviations are computed where K and V lie; the tensors of K and V are copies, made when first read. Valid during
    `Selector.score` only: the cache is written next.
    """

    _plan: BlendPlan
    _rows: torch.Tensor
    _new: NewKV
    _kv: PagedKV
    _slots: torch.Tensor

    def __init__(
        self,
        plan: BlendPlan,
        rows: torch.Tensor,
        step: LayerStep,
        new: NewKV,
        mass: torch.Tensor | None,
    ) -> None:
        """`new` is of the whole step; mass: [tokens] of the request."""
        # Into the dictionary, as Evidence is frozen; what it has beside these are the properties below.
        positions = step.metadata.positions[rows]
        self.__dict__.update(positions=positions, seed=plan.content_seed)
        self.__dict__.update(question_mass=None if mass is None else mass[positions])
        self.__dict__.update(_plan=plan, _rows=rows, _new=new, _kv=step.kv, _slots=step.metadata.slot_mapping)

    def k_deviation(self) -> torch.Tensor:
        return ops.kv_deviation(self._new.k, self._kv.key, self._slots, self._rows)

    def v_deviation(self) -> torch.Tensor:
        return ops.kv_deviation(self._new.v, self._kv.value, self._slots, self._rows)

    @cached_property
    def chunk_offsets(self) -> torch.Tensor:
        return self._plan.chunk_offsets.to(self.positions.device, non_blocking=True)[self.positions]

    @cached_property
    def k_new(self) -> torch.Tensor:
        return self._new.k[self._rows]

    @cached_property
    def k_old(self) -> torch.Tensor:
        return self._kv.key.flatten(0, 1)[self._slots[self._rows]]

    @cached_property
    def v_new(self) -> torch.Tensor:
        return self._new.v[self._rows]

    @cached_property
    def v_old(self) -> torch.Tensor:
        return self._kv.value.flatten(0, 1)[self._slots[self._rows]]
