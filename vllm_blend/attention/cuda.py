"""The contract on our CUDA kernels: tensor-core prefill of any positions, and decode that reads K and V once.

A step's requests fall into groups of neighbours: those with one query and those with a few are decoded, the rest are
prefilled. Each group is planned once a step, at its first layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerStep
from vllm_blend.ops import cuda_attention, cuda_library
from vllm_blend.ops.cuda_attention import AttentionPlan, MassPlan
from vllm_blend.ops.host_copy import to_device


@dataclass(frozen=True)
class _Group:
    rows: slice
    plan: AttentionPlan


@dataclass
class _Planned:
    """What the layers of a step share, by heads, cache shape and window."""

    metadata: AttentionMetadata
    captured: bool  # a plan made outside a graph would be stale in its replays
    groups: dict[tuple[int, int, int, int | None], list[_Group]] = field(default_factory=dict)


class CUDABackend(AttentionBackend):
    """See the module's docstring. Takes float16 and bfloat16 on compute capability 8.0 or later.

    Raises RuntimeError when the kernels are not built.
    """

    name = "cuda"
    smallest_block = 16
    capturable_decode = True
    capturable_prefill = True
    capturable_mass = True
    capturable_cascade = True

    def __init__(self) -> None:
        reason = cuda_library.unavailable_reason()
        if reason is not None:
            raise RuntimeError(
                "attention_backend='cuda' needs a CUDA device and the compiled kernels, or use 'auto' or "
                f"'torch_native': {reason}"
            )
        self._planned: _Planned | None = None
        self._mass_plan: MassPlan | None = None
        # Queries, and the output that came with their log-sum-exp before the layer asked for it.
        self._attended: tuple[torch.Tensor, torch.Tensor] | None = None

    def attend(self, step: LayerStep) -> torch.Tensor:
        attended, self._attended = self._attended, None
        if attended is not None and attended[0] is step.q:
            return attended[1]
        return self._attend(step, None)

    def attention_mass(self, step: LayerStep, query_rows: list[slice]) -> list[torch.Tensor]:
        masses = [torch.zeros(step.kv.kv_heads, n, device=step.q.device) for n in step.metadata.seq_lens]
        self.add_attention_mass(masses, step, query_rows)
        return [mass.sum(0) for mass in masses]

    def another(self) -> AttentionBackend:
        return CUDABackend()

    def attend_with_lse(self, step: LayerStep) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.empty(step.q.shape[:2], device=step.q.device)
        return self._attend(step._replace(window=None), lse), lse

    def attend_early(self, step: LayerStep) -> torch.Tensor:
        out, lse = self.attend_with_lse(step)
        self._attended = (step.q, out)
        return lse

    def add_attention_mass(
        self,
        masses: list[torch.Tensor],
        step: LayerStep,
        query_rows: list[slice],
        ignored: torch.Tensor | None = None,
    ) -> None:
        q, kv, metadata, scale, window = step[:5]
        lse = torch.empty(q.shape[:2], device=q.device)
        # The output comes with the log-sum-exp that is wanted here; the layer asks for it next.
        self._attended = (q, self._attend(step, lse))
        if ignored is not None:
            lse.masked_fill_(ignored[:, None], torch.inf)  # exp(score - inf) is no mass
        asking = [request for request, rows in enumerate(query_rows) if rows.stop > rows.start]
        tables = metadata.block_tables
        if len(asking) == 1:  # of which a graph may be captured: nothing is copied from the host
            [request] = asking
            rows, mass = query_rows[request], masses[request]
            own = (q[rows], lse[rows], metadata.positions[rows], kv, tables[request], mass, scale, window)
            cuda_attention.attention_mass(*own)
        elif asking:
            plan = self._mass_plan
            if plan is None or plan.masses is not masses or plan.rows != query_rows:
                self._mass_plan = plan = MassPlan(query_rows, masses)
            cuda_attention.attention_masses(q, lse, metadata.positions, kv, tables, plan, scale, window)

    def _attend(self, step: LayerStep, lse: torch.Tensor | None) -> torch.Tensor:
        q, kv, scale = step.q, step.kv, step.scale
        groups = self._groups(step)
        if len(groups) == 1:  # nearly always: no slices
            return cuda_attention.attention(q, kv, groups[0].plan, scale, None, lse)
        out = torch.empty_like(q)
        for group in groups:
            part = None if lse is None else lse[group.rows]
            cuda_attention.attention(q[group.rows], kv, group.plan, scale, out[group.rows], part)
        return out

    def _groups(self, step: LayerStep) -> list[_Group]:
        planned, capturing = self._planned, torch.cuda.is_current_stream_capturing()
        if planned is None or planned.metadata is not step.metadata or planned.captured is not capturing:
            self._planned = planned = _Planned(step.metadata, capturing)
        _, heads, dim = step.q.shape
        key = (heads, step.kv.kv_heads, dim, step.window)
        groups = planned.groups.get(key)
        if groups is None:
            groups = planned.groups[key] = _plan(step)
        return groups


def _parts(counts: list[int], few: int) -> Iterator[slice]:
    """Yield neighbouring requests that are planned together, by their numbers of queries: one, up to `few`, any."""
    singles = next((i for i, count in enumerate(counts) if count != 1), len(counts))
    some = next((i for i in range(singles, len(counts)) if counts[i] > few), len(counts))
    for part in (slice(0, singles), slice(singles, some), slice(some, len(counts))):
        if any(counts[part]):
            yield part


def _plan(step: LayerStep) -> list[_Group]:
    metadata = step.metadata
    few = cuda_attention.decode_max_queries(step.q.shape[1], step.kv.kv_heads, step.kv.head_dim)
    if metadata.device_query_start_loc is not None:  # what the host knows are bounds
        everything = slice(0, metadata.num_requests)
        most = metadata.num_tokens
        return [_group(step, everything, metadata.device_query_start_loc, most, few)]
    counts = [stop - start for start, stop in pairwise(metadata.query_start_loc)]
    groups = []
    for part in _parts(counts, few):
        own = counts[part]
        starts = None if min(own) == max(own) == 1 else _offsets(own, metadata.positions.device)
        groups.append(_group(step, part, starts, max(own), few))
    return groups


def _group(step: LayerStep, requests: slice, starts: torch.Tensor | None, most: int, few: int) -> _Group:
    """Plan some requests of a step.

    starts: [requests + 1] int32 offsets of their rows, None for one row each; `most`: rows of the longest; `few`: rows
    that a request may have to be decoded.
    """
    metadata, heads = step.metadata, step.q.shape[1]
    rows = slice(metadata.query_start_loc[requests.start], metadata.query_start_loc[requests.stop])
    positions, tables = metadata.positions[rows], metadata.block_tables[requests]
    if starts is None or most <= few:
        plan = cuda_attention.plan_decode(positions, tables, step.kv, heads, step.window, starts, most)
    else:
        plan = cuda_attention.plan_prefill(positions, starts, tables, step.kv, heads, step.window)
    return _Group(rows, plan)


def _offsets(counts: list[int], device: torch.device) -> torch.Tensor:
    """Return offsets [requests + 1] int32 on the device, made there where all counts are equal: a graph may capture
    it."""
    if min(counts) == max(counts):
        return torch.arange(0, (len(counts) + 1) * counts[0], counts[0], dtype=torch.int32, device=device)
    return to_device(np.cumsum([0, *counts], dtype=np.int32), device)
