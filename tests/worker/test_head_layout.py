"""Where each head has what, against a loop over heads and tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_blend.blend.plan import BlendPlan, Segment, make_plan
from vllm_blend.blend.selectors import make_selector
from vllm_blend.core.block_manager import BlockManager
from vllm_blend.kv_compress.chunks import ChunkCompression
from vllm_blend.kv_compress.config import CompressionSettings
from vllm_blend.kv_compress.metrics import make_metric
from vllm_blend.kv_compress.pages import HeadPagePool
from vllm_blend.kv_compress.state import CompressionState
from vllm_blend.kv_compress.tables import HeadTables
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.outputs import RequestMetrics
from vllm_blend.request import Request
from vllm_blend.worker.head_layout import HeadLayout, HeadRows

LAYERS, HEADS, DIM, SIZE = 2, 3, 4, 8
CPU = torch.device("cpu")


def chunk(tokens: int, share: float | None, seed: int) -> ChunkKV:
    k, v = torch.randn(2, LAYERS, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed))
    whole = ChunkKV(k, v)
    return whole if share is None else ChunkCompression(make_metric("keydiff"), share).compress(whole)


pieces = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 20), st.sampled_from([None, 0.1, 0.5, 1.0])), min_size=1, max_size=5
)


def plan_of(layout: list[tuple[int, int, float | None]], suffix: int) -> BlendPlan:
    """Of each piece: tokens that are not stored, before a chunk of so many, and the share of it that is kept."""
    segments, start = [], 0
    for seed, (hole, tokens, share) in enumerate(layout):
        segments.append(Segment(start + hole, chunk(tokens, share, seed)))
        start += hole + tokens
    ids = list(range(start + suffix))
    return make_plan(segments, ids, start, make_selector("none"), None, [1], None, LAYERS)


def opened(plans: list[BlendPlan], generated: int, most: int) -> tuple[list[Request], HeadTables]:
    tables = HeadTables(HeadPagePool(BlockManager(400, SIZE, False), LAYERS, HEADS), LAYERS, HEADS, SIZE, 500, CPU)
    requests = []
    for plan in plans:
        request = Request("r", list(plan.prompt_token_ids), None, RequestMetrics(arrival_time=0.0), blend=plan)
        request.output_token_ids += range(generated)
        request.compression = CompressionState(CompressionSettings())
        lengths = np.full((LAYERS, HEADS), most)
        request.compression.begin(tables.open(lengths), request.num_tokens)
        requests.append(request)
    return requests, tables


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(pieces, min_size=1, max_size=3),
    suffix=st.integers(1, 9),
    generated=st.integers(0, 3),
    data=st.data(),
)
def test_every_row_sees_what_its_head_has_up_to_its_position(
    prompts: list[list[tuple[int, int, float | None]]], suffix: int, generated: int, data: st.DataObject
) -> None:
    plans = [plan_of(prompt, suffix) for prompt in prompts]
    requests, tables = opened(plans, generated, 120)
    at, heads_have = [], []
    for plan, request in zip(plans, requests, strict=True):
        some = data.draw(st.sets(st.integers(0, request.num_tokens - 1)))
        at.append(torch.tensor(sorted(some | {request.num_tokens - 1})))
        heads_have.append(held(plan, request.num_tokens, set(at[-1].tolist())))
    layouts = [HeadLayout.of(request, tables, own) for request, own in zip(requests, at, strict=True)]
    for layout, have in zip(layouts, heads_have, strict=True):
        assert layout.lengths.tolist() == [[len(mine) for mine in heads] for heads in have]
    rows = HeadRows(layouts, at, CPU)
    assert len(rows) == LAYERS
    written: set[tuple[int, int]] = set()
    for layer, metadata in enumerate(rows):
        row = 0
        slots_of = [tables.slots_of(request.compression.index) for request in requests]  # type: ignore[union-attr]
        for request, positions in enumerate(at):
            for position in positions.tolist():
                for head in range(HEADS):
                    mine = heads_have[request][layer][head]
                    seen = [p for p in mine if p <= position]
                    assert metadata.positions[row] == len(seen) - 1 == metadata.seq_lens[row] - 1
                    slots = slots_of[request][layer, head].tolist()
                    table = metadata.block_tables[row].tolist()
                    assert [table[i // SIZE] * SIZE + i % SIZE for i in range(len(seen))] == slots[: len(seen)]
                    slot = int(metadata.slot_mapping[row])
                    assert slot == slots[mine.index(position)]
                    assert (layer, slot) not in written
                    written.add((layer, slot))
                    assert metadata.rope_positions is not None and metadata.rope_positions[row] == position
                    row += 1
        assert row == metadata.num_tokens == metadata.num_requests
    for request in requests:
        tables.close(request.compression.index)  # type: ignore[union-attr, arg-type]
    assert tables.pool.num_used_pages == 0


def held(plan: BlendPlan, num_tokens: int, computed: set[int]) -> list[list[list[int]]]:
    """By layer and head, the positions there are KVs of."""
    result = []
    for layer in range(LAYERS):
        heads = []
        for head in range(HEADS):
            there = set(range(num_tokens))
            for segment in plan.segments:
                if segment.kv.positions is not None:
                    kept = set(segment.kv.positions[layer, :, head].tolist())
                    there -= {segment.start + i for i in range(segment.kv.num_tokens) if i not in kept}
            heads.append(sorted(there | computed))
        result.append(heads)
    return result


def test_a_token_without_a_place_is_an_error() -> None:
    plan = plan_of([(0, 20, 0.1)], 2)
    [request], tables = opened([plan], 0, 40)
    with pytest.raises(RuntimeError, match="no place"):
        HeadLayout.of(request, tables).ranks(torch.arange(22))
