"""A chunk that is on its way from the disk, layer by layer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.segment import Extent, SegmentFiles
from vllm_blend.kv_store.serialization import PAGE, ChunkFault, ChunkHeader, ChunkLayout, check_numbers

READ_BYTES = 1 << 20  # small layers are read together, until they are so many bytes


class PendingChunk:
    """Layers arrive in any order, in other threads. A layer that is damaged, or late, is None, and the chunk a miss.

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
        """`report` is called once with what became of it: None or what was wrong. `release`, too, when nothing is being
        read any more."""
        self.kv, self.timeout = kv, timeout
        self.error: Exception | None = None
        self._plan = _plan(header.layout, READ_BYTES)
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
        """That are read."""
        return self.extent.num_bytes

    @property
    def is_small(self) -> bool:
        """Whether several such chunks may be read at once."""
        return self.num_bytes < READ_BYTES

    @property
    def bytes_left(self) -> int:
        """Of KV, that have not arrived."""
        with self._changed:
            share = self._ready.count(False) / len(self._ready)
        return int(self.kv.nbytes * share)

    def has(self, layer: int) -> bool:
        """Whether a layer has arrived, of a chunk that is not a miss so far. Never waits."""
        with self._changed:
            return self._ready[layer] and self.error is None

    @property
    def is_whole(self) -> bool:
        """Whether all of it has arrived. Never waits."""
        return self._done and self.error is None

    def watch(self, first: Callable[[], None] | None = None, done: Callable[[], None] | None = None) -> None:
        """Have `first` called when the first layer has arrived, or nothing is being read any more, and `done` when
        nothing is: once each, in a reading thread, or now. They must neither wait nor raise."""
        with self._changed:
            self._on_first += [first] if first is not None else []
            self._on_done += [done] if done is not None else []
        self._call_watchers()

    def layer(self, index: int, timeout: float | None = None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """K and V of a layer, each [tokens, kv_heads, head_dim], as soon as they are there; None when the chunk turns
        out to be a miss, among others because `timeout` (by default the store's) seconds have passed."""
        if not self._wait(lambda: self._ready[index], timeout):
            return None
        return self.kv.k[index], self.kv.v[index]

    def wait(self, timeout: float | None = None) -> ChunkKV | None:
        """The whole chunk; None as in `layer`."""
        return self.kv if self._wait(lambda: self._done, timeout) else None

    def abandon(self) -> None:
        """Nobody wants the chunk any more: what has not begun to be read will not be."""
        self._fail(InterruptedError("abandoned"))

    def give_up(self) -> None:
        """Instead of `read_run`: nothing is read."""
        self.abandon()
        for number in range(len(self.runs)):
            self.read_run(number)

    def read_run(self, number: int) -> None:
        """Read a part of the chunk; for one of the store's threads, once for each of `runs`."""
        try:
            if self.error is None:
                start, stop = self.runs[number]
                self._files.read(self.extent, start, self.payload[start:stop])
                self._arrived(number)
        except Exception as error:  # of any kind: whoever waits must hear of it
            self._fail(error)
        self._end(number)

    def take_whole(self) -> None:
        """All of the payload has been read, by somebody else: instead of `read_run`."""
        try:
            if self.error is None:
                for number in range(len(self.runs)):
                    self._arrived(number)
        except Exception as error:  # as above
            self._fail(error)
        for number in range(len(self.runs)):
            self._end(number)

    def _end(self, number: int) -> None:
        """Nothing of a run is being read any more."""
        with self._changed:
            self._unread -= 1
            last = self._unread == 0
        if last:
            self._release(self.error)
            self._tell()
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
            self._tell()
        return self.error is None

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if not self._done and self.error is None:
                self.error = error

    def _tell(self) -> None:
        with self._changed:
            first, self._reported = not self._reported, True
        if first:
            self._report(self.error)


def neighbours(chunks: Sequence[PendingChunk]) -> Iterator[list[PendingChunk]]:
    """Chunks that lie one behind the other, as many as make one read."""
    group: list[PendingChunk] = []
    size = 0
    for chunk in sorted(chunks, key=lambda chunk: (chunk.extent.segment, chunk.extent.offset)):
        follows = bool(group) and group[-1].extent.stop == (chunk.extent.segment, chunk.extent.offset)
        if group and not (follows and size + chunk.num_bytes <= READ_BYTES):
            yield group
            group, size = [], 0
        group.append(chunk)
        size += chunk.num_bytes
    if group:
        yield group


def read_together(files: SegmentFiles, chunks: Sequence[PendingChunk]) -> None:
    """Read chunks that lie one behind the other; for one of the store's threads, instead of `read_run`."""
    first, together = chunks[0].extent, len(chunks) > 1
    if together:
        try:
            files.read_adjacent(first.segment, first.offset, [chunk.payload for chunk in chunks])
        except (ChunkFault, OSError):  # of one of them: each is read by itself, and says what is wrong with it
            together = False
    for chunk in chunks:
        if together:
            chunk.take_whole()
        else:
            for number in range(len(chunk.runs)):
                chunk.read_run(number)


def plan_runs(layout: ChunkLayout, read_bytes: int = READ_BYTES) -> list[tuple[int, int]]:
    """The parts of a payload that are read at once: start and stop, whole pages, each behind the last one. Small layers
    are read together, until they are `read_bytes`."""
    runs, start = [], 0
    for _, layer_stop in layer_spans(layout):
        stop = -(-layer_stop // PAGE) * PAGE
        if stop - start >= read_bytes:
            runs.append((start, stop))
            start = stop
    if start < layout.payload_bytes:
        runs.append((start, layout.payload_bytes))
    return runs


def layer_spans(layout: ChunkLayout) -> list[tuple[int, int]]:
    return [layout.layer_span(layer) for layer in range(layout.num_layers)]


@dataclass(frozen=True)
class _Plan:
    runs: tuple[tuple[int, int], ...]
    layers: tuple[tuple[int, ...], ...]  # of each run: the layers of which it has a part
    num_runs: tuple[int, ...]  # of each layer: the runs that have a part of it


@lru_cache(256)  # chunks of one length are alike
def _plan(layout: ChunkLayout, read_bytes: int) -> _Plan:
    runs, spans = tuple(plan_runs(layout, read_bytes)), layer_spans(layout)
    layers = tuple(
        tuple(layer for layer, (first, last) in enumerate(spans) if first < stop and start < last)
        for start, stop in runs
    )
    return _Plan(runs, layers, tuple(sum(layer in some for some in layers) for layer in range(len(spans))))
