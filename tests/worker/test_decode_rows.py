"""The arrays of decode steps are those that writing every row gives, however a batch goes on."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from vllm_blend.core.block_manager import BlockManager
from vllm_blend.core.pages import MISSING, BlockTable
from vllm_blend.outputs import RequestMetrics
from vllm_blend.request import Request
from vllm_blend.sampling_params import SamplingParams
from vllm_blend.worker.batch import NOTHING_DRAWN, Drawn, Span
from vllm_blend.worker.decode_rows import DecodeRows

pytestmark = pytest.mark.cpu_only
BLOCK_SIZE, SIZE, MAX_BLOCKS = 4, 6, 16


class Batch:
    """Requests that decode: `advance` gives each one token more."""

    def __init__(self, seed: int, has_pages: bool = True) -> None:
        self.rng, self.has_pages = random.Random(seed), has_pages
        self.blocks = BlockManager(400, BLOCK_SIZE, enable_prefix_caching=False)
        self.requests: list[Request] = []

    def add(self) -> None:
        length = self.rng.randrange(1, 12)
        prompt = [self.rng.randrange(100) for _ in range(length)]
        request = Request("r", prompt, SamplingParams(), RequestMetrics(0.0))
        request.output_token_ids.append(self.rng.randrange(100))
        self.reopen(request)
        self.requests.append(request)

    def reopen(self, request: Request) -> None:
        """Give a request another table, as after a preemption."""
        pages = BlockTable(self.blocks)
        assert pages.grow(request.num_tokens)
        request.hold(pages)
        if not self.has_pages:
            request.pages = None

    def spans(self) -> list[Span]:
        return [Span(request, request.num_tokens - 1, request.num_tokens) for request in self.requests]

    def drawn(self) -> Drawn:
        rows = {request: row for row, request in enumerate(self.requests)}
        return Drawn(rows, torch.zeros(len(rows), dtype=torch.int64))

    def advance(self, ahead: bool) -> None:
        for request in self.requests:
            request.output_token_ids += [self.rng.randrange(100)] * (request.num_in_flight + (not ahead))
            request.num_in_flight = int(ahead)
            if request.pages is not None:
                assert request.pages.grow(request.num_tokens)
            elif len(request.block_table) * BLOCK_SIZE < request.num_tokens:
                request.block_table += self.blocks.allocate(1)


def check(rows: DecodeRows, batch: Batch, sent: np.ndarray) -> None:
    """Compare with rows that are written anew, and what has been sent to the device with rows so far."""
    fresh, spans = DecodeRows(SIZE, MAX_BLOCKS, BLOCK_SIZE), batch.spans()
    drawn = batch.drawn() if batch.requests[0].num_in_flight else NOTHING_DRAWN
    rows.update(spans, drawn)
    sent[:, : rows.unsent] = rows.tables[:, : rows.unsent]
    rows.unsent = 0
    fresh.update(spans, drawn)
    assert np.array_equal(rows.rows, fresh.rows)
    assert np.array_equal(rows.tables, fresh.tables) and np.array_equal(sent, fresh.tables)


@pytest.mark.parametrize("has_pages", [True, False])  # requests on another rank than the first have none
@pytest.mark.parametrize("seed", range(12))
def test_rows_are_those_of_a_step_written_anew(seed: int, has_pages: bool) -> None:
    batch, rows = Batch(seed, has_pages), DecodeRows(SIZE, MAX_BLOCKS, BLOCK_SIZE)
    sent, rng = np.zeros((SIZE, MAX_BLOCKS), np.int32), random.Random(seed)
    for _ in range(3):
        batch.add()
    for step in range(60):
        event = rng.randrange(12)
        if event == 0 and len(batch.requests) < SIZE:
            batch.add()
        elif event == 1 and len(batch.requests) > 1:
            batch.requests.remove(rng.choice(batch.requests))
        elif event == 2:
            rng.shuffle(batch.requests)
        elif event == 3:
            batch.reopen(rng.choice(batch.requests))
        elif event == 4:  # a step that this graph does not see
            batch.advance(ahead=False)
        batch.requests = [request for request in batch.requests if request.num_tokens < 4 * MAX_BLOCKS - 3]
        if not batch.requests:
            batch.add()
        check(rows, batch, sent)
        batch.advance(ahead=step % 3 != 0)


def test_blocks_that_move_are_seen() -> None:
    """Chunks leave the device and come back: the table then has other entries, and its pages another version."""
    batch, rows = Batch(0), DecodeRows(SIZE, MAX_BLOCKS, BLOCK_SIZE)
    sent = np.zeros((SIZE, MAX_BLOCKS), np.int32)
    batch.add()
    [request] = batch.requests
    while request.num_tokens < 10:
        check(rows, batch, sent)
        batch.advance(ahead=False)
    pages = request.pages
    assert pages is not None
    for blocks in ([MISSING], [399], [398]):
        pages.blocks[:1], pages.num_missing = blocks, int(blocks == [MISSING])
        pages.version += 1
        check(rows, batch, sent)
        batch.advance(ahead=False)
        check(rows, batch, sent)
        batch.advance(ahead=False)


def test_a_step_that_goes_on_sends_tables_only_for_another_block() -> None:
    batch, rows = Batch(1), DecodeRows(SIZE, MAX_BLOCKS, BLOCK_SIZE)
    batch.add()
    batch.add()
    rows.update(batch.spans(), NOTHING_DRAWN)
    assert rows.unsent
    for _ in range(12):
        rows.unsent = 0
        batch.advance(ahead=False)
        enters = any((request.num_tokens - 1) % BLOCK_SIZE == 0 for request in batch.requests)
        rows.update(batch.spans(), NOTHING_DRAWN)
        assert bool(rows.unsent) == enters
