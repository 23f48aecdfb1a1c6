"""Attention over what is left of a request in head pages is dense attention with the evicted KVs masked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.features.kv_compress.store import Shape, Store
from tests.features.kv_compress.worlds import ALLOCATIONS
from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerStep
from vllm_blend.attention.registry import make_backend
from vllm_blend.features.kv_compress.evictions import schedule_evictions

CPU = torch.device("cpu")
SHAPES = st.builds(Shape, st.integers(1, 2), st.integers(1, 3), st.sampled_from([4, 8]), st.just(60), st.just(16))


class Dense:
    """What a request would have in a cache that evicts nothing: K and V [L, H, positions, D], and what is masked."""

    def __init__(self, store: Store, table: list[int], n: int) -> None:
        blocks = (
            pages[:, table].flatten(1, 2)[:, :n].transpose(1, 2) for pages in (store.cache.key, store.cache.value)
        )
        self.k, self.v = (tensor.double() for tensor in blocks)
        self.visible = torch.ones(self.k.shape[:3], dtype=torch.bool)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """One KV [L, H, D] more."""
        self.k, self.v = (torch.cat([old, new.double()[:, :, None]], 2) for old, new in ((self.k, k), (self.v, v)))
        self.visible = torch.nn.functional.pad(self.visible, (0, 1), value=True)

    def mask(self, positions: torch.Tensor, evicted: torch.Tensor) -> None:
        """Return what `evicted` [L, H, n] says of the KVs at `positions` [L, H, n]."""
        layer, head, k = evicted.nonzero().unbind(-1)
        at = positions[layer, head, k]
        assert self.visible[layer, head, at].all()  # nothing goes twice
        self.visible[layer, head, at] = False

    def attend(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """q [H, G, D] at the end of the request."""
        scores = (q.double() @ self.k[layer].mT * scale).masked_fill(~self.visible[layer, :, None], -torch.inf)
        return scores.softmax(-1) @ self.v[layer]


@pytest.mark.parametrize("name", ["cpu", "torch_native"])
@settings(max_examples=25, deadline=None)
@given(SHAPES, st.data(), st.integers(0, 1000), st.integers(1, 4))
def test_attention_after_evictions(name: str, shape: Shape, data: st.DataObject, seed: int, group: int) -> None:
    """Two requests: evicted from at the end of the prompt, then decoding and evicted from in turns."""
    store, backend = Store(shape, seed), make_backend(name, CPU, torch.float32, shape.head_dim)
    dense: dict[int, Dense] = {}
    allocation = data.draw(st.sampled_from(ALLOCATIONS))
    for n in data.draw(st.lists(st.integers(1, 30), min_size=2, max_size=2)):
        table, metric = store.prefill(n)
        at, lengths = torch.arange(n).expand(*metric.shape), torch.full(metric.shape[:2], n)
        num_blocks = data.draw(st.integers(0, 12))
        evictions = schedule_evictions(metric, at, lengths, num_blocks, 1, n - 1, shape.block_size, allocation)
        wanted = Dense(store, table, n)
        wanted.mask(at, evictions.evicted)
        dense[store.adopt(table, metric, evictions)] = wanted
    for _ in range(data.draw(st.integers(1, 5))):
        for index, wanted in dense.items():
            if data.draw(st.booleans()):
                _, positions = store.engine.read(store.tables.slots_of(index))
                evictions = store.compress(index, data.draw(st.integers(0, 6)), 1, wanted.k.shape[2] - 1, allocation)
                wanted.mask(positions, evictions.evicted)
            assert store.decode(index, wanted.k.shape[2])
            newest = store.tables.decode_batch([index]).slots
            wanted.append(store.keys[newest], store.values[newest])
        assert_all_equal_dense(store, dense, backend, group)


def assert_all_equal_dense(store: Store, dense: dict[int, Dense], backend: AttentionBackend, group: int) -> None:
    """Check all requests in one batch, each (request, head) a row of its own."""
    indices, shape, scale = [*dense], store.shape, 0.3
    batch, rows = store.tables.decode_batch(indices), len(indices) * shape.heads
    for layer in range(shape.layers):
        metadata = AttentionMetadata(
            positions=batch.positions[layer],
            slot_mapping=batch.slots[layer],
            block_tables=batch.block_tables[layer],
            query_start_loc=list(range(rows + 1)),
            seq_lens=store.tables.lengths[indices, layer].reshape(-1).tolist(),
            at_end=(True,) * rows,
            per_head=True,
        )
        q = store.noise(len(indices), shape.heads, group, shape.head_dim)
        out = backend.attend(LayerStep(q.flatten(0, 1), store.engine.layer, metadata, scale))
        for request, index in enumerate(indices):
            wanted = dense[index].attend(layer, q[request], scale)
            torch.testing.assert_close(out.view_as(q)[request].double(), wanted, rtol=2e-5, atol=2e-5)
