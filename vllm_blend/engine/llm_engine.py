"""The step loop: requests in, one step of the model at a time, outputs out."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from vllm_blend.blend.encoding_contexts import make_encoding_context
from vllm_blend.blend.metadata import check_one_thread, plan_from_old_kvs
from vllm_blend.chunks.chunk import Chunk, Deletion
from vllm_blend.chunks.composition import ChunkComposition, composition_key
from vllm_blend.chunks.registry import ChunkRegistry
from vllm_blend.config import EngineConfig, resolve_device, resolve_dtype
from vllm_blend.core.block_manager import BlockManager
from vllm_blend.core.page_manager import PageManager
from vllm_blend.core.scheduler import Scheduler, SchedulerOutput
from vllm_blend.engine import chunk_registration, generation_config, request_checks, setup
from vllm_blend.engine.arg_utils import EngineArgs
from vllm_blend.engine.chunk_encoding import check_chunk, run_encodings
from vllm_blend.engine.chunk_stores import bytes_per_token, make_controller, make_store, observe_step, store_gauges
from vllm_blend.engine.composer import ChunkComposer
from vllm_blend.engine.detokenizer import Detokenizer
from vllm_blend.engine.driver import Driver, TurnLock, exclusive, interrupts_held_back
from vllm_blend.engine.kv_compression import KVCompression
from vllm_blend.engine.loaded_model import LoadedModelConfig, loaded_model_config
from vllm_blend.engine.metrics import EngineMetrics, Gauge, Metric, StatLogger
from vllm_blend.engine.offloading import make_offload, offload_gauges
from vllm_blend.engine.output_processor import OutputProcessor, RequestGroup
from vllm_blend.engine.own_device import current, on_own_device, with_index
from vllm_blend.engine.speculative_decoding import SpeculativeDecoding
from vllm_blend.engine.step_results import StepResults
from vllm_blend.executor.uniproc import UniProcExecutor
from vllm_blend.inputs import ParsedPrompt, PromptType, parse_context, parse_prompt
from vllm_blend.kv_store.chunk_kv import ChunkKV, ChunkLost
from vllm_blend.kv_store.keys import ChunkId
from vllm_blend.kv_store.tiered import TieredChunkStore
from vllm_blend.layers.sampling_state import SamplingState
from vllm_blend.models.loader import load_hf_config
from vllm_blend.outputs import RequestMetrics, RequestOutput
from vllm_blend.request import Request
from vllm_blend.sampling_params import SamplingParams
from vllm_blend.worker.model_runner import RunnerOutput

logger = logging.getLogger(__name__)

LOAD_WAIT_SECONDS = 0.05  # the longest that a step waits for chunks when there is nothing to compute


@dataclass(frozen=True)
class _Step:
    """A step that was queued on the device."""

    scheduled: SchedulerOutput
    result: RunnerOutput
    launched: float | None  # time.perf_counter, where nothing else was on the device

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for it any more."""
        return all(item.request.finished for item in self.scheduled.scheduled)


class LLMEngine:
    """Continuous batching over one executor. `add_request`, `step` and `abort_request` are as in vLLM.

    Any thread may call any public method. What cannot be shared is a RuntimeError at once.
    A function of the user's that a step calls may look at the engine; changing it is a RuntimeError, too.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.driver = Driver(self)
        self.config = config
        self.device = with_index(resolve_device(config.model.device))
        with current(self.device):
            self._build(config, self.device)

    def _build(self, config: EngineConfig, device: torch.device) -> None:
        model = config.model
        self.hf_config = load_hf_config(model.model, model.revision, model.trust_remote_code, model.hf_overrides)
        self.max_model_len = setup.resolve_max_model_len(config.model, self.hf_config)
        dtype = resolve_dtype(config.model.dtype, setup.checkpoint_dtype(self.hf_config), device)
        self.model_config = loaded_model_config(config.model, self.hf_config, dtype, self.max_model_len)
        self.tokenizer: PreTrainedTokenizerBase | None = setup.load_tokenizer(config.model)
        generation = generation_config.load_generation_config(config.model, self.hf_config)
        self.default_sampling_settings = generation_config.default_sampling_settings(config.model, generation)
        self.eos_token_ids = generation_config.eos_token_ids(generation, self.hf_config, self.tokenizer)
        self.model_executor = UniProcExecutor(config, self.hf_config, dtype, device, self.max_model_len)
        worker = self.model_executor.driver_worker
        cache = config.cache
        self.blocks = BlockManager(worker.model_runner.cache.num_blocks, cache.block_size, cache.enable_prefix_caching)
        self.scheduler = Scheduler(self.blocks, config.scheduler.max_num_seqs, config.scheduler.step_tokens(device))
        self.fingerprint = setup.fingerprint(config.model, worker, self.tokenizer)
        self.controller = make_controller(config.blend, worker)
        self.chunk_store = make_store(config, self.fingerprint, worker, self.controller)
        self.pages = PageManager(self.blocks)
        self.chunk_registry = ChunkRegistry(self.chunk_store, self.pages)
        sizes = (worker.num_layers, bytes_per_token(worker))
        rounds = config.chunk_store.format != "auto"
        self.composer = ChunkComposer(
            self.fingerprint,
            self.chunk_store,
            config.blend,
            *sizes,
            self.controller,
            rounds,
            encoding=make_encoding_context(config.blend.encoding_context, self.tokenizer, config.blend.ordinals),
            max_model_len=self.max_model_len,
            prioritize=self.scheduler.prioritize,
        )
        self.processor = OutputProcessor(self.tokenizer, self.max_model_len)
        self.metrics = EngineMetrics()
        self._stat_logger = None if config.disable_log_stats else StatLogger(self.metrics)
        self._groups: dict[str, RequestGroup] = {}
        self.results = StepResults(self)
        self.async_scheduling = config.runs_ahead(device)
        self.offload = make_offload(config.offload, worker.model_runner, self.blocks, self.async_scheduling)
        if self.offload is not None:
            self.scheduler.on_release = self.offload.released
        self.speculation = SpeculativeDecoding.of(config.speculative, self.metrics, self.async_scheduling)
        self.kv_compression = KVCompression.of(config, worker, self.scheduler)
        self._in_flight: _Step | None = None
        self._unreported: list[RequestGroup] = []  # which ended in a step that could not be read
        self._launch_failed = False
        self._warned_of_chunks = False

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLMEngine:
        return cls(args.create_engine_config())

    @property
    def lock(self) -> TurnLock:
        """What a thread holds while it looks at the engine's state or changes it. The tokenizer belongs to that state:
        not every tokenizer can be used by two threads at a time."""
        return self.driver.lock

    @property
    def decoder(self) -> Any:
        """The decoder stack, which carries the public blending hooks."""
        return self.model_executor.driver_worker.model_runner.model.model

    def get_model_config(self) -> LoadedModelConfig:
        return self.model_config

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer. Raises ValueError if the engine has none."""
        if self.tokenizer is None:
            raise ValueError(
                "the engine has no tokenizer (skip_tokenizer_init=True): give token ids to generate(), or leave "
                "skip_tokenizer_init out"
            )
        return self.tokenizer

    @exclusive
    def set_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Use another tokenizer from the next request on. Raises RuntimeError while requests are unfinished: their
        answers would be decoded by two tokenizers."""
        if self._groups:
            raise RuntimeError(
                f"{len(self._groups)} requests are unfinished, and they use the tokenizer: finish or abort them first"
            )
        self.tokenizer = self.processor.tokenizer = tokenizer
        eos = tokenizer.eos_token_id
        self.eos_token_ids |= set() if eos is None else {eos}

    def add_request(
        self,
        request_id: str,
        prompt: PromptType | ParsedPrompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        final_only: bool = False,
        priority: int = 0,
    ) -> None:
        """Queue a prompt. Raises ValueError or TypeError, having changed nothing, when it or its parameters are wrong.

        With `final_only`, `step` reports the request once, when it is finished. With `scheduling_policy="priority"`,
        requests of a lower `priority` go first.
        """
        arrival_time = time.time() if arrival_time is None else arrival_time  # before it waits for a step to end
        with self.lock:
            parsed = parse_prompt(prompt, self.tokenizer, self.hf_config.vocab_size, self.max_model_len)
            self.add_parsed(request_id, parsed, params, arrival_time, final_only, priority=priority)

    @exclusive
    @on_own_device
    def add_parsed(
        self,
        request_id: str,
        parsed: ParsedPrompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        final_only: bool = False,
        on_end: Callable[[], None] | None = None,
        priority: int = 0,
    ) -> None:
        """As `add_request`, of a prompt as token ids. `on_end` is called once, when the request has finished in any
        way."""
        if request_id in self._groups:
            raise ValueError(f"request_id {request_id!r} is in use: give every running request an id of its own")
        request_checks.check_priority(priority, self.config.scheduler.policy)
        request_checks.check_logprobs(params, self.config.model.max_logprobs, self.hf_config.vocab_size)
        bad_words = params.bind(self.tokenizer, self.hf_config.vocab_size)
        compression = self.config.kv_compress.settings_of(params.compression)
        request_checks.check_length(parsed, self.max_model_len)
        request_checks.check_chunk_settings(parsed, self.config.blend.enable_blending, self.offload is not None)
        blending = self.composer.blends(parsed)
        hooks = self.decoder.cache_fuse_metadata
        plan, composition = None, None
        if parsed.chunk_bounds and not self.config.blend.enable_blending and not self._warned_of_chunks:
            self._warned_of_chunks = True
            logger.warning(
                "a prompt has chunks, but the engine does not blend: this prompt and later ones are computed whole, "
                "and no chunk is stored or reused; give enable_blending=True to the engine. This is said once"
            )
        if self.config.blend.enable_blending and parsed.chunk_bounds:
            asked = self.composer.check(parsed)  # its settings must hold, also where the prompt is too short to blend
            if blending and self.composer.compresses(parsed):
                self.config.kv_compress.check_compressed_chunks(compression)
            elif blending and parsed.retain is not False:
                composition = composition_key(self.fingerprint, parsed, asked)
        check_one_thread(hooks, (group.thread for group in self._groups.values()))
        if not blending and hooks.get("check"):
            plan = self._plan_from_hooks(parsed)
        if blending or plan is not None:
            request_checks.check_nothing_needs_every_token(params, collects=bool(hooks.get("collect")))
        metrics = RequestMetrics(arrival_time=time.time() if arrival_time is None else arrival_time)
        requests, token_ids = [], list(parsed.token_ids)  # which all completions share
        for index in range(params.n):
            own = params.for_completion(index)
            longest = min(self.max_model_len, len(parsed.token_ids) + (own.max_tokens or self.max_model_len))
            request = Request(
                request_id,
                token_ids,
                own,
                metrics,
                index,
                longest,
                priority=priority,
                salt=parsed.salt,
                blend=plan,
            )
            request.composition = composition
            request.sampling = SamplingState(
                own, request.prompt_token_ids, request.output_token_ids, tuple(self.eos_token_ids), bad_words
            )
            request.detokenizer = Detokenizer(self.tokenizer, own, request.prompt_token_ids)
            if self.offload is not None:
                request.chunk_bounds, request.chunk_ranking = parsed.chunk_bounds, parsed.chunk_ranking
            if hooks.get("collect") and index == 0:
                request.collect_from = 0
            requests.append(request)
        if plan is not None:
            hooks["check"] = False
        group = RequestGroup(request_id, parsed, metrics, requests, final_only, on_end=on_end)
        self._groups[request_id] = group
        self.metrics.chat_parts_merged += parsed.num_merged_parts
        self.metrics.chat_parts_unfound += parsed.num_unfound_parts
        self.processor.groups |= dict.fromkeys(requests, group)
        if self.kv_compression is not None:
            self.kv_compression.begin(requests, compression)
        if self.speculation is not None and not params.logits_processors:  # these may count their calls: no guesses
            self.speculation.begin(requests, parsed.chunk_bounds)
        # Whose context is in retained pages already is composed only if these are gone when its turn comes.
        is_retained = composition is not None and composition.key in self.blocks.retained
        encodings = self.composer.compose(parsed, requests) if blending and not is_retained else []
        for request in [*encodings, *requests]:
            self.scheduler.add(request)

    @exclusive
    def generate_from_chunks(
        self,
        composition: ChunkComposition,
        params: SamplingParams,
        request_id: str,
        final_only: bool = False,
        arrival_time: float | None = None,
    ) -> Iterator[RequestOutput]:
        """Queue a prompt made of registered chunks; an iterator of its outputs, which runs the engine's steps as far as
        it needs. Its chunks cannot be deleted until it has finished.

        Raises ValueError as `add_request` does, and for chunks that are not registered.
        """
        return chunk_registration.generate_from_chunks(self, request_id, composition, params, final_only, arrival_time)

    @exclusive
    @on_own_device
    def register_chunk(self, chunk: Chunk, name: str | None = None, metadata: Mapping[str, Any] | None = None) -> Chunk:
        """Enter a chunk into `chunk_registry` and compute its KV now; see `engine/chunk_registration.py`."""
        return chunk_registration.register_chunk(self, chunk, name, metadata)

    @exclusive
    @on_own_device
    def delete_chunk(self, id_or_name: str | Chunk) -> Deletion:
        """Delete a registered chunk, or have it deleted when the last request that uses it ends."""
        return chunk_registration.delete_chunk(self, id_or_name)

    def shutdown(self) -> None:
        """Abort all requests, write what the chunk stores still have to write, and free everything. Whatever is asked
        of the engine afterwards is a RuntimeError; threads that wait for answers get it too."""
        with self.driver.lock.unless_closed() as is_open:
            if is_open:
                self._shut_down()

    @exclusive
    @on_own_device
    def _shut_down(self) -> None:
        store, loader = self.chunk_store, self.composer.loader
        self.driver.abandon_all()
        self.abort_request(list(self._groups))
        self.drop_finished()
        if loader is not None:
            loader.close()
        if isinstance(store, TieredChunkStore):
            store.close()
        store.clear()
        device, driver = self.model_executor.driver_worker.device, self.driver
        driver.lock.closed = "the engine has been shut down: make another LLM"
        for name in self.__dict__.keys() - {"driver"}:  # the parts know one another: none may stay reachable from here
            del self.__dict__[name]
        driver.ring_all()
        del store, loader
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Explain why an engine that has been shut down lacks everything."""
            driver = self.__dict__.get("driver")
            if driver is not None and driver.lock.closed is not None:
                raise RuntimeError(driver.lock.closed)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def has_request(self, request_id: str) -> bool:
        """Whether a request has not finished."""
        return request_id in self._groups

    @exclusive
    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        self.blocks.reset_prefix_cache()

    @exclusive
    @on_own_device
    def drop_finished(self) -> None:
        """Let go of requests that have finished: a step in flight that nobody waits for may hold their chunks' KV."""
        self._drop_abandoned()

    def _drop_abandoned(self) -> None:
        if self._in_flight is not None and self._in_flight.abandoned:
            self._in_flight = None

    @exclusive
    @on_own_device
    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Stop requests and free their pages; unknown ids are ignored, as they may just have finished. A thread that
        waits for one gets what there is of it, with the finish reason "abort"."""
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            group = self._groups.get(one)
            for request in group.requests if group is not None else []:
                if not request.finished:
                    self.finish(request, "abort")
            self.driver.forget(one)
            if group is not None:
                self._unreported = [other for other in self._unreported if other is not group]
                if self.driver.awaits(one):
                    self.driver.distribute([self.processor.output(group)])
                self._forget(group)
                for encoding in self.composer.forget(group.requests):
                    self.scheduler.finish(encoding)
        self._settle_if_idle()

    def identify_chunks(
        self,
        prefix: str | Sequence[int],
        chunks: Sequence[str | Sequence[int]],
        continues: Sequence[int | None] | None = None,
        encode_after: Sequence[str | Sequence[int]] | None = None,
        cache_salt: str | None = None,
    ) -> tuple[ChunkId | None, list[ChunkId]]:
        """Return how the store names a prompt's prefix (None where there is none) and its chunks. Computes nothing.
        `continues`, `encode_after` and `cache_salt` as in a `ChunkedPrompt`."""
        with self.lock:
            sizes = (self.tokenizer, self.hf_config.vocab_size)
            return self.composer.identify(parse_context(prefix, chunks, *sizes, continues, encode_after, cache_salt))

    @on_own_device
    def encode_chunks(
        self,
        prefix: str | Sequence[int],
        chunks: Sequence[str | Sequence[int]],
        continues: Sequence[int | None] | None = None,
        encode_after: Sequence[str | Sequence[int]] | None = None,
        cache_salt: str | None = None,
    ) -> list[ChunkKV]:
        """Return the KV of `chunks`, each encoded after what the engine's encoding context puts before it (`prefix`,
        unless told otherwise), just as a prompt of these pieces, with this `cache_salt`, would have it done.

        Computes what the chunk store does not have and leaves it there; unfinished requests go on meanwhile. Raises
        ValueError or TypeError for bad pieces.
        """
        with self.lock:
            self.lock.check_between_steps()
            sizes = (self.tokenizer, self.hf_config.vocab_size)
            parsed = parse_context(prefix, chunks, *sizes, continues, encode_after, cache_salt)
        return run_encodings(self, parsed)

    @exclusive
    @on_own_device
    def load_chunk(self, chunk: ChunkId, kv: ChunkKV) -> None:
        """Put KV that was computed earlier into the chunk store. Raises ValueError where it cannot be this chunk's."""
        check_chunk(self.fingerprint, chunk, kv)
        self.chunk_store.put(chunk.key, kv.copy().of(chunk))  # the caller may go on to change his

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do, or to hand over."""
        with self.lock:
            return not self.is_idle or self.driver.keeps_outputs

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, and nothing waits to run."""
        return not (self.scheduler.has_requests or self.composer.is_loading or self._unreported)

    def get_num_unfinished_requests(self) -> int:
        return len(self._groups)

    @exclusive
    @on_own_device
    def step(self) -> list[RequestOutput]:
        """Run one step; outputs of the requests that advanced. Nothing to do returns an empty list, and so does waiting
        for chunks that are being loaded, after a moment.

        Outputs that another caller waits for, such as `LLM.generate` in another thread, go there. In return the newest
        outputs of requests that advanced in steps of such callers are among those of the next call.
        """
        with self.lock.step(), interrupts_held_back():
            self.driver.distribute(self._run_step())
        return self.driver.take_kept()

    def _run_step(self) -> list[RequestOutput]:
        """As `step`, for the requests of all callers.

        With asynchronous scheduling the step after it is queued on the device before this one is read, so that the host
        works while the device does. What a request that turns out to have ended computes too much is thrown away.
        """
        self._schedule_first(self.composer.poll())
        self._compose_lost()
        if self._in_flight is None or self._in_flight.abandoned:
            self._in_flight = self._launch(ahead=False)
        if self._in_flight is None and self.composer.start_early():
            self._in_flight = self._launch(ahead=False)
        if self._in_flight is None:
            if not self._unreported:
                self.composer.wait(LOAD_WAIT_SECONDS)
            return self._report(())
        following = self._launch(ahead=True) if self._may_run_ahead(self._in_flight) else None
        done, self._in_flight = self._in_flight, following
        try:
            touched = self._read(done)
            self._settle_if_idle()
        except BaseException:
            self._undo([done] if following is None else [done, following])
            raise
        return self._report(touched)

    def _launch(self, ahead: bool) -> _Step | None:
        """Queue a step on the device; None when there is nothing to compute."""
        if self.speculation is not None:
            self.speculation.propose(self.scheduler.running, ahead)
        if self.offload is not None:
            self.offload.begin_step(self.scheduler.running)
        if self.kv_compression is not None and not ahead:
            self.kv_compression.run()
        scheduled = self.scheduler.schedule(ahead)
        if not scheduled:
            return None
        self._count_scheduled(scheduled)
        launched = None if ahead else time.perf_counter()
        self._launch_failed = True
        try:
            result = self.model_executor.execute_model(scheduled)
        except ChunkLost as error:
            self._start_again(scheduled, error)
            result = None
        self._launch_failed = False
        if result is None:
            return None
        self.scheduler.advance(scheduled)
        if self.kv_compression is not None:
            self.kv_compression.launched(scheduled)
        if self.offload is not None and result.queries is not None:
            self.offload.observe(((i.request, i.start, i.stop) for i in scheduled.scheduled), result.queries)
        for request in result.sampled:
            request.num_in_flight += 1
        return _Step(scheduled, result, launched)

    def _start_again(self, scheduled: SchedulerOutput, error: ChunkLost) -> None:
        """A stored chunk turned out to be damaged in the middle of a step: whoever reuses it starts again without, and
        the rest of the step is done again."""
        logger.warning("a step is done again: %s", error)
        lost: dict[str, list[Request]] = {}
        for item in scheduled.scheduled:
            segments = item.request.blend.segments if item.is_blend and item.request.blend is not None else ()
            if any(segment.kv.arriving is not None and segment.kv.arriving.is_lost for segment in segments):
                lost.setdefault(item.request.request_id, []).append(item.request)
        for request_id, requests in reversed(lost.items()):
            self.scheduler.send_back(requests)
            self._schedule_first(self.composer.start_again(self._groups[request_id].parsed, requests))

    def _may_run_ahead(self, step: _Step) -> bool:
        """Whether the next step can be chosen and computed before the tokens of this one are known."""
        if not self.async_scheduling or self._launch_failed:  # after an error, the next step starts from what is known
            return False
        if self.speculation is not None and not self.speculation.may_run_ahead(step.scheduled, self.scheduler.running):
            return False
        if self.kv_compression is not None and not self.kv_compression.may_run_ahead(step.result.sampled):
            return False
        return not any(r.sampling is not None and r.sampling.needs_history for r in step.result.sampled)

    def _settle_if_idle(self) -> None:
        """When nothing is left to run, drop a step that was queued ahead for requests that have ended, and end the
        moves of chunks, so that an idle engine holds no pages."""
        if self.scheduler.has_requests:
            return
        self._drop_abandoned()
        if self.offload is not None:
            self.offload.end_moves()

    def _undo(self, steps: Sequence[_Step]) -> None:
        """A step could not be read: what it and the one after it were to give is computed again, and requests that had
        ended by then are reported by the next step."""
        self._in_flight = None
        again: dict[Request, None] = {}
        for step in steps:
            for request in step.result.sampled:
                if request.sampling is not None:
                    request.sampling.take_back(request.num_in_flight)
                request.num_in_flight = 0
            for item in step.scheduled.scheduled:
                group = self.processor.groups.get(item.request)
                if group is not None and group.finished and group not in self._unreported:
                    self._unreported.append(group)
                if item.request in self.scheduler.running:
                    again[item.request] = None
        self.scheduler.send_back(list(again))

    def _read(self, step: _Step) -> list[RequestGroup]:
        """Wait for a step's tokens and enter them; the groups of the requests that advanced."""
        self.scheduler.settle(step.scheduled)
        touched = self.results.process(step.scheduled, step.result)
        if self.controller is not None and step.launched is not None:
            device = self.model_executor.driver_worker.device
            observe_step(self.controller, step.scheduled, step.result, device, step.launched)
        self.metrics.num_steps += 1
        if self._stat_logger is not None:
            self._stat_logger.step(len(self.scheduler.running), len(self.scheduler.waiting), self.cache_usage)
        return touched

    def _report(self, touched: Sequence[RequestGroup]) -> list[RequestOutput]:
        """The outputs of groups that advanced, and of those that an earlier step could not report."""
        earlier, self._unreported = self._unreported, []
        outputs = []
        for group in dict.fromkeys([*earlier, *touched]):
            if group.finished or not group.final_only:
                outputs.append(self.processor.output(group))
            if group.finished:
                self._forget(group)
        return outputs

    @property
    def cache_usage(self) -> float:
        """The share of the KV cache's blocks that requests hold, 0..1."""
        return 1 - self.blocks.num_free_blocks / self.blocks.num_usable_blocks

    def get_metrics(self) -> list[Metric]:
        with self.lock:
            return [
                *self.metrics.counters(),
                Gauge("vllm:num_requests_running", len(self.scheduler.running)),
                Gauge("vllm:num_requests_waiting", len(self.scheduler.waiting)),
                Gauge("vllm:kv_cache_usage_perc", self.cache_usage),
                Gauge("vllm:num_preemptions", self.scheduler.num_preemptions),
                Gauge("vllm_blend:chunk_cache_chunks", len(self.chunk_store)),
                Gauge("vllm_blend:chunk_cache_bytes", self.chunk_store.num_bytes),
                Gauge("vllm_blend:chunks_encoded", self.composer.num_encoded),
                Gauge("vllm_blend:chunks_registered", len(self.chunk_registry)),
                Gauge("vllm_blend:compositions_retained", len(self.blocks.retained)),
                *store_gauges(self.chunk_store, self.composer, self.controller),
                *offload_gauges(self.offload),
                *([] if self.kv_compression is None else self.kv_compression.gauges()),
            ]

    def finish_encoding(self, request: Request) -> None:
        """The prompt of a chunk that is being encoded has been computed."""
        started = self.composer.encoded(request)
        self.scheduler.finish(request)
        self._schedule_first(started)

    def _schedule_first(self, encodings: Sequence[Request]) -> None:
        """Ahead of the queue: whoever needs them came before what waits there now."""
        for encoding in reversed(encodings):
            self.scheduler.add_first(encoding)

    def _compose_lost(self) -> None:
        """Plans for requests whose context was in pages that have been given to others since."""
        lost, self.scheduler.lost = self.scheduler.lost, []
        for request in lost:
            if not request.finished:
                self._schedule_first(self.composer.compose(self.processor.groups[request].parsed, [request]))

    def finish(self, request: Request, reason: str) -> None:
        """End a request, unless it has just ended itself, and take its pages back."""
        if not request.finished:
            request.finish(reason)
        self.scheduler.finish(request)
        self.metrics.finished[reason] = self.metrics.finished.get(reason, 0) + 1

    def _forget(self, group: RequestGroup) -> None:
        self._groups.pop(group.request_id, None)
        for request in group.requests:
            self.processor.groups.pop(request, None)
        self.model_executor.driver_worker.model_runner.forget(group.requests)
        on_end, group.on_end = group.on_end, None
        if on_end is not None:
            on_end()

    def _plan_from_hooks(self, parsed: ParsedPrompt) -> Any:
        worker, decoder = self.model_executor.driver_worker, self.decoder
        return plan_from_old_kvs(
            decoder.cache_fuse_metadata,
            decoder.old_kvs,
            parsed.token_ids,
            worker.num_layers,
            worker.num_kv_heads,
            worker.head_dim,
            self.results.last_collected,
        )

    def _count_scheduled(self, scheduled: SchedulerOutput) -> None:
        for item in scheduled.scheduled:
            composition = item.request.composition
            if composition is not None and not item.is_blend and item.start == composition.num_tokens:
                asked = self.composer.check(self.processor.groups[item.request].parsed)
                if self.processor.record_retained(item.request, composition, asked):
                    self.metrics.count_found("retained", composition.num_tokens)
        for request in scheduled.admitted:
            if request.params is None:
                continue
            self.metrics.prompt_tokens += request.num_prompt_tokens
            if request.exact and self.config.cache.enable_prefix_caching:
                self.metrics.prefix_cache_queries += request.num_prompt_tokens
                self.metrics.prefix_cache_hits += request.num_cached_tokens
                self.metrics.count_found("prefix_cache", request.num_cached_tokens)
