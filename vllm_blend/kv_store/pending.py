"""Chunks that are on their way from the disk, layer by layer, and those of one prompt together, so that it can run
while they arrive.

The disk gives the first layers of all of them first. When those are there, a forward pass may begin: it asks for
each layer before it computes it, while the next ones are being read (CacheBlend, Yao et al., EuroSys 2025, section 5).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from vllm_blend.kv_store.chunk_kv import ChunkKV, ChunkLost, ExpectedChunk
from vllm_blend.kv_store.host_memory import PAGE, round_up
from vllm_blend.kv_store.layout import ChunkFault, ChunkLayout
from vllm_blend.kv_store.segment import Extent, SegmentFiles
from vllm_blend.kv_store.serialization import ChunkHeader, check_numbers

READ_BYTES = 1 << 20  # small layers are read together, until they are so many bytes


class PendingChunk:
    """A chunk whose layers arrive in any order, in other threads. A layer that is damaged or late is None, and the
    chunk a miss.

    `kv` has the shape of the chunk at once; a layer of it is valid from when `layer` has returned it. The reading
    threads hold on to the memory until they are done with it.
    """

    def __init__(
        self,
        header: ChunkHeader,
        files: SegmentFiles,
        extent: Extent,
        payload: torch.Tensor,
        kv: ChunkKV,
        timeout: float,
        report: Callable[[Exception | None], None],
        release: Callable[[Exception | None], None],
    ) -> None:
        """`report` is called once, with None or with what was wrong; so is `release`, when nothing is being read any
        more."""
        self.kv, self.timeout = kv, timeout
        self.deadline = math.inf  # time.monotonic, of all waits for a layer that a prompt needs
        self.error: Exception | None = None
        self._plan = _plan_reads(header.layout, READ_BYTES)
        self.runs = self._plan.runs
        self.extent = extent
        self._header, self._files, self.payload = header, files, payload
        self._report, self._release = report, release
        self._in_place = payload.data_ptr() == kv.k.data_ptr()
        self._changed = threading.Condition()
        self._missing = list(self._plan.num_runs)
        self._ready = [False] * header.layout.num_layers
        self._unread = len(self.runs)
        self._reported = self._done = False
        self._on_first: list[Callable[[], None]] = []
        self._on_done: list[Callable[[], None]] = []

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are read."""
        return self.extent.num_bytes

    @property
    def is_small(self) -> bool:
        """Return whether several such chunks may be read at once."""
        return self.num_bytes < READ_BYTES

    @property
    def bytes_left(self) -> int:
        """Return the bytes of KV that have not arrived."""
        with self._changed:
            share = self._ready.count(False) / len(self._ready)
        return int(self.kv.nbytes * share)

    @property
    def is_lost(self) -> bool:
        """Return whether the chunk is a miss."""
        return self.error is not None

    def has(self, layer: int) -> bool:
        """Return whether a layer has arrived, and the chunk is not a miss so far. Never waits."""
        with self._changed:
            return self._ready[layer] and self.error is None

    @property
    def is_whole(self) -> bool:
        """Return whether all of it has arrived. Never waits."""
        return self._done and self.error is None

    def watch(self, first: Callable[[], None] | None = None, done: Callable[[], None] | None = None) -> None:
        """Call `first` when the first layer has arrived, or nothing is being read any more, and `done` when nothing is:
        once each, in a reading thread, or now. They must neither wait nor raise."""
        with self._changed:
            self._on_first += [first] if first is not None else []
            self._on_done += [done] if done is not None else []
        self._call_watchers()

    def layer(self, index: int, timeout: float | None = None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return K and V of a layer, each [tokens, kv_heads, head_dim], as soon as they are there; None when the chunk
        turns out to be a miss, among others because `timeout` (by default the store's) seconds have passed."""
        if not self._wait(lambda: self._ready[index], timeout):
            return None
        return self.kv.k[index], self.kv.v[index]

    def wait_layer(self, layer: int) -> None:
        """Return when a layer is there. Raises ChunkLost where it is not by `deadline`."""
        if self.layer(layer, max(0.0, self.deadline - time.monotonic())) is None:
            raise ChunkLost(f"layer {layer} of a stored chunk did not arrive: {self.error}")

    def wait(self, timeout: float | None = None) -> ChunkKV | None:
        """Return the whole chunk when it is there; None as in `layer`."""
        return self.kv if self._wait(lambda: self._done, timeout) else None

    def abandon(self) -> None:
        """Do not read what has not begun to be read: the chunk is not wanted any more."""
        self._fail(InterruptedError("abandoned"))

    def give_up(self) -> None:
        """Read nothing, instead of `read_run`."""
        self.abandon()
        for number in range(len(self.runs)):
            self.read_run(number)

    def read_run(self, number: int, is_read: bool = False) -> None:
        """Read a part of the chunk, unless its payload has been read with others; for one of the store's threads, once
        for each of `runs`."""
        try:
            if self.error is None:
                start, stop = self.runs[number]
                if not is_read:
                    self._files.read(self.extent, start, self.payload[start:stop])
                self._arrived(number)
        except Exception as error:  # of any kind: a waiting thread must hear of it
            self._fail(error)
        self._end(number)

    def _end(self, number: int) -> None:
        """Note that nothing of a run is being read any more."""
        with self._changed:
            self._unread -= 1
            last = self._unread == 0
        if last:
            self._release(self.error)
            self._report_once()
            with self._changed:
                self._done = True
                self._changed.notify_all()
            self._call_watchers()

    def _arrived(self, number: int) -> None:
        complete = []
        with self._changed:
            for layer in self._plan.layers[number]:
                self._missing[layer] -= 1
                if self._missing[layer] == 0:
                    complete.append(layer)
        self._header.check_layers(self.payload, complete)
        if not self._in_place:
            for layer in complete:
                self._header.layout.read_layer(self.payload, layer, self.kv)
        check_numbers(self.kv, complete)
        with self._changed:
            for layer in complete:
                self._ready[layer] = True
            self._changed.notify_all()
        if 0 in complete:
            self._call_watchers()

    def _call_watchers(self) -> None:
        calls: list[Callable[[], None]] = []
        with self._changed:
            if self._ready[0] or self._done:
                calls, self._on_first = self._on_first, []
            if self._done:
                calls, self._on_done = calls + self._on_done, []
        for call in calls:
            call()

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        with self._changed:
            while not ready() and not self._done:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            late = not ready() and not self._done
        if late:
            self._fail(TimeoutError("it took too long"))
            self._report_once()
        return self.error is None

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if not self._done and self.error is None:
                self.error = error

    def _report_once(self) -> None:
        with self._changed:
            first, self._reported = not self._reported, True
        if first:
            self._report(self.error)


@dataclass(frozen=True)
class RequestedChunk:
    """A chunk that a prompt asks a disk for. With `may_recompute`, the store's observer may have it computed."""

    expected: ExpectedChunk
    may_recompute: bool = False


@dataclass(frozen=True)
class StartedReads:
    """The chunks that a disk has begun to read, and those that it has but that are `declined`: computing them is
    faster. It does not have the others."""

    pending: Mapping[str, PendingChunk] = field(default_factory=dict)
    declined: frozenset[str] = frozenset()


class Arrivals:
    """The chunks that one prompt requests from the disk. The thread that loads the first one begins to read them
    all."""

    def __init__(self, ready: Callable[[], None]) -> None:
        """`ready` is called, in some thread, when the first layer of a chunk that is being read is there, or never will
        be."""
        self.adding = threading.Lock()  # to be held while `requested` is added to: no read begins meanwhile
        self.requested: dict[str, RequestedChunk] = {}  # by key
        self._ready = ready
        self._started: StartedReads | None = None

    def start(self, read: Callable[[Mapping[str, RequestedChunk]], StartedReads]) -> StartedReads:
        """Begin to read, unless another thread has. Waits until it is known what is being read."""
        with self.adding:
            if self._started is None:
                self._started = read(self.requested)
                for pending in self._started.pending.values():
                    pending.watch(first=self._ready)
            return self._started

    def kv(self, key: str, deadline: float) -> ChunkKV | None:
        """Return a chunk of which the first layer is there, and the others will be by `deadline` (time.monotonic), or
        it is lost. Never waits."""
        started = self._started
        pending = None if started is None else started.pending.get(key)
        if pending is None or not pending.has(0):
            return None
        pending.deadline = deadline
        return replace(pending.kv, arriving=pending)


def submit_reads(pool: Executor, files: SegmentFiles, chunks: Sequence[PendingChunk]) -> None:
    """Have chunks read: small ones that are neighbours together, and of others the first layers of all first."""
    for group in _group_neighbours([chunk for chunk in chunks if chunk.is_small]):
        pool.submit(_read_together, files, group)
    large = [chunk for chunk in chunks if not chunk.is_small]
    runs = [(start, at, number) for at, chunk in enumerate(large) for number, (start, _) in enumerate(chunk.runs)]
    for _, at, number in sorted(runs):
        pool.submit(large[at].read_run, number)


def _group_neighbours(chunks: Sequence[PendingChunk]) -> list[list[PendingChunk]]:
    """Return groups of chunks that lie one behind the other, each of as many as make one read."""
    groups: list[list[PendingChunk]] = []
    stop: tuple[str, int] | None = None
    num_bytes = 0
    for chunk in sorted(chunks, key=lambda chunk: (chunk.extent.segment, chunk.extent.offset)):
        if stop != (chunk.extent.segment, chunk.extent.offset) or num_bytes + chunk.num_bytes > READ_BYTES:
            groups.append([])
            num_bytes = 0
        groups[-1].append(chunk)
        num_bytes += chunk.num_bytes
        stop = chunk.extent.stop
    return groups


def _read_together(files: SegmentFiles, chunks: Sequence[PendingChunk]) -> None:
    """Read chunks that lie one behind the other; for one of the store's threads, instead of `read_run`."""
    first, together = chunks[0].extent, len(chunks) > 1
    if together:
        try:
            files.read_adjacent(first.segment, first.offset, [chunk.payload for chunk in chunks])
        except (ChunkFault, OSError):  # of one of them: each is read by itself, and says what is wrong with it
            together = False
    for chunk in chunks:
        for number in range(len(chunk.runs)):
            chunk.read_run(number, is_read=together)


def plan_runs(layout: ChunkLayout, read_bytes: int = READ_BYTES) -> list[tuple[int, int]]:
    """Return the parts of a payload that are read at once: start and stop, whole pages, each behind the last one. Small
    layers are read together, until they are `read_bytes`."""
    runs, start = [], 0
    for layer in range(layout.num_layers):
        stop = round_up(layout.layer_span(layer)[1], PAGE)
        if stop - start >= read_bytes:
            runs.append((start, stop))
            start = stop
    if start < layout.payload_bytes:
        runs.append((start, layout.payload_bytes))
    return runs


@dataclass(frozen=True)
class _ReadPlan:
    runs: list[tuple[int, int]]
    layers: list[list[int]]  # of each run: the layers of which it has a part
    num_runs: list[int]  # of each layer: the runs that have a part of it


@lru_cache(256)  # chunks of one length are alike
def _plan_reads(layout: ChunkLayout, read_bytes: int) -> _ReadPlan:
    runs, spans = plan_runs(layout, read_bytes), [layout.layer_span(layer) for layer in range(layout.num_layers)]
    layers = [[i for i, (first, last) in enumerate(spans) if first < stop and start < last] for start, stop in runs]
    return _ReadPlan(runs, layers, [sum(layer in some for some in layers) for layer in range(len(spans))])
