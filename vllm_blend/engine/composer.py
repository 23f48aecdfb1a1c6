"""Makes a blend plan from a chunked prompt: finds the stored KV of its pieces, and has missing ones encoded first.

The prefix is a piece of its own, encoded after nothing, and exact. What every chunk is encoded after is decided by an
encoding context: by default the prefix, filler passages (none for the first chunk, which is exact where it stands) and
the passages of its page. Encoding a chunk after the prefix and its company, the filler, is itself a blend: these are
exact segments, the chunk is the suffix. After anything else it is a plain prefill. Several requests that lack the same
chunk in the same context share one encoding.

Where the store has tiers below the memory, what is not in memory is asked for there first, in other threads, and
encoded when it is not there, damaged or late.

Chunks that a prompt has computed in place are looked for in the same way, and never encoded: where they are not stored
they are holes of the plan, and a prompt of which nothing is stored runs as a plain one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from functools import partial

from vllm_blend.blend.plan import Segment
from vllm_blend.engine.admission import AdmissionQueue
from vllm_blend.engine.blend_planner import BlendPlanner
from vllm_blend.engine.pieces import PendingBlend, Piece, PieceFinder, StoredChunks, memory_of
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.keys import ChunkId
from vllm_blend.kv_store.pending import Arrivals, RequestedChunk
from vllm_blend.kv_store.prefetch import ChunkLoader
from vllm_blend.kv_store.tiered import TieredChunkStore
from vllm_blend.kv_store.tiers import DISK
from vllm_blend.outputs import RequestMetrics
from vllm_blend.request import Request

RETENTION_LEVEL = 50  # of chunks that a prompt has retained: in the middle of those that can be asked for
JOINED = "joined"  # where KV was found that another prompt was having encoded already


class ChunkComposer:
    """Makes plans, and the requests that encode missing chunks. Purely host-side; the scheduler runs what it
    returns."""

    def __init__(
        self,
        store: TieredChunkStore,
        finder: PieceFinder,
        planner: BlendPlanner,
        prioritize: Callable[[Request, int], None],
        collected: Callable[[Request], ChunkKV],
    ) -> None:
        """`prioritize` changes the priority of a request that may be queued already; `collected` gives the KV that a
        request has computed."""
        self.store, self.finder, self.planner, self._prioritize = store, finder, planner, prioritize
        self._collected = collected
        self.stored = StoredChunks(finder.model, store)
        self.bytes_per_token = planner.bytes_per_token
        self.loader = ChunkLoader() if store.below else None
        self.num_encoded = 0
        self.num_early = 0  # prompts that ran while their chunks arrived
        self.num_lost = 0  # of those, prompts that had to start again
        self._encoding: dict[str, Request] = {}  # key -> the request that computes it
        self._loading: dict[str, Arrivals] = {}  # key -> what is read together
        self._waiting: dict[str, list[PendingBlend]] = {}  # key -> the blends that need it, encoded or loaded
        self._admission = AdmissionQueue(store.budget_bytes, self.bytes_per_token)

    def compose(
        self, parsed: ParsedPrompt, requests: Sequence[Request], patient: bool = False, own: Container[int] = ()
    ) -> list[Request]:
        """Give `requests` (the completions of one prompt that `blends`) a plan, now or when their chunks are encoded.

        Return new requests to schedule first; `requests` are blocked until those are done. `patient` ones do not
        `start_early`. `own` has the positions at which pieces start that were encoded for `requests` earlier.
        """
        owner = requests[0].owner
        pending = PendingBlend(parsed, list(requests), owner, self.finder.pieces(parsed), patient=patient)
        pending.own.update(piece.id.key for piece in pending.pieces if piece.start in own)
        if self.loader is None:  # nothing is held for longer than the store would
            return self.start(pending)
        for request in requests:
            request.blocked = True
        self._admission.add(pending)
        return self._start_admitted()

    def poll(self) -> list[Request]:
        """Take what has been loaded since the last call, without waiting. Return encodings to schedule first."""
        if self.loader is None:
            return []
        started: list[Request] = []
        for key, kv in self.loader.poll():
            self._loading.pop(key, None)
            for pending in self._waiting.pop(key, []):
                found_in = memory_of(kv) if kv is None or kv.loaded_from is None else kv.loaded_from
                piece = next((piece for piece in pending.pieces if piece.id.key == key), None)
                pending.fill(key, None if piece is None else self.stored.checked(piece.id, kv), found_in)
                started += self._advance(pending)
        return started + self._start_admitted()

    def start_early(self) -> bool:
        """Let a prompt run while its chunks arrive: the first one that waits only for chunks of which the disk has
        given the first layers. Return whether there is such a prompt.

        This is for when there is nothing else to compute, as the step waits for each layer.
        """
        for pending in dict.fromkeys(one for waiting in self._waiting.values() for one in waiting):
            chunks = None if pending.patient or not pending.requests else self._arriving(pending)
            if chunks is not None:
                for key, kv in chunks.items():
                    pending.fill(key, kv, DISK)
                    self._waiting[key].remove(pending)
                    if not self._waiting[key]:
                        del self._waiting[key]
                self.num_early += 1
                self._finish(pending)
                return True
        return False

    def start_again(self, parsed: ParsedPrompt, requests: Sequence[Request]) -> list[Request]:
        """Compose `requests` (of one prompt) anew, chunks of which were lost in the middle of a step."""
        self.num_lost += 1
        plan = requests[0].blend
        own = [segment.start for segment in plan.segments if segment.found_in is None] if plan is not None else []
        for request in requests:
            request.blend = None
        self._admission.readmit(requests)
        return self.compose(parsed, requests, patient=True, own=own)

    @property
    def is_loading(self) -> bool:
        """Return whether prompts wait for chunks that are being loaded. One that started early does not."""
        return not self._waiting.keys().isdisjoint(self._loading)

    def wait(self, timeout: float) -> None:
        """Return when `poll` has something to do, after `timeout` seconds at the latest."""
        if self.loader is not None:
            self.loader.wait(timeout)

    def forget(self, requests: Sequence[Request]) -> list[Request]:
        """Drop requests that are gone. Return the encodings that no prompt waits for any more, which need not run."""
        gone = set(requests)
        self._admission.forget(requests)
        # A pending blend without requests is an encoding ahead of any question: its caller waits.
        return self._withdraw(lambda pending: bool(pending.requests) and gone.issuperset(pending.requests))

    def withdraw(self, pending: PendingBlend) -> list[Request]:
        """Drop what was to be encoded ahead of any question, as `forget` does for requests."""
        return self._withdraw(lambda other: other is pending)

    def _withdraw(self, is_gone: Callable[[PendingBlend], bool]) -> list[Request]:
        orphans = []
        for key, waiting in list(self._waiting.items()):
            waiting[:] = [pending for pending in waiting if not is_gone(pending)]
            if waiting:
                continue
            del self._waiting[key]
            if key in self._encoding:  # the next prompt that needs the chunk starts another
                orphans.append(self._encoding.pop(key))
            else:
                self._loading.pop(key, None)
                if self.loader is not None:
                    self.loader.cancel(key)
        return orphans

    def encoded(self, encode: Request) -> list[Request]:
        """Store what an encoding request has computed. Return encodings that could only start now."""
        key = encode.request_id
        start = encode.collect_from
        ids = encode.prompt_token_ids
        content = ChunkId.from_tokens(self.finder.model, ids[:start], ids[start:], salt=encode.salt)
        kv = self.store.put(key, self._collected(encode).with_content(content).owned_by(encode.owner))
        self.num_encoded += 1
        del self._encoding[key]
        started: list[Request] = []
        for pending in self._waiting.pop(key, []):
            scheduled = encode.metrics.first_scheduled_time or time.time()
            pending.first_scheduled_time = min(pending.first_scheduled_time, scheduled)
            pending.fill(key, kv, JOINED)
            started += self._advance(pending)
        return started

    def _start_admitted(self) -> list[Request]:
        """Begin with the prompts that are admitted now; return encodings to start."""
        started: list[Request] = []
        while (pending := self._admission.next()) is not None:
            started += self.start(pending)
        return started

    def start(self, pending: PendingBlend) -> list[Request]:
        """Take what is in memory, and see to the rest. Return encodings to run: when these are done, nothing is
        missing of the blend."""
        for piece, seconds in zip(pending.chunks, pending.parsed.retention, strict=False):
            if seconds:
                self.store.retain(piece.id.key, RETENTION_LEVEL, seconds, pending.owner.name)
        for piece in pending.pieces:
            kv = self.stored.find_in_memory(piece.id)
            pending.take(piece, kv, memory_of(kv))
        return self._advance(pending)

    def _advance(self, pending: PendingBlend) -> list[Request]:
        """Finish a blend that has all its pieces. Otherwise load what may be below the memory, and return encodings to
        start for what is not. Chunks wait for their prefix before they are encoded."""
        missing = pending.missing
        if not missing:
            self._finish(pending)
            return []
        for request in pending.requests:
            request.blocked = True
        absent = self._load_all(pending, missing)
        pending.leave_out({piece.id.key for piece in absent})
        missing = pending.missing
        is_idle = not any(piece.id.key in self._loading or piece.id.key in self._encoding for piece in missing)
        if is_idle and not (missing and pending.chunks):  # a prefix without chunks is not worth encoding
            self._finish(pending)
            return []
        absent = [piece for piece in missing if piece.id.key not in self._loading]
        prefix = pending.prefix
        if prefix is not None and prefix.kv is None:
            absent = [piece for piece in absent if piece is prefix]
        else:
            absent = self._after_company(absent)
        started = []
        priority = min((each.priority for each in pending.requests), default=0)
        for piece in absent:
            key = piece.id.key
            self._wait_for(key, pending)
            if key not in self._encoding:
                request = self._encoding[key] = self._encode_request(piece, pending)
                request.priority = priority
                pending.own.add(key)
                started.append(request)
            elif priority < self._encoding[key].priority:  # it is as urgent as the most urgent prompt that waits for it
                self._prioritize(self._encoding[key], priority)
        return started

    def _after_company(self, absent: Sequence[Piece]) -> list[Piece]:
        """Return those of `absent` whose company is in memory, and the companies of the others."""
        ready: list[Piece] = []
        companies: dict[str, Piece] = {}
        for piece in absent:
            company = piece.company
            if company is not None and company.kv is None:
                company.kv = self.stored.find_in_memory(company.id)
            if company is None or company.kv is not None:
                ready.append(piece)
            else:
                companies[company.id.key] = company
        return [*companies.values(), *ready]

    def _load_all(self, pending: PendingBlend, pieces: Sequence[Piece]) -> list[Piece]:
        """Have pieces loaded by other threads. Return those that have to be encoded."""
        if self.loader is None:
            return list(pieces)
        arrivals = Arrivals(self.loader.wake)
        with arrivals.adding:
            return [piece for piece in pieces if not self._load(pending, piece, self.loader, arrivals)]

    def _load(self, pending: PendingBlend, piece: Piece, loader: ChunkLoader, arrivals: Arrivals) -> bool:
        key = piece.id.key
        if key not in self._loading:
            if key in pending.asked or key in self._encoding:
                return False
            pending.asked.add(key)
            # An explicit ratio says what a prompt wants: the controller leaves it alone.
            controlled = self.planner.controller is not None and pending.parsed.blend_recompute_ratio is None
            expected = self.stored.expected(piece.id)
            if not loader.request(key, partial(self.store.load, key, expected, controlled, arrivals, pending.owner)):
                return False
            arrivals.requested[key] = RequestedChunk(expected, controlled)
            self._loading[key] = arrivals
        pending.asked.add(key)
        pending.first_scheduled_time = min(pending.first_scheduled_time, time.time())
        self._wait_for(key, pending)
        return True

    def _arriving(self, pending: PendingBlend) -> dict[str, ChunkKV] | None:
        """Return what a prompt waits for by key, if all of it has begun to arrive from a disk."""
        assert self.loader is not None
        chunks = {}
        for piece in pending.missing:
            key = piece.id.key
            arriving = self._loading[key].kv(key, self.loader.deadline(key)) if key in self._loading else None
            kv = self.stored.checked(piece.id, arriving)
            if kv is None:
                return None
            chunks[key] = kv
        return chunks

    def _wait_for(self, key: str, pending: PendingBlend) -> None:
        waiting = self._waiting.setdefault(key, [])
        if pending not in waiting:
            waiting.append(pending)

    def _encode_request(self, piece: Piece, pending: PendingBlend) -> Request:
        before: list[int] = [*(piece.context or ())]
        plan = None
        if piece.context is None:
            first = [each for each in (pending.prefix, piece.company) if each is not None and each is not piece]
            before = [token for each in first for token in each.id.token_ids]
            if first:
                segments = [Segment(each.start, each.kv, exact=True) for each in first if each.kv is not None]
                plan = self.planner.plan_after(segments, [*before, *piece.id.token_ids])
        ids = [*before, *piece.id.token_ids]
        metrics = RequestMetrics(arrival_time=time.time())
        request = Request(
            piece.id.key, ids, None, metrics, salt=pending.parsed.salt, blend=plan, collect_from=len(before)
        )
        asking = next(iter(pending.requests), None)
        request.owner = pending.owner
        request.call = "" if asking is None else asking.call
        return request

    def _finish(self, pending: PendingBlend) -> None:
        if not pending.requests:
            if pending.on_complete is not None:
                pending.on_complete()
            return
        segments = [Segment(p.start, p.kv, p.exact, p.found_in) for p in pending.pieces if p.kv is not None]
        plan = None  # nothing is reused but perhaps the prefix, which the prefix cache takes care of
        if pending.chunks:
            plan = self.planner.plan_stored(pending.parsed, segments)
        for request in pending.requests:
            request.blend, request.blocked = plan, False
            if pending.first_scheduled_time != float("inf"):  # encoding its chunks is part of serving a request
                # from its arrival on, where the encoding had begun for another request
                began = max(pending.first_scheduled_time, request.metrics.arrival_time)
                request.metrics.first_scheduled_time = began
