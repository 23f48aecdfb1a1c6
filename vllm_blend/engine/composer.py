"""From a chunked prompt to a blend plan: find the stored KV of its pieces, and have what is missing encoded first.

The prefix is a piece of its own, encoded after nothing. Every chunk is encoded after the prefix, so the first chunk of
a prompt is exact where it stands, and so is the prefix. Encoding a chunk is itself a blend: its prefix is an exact
segment, the chunk is the suffix. Several requests that lack the same chunk share one encoding.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_blend.blend.plan import BlendPlan, Segment, make_plan
from vllm_blend.blend.selectors import make_selector
from vllm_blend.config import BlendConfig, check_ratio
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.cpu import MemoryChunkStore
from vllm_blend.kv_store.keys import ChunkId, ModelFingerprint
from vllm_blend.outputs import RequestMetrics
from vllm_blend.request import Request

logger = logging.getLogger(__name__)


@dataclass
class _Piece:
    start: int
    id: ChunkId
    exact: bool
    kv: ChunkKV | None = None


@dataclass(eq=False)
class _Composition:
    """A prompt on its way to a plan. Its pieces hold their KV themselves: eviction from the store cannot undo
    progress."""

    parsed: ParsedPrompt
    requests: list[Request]
    pieces: list[_Piece]
    first_scheduled_time: float = field(default=float("inf"))

    @property
    def missing(self) -> list[_Piece]:
        return [piece for piece in self.pieces if piece.kv is None]


class ChunkComposer:
    """Makes plans, and the requests that encode missing chunks. Purely host-side; the scheduler runs what it
    returns."""

    def __init__(self, model: ModelFingerprint, store: MemoryChunkStore, config: BlendConfig, num_layers: int) -> None:
        self.model, self.store, self.config, self.num_layers = model, store, config, num_layers
        self.num_encoded = 0
        self._encoding: dict[str, Request] = {}  # key -> the request that computes it
        self._waiting: dict[str, list[_Composition]] = {}
        selector = make_selector(config.selector)
        if config.enable_blending:  # settings that exclude each other are an error now, not with the first prompt
            ratios = (config.recompute_ratio, config.check_layers, config.recompute_ratios)
            make_plan((), (0,), 0, selector, *ratios, num_layers)

    def blends(self, parsed: ParsedPrompt) -> bool:
        """Whether a prompt is blended: without chunks, or with a context below `min_tokens`, it stays a plain one."""
        bounds = parsed.chunk_bounds
        return self.config.enable_blending and bool(bounds) and bounds[-1][1] >= self.config.min_tokens

    def check(self, parsed: ParsedPrompt) -> None:
        """Raise ValueError if the prompt asks for a blend that cannot be."""
        self._plan(parsed, ())

    def compose(self, parsed: ParsedPrompt, requests: Sequence[Request]) -> list[Request]:
        """Give `requests` (the completions of one prompt that `blends`) a plan, now or when their chunks are encoded.

        Returns new requests to schedule first; `requests` are blocked until those are done.
        """
        composition = _Composition(parsed, list(requests), self._pieces(parsed))
        for piece in composition.pieces:
            piece.kv = self.store.get(piece.id.key)
        if not composition.missing:
            self._finish(composition)
            return []
        for request in requests:
            request.blocked = True
        return self._encode_missing(composition)

    def identify(self, parsed: ParsedPrompt) -> tuple[ChunkId | None, list[ChunkId]]:
        """The prefix of a prompt (None where there is none) and its chunks, as the store knows them."""
        ids = [piece.id for piece in self._pieces(parsed)]
        return (ids[0], ids[1:]) if len(ids) > len(parsed.chunk_bounds) else (None, ids)

    def encode(self, parsed: ParsedPrompt) -> tuple[list[Request], Callable[[], list[ChunkKV]]]:
        """Have the chunks of a prompt encoded before anybody asks anything about them.

        Returns the requests to run, and a function that gives the chunks' KV in order when nothing is left to run.
        """
        composition = _Composition(parsed, [], self._pieces(parsed))
        for piece in composition.pieces:
            piece.kv = self.store.get(piece.id.key)

        def chunks() -> list[ChunkKV]:
            own = composition.pieces[len(composition.pieces) - len(parsed.chunk_bounds) :]
            return [piece.kv.copy() for piece in own if piece.kv is not None]  # the store's own must not be changed

        return self._encode_missing(composition) if composition.missing else [], chunks

    def forget(self, requests: Sequence[Request]) -> list[Request]:
        """`requests` are gone. Returns the encodings that nobody waits for any more, which need not run."""
        gone = set(requests)
        orphans = []
        for key, waiting in list(self._waiting.items()):
            # A composition without requests is an encoding ahead of any question: its caller waits.
            waiting[:] = [c for c in waiting if not c.requests or not gone.issuperset(c.requests)]
            if not waiting:
                orphans.append(self._encoding[key])
                self.abandon(self._encoding[key])
        return orphans

    def abandon(self, encode: Request) -> None:
        """An encoding will not finish: the next prompt that needs its chunk starts another."""
        self._encoding.pop(encode.request_id, None)
        self._waiting.pop(encode.request_id, None)

    def encoded(self, encode: Request) -> list[Request]:
        """Store what an encoding request has computed; returns encodings that could only start now."""
        k, v = encode.collected_kv().unbind(0)
        key = encode.request_id
        kv = self.store.put(key, ChunkKV(k.contiguous(), v.contiguous()))
        self.num_encoded += 1
        del self._encoding[key]
        started: list[Request] = []
        for composition in self._waiting.pop(key, []):
            scheduled = encode.metrics.first_scheduled_time or time.time()
            composition.first_scheduled_time = min(composition.first_scheduled_time, scheduled)
            for piece in composition.pieces:
                if piece.id.key == key:
                    piece.kv = kv
            if composition.missing:
                started += self._encode_missing(composition)
            else:
                self._finish(composition)
        return started

    def _pieces(self, parsed: ParsedPrompt) -> list[_Piece]:
        ids = parsed.token_ids
        first = parsed.chunk_bounds[0][0] if parsed.chunk_bounds else len(ids)
        prefix = ids[:first]
        pieces = [_Piece(0, ChunkId.of(self.model, [], prefix), True)] if prefix else []
        for start, stop in parsed.chunk_bounds:
            pieces.append(_Piece(start, ChunkId.of(self.model, prefix, ids[start:stop]), start == first))
        return pieces

    def _encode_missing(self, composition: _Composition) -> list[Request]:
        """Encodings to start for a composition, given the pieces it has. Chunks wait for their prefix."""
        prefix = (
            composition.pieces[0]
            if composition.pieces[0].start == 0 and composition.parsed.chunk_bounds[0][0]
            else None
        )
        startable = [prefix] if prefix is not None and prefix.kv is None else composition.missing
        started = []
        for piece in startable:
            waiting = self._waiting.setdefault(piece.id.key, [])
            if composition not in waiting:
                waiting.append(composition)
            if piece.id.key not in self._encoding:
                request = self._encoding[piece.id.key] = self._encode_request(piece, prefix)
                started.append(request)
        return started

    def _encode_request(self, piece: _Piece, prefix: _Piece | None) -> Request:
        if prefix is None or piece is prefix:
            ids, plan = list(piece.id.token_ids), None
        else:
            assert prefix.kv is not None
            ids = [*prefix.id.token_ids, *piece.id.token_ids]
            plan = make_plan(
                [Segment(0, prefix.kv, exact=True)],
                ids,
                len(prefix.id.token_ids),
                make_selector("none"),
                None,
                self.config.check_layers,
                None,
                self.num_layers,
            )
        start = len(ids) - len(piece.id.token_ids)
        metrics = RequestMetrics(arrival_time=time.time())
        return Request(piece.id.key, ids, None, metrics, blend=plan, collect_from=start)

    def _finish(self, composition: _Composition) -> None:
        if not composition.requests:
            return
        segments = [Segment(p.start, p.kv, p.exact) for p in composition.pieces if p.kv is not None]
        plan = self._plan(composition.parsed, segments)
        for request in composition.requests:
            request.blend, request.blocked = plan, False
            if composition.first_scheduled_time != float("inf"):  # encoding its chunks is part of serving a request
                request.metrics.first_scheduled_time = composition.first_scheduled_time

    def _plan(self, parsed: ParsedPrompt, segments: Sequence[Segment]) -> BlendPlan:
        check_ratio("blend_recompute_ratio", parsed.blend_recompute_ratio)
        ratio, ratios = parsed.blend_recompute_ratio, None
        if ratio is None and parsed.blend_selector is None:  # the engine's ratios are meant for its own selector
            ratio, ratios = self.config.recompute_ratio, self.config.recompute_ratios
        return make_plan(
            segments,
            parsed.token_ids,
            parsed.chunk_bounds[-1][1],
            make_selector(parsed.blend_selector or self.config.selector),
            ratio,
            self.config.check_layers,
            ratios,
            self.num_layers,
        )
