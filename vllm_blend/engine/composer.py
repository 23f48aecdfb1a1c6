"""From a chunked prompt to a blend plan: find the stored KV of its pieces, and have what is missing encoded first.

The prefix is a piece of its own, encoded after nothing, and exact. What every chunk is encoded after is the business of
an encoding context: by default the prefix, so that the first chunk is exact where it stands, and the passages of its
page. Encoding a chunk after the prefix is itself a blend: the prefix is an exact segment, the chunk is the suffix.
After anything else it is a plain prefill. Several requests that lack the same chunk in the same context share one
encoding.

Where the store has tiers below the memory, what is not in memory is asked for there first, in other threads, and
encoded when it is not there, damaged or late.

Chunks that a prompt has computed in place are looked for in the same way, and never encoded: where they are not stored
they are holes of the plan, and a prompt of which nothing is stored runs as a plain one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial

from vllm_blend.blend.controller import LoadingController
from vllm_blend.blend.encoding_contexts import ContextPieces, EncodingContext
from vllm_blend.blend.encoding_contexts.base import Tokens
from vllm_blend.blend.plan import BlendPlan, Segment, make_plan
from vllm_blend.blend.selectors import make_selector
from vllm_blend.config import BlendConfig, check_ratio
from vllm_blend.engine.composition import Composition, Piece, Turns
from vllm_blend.engine.compressed_chunks import check_selector
from vllm_blend.inputs import ParsedPrompt, begins_with
from vllm_blend.kv_store.arrivals import Arrivals, WantedChunk
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.cpu import MemoryChunkStore
from vllm_blend.kv_store.keys import ChunkId, ModelFingerprint, context_id
from vllm_blend.kv_store.prefetch import ChunkLoader
from vllm_blend.kv_store.tiered import DISK, MEMORY, Choice, TieredChunkStore
from vllm_blend.kv_store.validation import ExpectedChunk, find_kv_mismatch
from vllm_blend.outputs import RequestMetrics
from vllm_blend.request import Request

logger = logging.getLogger(__name__)

JOINED = "joined"  # where KV was found that another prompt was having encoded already


class ChunkComposer:
    """Makes plans, and the requests that encode missing chunks. Purely host-side; the scheduler runs what it
    returns."""

    def __init__(
        self,
        model: ModelFingerprint,
        store: MemoryChunkStore | TieredChunkStore,
        config: BlendConfig,
        num_layers: int,
        bytes_per_token: int,
        controller: LoadingController | None = None,
        rounds: bool = False,
        *,
        encoding: EncodingContext,
        max_model_len: int,
        prioritize: Callable[[Request, int], None],
    ) -> None:
        """`rounds`: whether chunks of the store may come back with fewer bits than they were computed with.
        `prioritize` changes the priority of a request that may be queued already."""
        self.model, self.store, self.config, self.num_layers = model, store, config, num_layers
        self.rounds = rounds
        self.encoding, self.max_model_len, self._prioritize = encoding, max_model_len, prioritize
        self.compression = config.chunk_compression()  # of chunks; a prefix is stored whole, and registered chunks are
        self.bytes_per_token, self.controller = bytes_per_token, controller
        self.loader = ChunkLoader() if isinstance(store, TieredChunkStore) else None
        self.num_encoded = 0
        self.num_early = 0  # prompts that ran while their chunks arrived
        self.num_lost = 0  # of those, prompts that had to start again
        self._encoding: dict[str, Request] = {}  # key -> the request that computes it
        self._loading: dict[str, Arrivals] = {}  # key -> what is read together
        self._waiting: dict[str, list[Composition]] = {}  # key -> who needs it, encoded or loaded
        self._turns = Turns(store.budget_bytes, bytes_per_token)
        selector = make_selector(config.selector, self.compression is not None)
        if config.enable_blending:  # settings that exclude each other are an error now, not with the first prompt
            ratios = (config.recompute_ratio, config.check_layers, config.recompute_ratios)
            make_plan((), (0,), 0, selector, *ratios, num_layers)
            if self.compression is not None:
                check_selector(selector, num_layers)

    def blends(self, parsed: ParsedPrompt) -> bool:
        """Whether a prompt is blended: without chunks, or with a context below `min_tokens`, it stays a plain one."""
        bounds = parsed.chunk_bounds
        return self.config.enable_blending and bool(bounds) and bounds[-1][1] >= self.config.min_tokens

    def compresses(self, parsed: ParsedPrompt) -> bool:
        """Whether the chunks of a prompt are stored compressed."""
        return self.compression is not None and not parsed.pieces

    def check(self, parsed: ParsedPrompt) -> BlendPlan:
        """What the prompt asks for, as a plan without segments. Raises ValueError if that cannot be."""
        return self._plan(parsed, ())

    def compose(
        self, parsed: ParsedPrompt, requests: Sequence[Request], patient: bool = False, own: Container[int] = ()
    ) -> list[Request]:
        """Give `requests` (the completions of one prompt that `blends`) a plan, now or when their chunks are encoded.

        Returns new requests to schedule first; `requests` are blocked until those are done. `patient` ones do not
        `start_early`. `own`: where pieces start that were encoded for `requests` earlier.
        """
        # Which KVs a compressed chunk has decides where all others go: nothing runs before that is known.
        patient = patient or self.compresses(parsed)
        composition = Composition(parsed, list(requests), self.pieces(parsed), patient=patient)
        composition.own.update(piece.id.key for piece in composition.pieces if piece.start in own)
        if self.loader is None:  # nothing is held for longer than the store would
            return self._start(composition)
        for request in requests:
            request.blocked = True
        self._turns.add(composition)
        return self._take_turns()

    def poll(self) -> list[Request]:
        """Take what has been loaded since the last call. Returns encodings to schedule first. Never waits."""
        if self.loader is None:
            return []
        started: list[Request] = []
        for key, kv in self.loader.poll():
            self._loading.pop(key, None)
            for composition in self._waiting.pop(key, []):
                found_in = _memory_of(kv) if kv is None or kv.loaded_from is None else kv.loaded_from
                piece = next((piece for piece in composition.pieces if piece.id.key == key), None)
                composition.fill(key, None if piece is None else self._checked(piece, kv), found_in)
                started += self._advance(composition)
        return started + self._take_turns()

    def _checked(self, piece: Piece, kv: ChunkKV | None) -> ChunkKV | None:
        """Return a chunk that a store gave; None, with a warning, where it is not what the prompt wants.

        Tiers check what they read; this is where all KV that a prompt reuses comes by, wherever it was.
        """
        return None if kv is None or _mismatches(self._expected(piece), kv) else kv

    def find_stored(self, chunk: ChunkId) -> ChunkKV | None:
        """Return a whole chunk from the first tier that has it; None where none has, or it is something else."""
        expected = ExpectedChunk(self.model, chunk)
        store = self.store
        kv = store.get(chunk.key, expected) if isinstance(store, TieredChunkStore) else store.get(chunk.key)
        return None if kv is None or _mismatches(expected, kv) else kv

    def _expected(self, piece: Piece) -> ExpectedChunk:
        compression = self.compression if piece.compressed else None
        num_kvs = None if compression is None else compression.num_kept(len(piece.id.token_ids))
        return ExpectedChunk(self.model, piece.id, num_kvs)

    def start_early(self) -> bool:
        """Let a prompt run while its chunks arrive: the first one that waits only for chunks of which the disk has
        given the first layers. For when there is nothing else to compute, as the step waits for each layer. Whether
        there is such a prompt."""
        for composition in dict.fromkeys(c for waiting in self._waiting.values() for c in waiting):
            chunks = None if composition.patient or not composition.requests else self._arriving(composition)
            if chunks is not None:
                for key, kv in chunks.items():
                    composition.fill(key, kv, DISK)
                    self._waiting[key].remove(composition)
                    if not self._waiting[key]:
                        del self._waiting[key]
                self.num_early += 1
                self._finish(composition)
                return True
        return False

    def start_again(self, parsed: ParsedPrompt, requests: Sequence[Request]) -> list[Request]:
        """Chunks of `requests` (of one prompt) were lost in the middle of a step: as `compose`, from the beginning."""
        self.num_lost += 1
        plan = requests[0].blend
        own = [segment.start for segment in plan.segments if segment.found_in is None] if plan is not None else []
        for request in requests:
            request.blend = None
        self._turns.give_back(requests)
        return self.compose(parsed, requests, patient=True, own=own)

    @property
    def is_loading(self) -> bool:
        """Whether prompts wait for chunks that are being loaded. A prompt that started early does not."""
        return not self._waiting.keys().isdisjoint(self._loading)

    def wait(self, timeout: float) -> None:
        """Return when `poll` has something to do, after `timeout` seconds at the latest."""
        if self.loader is not None:
            self.loader.wait(timeout)

    def identify(self, parsed: ParsedPrompt) -> tuple[ChunkId | None, list[ChunkId]]:
        """The prefix of a prompt (None where there is none) and its chunks, as the store knows them."""
        ids = [piece.id for piece in self.pieces(parsed)]
        return (ids[0], ids[1:]) if len(ids) > len(parsed.chunk_bounds) else (None, ids)

    def encode(self, composition: Composition) -> list[Request]:
        """Have the chunks of a prompt encoded before any question is asked about them. Returns requests to run; nothing
        is missing of the composition when that is done."""
        return self._start(composition)

    def forget(self, requests: Sequence[Request]) -> list[Request]:
        """`requests` are gone. Returns the encodings that no prompt waits for any more, which need not run."""
        gone = set(requests)
        self._turns.forget(requests)
        # A composition without requests is an encoding ahead of any question: its caller waits.
        return self._withdraw(lambda c: bool(c.requests) and gone.issuperset(c.requests))

    def withdraw(self, composition: Composition) -> list[Request]:
        """Drop what was to be encoded ahead of any question, as `forget` does for requests."""
        return self._withdraw(lambda c: c is composition)

    def _withdraw(self, is_gone: Callable[[Composition], bool]) -> list[Request]:
        orphans = []
        for key, waiting in list(self._waiting.items()):
            waiting[:] = [c for c in waiting if not is_gone(c)]
            if waiting:
                continue
            if key in self._encoding:
                orphans.append(self._encoding[key])
                self.abandon(self._encoding[key])
            else:
                self._cancel_load(key)
        return orphans

    def abandon(self, encode: Request) -> None:
        """An encoding will not finish: the next prompt that needs its chunk starts another."""
        self._encoding.pop(encode.request_id, None)
        self._waiting.pop(encode.request_id, None)

    def encoded(self, encode: Request) -> list[Request]:
        """Store what an encoding request has computed; returns encodings that could only start now."""
        k, v = encode.collected_kv().unbind(0)
        key = encode.request_id
        start = encode.collect_from
        ids = encode.prompt_token_ids
        content = ChunkId.of(self.model, ids[:start], ids[start:], salt=encode.salt)
        kv = ChunkKV(k.contiguous(), v.contiguous(), content=content)
        if self.compression is not None and content.key != key:
            content = ChunkId.of(self.model, ids[:start], ids[start:], self.compression.name, encode.salt)
            kv = self.compression.compress(kv).of(content)
        kv = self.store.put(key, kv)
        self.num_encoded += 1
        del self._encoding[key]
        started: list[Request] = []
        for composition in self._waiting.pop(key, []):
            scheduled = encode.metrics.first_scheduled_time or time.time()
            composition.first_scheduled_time = min(composition.first_scheduled_time, scheduled)
            composition.fill(key, kv, JOINED)
            started += self._advance(composition)
        return started

    def _take_turns(self) -> list[Request]:
        """Begin with prompts whose turn it is; returns encodings to start."""
        started: list[Request] = []
        while (composition := self._turns.next()) is not None:
            started += self._start(composition)
        return started

    def _start(self, composition: Composition) -> list[Request]:
        """Take what is in memory, and see to the rest."""
        get = self.store.get_now if isinstance(self.store, TieredChunkStore) else self.store.get
        for piece in composition.pieces:
            kv = self._checked(piece, get(piece.id.key))
            composition.take(piece, kv, _memory_of(kv))
        return self._advance(composition)

    def pieces(self, parsed: ParsedPrompt) -> list[Piece]:
        ids = parsed.token_ids
        if parsed.pieces:
            return [
                Piece(p.start, p.id, begins_with(ids, p.start, p.context), context=p.context) for p in parsed.pieces
            ]
        prefix = parsed.prefix
        salt = parsed.salt
        pieces = [Piece(0, ChunkId.of(self.model, [], prefix, salt=salt), True)] if prefix else []
        whole = tuple(ids)
        chunks = tuple(whole[start:stop] for start, stop in parsed.chunk_bounds)
        given = ContextPieces(tuple(prefix), chunks, parsed.continues, parsed.encode_after)
        how = "" if self.compression is None else self.compression.name
        all_in_place = frozenset(parsed.in_place_chunks)
        context: Tokens | None = None
        identity = ""
        for index, (start, stop) in enumerate(parsed.chunk_bounds):
            earlier, context = context, self.encoding.before(given, index, self.max_model_len - (stop - start))
            if earlier is None or (context is not earlier and context != earlier):  # mostly it is the prefix itself
                identity = context_id(context, salt)
            chunk = ChunkId.after(identity, self.model, chunks[index], how)
            own = None if context is given.prefix or context == given.prefix else context
            is_exact = begins_with(ids, start, context)
            in_place = index in all_in_place
            pieces.append(Piece(start, chunk, is_exact, in_place=in_place, context=own, compressed=bool(how)))
        return pieces

    def _advance(self, composition: Composition) -> list[Request]:
        """Finish a composition that has all its pieces; load what may be below the memory, and return encodings to
        start for what is not. Chunks wait for their prefix before they are encoded."""
        missing = composition.missing
        if not missing:
            self._finish(composition)
            return []
        for request in composition.requests:
            request.blocked = True
        absent = self._load_all(composition, missing)
        composition.leave_out({piece.id.key for piece in absent})
        missing = composition.missing
        if all(self._is_idle(piece) for piece in missing) and not (missing and composition.chunks):
            self._finish(composition)  # a prefix without chunks is not worth encoding
            return []
        absent = [piece for piece in missing if piece.id.key not in self._loading]
        prefix = composition.prefix
        if prefix is not None and prefix.kv is None:
            absent = [piece for piece in absent if piece is prefix]
        started = []
        priority = min((each.priority for each in composition.requests), default=0)
        for piece in absent:
            key = piece.id.key
            self._wait_for(key, composition)
            if key not in self._encoding:
                request = self._encoding[key] = self._encode_request(piece, prefix, composition.parsed.salt)
                request.priority = priority
                composition.own.add(key)
                started.append(request)
            elif priority < self._encoding[key].priority:  # it is as urgent as the most urgent prompt that waits for it
                self._prioritize(self._encoding[key], priority)
        return started

    def _is_idle(self, piece: Piece) -> bool:
        """Whether nobody loads or encodes a piece."""
        return piece.id.key not in self._loading and piece.id.key not in self._encoding

    def _load_all(self, composition: Composition, pieces: Sequence[Piece]) -> list[Piece]:
        """Have pieces loaded by other threads. Returns those that have to be encoded."""
        if self.loader is None:
            return list(pieces)
        arrivals = Arrivals(self.loader.wake)
        with arrivals.adding:
            return [piece for piece in pieces if not self._load(composition, piece, self.loader, arrivals)]

    def _load(self, composition: Composition, piece: Piece, loader: ChunkLoader, arrivals: Arrivals) -> bool:
        key = piece.id.key
        if key not in self._loading:
            if key in composition.asked or key in self._encoding:
                return False
            composition.asked.add(key)
            assert isinstance(self.store, TieredChunkStore)
            # An explicit ratio says what a prompt wants: the controller leaves it alone.
            controlled = self.controller is not None and composition.parsed.blend_recompute_ratio is None
            num_tokens = len(piece.id.token_ids)
            choice = partial(_choice, num_tokens * self.bytes_per_token, num_tokens) if controlled else None
            expected = self._expected(piece)
            if not loader.request(key, partial(self.store.load, key, choice, arrivals, expected)):
                return False
            arrivals.wanted[key] = WantedChunk(expected, choice)
            self._loading[key] = arrivals
        composition.asked.add(key)
        composition.first_scheduled_time = min(composition.first_scheduled_time, time.time())
        self._wait_for(key, composition)
        return True

    def _arriving(self, composition: Composition) -> dict[str, ChunkKV] | None:
        """What a prompt waits for, when all of it has begun to arrive from a disk."""
        assert self.loader is not None
        chunks = {}
        for piece in composition.missing:
            key = piece.id.key
            arriving = self._loading[key].kv(key, self.loader.deadline(key)) if key in self._loading else None
            kv = self._checked(piece, arriving)
            if kv is None:
                return None
            chunks[key] = kv
        return chunks

    def _wait_for(self, key: str, composition: Composition) -> None:
        waiting = self._waiting.setdefault(key, [])
        if composition not in waiting:
            waiting.append(composition)

    def _cancel_load(self, key: str) -> None:
        self._loading.pop(key, None)
        self._waiting.pop(key, None)
        if self.loader is not None:
            self.loader.cancel(key)

    def _encode_request(self, piece: Piece, prefix: Piece | None, salt: bytes) -> Request:
        if prefix is None or piece is prefix or piece.context is not None:
            ids, plan = [*(piece.context or ()), *piece.id.token_ids], None
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
        return Request(piece.id.key, ids, None, metrics, salt=salt, blend=plan, collect_from=start)

    def _finish(self, composition: Composition) -> None:
        if not composition.requests:
            if composition.on_complete is not None:
                composition.on_complete()
            return
        # What heads have dropped of a chunk that stands where it was encoded is missing all the same.
        stored = [(piece, piece.kv) for piece in composition.pieces if piece.kv is not None]
        segments = [Segment(p.start, kv, p.exact and kv.num_kvs == kv.num_tokens, p.found_in) for p, kv in stored]
        plan = None  # nothing is reused but perhaps the prefix, which is the prefix cache's business
        if composition.chunks:
            plan = self._controlled(self._plan(composition.parsed, segments), composition.parsed)
            if self.rounds and plan.ratio >= 1:  # a prefix that stands where it was encoded is exact but for its bits
                plan = replace(plan, segments=tuple(replace(segment, exact=False) for segment in plan.segments))
        for request in composition.requests:
            request.blend, request.blocked = plan, False
            if composition.first_scheduled_time != float("inf"):  # encoding its chunks is part of serving a request
                # from its arrival on, where the encoding had begun for another request
                began = max(composition.first_scheduled_time, request.metrics.arrival_time)
                request.metrics.first_scheduled_time = began

    def _plan(self, parsed: ParsedPrompt, segments: Sequence[Segment]) -> BlendPlan:
        check_ratio("blend_recompute_ratio", parsed.blend_recompute_ratio)
        name = self.config.selector if parsed.blend_selector is None else parsed.blend_selector
        selector = make_selector(name, self.compresses(parsed))
        if self.compresses(parsed):
            check_selector(selector, self.num_layers)
        ratio, ratios = parsed.blend_recompute_ratio, None
        if ratio is None and parsed.blend_selector is None:  # the engine's ratios are meant for its own selector
            ratio, ratios = self.config.recompute_ratio, self.config.recompute_ratios
        return make_plan(
            segments,
            parsed.token_ids,
            parsed.chunk_bounds[-1][1],
            selector,
            ratio,
            self.config.check_layers,
            ratios,
            self.num_layers,
        )

    def _controlled(self, plan: BlendPlan, parsed: ParsedPrompt) -> BlendPlan:
        """The plan with the ratio that the controller chooses, where nobody gave one that is not a floor."""
        fixed = plan.selector.fixed_ratio is not None or self.config.recompute_ratios is not None
        if self.controller is None or fixed or parsed.blend_recompute_ratio is not None:
            return plan
        loads = {MEMORY: 0, DISK: 0}
        for segment in plan.segments:
            arriving = segment.kv.arriving
            if arriving is not None:
                loads[DISK] += arriving.bytes_left
            else:
                loads[MEMORY] += segment.kv.num_tokens * self.bytes_per_token
        choice = self.controller.choose_ratio(plan.ratio, loads, plan.suffix_start)
        shares = plan.selector.shares(choice.ratio, self.config.check_layers)
        return replace(plan, ratio=choice.ratio, shares=tuple(shares)) if choice.ratio > plan.ratio else plan


def _mismatches(expected: ExpectedChunk, kv: ChunkKV) -> bool:
    """Whether KV is not what is expected; a warning says how."""
    mismatch = find_kv_mismatch(expected, kv)
    if mismatch is not None:
        logger.warning("stored chunk %s not used, it will be computed again: %s", expected.chunk.key, mismatch)
    return mismatch is not None


def _choice(num_bytes: int, num_tokens: int, tier: str) -> Choice:
    return Choice(tier, num_bytes, num_tokens)


def _memory_of(kv: ChunkKV | None) -> str:
    """Return where a chunk was found that was in memory."""
    return "host" if kv is None or kv.k.device.type == "cpu" else "device"
