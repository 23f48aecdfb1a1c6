"""The evidence that a check layer shows to selectors: nothing is copied that they do not ask for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Literal

import torch

from vllm_blend import ops
from vllm_blend.attention.context import NewKV
from vllm_blend.attention.kv_scales import KVScales, scaled
from vllm_blend.attention.metadata import LayerStep
from vllm_blend.blend.plan import BlendPlan
from vllm_blend.blend.selectors import Evidence
from vllm_blend.ops.deviation import squared_distance
from vllm_blend.ops.e4m3 import gathered, widened
from vllm_blend.ops.paged_kv import PagedKV
from vllm_blend.worker.shared_heads import ALL_HEADS, SharedHeads


class LayerEvidence(Evidence):
    """`Evidence` of the rows `rows` ([n] int64) of a step, before a layer's K and V overwrite the reused ones.

    Deviations are computed where K and V lie; the tensors of K and V are copies, made when first read. Valid during
    `Selector.score` only: the cache is written next.

    Where ranks share the heads, what is read counts all of them: rank 0 reads it, and has the others `look` at theirs.
    """

    _plan: BlendPlan
    _rows: torch.Tensor
    _new: NewKV
    _kv: PagedKV
    _slots: torch.Tensor
    _scales: KVScales | None
    _heads: SharedHeads
    _read: dict[str, torch.Tensor]

    def __init__(
        self,
        plan: BlendPlan,
        rows: torch.Tensor,
        step: LayerStep,
        new: NewKV,
        heads: SharedHeads = ALL_HEADS,
    ) -> None:
        """`new` is of the whole step."""
        # Into the dictionary, as Evidence is frozen; what it has beside these are the properties below.
        positions = step.metadata.positions[rows]
        self.__dict__.update(positions=positions, seed=plan.content_seed)
        self.__dict__.update(_plan=plan, _rows=rows, _new=new, _kv=step.kv, _slots=step.metadata.slot_mapping)
        self.__dict__.update(_scales=step.kv_scales, _heads=heads, _read={})

    def look(self, name: str) -> None:
        """Add this rank's part to what rank 0 reads: a method without arguments or an attribute."""
        found = getattr(self, name)
        if callable(found):
            found()

    def _announce(self, name: str) -> None:
        if self._heads.ranks.leads:
            self._heads.ranks.tell(name)

    def k_deviation(self) -> torch.Tensor:
        self._announce("k_deviation")
        return self._heads.kv_sum(self._deviation(self._new.k, self._kv.key, "k"))

    def v_deviation(self) -> torch.Tensor:
        self._announce("v_deviation")
        return self._heads.kv_sum(self._deviation(self._new.v, self._kv.value, "v"))

    @cached_property
    def chunk_offsets(self) -> torch.Tensor:
        return self._plan.chunk_offsets.to(self.positions.device, non_blocking=True)[self.positions]

    @property
    def k_new(self) -> torch.Tensor:
        return self._of_all_heads("k_new", lambda: self._unscaled(self._new.k[self._rows], "k"))

    @property
    def k_old(self) -> torch.Tensor:
        return self._of_all_heads("k_old", lambda: self._cached(self._kv.key, "k"))

    @property
    def v_new(self) -> torch.Tensor:
        return self._of_all_heads("v_new", lambda: self._unscaled(self._new.v[self._rows], "v"))

    @property
    def v_old(self) -> torch.Tensor:
        return self._of_all_heads("v_old", lambda: self._cached(self._kv.value, "v"))

    def _deviation(self, new: torch.Tensor, cached: torch.Tensor, which: Literal["k", "v"]) -> torch.Tensor:
        if self._scales is None:
            return ops.kv_deviation(new, cached, self._slots, self._rows)
        return squared_distance(self._unscaled(new[self._rows], which), self._cached(cached, which))

    def _cached(self, cache: torch.Tensor, which: Literal["k", "v"]) -> torch.Tensor:
        """Return the rows' K or V that are reused, in the dtype and units of the model."""
        cached = gathered(cache.flatten(0, 1), self._slots[self._rows])
        return self._unscaled(widened(cached, self._new.v.dtype), which)

    def _unscaled(self, x: torch.Tensor, which: Literal["k", "v"]) -> torch.Tensor:
        return x if self._scales is None else scaled(x, getattr(self._scales, which))

    def _of_all_heads(self, name: str, part: Callable[[], torch.Tensor]) -> torch.Tensor:
        if name not in self._read:
            self._announce(name)
            self._read[name] = self._heads.all_kv(part())
        return self._read[name]
