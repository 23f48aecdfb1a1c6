"""The scheduler runs requests in ordinary blocks and in head pages side by side, and cannot tell them apart."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_blend.core.block_manager import BlockManager
from vllm_blend.core.scheduler import Scheduler
from vllm_blend.features.kv_compress.config import CompressionSettings, KVCompressConfig
from vllm_blend.features.kv_compress.pages import HeadPagePool
from vllm_blend.features.kv_compress.scheduler import KVCompressScheduler
from vllm_blend.features.kv_compress.state import COMPRESSION, CompressionState, HeadPageTable
from vllm_blend.features.kv_compress.tables import HeadTables
from vllm_blend.outputs import RequestMetrics
from vllm_blend.request import Request
from vllm_blend.sampling_params import SamplingParams

LAYERS, HEADS, SIZE, NUM_BLOCKS, CPU = 2, 2, 4, 24, torch.device("cpu")


def new_tables(blocks: BlockManager) -> HeadTables:
    return HeadTables(HeadPagePool(blocks, LAYERS, HEADS), LAYERS, HEADS, SIZE, 200, CPU)


def adopt(request: Request, tables: HeadTables, kept: int) -> bool:
    """Have a request go on in head pages, with `kept` KVs in each head. Return whether there was room: blocks that it
    shares with another do not become head pages."""
    pool = tables.pool
    released = pool.blocks.num_free_without(request.block_table) - pool.blocks.num_free_blocks
    if LAYERS * HEADS * -(-kept // SIZE) > pool.num_free_pages + released * pool.pages_per_block:
        return False
    assert request.pages is not None
    request.pages.release()
    state = CompressionState(CompressionSettings(), num_tokens=request.num_computed_tokens)
    state.index = tables.open(np.full((LAYERS, HEADS), kept))
    request.hold(HeadPageTable(tables, state.index, state))
    return True


@example(seed=312, lengths=[34, 40, 23, 32, 22, 4])  # a request that shares blocks is to be adopted with few free
@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**6), lengths=st.lists(st.integers(1, 40), min_size=2, max_size=6))
def test_both_kinds_of_tables_give_back_what_they_took(seed: int, lengths: list[int]) -> None:
    choose = random.Random(seed)
    blocks = BlockManager(NUM_BLOCKS, SIZE)
    tables = new_tables(blocks)
    scheduler = Scheduler(blocks, 4, 32)
    params = SamplingParams(max_tokens=30)
    requests = [
        Request(str(index), [choose.randrange(3) for _ in range(length)], params, RequestMetrics(0.0), 0, 90)
        for index, length in enumerate(lengths)
    ]
    for request in requests:
        scheduler.add(request)
    adopted = 0
    for _ in range(1000):
        for request in scheduler.running:
            in_blocks = request.block_table and request.num_computed_tokens == request.num_tokens - 1
            if in_blocks and request.output_token_ids and choose.random() < 0.3:
                adopted += adopt(request, tables, choose.randint(1, request.num_computed_tokens))
        output = scheduler.schedule()
        held = [request.pages for request in scheduler.running if isinstance(request.pages, HeadPageTable)]
        assert tables.pool.num_used_pages == sum(np.count_nonzero(tables.tables[pages.index]) for pages in held)
        used = {block for request in scheduler.running for block in request.block_table}
        assert blocks.num_free_blocks == blocks.num_usable_blocks - len(used) - tables.pool.num_cut_blocks
        scheduler.advance(output)
        for item in output.scheduled:
            assert item.request.pages is not None and not (item.request.exact and item.request.pages in held)
            if item.samples:
                item.request.output_token_ids.append(choose.randrange(3))
        for item in output.scheduled:
            if len(item.request.output_token_ids) == 30:
                scheduler.finish(item.request)
        if not scheduler.has_requests:
            break
    assert all(len(request.output_token_ids) == 30 for request in requests) and adopted
    assert blocks.num_free_blocks == blocks.num_usable_blocks and tables.pool.num_used_pages == 0


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_head_pages_hold_as_many_tokens_as_they_say(taken: int) -> None:
    blocks = BlockManager(NUM_BLOCKS, SIZE)
    tables = new_tables(blocks)
    blocks.allocate(taken)
    state = CompressionState(CompressionSettings(), num_tokens=6)
    state.index = tables.open(np.full((LAYERS, HEADS), 6))
    pages = HeadPageTable(tables, state.index, state)
    most = pages.max_tokens
    assert most > 6
    assert pages.grow(most) and state.num_tokens == most
    free = tables.pool.num_free_pages
    assert not pages.grow(most + SIZE + 1) and (state.num_tokens, tables.pool.num_free_pages) == (most, free)
    pages.release()
    assert tables.pool.num_used_pages == 0


@pytest.mark.parametrize(("step_tokens", "is_short"), [(13, False), (14, True)])
def test_what_decodes_in_head_pages_takes_of_the_next_steps_budget(step_tokens: int, is_short: bool) -> None:
    """So a prompt beside it gets what is left of the budget, and blocks for that many tokens alone."""
    blocks = BlockManager(NUM_BLOCKS, SIZE)
    tables = new_tables(blocks)
    state = CompressionState(CompressionSettings(), num_tokens=6)
    state.index = tables.open(np.full((LAYERS, HEADS), 6))
    decoding, prompt = (
        Request(name, [0] * 40, SamplingParams(), RequestMetrics(0.0), 0, 90) for name in ("decoding", "prompt")
    )
    COMPRESSION.set(decoding, state)
    blocks.allocate(blocks.num_free_blocks - 3)
    scheduler = KVCompressScheduler(KVCompressConfig(), tables, step_tokens)
    assert scheduler.is_short([decoding, prompt]) == is_short
