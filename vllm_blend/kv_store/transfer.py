"""Chunk KV between host memory and a GPU, in the background.

To the GPU it travels layer by layer, on a stream of its own and through a small ring of device buffers: while the model
computes a layer, the next ones arrive (CacheBlend, Yao et al., EuroSys 2025, section 5: loading layer i + 1 while layer
i is computed).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import torch

from vllm_blend import ops
from vllm_blend.kv_store.chunk_kv import ChunkKV

NUM_SLOTS = 8
SLOT_BYTES = 16 << 20  # of the ring: 4096 tokens of a 7B model's layer, 0.3 ms of a PCIe 5 link


class Progress(Protocol):
    """An event of a CUDA stream, or what answers as one does."""

    def query(self) -> bool:
        """Return whether it has happened."""

    def synchronize(self) -> None:
        """Wait until it has."""


class InFlight:
    """Holds on to memory that asynchronous copies still read or write, however its owners come and go."""

    def __init__(self) -> None:
        self._held: deque[tuple[Progress, object]] = deque()

    def hold(self, until: Progress, what: object) -> None:
        self._held.append((until, what))

    def release(self) -> None:
        """Let go of what is finished."""
        self._held = deque(entry for entry in self._held if not entry[0].query())

    def wait(self) -> bool:
        """Let go of everything, as soon as it is finished. Return whether there was anything."""
        waited = bool(self._held)
        while self._held:
            self._held.popleft()[0].synchronize()
        return waited


def copy_to_host(chunk: ChunkKV, memory: torch.Tensor, in_flight: InFlight) -> ChunkKV:
    """Return `chunk` in `memory` (host, [chunk.nbytes] uint8), as [layers, 2, tokens, kv_heads, head_dim]: a layer lies
    in one piece. From a GPU, this queues the copies and returns; `ChunkKV.written` says when they are done."""
    layers, *rows = chunk.k.shape
    packed = memory[: 2 * chunk.k.nbytes].view(chunk.k.dtype).view(layers, 2, *rows)
    result = chunk.moved(packed[:, 0], packed[:, 1])
    if not chunk.k.is_cuda:
        chunk.wait()
        result.k.copy_(chunk.k)
        result.v.copy_(chunk.v)
        return result
    stream = _outbound(chunk.k.device)
    stream.wait_stream(torch.cuda.current_stream(chunk.k.device))
    with torch.cuda.stream(stream):
        for source, target in ((chunk.k, result.k), (chunk.v, result.v)):
            for layer in range(layers):  # one by one they are contiguous: no copy waits for a temporary
                target[layer].copy_(source[layer], non_blocking=True)
            source.record_stream(stream)
    written = torch.cuda.Event()
    written.record(stream)
    in_flight.hold(written, memory)
    return replace(result, written=written)


@cache
def _outbound(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class StagingRing:
    """Device buffers that arriving KV passes through, and the stream that fills them in turn."""

    def __init__(
        self,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        num_slots: int = NUM_SLOTS,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        self.slot_tokens = max(1, slot_bytes // (2 * kv_heads * head_dim * dtype.itemsize))
        shape = (num_slots, 2, self.slot_tokens, kv_heads, head_dim)
        self.slots = torch.empty(shape, dtype=dtype, device=device)
        self.pairs = [(slot[0], slot[1]) for slot in self.slots]  # K and V, each [slot_tokens, kv_heads, head_dim]
        self.stream = torch.cuda.Stream(device)
        self.filled = [torch.cuda.Event() for _ in range(num_slots)]
        self.emptied = [torch.cuda.Event() for _ in range(num_slots)]

    def accepts(self, chunk: ChunkKV) -> bool:
        """Return whether a chunk can travel through the ring: it is on the host, in the ring's dtype and shape, each
        layer in one piece."""
        alike = chunk.k.dtype == self.slots.dtype and chunk.k.shape[2:] == self.slots.shape[3:]
        return alike and chunk.on_host is not None


@dataclass(frozen=True)
class _SlotGroup:
    """Pieces that travel together: as many rows as a slot holds."""

    start: int  # row of the load
    stop: int
    pieces: ops.HostPieces


@dataclass(frozen=True)
class Arrival:
    """Rows start .. stop - 1 of a load in one layer, on the device: K before RoPE and V, each [1, rows, kv_heads,
    head_dim], valid on the current stream until the next one is asked for."""

    rows: slice
    k: torch.Tensor
    v: torch.Tensor


class LayerwiseLoad:
    """Chunks on their way to the device, all of layer 0 first. Their tokens one after another are the load's rows.

    Only work on the device waits for a layer, and only for that one. Chunks are held until the last copy is over, also
    if not all layers are asked for (`abandon`).
    """

    def __init__(self, ring: StagingRing, chunks: Sequence[ChunkKV], num_layers: int) -> None:
        self.ring, self.num_layers = ring, num_layers
        for chunk in chunks:
            if len(chunk.k) != num_layers or not ring.accepts(chunk):
                raise ValueError(
                    f"chunk KV {list(chunk.k.shape)} {chunk.k.dtype} of {chunk.num_tokens} tokens cannot be loaded: "
                    f"[{num_layers} layers, tokens, *{list(ring.slots.shape[3:])}] {ring.slots.dtype} "
                    "must lie on the host, each layer in one piece"
                )
        self._chunks = chunks
        self._groups = _groups(chunks, ring.slot_tokens)
        self._issued = self._taken = 0  # of num_layers * len(groups) transfers
        self._total = num_layers * len(self._groups)
        for chunk in chunks:
            if chunk.written is not None:
                ring.stream.wait_event(chunk.written)
        for _ in range(len(ring.filled)):
            self._issue()

    def layer(self, layer: int) -> Iterator[Arrival]:
        """Yield the arrivals of a layer. Layers come in ascending order, each once."""
        ring = self.ring
        if self._taken != layer * len(self._groups):
            raise RuntimeError(f"layer {layer} of a load was asked for out of order")
        for group in self._groups:
            slot = self._taken % len(ring.filled)
            stream = torch.cuda.current_stream(ring.slots.device)
            stream.wait_event(ring.filled[slot])
            count = group.stop - group.start
            k, v = ring.pairs[slot]
            yield Arrival(slice(group.start, group.stop), k[None, :count], v[None, :count])
            ring.emptied[slot].record(stream)
            self._taken += 1
            self._issue()

    def abandon(self) -> None:
        """Issue no further copies: no more layers will be asked for."""
        self._total = self._issued

    def query(self) -> bool:
        """Return whether nothing is being copied, or will be."""
        return self._issued == self._total and self._last.query()

    def synchronize(self) -> None:
        """Wait for the copies that were queued."""
        self._last.synchronize()

    @property
    def _last(self) -> torch.cuda.Event:
        return self.ring.filled[(self._issued - 1) % len(self.ring.filled)]

    def _issue(self) -> None:
        if self._issued >= self._total:
            return
        ring, slot = self.ring, self._issued % len(self.ring.filled)
        layer, index = divmod(self._issued, len(self._groups))
        ring.stream.wait_event(ring.emptied[slot])
        ops.copy_pieces(self._groups[index].pieces, layer, *ring.pairs[slot], ring.stream)
        ring.filled[slot].record(ring.stream)
        self._issued += 1


def _groups(chunks: Sequence[ChunkKV], slot_tokens: int) -> list[_SlotGroup]:
    """Cut the rows of all chunks where a slot is full."""
    groups: list[_SlotGroup] = []
    pieces: list[tuple[ops.HostKV, int, int]] = []
    start = row = 0
    for chunk in chunks:
        kv, taken = chunk.on_host, 0
        assert kv is not None
        while taken < chunk.num_tokens:
            count = min(chunk.num_tokens - taken, start + slot_tokens - row)
            pieces.append((kv, taken, taken + count))
            taken += count
            row += count
            if row == start + slot_tokens:
                groups.append(_SlotGroup(start, row, ops.HostPieces(pieces)))
                pieces, start = [], row
    if pieces:
        groups.append(_SlotGroup(start, row, ops.HostPieces(pieces)))
    return groups
