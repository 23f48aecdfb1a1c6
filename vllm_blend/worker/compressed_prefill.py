"""Prompts over compressed chunks, computed in head pages from the start.

A head has only the KVs of a chunk that it has kept, so a block of all heads could not hold them. The pass is that of
any blend: stored KV is placed, the question looks, the chosen tokens and the suffix are computed. A token that is
computed again is in every head then, whether that head has kept it or not: with all of them computed, the pages hold
what full prefill would have put there.

Slots of a head are in order of position, which is what the mask goes by. So what the question looks at is placed
without the tokens that it is about to choose, and placed again beside these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from vllm_blend import ops
from vllm_blend.attention.context import ForwardContext, LayerHook, forward_context
from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerCache
from vllm_blend.blend.plan import BlendPlan
from vllm_blend.blend.selectors import Look, LooksAt
from vllm_blend.kv_compress.tables import HeadTables
from vllm_blend.layers.rotary import RotaryEmbedding
from vllm_blend.ops.host_copy import to_device
from vllm_blend.request import Request
from vllm_blend.worker.blend_runner import choose_positions, failure, question_positions
from vllm_blend.worker.cache_engine import CacheEngine
from vllm_blend.worker.head_layout import NOWHERE, HeadLayout, HeadRows


@dataclass(frozen=True)
class Prefilled:
    """What became of the prompts of a step."""

    hidden: torch.Tensor  # [requests, hidden_size], of their last tokens
    computed: list[torch.Tensor]  # of each, the positions before the suffix that were computed, [n] int64
    errors: dict[int, str]  # of those whose selector has failed


class CompressedPrefill:
    """Runs the model over blended prompts whose requests have head pages."""

    def __init__(self, model: nn.Module, cache: CacheEngine, tables: HeadTables, backend: AttentionBackend) -> None:
        self.model, self.cache, self.tables, self.backend = model, cache, tables, backend
        self.rotaries: list[RotaryEmbedding] = [layer.self_attn.attn.rotary for layer in model.model.layers]  # type: ignore[union-attr]
        self.device = cache.head_keys.device

    def run(self, requests: Sequence[Request]) -> Prefilled:
        """Raises ChunkLost where stored KV that was on its way is lost."""
        at, errors = self._choose(requests)
        layouts = [HeadLayout.of(request, self.tables, own) for request, own in zip(requests, at, strict=True)]
        for request, layout in zip(requests, layouts, strict=True):
            self._place(_plan(request), layout)
        rows = HeadRows(layouts, at, self.device)
        hidden = self._forward(requests, at, rows, len(self.rotaries))
        for request, layout in zip(requests, layouts, strict=True):
            assert request.compression is not None and request.compression.index is not None
            self.tables.shrink(request.compression.index, layout.lengths.numpy())
        ends = torch.tensor(rows.num_tokens).cumsum(0) - 1
        starts = [_plan(request).suffix_start for request in requests]
        computed = [positions[positions < start] for positions, start in zip(at, starts, strict=True)]
        return Prefilled(hidden[to_device(ends, self.device)], computed, errors)

    def _place(self, plan: BlendPlan, layout: HeadLayout) -> None:
        """Write stored KV to the request's slots, K rotated to where it stands, and note the positions of all KVs."""
        num_layers, kv_heads, n = layout.positions.shape
        there = layout.positions != NOWHERE
        slots = layout.slots(torch.arange(n).expand(layout.positions.shape)).masked_fill(~there, 0)
        noted = layout.positions.masked_fill(~there, 0)
        self.cache.enter(to_device(slots.flatten(1), self.device), to_device(noted.flatten(1), self.device))
        pieces = []
        for segment in plan.segments:
            segment.kv.wait()
            kept = segment.kv.positions
            within = torch.arange(segment.kv.num_tokens) if kept is None else kept.transpose(1, 2).long()
            pieces.append((segment.start + within).expand(num_layers, kv_heads, -1))
        stored = torch.cat(pieces, -1)
        places = layout.slots(layout.ranks(stored))
        for layer in range(num_layers):
            by_token = [to_device(of[layer].t().flatten(), self.device) for of in (stored, places)]
            cos, sin = self.rotaries[layer].cos_sin(by_token[0])
            kvs = [(self._by_slot(s.kv.k[layer]), self._by_slot(s.kv.v[layer])) for s in plan.segments]
            keys, values = self.cache.head_keys[None], self.cache.head_values[None]
            ops.place_chunks(kvs, cos, sin, keys, values, by_token[1])

    def _by_slot(self, x: torch.Tensor) -> torch.Tensor:
        """K or V of a layer [KVs, kv_heads, head_dim] as rows of one head each, [1, KVs * kv_heads, 1, head_dim]."""
        return x.to(self.device, non_blocking=True).reshape(1, -1, 1, x.shape[-1])

    def _choose(self, requests: Sequence[Request]) -> tuple[list[torch.Tensor], dict[int, str]]:
        """The ascending positions of each request that are computed, on the host, and which selectors failed."""
        plans = [_plan(request) for request in requests]
        asking = [index for index, plan in enumerate(plans) if plan.looks_at is LooksAt.QUESTION]
        masses: dict[int, torch.Tensor] = {}
        if asking:
            looked = self._question([requests[i] for i in asking])
            masses = dict(zip(asking, looked, strict=True))
        result, errors = [], {}
        for index, (request, plan) in enumerate(zip(requests, plans, strict=True)):
            chosen = plan.candidates
            if plan.final_budget < len(chosen):
                try:
                    chosen = choose_positions(plan, masses.get(index), plan.final_budget).cpu()
                except Exception as error:  # a user's selector may raise anything; it may only cost its own request
                    errors[index], chosen = failure(plan, error), chosen[:0]  # there are pages for the budget alone
            suffix = torch.arange(plan.suffix_start, request.num_tokens)
            result.append(torch.cat([chosen, plan.holes, suffix]).sort().values)
        return result, errors

    def _question(self, requests: Sequence[Request]) -> list[torch.Tensor]:
        """As `blend_runner.question_mass`: one pass of the suffixes and holes alone."""
        layouts = [HeadLayout.of(request, self.tables) for request in requests]
        for request, layout in zip(requests, layouts, strict=True):
            self._place(_plan(request), layout)
        num_layers, looks, at, counts = len(self.rotaries), [], [], []
        for request in requests:
            plan = _plan(request)
            looks.append(plan.selector.look(num_layers))
            positions, num_suffix = question_positions(plan)
            at.append(positions)
            wanted = looks[-1].tokens
            counts.append(num_suffix if wanted is None else min(wanted, num_suffix))
        rows = HeadRows(layouts, at, self.device)
        sizes = [_plan(request).num_prompt_tokens for request in requests]
        hook = HeadMassHook(self.backend, rows, layouts, looks, counts, sizes)
        self._forward(requests, at, rows, max(look.stop for look in looks), hook)
        return hook.masses()

    def _forward(
        self,
        requests: Sequence[Request],
        at: Sequence[torch.Tensor],
        rows: HeadRows,
        num_layers: int,
        *hooks: LayerHook,
    ) -> torch.Tensor:
        """Hidden states [tokens, hidden_size] behind the model's first `num_layers` layers."""
        known = [torch.from_numpy(request.token_array(request.num_tokens)) for request in requests]
        ids = torch.cat([tokens[positions] for tokens, positions in zip(known, at, strict=True)])
        caches = [self.cache.layer] * num_layers
        context = ForwardContext(rows[0], caches, self.backend, hooks, by_layer=rows)
        with forward_context(context):
            hidden: torch.Tensor = self.model(to_device(ids, self.device))
        return hidden


class HeadMassHook(LayerHook):
    """Gathers the attention that each request's last rows pay to every position of their request: `QuestionMassHook`
    where heads hold different positions. A position that a head has not kept gets nothing there."""

    def __init__(
        self,
        backend: AttentionBackend,
        rows: HeadRows,
        layouts: Sequence[HeadLayout],
        looks: Sequence[Look],
        counts: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        """`counts`: how many of each request's last rows look; `sizes`: positions that its prompt has."""
        self.backend, self.rows, self.layouts, self.looks, self.counts = backend, rows, layouts, looks, counts
        self._masses = [torch.zeros(size, device=rows.device) for size in sizes]

    def on_query(
        self,
        layer_idx: int,
        q: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> None:
        heads, tables = self.rows.kv_heads, self.rows.tables(layer_idx)
        by_token = q.view(-1, heads, *q.shape[1:])
        seen = metadata.positions.view(-1, heads)
        stop = 0
        for request, (look, count) in enumerate(zip(self.looks, self.counts, strict=True)):
            stop += self.rows.num_tokens[request]
            if not look.first <= layer_idx < look.stop:
                continue
            own, total = slice(stop - count, stop), self._masses[request]
            positions = self.layouts[request].positions[layer_idx]
            n = int((positions[0] < len(total)).sum())  # the last ones may be of generated tokens
            last = seen[own].t().reshape(-1)
            view = AttentionMetadata(
                positions=last,
                slot_mapping=last,  # nothing is written
                block_tables=tables[request * heads : (request + 1) * heads],
                query_start_loc=[head * count for head in range(heads + 1)],
                seq_lens=[n] * heads,
                per_head=True,
            )
            mine = by_token[own].transpose(0, 1).reshape(-1, *q.shape[1:])
            queries = [slice(head * count, (head + 1) * count) for head in range(heads)]
            masses = self.backend.attention_mass(mine, cache, view, scale, queries, window)
            at = to_device(positions[:, :n].flatten(), q.device)
            total.index_add_(0, at, torch.cat(masses).to(total.dtype))

    def masses(self) -> list[torch.Tensor]:
        """Per request [tokens] float32: mean over layers and heads."""
        layers = [look.stop - look.first for look in self.looks]
        return [mass / (count * self.rows.kv_heads) for mass, count in zip(self._masses, layers, strict=True)]


def _plan(request: Request) -> BlendPlan:
    assert request.blend is not None
    return request.blend
