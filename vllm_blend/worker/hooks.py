"""The layer hooks that a step runs with: capture KV, measure the question's attention, narrow to the chosen tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from vllm_blend.attention.context import Kept, LayerHook, NewKV
from vllm_blend.attention.metadata import AttentionBackend, LayerStep
from vllm_blend.blend.plan import BlendPlan
from vllm_blend.blend.selectors import Look, choose
from vllm_blend.distributed.ranks import RankLostError
from vllm_blend.ops.e4m3 import narrowed
from vllm_blend.worker.evidence import LayerEvidence
from vllm_blend.worker.shared_heads import ALL_HEADS, SharedHeads, agree


class CaptureHook(LayerHook):
    """Keeps K before RoPE and V of some requests' rows, in the memory where they stay: a chunk is large."""

    def __init__(self, first_rows: dict[int, int], num_layers: int, dtypes: dict[int, torch.dtype]) -> None:
        """first_rows: request of the step -> the first of its rows to keep; dtypes: what these are kept in, where it
        is not the model's dtype."""
        self.first_rows, self.num_layers, self.dtypes = first_rows, num_layers, dtypes
        self._captured: dict[int, torch.Tensor] = {}

    def on_kv(self, step: LayerStep, new: NewKV) -> None:
        for request, first in self.first_rows.items():
            rows = step.metadata.rows(request)
            rows = slice(rows.start + first, rows.stop)
            dtype = self.dtypes.get(request, new.v.dtype)
            k, v = (narrowed(x[rows], dtype) for x in (new.k_unrotated, new.v))
            if request not in self._captured:
                self._captured[request] = k.new_empty(2, self.num_layers, *k.shape)
            self._captured[request][0, step.layer_idx] = k
            self._captured[request][1, step.layer_idx] = v

    def captured(self, request: int) -> torch.Tensor:
        """Return a request's kept rows: [2, layers, tokens, kv_heads, head_dim]."""
        return self._captured[request]


class QuestionMassHook(LayerHook):
    """Gathers, over the layers, the attention that each request's suffix rows pay to every position of their
    request."""

    def __init__(
        self,
        backend: AttentionBackend,
        num_suffix_rows: Sequence[int],
        looks: Sequence[Look],
        ignored: torch.Tensor | None = None,
        heads: SharedHeads = ALL_HEADS,
    ) -> None:
        """`looks`: the layers that count for each request. `ignored` [tokens] bool: rows that do not count, see
        `AttentionBackend.add_attention_mass`."""
        self.backend, self.num_rows, self.looks = backend, num_suffix_rows, looks
        self.ignored, self.heads = ignored, heads
        self._masses: list[torch.Tensor] = []  # per request [kv_heads, seq_len] float32

    def on_query(self, step: LayerStep) -> None:
        metadata = step.metadata
        if not self._masses:
            shapes = [(step.kv.kv_heads, n) for n in metadata.seq_lens]
            self._masses = [torch.zeros(shape, device=step.q.device) for shape in shapes]
        rows = []
        for look, count, stop in zip(self.looks, self.num_rows, metadata.query_start_loc[1:], strict=True):
            counts = look.first <= step.layer_idx < look.stop
            rows.append(slice(stop - count if counts else stop, stop))
        self.backend.add_attention_mass(self._masses, step, rows, self.ignored)

    def masses(self) -> list[torch.Tensor]:
        """Return the mass of each request, [seq_len] float32: the sum over its rows, the mean over heads and layers."""
        layers = [look.stop - look.first for look in self.looks]
        return [self.heads.mean(mass.sum(0) / count) for mass, count in zip(self._masses, layers, strict=True)]


@dataclass
class _Narrowing:
    """The state of a blended request while its token set shrinks: rows relative to its first row, int64, ascending."""

    plan: BlendPlan
    candidates: torch.Tensor  # still in the running
    others: torch.Tensor  # holes, suffix, generated tokens: never dropped


class NarrowingHook(LayerHook):
    """Chooses tokens at check layers, by comparing fresh K and V with what the cache still holds there.

    A selector that fails leaves its request whole, which is right and slow; the caller reports `errors`. How many rows
    stay is known before which ones, so nothing here waits for the device.
    """

    def __init__(
        self,
        plans: dict[int, tuple[BlendPlan, torch.Tensor]],
        device: torch.device,
        heads: SharedHeads = ALL_HEADS,
    ) -> None:
        """plans: request of the step -> its plan, and the positions it starts with ([n] int64, on the host)."""
        self.errors: dict[int, str] = {}
        self._heads = heads
        self._state = {request: _start(*given, device) for request, given in plans.items()}
        self._layers = {layer for plan, _ in plans.values() for layer in plan.check_layers}

    def wants_kv(self, layer_idx: int) -> bool:
        return layer_idx in self._layers

    def on_kv(self, step: LayerStep, new: NewKV) -> Kept | None:
        if step.layer_idx not in self._layers:
            return None
        kept, offsets = [], [0]
        for request in range(step.metadata.num_requests):
            rows = step.metadata.rows(request)
            chosen = self._choose(request, rows.start, step, new)
            if chosen is None:
                kept.append(torch.arange(rows.start, rows.stop, device=new.k.device))
            else:
                kept.append(chosen + rows.start)
            offsets.append(offsets[-1] + len(kept[-1]))
        return Kept(torch.cat(kept), offsets)

    def _choose(self, request: int, start: int, step: LayerStep, new: NewKV) -> torch.Tensor | None:
        """Return the relative rows that a request keeps at this layer, None for all."""
        layer_idx = step.layer_idx
        state = self._state.get(request)
        if state is None or layer_idx not in state.plan.check_layers or request in self.errors:
            return None
        plan = state.plan
        budget = plan.budget(plan.shares[plan.check_layers.index(layer_idx)])
        try:
            evidence = LayerEvidence(plan, start + state.candidates, step, new, self._heads)
            own = partial(choose, plan.selector, evidence, budget)
            chosen = state.candidates[agree(self._heads.ranks, own, new.k.device, evidence.look)]
        except RankLostError:
            raise
        except Exception as error:  # a user's selector may raise anything; it may only cost its own request
            self.errors[request] = f"the selector {plan.selector.name!r} failed: {error!r}"
            return None
        rows = torch.cat([chosen, state.others]).sort().values
        self._state[request] = _Narrowing(
            plan, torch.searchsorted(rows, chosen), torch.searchsorted(rows, state.others)
        )
        return rows


def _start(plan: BlendPlan, positions: torch.Tensor, device: torch.device) -> _Narrowing:
    is_candidate = torch.isin(positions, plan.candidates)
    rows = torch.arange(len(positions))
    candidates, others = rows[is_candidate], rows[~is_candidate]
    return _Narrowing(plan, candidates.to(device, non_blocking=True), others.to(device, non_blocking=True))
