"""The ring's protocol on streams that run their work in any order that the events between them allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_blend import ops
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.transfer import LayerwiseLoad, StagingRing
from vllm_blend.ops.transfer import copy_pieces_reference

LAYERS = 3


class Event:
    """An event like CUDA's: a wait is for the last record before it, and for nothing if there is none."""

    def __init__(self) -> None:
        self.recorded = self.happened = 0

    def record(self, stream: Stream) -> None:
        self.recorded += 1
        version = self.recorded
        stream.work.append((None, lambda: setattr(self, "happened", version)))

    def query(self) -> bool:
        return self.happened == self.recorded


class Stream:
    """Work that has been queued: (what must be true first, what to do then)."""

    def __init__(self) -> None:
        self.work: deque[tuple[Callable[[], bool] | None, Callable[[], Any]]] = deque()

    def wait_event(self, event: Event) -> None:
        version = event.recorded
        self.work.append((lambda: event.happened >= version, lambda: None))

    def run(self, work: Callable[[], Any]) -> None:
        self.work.append((None, work))

    @property
    def ready(self) -> bool:
        return bool(self.work) and (self.work[0][0] is None or self.work[0][0]())


class Device:
    """A device with two streams, whose order in time is random."""

    def __init__(self, seed: int, num_slots: int, slot_tokens: int) -> None:
        self.main, self.copies, self._random = Stream(), Stream(), random.Random(seed)
        self.ring = StagingRing.__new__(StagingRing)
        self.ring.slot_tokens = slot_tokens
        self.ring.slots = torch.full((num_slots, 2, slot_tokens, 1, 2), float("nan"))
        self.ring.pairs = [(slot[0], slot[1]) for slot in self.ring.slots]
        self.ring.stream = self.copies  # type: ignore[assignment]
        self.ring.filled = [Event() for _ in range(num_slots)]  # type: ignore[misc]
        self.ring.emptied = [Event() for _ in range(num_slots)]  # type: ignore[misc]

    def some_time_passes(self, steps: int | None = None) -> None:
        """Run what may run, one stream or the other; None: until nothing is left."""
        while steps is None or steps > 0:
            ready = [stream for stream in (self.main, self.copies) if stream.ready]
            if not ready:
                assert steps is not None or not (self.main.work or self.copies.work), "streams wait for each other"
                return
            self._random.choice(ready).work.popleft()[1]()
            steps = None if steps is None else steps - 1

    @property
    def now(self) -> int:
        return self._random.randrange(8)


@pytest.fixture(scope="module", autouse=True)
def played() -> Iterator[pytest.MonkeyPatch]:
    """`transfer` on a device that the host plays."""
    with pytest.MonkeyPatch.context() as patch:

        def copy(pieces: Any, layer: int, k: torch.Tensor, v: torch.Tensor, stream: Stream) -> None:
            stream.run(lambda: copy_pieces_reference(pieces, layer, k, v))

        patch.setattr(ops, "copy_pieces", copy)
        patch.setattr(torch.cuda, "current_stream", lambda device: _device.main)
        yield patch


_device: Device


def chunk(tokens: int, seed: int) -> ChunkKV:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randn(LAYERS, 2, tokens, 1, 2, generator=generator)
    return ChunkKV(packed[:, 0], packed[:, 1])


def read(load: LayerwiseLoad, layers: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Queue what a forward does: copies of each layer's arrivals, taken when the device comes to them."""
    result: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(layers)]
    for layer in range(layers):
        for arrival in load.layer(layer):
            taken = (torch.zeros_like(arrival.k), torch.zeros_like(arrival.v))
            result[layer].append(taken)

            def take(taken: Any = taken, arrival: Any = arrival) -> None:
                taken[0].copy_(arrival.k)
                taken[1].copy_(arrival.v)

            _device.main.run(take)
            _device.some_time_passes(_device.now)
    return result


@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3),
    cut=st.integers(0, LAYERS),
    num_slots=st.integers(1, 4),
    slot_tokens=st.integers(1, 8),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=150, deadline=None)
def test_every_layer_is_read_as_it_was_stored(
    lengths: list[list[int]], cut: int, num_slots: int, slot_tokens: int, seed: int
) -> None:
    """Loads one after another through one ring, each second one given up after some layers."""
    global _device
    _device = Device(seed, num_slots, slot_tokens)
    expected, results = [], []
    for index, each in enumerate(lengths):
        chunks = [chunk(tokens, seed + 10 * index + i) for i, tokens in enumerate(each)]
        load = LayerwiseLoad(_device.ring, chunks, LAYERS)
        results.append(read(load, cut if index % 2 else LAYERS))
        expected.append(chunks)
        load.abandon()
    _device.some_time_passes()
    assert load.query()
    for result, chunks in zip(results, expected, strict=True):
        for layer, arrivals in enumerate(result):
            for half, name in enumerate("kv"):
                whole = torch.cat([getattr(each, name)[layer] for each in chunks])
                assert torch.equal(torch.cat([arrival[half][0] for arrival in arrivals]), whole)


def test_a_load_runs_ahead_as_far_as_the_ring_goes() -> None:
    global _device
    _device = Device(0, num_slots=2, slot_tokens=4)
    load = LayerwiseLoad(_device.ring, [chunk(4, 1)], LAYERS)
    _device.some_time_passes()
    assert load._issued == 2
    assert not load.query()
    read(load, 1)
    assert load._issued == 3
    _device.some_time_passes()
    assert load.query()


def test_layers_come_in_order() -> None:
    global _device
    _device = Device(0, num_slots=2, slot_tokens=4)
    load = LayerwiseLoad(_device.ring, [chunk(4, 1)], LAYERS)
    with pytest.raises(RuntimeError, match="layer 1 of a load was asked for out of order"):
        next(load.layer(1))


@pytest.mark.parametrize("wrong", ["scattered", "layers", "heads", "head size", "dtype"])
def test_a_chunk_that_a_slot_cannot_take_is_refused(wrong: str) -> None:
    """It lies elsewhere, or would be copied past its end or the slot's."""
    global _device
    _device = Device(0, num_slots=2, slot_tokens=4)
    kv = torch.randn(LAYERS, 4, 1, 2)
    scattered = torch.randn(LAYERS, 2, 4, 2)[..., ::2].transpose(1, 2)
    chunk_kv = {
        "scattered": lambda: ChunkKV(scattered, scattered),
        "layers": lambda: ChunkKV(kv[1:], kv[1:]),
        "heads": lambda: ChunkKV(kv.view(LAYERS, 2, 2, 2), kv.view(LAYERS, 2, 2, 2)),
        "head size": lambda: ChunkKV(kv.view(LAYERS, 2, 1, 4), kv.view(LAYERS, 2, 1, 4)),
        "dtype": lambda: ChunkKV(kv.half(), kv.half()),
    }[wrong]()
    with pytest.raises(ValueError, match=r"cannot be loaded: .* must lie on the host, each layer in one piece"):
        LayerwiseLoad(_device.ring, [chunk(4, 1), chunk_kv], LAYERS)
