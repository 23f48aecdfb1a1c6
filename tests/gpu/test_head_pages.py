"""Evictions on a GPU: to the last bit those of the CPU, and without waiting where a step is being prepared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tests.features.kv_compress.store import Shape, Store
from tests.features.kv_compress.worlds import ALLOCATIONS
from vllm_blend.features.kv_compress.evictions import SORTED_BYTES, schedule_evictions
from vllm_blend.features.kv_compress.moves import num_moves, schedule_moves

pytestmark = pytest.mark.gpu

SHAPE = Shape(layers=4, heads=2, block_size=16, num_blocks=200, head_dim=64)
PROMPTS = (300, 17, 161)
CUDA = torch.device("cuda")


@contextmanager
def nothing_waits() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def life_of_requests(device: torch.device, allocation: str) -> list[object]:
    """Prompts come, are evicted from, decode, are evicted from together; everything that is in the cache then."""
    store = Store(SHAPE, seed=3, device=device)
    indices = []
    for n in PROMPTS:
        table, metric = store.prefill(n)
        at, lengths = torch.arange(n, device=device).expand(*metric.shape), torch.full((4, 2), n, device=device)
        evictions = schedule_evictions(metric, at, lengths, 60, 4, n - 16, SHAPE.block_size, allocation)  # type: ignore[arg-type]
        indices.append(store.adopt(table, metric, evictions))
    for step in range(20):
        for index, n in zip(indices, PROMPTS, strict=True):
            assert store.decode(index, n + step)
    ends = torch.tensor([n + 4 for n in PROMPTS], device=device)
    evictions = store.compress(indices, torch.tensor([30, 0, 9], device=device), 4, ends, allocation)
    return [evictions.num_blocks.tolist(), *(store.content(index) for index in indices)]


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_the_same_as_on_the_cpu(allocation: str) -> None:
    assert life_of_requests(CUDA, allocation) == life_of_requests(torch.device("cpu"), allocation)


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_ties_and_odd_values(allocation: str) -> None:
    generator = torch.Generator().manual_seed(1)
    odd = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-40, torch.inf, -torch.inf, torch.nan])
    metric = odd[torch.randint(len(odd), (3, 8, 4, 500), generator=generator)]
    positions = torch.rand(metric.shape, generator=generator).argsort(-1)
    lengths = torch.randint(501, metric.shape[:-1], generator=generator)
    args = (torch.tensor([400, 7, 0]), 4, torch.tensor([500, 300, 490]))
    expected = schedule_evictions(metric, positions, lengths, *args, 16, allocation)  # type: ignore[arg-type]
    on_gpu = [x.cuda() if isinstance(x, torch.Tensor) else x for x in (metric, positions, lengths, *args)]
    with nothing_waits():
        actual = schedule_evictions(*on_gpu, 16, allocation)  # type: ignore[arg-type,call-arg]
    assert torch.equal(actual.evicted.cpu(), expected.evicted)
    assert torch.equal(actual.num_blocks.cpu(), expected.num_blocks)


@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("shape", [(8, 16, 8, 4096), (1, 32, 8, 8192), (64, 32, 8, 64)])
def test_memory_that_choosing_takes(allocation: str, shape: tuple[int, ...]) -> None:
    """Engines leave so much of a GPU's memory free."""
    metric = torch.rand(shape, device=CUDA)
    positions = torch.arange(shape[-1], device=CUDA).expand(shape).contiguous()
    lengths = torch.full(shape[:-1], shape[-1], device=CUDA)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    evictions = schedule_evictions(metric, positions, lengths, 1000, 4, shape[-1] - 32, 16, allocation)  # type: ignore[arg-type]
    schedule_moves(evictions, lengths, positions, int(num_moves(evictions, evictions.new_lengths(lengths))))
    assert torch.cuda.max_memory_allocated() - before <= SORTED_BYTES * metric.numel() + (16 << 20)


def test_a_step_waits_for_nothing() -> None:
    store = Store(SHAPE, seed=5, device=CUDA)
    indices = [store.tables.open(np.full((4, 2), n)) for n in PROMPTS]
    positions = torch.full((len(PROMPTS) * 2,), 400, device=CUDA)
    store.tables.decode_batch(indices)
    with nothing_waits():
        for _ in range(20):
            assert store.tables.append(indices)
            batch = store.tables.decode_batch([*indices, 0])
            store.engine.record_new(batch.slots[:, :-2], positions, 0.0)
        store.tables.shrink(indices[0], store.tables.lengths[indices[0]] // 2)
        slots = store.tables.slots_of(indices[0])
    assert ((slots >= 0).sum(-1).cpu().numpy() == store.tables.lengths[indices[0]]).all()
