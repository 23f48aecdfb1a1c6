"""`LLMEngine`: the parts of an engine, and what callers ask of it under vLLM's names (`ChunkedEngine` has the rest).

The file is long because that surface is wide. Most methods check who calls, and delegate.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from vllm_blend.blend.encoding_contexts import make_encoding_context
from vllm_blend.chunks.registry import ChunkRegistry
from vllm_blend.config import EngineConfig, EngineConfigSource
from vllm_blend.core.block_manager import BlockManager
from vllm_blend.core.page_manager import PageManager
from vllm_blend.core.scheduler import Scheduler
from vllm_blend.devices import resolve_cache_dtype, resolve_device
from vllm_blend.engine import generation_config, setup
from vllm_blend.engine.blend_planner import BlendPlanner, check_settings
from vllm_blend.engine.chunk_encoding import ChunkRegistration
from vllm_blend.engine.chunk_stores import make_controller, make_store, store_gauges
from vllm_blend.engine.chunked_engine import ChunkedEngine
from vllm_blend.engine.composer import ChunkComposer
from vllm_blend.engine.driver import Driver
from vllm_blend.engine.end_tokens import eos_token_ids
from vllm_blend.engine.errors import dead_if_lost
from vllm_blend.engine.extension import EngineParts, Extension, make_extensions
from vllm_blend.engine.interrupts import interrupts_held_back
from vllm_blend.engine.lock import current, exclusive, with_index
from vllm_blend.engine.metrics import EngineMetrics, Gauge, Metric, StatLogger
from vllm_blend.engine.output_processor import OutputProcessor
from vllm_blend.engine.pieces import PieceFinder
from vllm_blend.engine.request_builder import NewRequest, RequestBuilder
from vllm_blend.engine.requests import LiveRequests
from vllm_blend.engine.setup import LoadedModelConfig
from vllm_blend.engine.step_loop import StepLoop
from vllm_blend.engine.step_results import StepResults
from vllm_blend.executor.worker_process import WorkerSettings
from vllm_blend.inputs import ParsedPrompt, PromptType
from vllm_blend.models.causal_lm import Decoder
from vllm_blend.models.loader import load_hf_config
from vllm_blend.ops.e4m3 import E4M3
from vllm_blend.outputs import RequestOutput
from vllm_blend.prompt_parser import parse_prompt
from vllm_blend.sampling_params import RequestOutputKind, SamplingParams

E = TypeVar("E", bound=Extension)


class LLMEngine(ChunkedEngine):
    """Continuous batching over one executor. `add_request`, `step` and `abort_request` are as in vLLM.

    Any thread may call any public method. What cannot be shared is a RuntimeError at once.
    A function of the user's that a step calls may look at the engine; changing it is a RuntimeError, too.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.driver = Driver(self)
        self.config = config
        self.device = with_index(resolve_device(config.model.device))
        with current(self.device):
            try:
                self._build(config, self.device)
            except BaseException:
                for extension in self.__dict__.get("extensions", ()):
                    extension.close()
                if "model_executor" in self.__dict__:
                    self.model_executor.shutdown()
                raise

    def _build(self, config: EngineConfig, device: torch.device) -> None:
        model = config.model
        self.hf_config = load_hf_config(model.model, model.revision, model.trust_remote_code, model.hf_overrides)
        self.max_model_len = setup.resolve_max_model_len(config.model, self.hf_config)
        dtype = setup.resolve_model_dtype(config.model, self.hf_config, device)
        resolve_cache_dtype(config.cache.kv_cache_dtype, dtype)  # an error now, not when weights are loaded
        resolved = {"tokenizer": model.tokenizer or model.model, "dtype": dtype, "max_model_len": self.max_model_len}
        self.model_config = LoadedModelConfig(**vars(model) | resolved, hf_config=self.hf_config)
        self.tokenizer: PreTrainedTokenizerBase | None = setup.load_tokenizer(config.model)
        generation = generation_config.load_generation_config(config.model, self.hf_config)
        self.default_sampling_settings = generation_config.default_sampling_settings(config.model, generation)
        self.eos_token_ids = eos_token_ids(generation, self.hf_config, self.tokenizer)
        blend = config.blend
        check_settings(blend, self.hf_config.num_hidden_layers)  # a mistake costs no loading
        vocab_size = self.hf_config.vocab_size if blend.enable_blending else None
        encoding = make_encoding_context(blend.encoding_context, self.tokenizer, vocab_size)
        settings = WorkerSettings(config, self.hf_config, dtype, device, self.max_model_len)
        self.model_executor = executor = setup.make_executor(config, settings)
        worker = executor.driver_worker
        cache = config.cache
        self.blocks = BlockManager(worker.model_runner.cache.num_blocks, cache.block_size, cache.enable_prefix_caching)
        divides_blends = all(feature.divides_blends for feature in config.features if feature.is_on)
        step_tokens = config.scheduler.step_tokens(device)
        self.scheduler = Scheduler(self.blocks, config.scheduler.max_num_seqs, step_tokens, divides_blends)
        self.fingerprint = setup.fingerprint(config.model, worker, self.tokenizer)
        self.controller = make_controller(config.blend, worker)
        self.chunk_store = make_store(config, self.fingerprint, worker, self.controller)
        self.pages = PageManager(self.blocks)
        self.chunk_registry = ChunkRegistry(self.chunk_store, self.pages)
        # Keys of an FP8 chunk are rounded once more in their pages.
        rounds = config.chunk_store.format != "auto" or worker.shape.dtype is E4M3
        self.planner = BlendPlanner(blend, worker.num_layers, worker.shape.bytes_per_token, self.controller, rounds)
        finder = PieceFinder(self.fingerprint, encoding, self.max_model_len)
        self.composer = ChunkComposer(
            self.chunk_store, finder, self.planner, self.scheduler.prioritize, executor.collected_chunk
        )
        self.processor = OutputProcessor(self.tokenizer, self.max_model_len)
        self.metrics = EngineMetrics()
        runs_ahead = config.scheduler.runs_ahead(device)
        self.extensions = make_extensions(
            EngineParts(
                config, worker, self.scheduler, runs_ahead, self.lock, lambda: self.tokenizer, self.eos_token_ids
            )
        )
        self.scheduler.on_release += [extension.released for extension in self.extensions]
        self.requests = LiveRequests(self.scheduler, self.composer, self.metrics, executor.forget)
        prefill = partial(executor.prefill_chunk, max_tokens=self.scheduler.max_num_batched_tokens)
        self.registration = ChunkRegistration(self.chunk_registry, self.composer, self.pages, prefill)
        self.results = StepResults(self.requests, self.processor, self.metrics, self.extensions, self.decoder)
        stat_logger = None if config.disable_log_stats else StatLogger(self.metrics)
        self.loop = StepLoop(
            self.model_executor,
            self.requests,
            self.results,
            self.extensions,
            self.controller,
            stat_logger,
            runs_ahead,
        )
        self.builder = RequestBuilder(
            config,
            self.tokenizer,
            self.eos_token_ids,
            self.max_model_len,
            worker,
            self.planner,
            self.fingerprint,
            self.extensions,
            lambda: self.results.last_collected,
        )

    def __repr__(self) -> str:
        """Return the model, and how much there is to do."""
        if self.driver.lock.closed is not None:
            return f"<{type(self).__name__}, shut down>"
        return f"<{type(self).__name__} of {self.config.model.model!r}, {len(self.requests.by_id)} unfinished requests>"

    @classmethod
    def from_engine_args(cls, args: EngineConfigSource) -> LLMEngine:
        return cls(args.create_engine_config())

    @property
    def decoder(self) -> Decoder:
        """Return the decoder stack, which carries the public blending hooks."""
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
        unfinished = self.get_num_unfinished_requests()
        if unfinished:
            raise RuntimeError(
                f"{unfinished} requests are unfinished, and they use the tokenizer: finish or abort them first"
            )
        self.tokenizer = self.processor.tokenizer = self.builder.tokenizer = tokenizer
        if tokenizer.eos_token_id is not None:
            self.eos_token_ids |= {tokenizer.eos_token_id}

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

        With `final_only`, or the output kind FINAL_ONLY, `step` reports the request once, when it is finished; it
        reports no DELTA. With `scheduling_policy="priority"`,
        requests of a lower `priority` go first.
        """
        arrival_time = time.time() if arrival_time is None else arrival_time  # before it waits for a step to end
        if params.output_kind is RequestOutputKind.DELTA and not final_only:
            raise ValueError("output_kind=DELTA is for AsyncLLM.generate: use CUMULATIVE, or final_only=True")
        final_only = final_only or params.output_kind is RequestOutputKind.FINAL_ONLY
        self.prepare(params)
        with self.lock:
            parsed = self.parse(prompt)
            self.add(NewRequest(request_id, parsed, params, arrival_time, final_only, priority))

    def parse(self, prompt: PromptType | ParsedPrompt) -> ParsedPrompt:
        """Tokenize and check a prompt. Raises ValueError or TypeError naming the field and the fix."""
        vocab_size, trusts = self.hf_config.vocab_size, self.config.model.trusted_chunks
        return parse_prompt(prompt, self.tokenizer, vocab_size, self.max_model_len, trusts)

    def needs_preparation(self, params: SamplingParams) -> bool:
        """Return whether `prepare` would take long."""
        return any(extension.needs_preparation(params) for extension in self.extensions)

    def prepare(self, params: SamplingParams) -> None:
        """Do what takes long for requests with these parameters, such as compiling a grammar, while the engine goes on
        with others. `add_request` does it, too; a caller that holds the engine's lock then calls this before."""
        for extension in self.extensions:
            extension.prepare(params)

    @exclusive
    def add(self, new: NewRequest) -> None:
        """Queue a request whose prompt is token ids, as `add_request` does."""
        if new.request_id in self.requests.by_id:
            raise ValueError(f"request_id {new.request_id!r} is in use: give every running request an id of its own")
        group = self.builder.build(new, (other.thread for other in self.requests.by_id.values()))
        for extension in self.extensions:
            extension.begin(group.requests, group.parsed, new.params)
        if group.requests[0].blend is not None:
            self.decoder.cache_fuse_metadata["check"] = False
        self.requests.add(group)
        self.metrics.chat_parts_merged += new.parsed.num_merged_parts
        self.metrics.chat_parts_unfound += new.parsed.num_unfound_parts
        self.requests.queue(group)

    def shutdown(self) -> None:
        """Abort all requests, write what the chunk stores still have to write, and free everything. Whatever is asked
        of the engine afterwards is a RuntimeError; threads that wait for answers get it too."""
        with self.driver.lock.unless_closed() as is_open:
            if is_open:
                self._shut_down()

    @exclusive
    def _shut_down(self) -> None:
        store, loader = self.chunk_store, self.composer.loader
        self.driver.abandon_all()
        self.abort_request(list(self.requests.by_id))
        self.drop_finished()
        if loader is not None:
            loader.close()
        store.close()
        store.clear()
        for extension in self.extensions:
            extension.close()
        device, driver = self.model_executor.driver_worker.device, self.driver
        self.model_executor.shutdown()
        driver.lock.closed = "the engine has been shut down: make another LLM"
        for name in self.__dict__.keys() - {"driver"}:  # the parts know one another: none may stay reachable from here
            del self.__dict__[name]
        driver.wake_all()
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

    @exclusive
    def check_workers(self) -> None:
        """Raise EngineDeadError if a process that shares the model has ended. A step finds out by itself."""
        with dead_if_lost():
            self.model_executor.check()

    def has_request(self, request_id: str) -> bool:
        """Return whether a request is unfinished."""
        return request_id in self.requests.by_id

    @exclusive
    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        self.blocks.reset_prefix_cache()

    @exclusive
    def drop_finished(self) -> None:
        """Let go of requests that have finished: a step in flight whose requests are gone may hold their chunks' KV."""
        self.loop.drop_abandoned()

    @exclusive
    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Stop requests and free their pages; unknown ids are ignored, as they may just have finished. A thread that
        waits for one gets what there is of it, with the finish reason "abort"."""
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            self.driver.forget(one)
            group = self.requests.by_id.get(one)
            if group is not None:
                self.requests.abort(group)
                self.loop.withdraw_report(group)
                if self.driver.awaits(one):
                    self.driver.distribute([self.processor.output(group)])
                self.requests.forget(group)
                self.requests.withdraw_encodings(group)
        self.loop.settle_if_idle()

    @exclusive
    def stop_completion(self, request_id: str, index: int) -> None:
        """End one completion of a request whose stop string was found outside the engine, and free its pages. Nothing
        is reported of it. It is ignored if it has just ended."""
        group = self.requests.by_id.get(request_id)
        if group is None or group.requests[index].finished:
            return
        self.requests.finish(group.requests[index], "stop")
        if group.finished:
            self.loop.withdraw_report(group)
            self.requests.forget(group)
        self.loop.settle_if_idle()

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has anything to do, or to hand over."""
        with self.lock:
            return not self.is_idle or self.driver.keeps_outputs

    @property
    def is_idle(self) -> bool:
        """Return whether nothing runs, and nothing waits to run."""
        return self.loop.is_idle

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests.by_id)

    @exclusive
    def step(self) -> list[RequestOutput]:
        """Run one step, and return the outputs of the requests that advanced. With nothing to do the list is empty, and
        so it is, after a moment, while chunks are being loaded.

        Outputs that another caller waits for, such as `LLM.generate` in another thread, go there. In return the newest
        outputs of requests that advanced in steps of such callers are among those of the next call.
        """
        with self.lock.step(), interrupts_held_back():
            self.driver.distribute(self.loop.run())
        return self.driver.take_kept()

    @exclusive
    def run_full_steps(self) -> None:
        """Have the device begin with requests that fill a step, while the caller goes on to add others. Nothing is done
        on a CPU, or while another thread drives the engine."""
        if self.driver.is_driven or not self.loop.has_full_step:
            return
        with self.lock.step(), interrupts_held_back():
            self.driver.distribute(self.loop.run_full())

    def get_metrics(self) -> list[Metric]:
        with self.lock:
            return [
                *self.metrics.counters(),
                Gauge("vllm:num_requests_running", len(self.scheduler.running)),
                Gauge("vllm:num_requests_waiting", len(self.scheduler.waiting)),
                Gauge("vllm:kv_cache_usage_perc", self.blocks.usage),
                Gauge("vllm_blend:kv_cache_blocks", self.blocks.num_blocks),
                Gauge("vllm_blend:prefill_peak_tokens_per_second", self.metrics.peak_prefill_speed),
                Gauge("vllm:num_preemptions", self.scheduler.num_preemptions),
                Gauge("vllm_blend:chunks_registered", len(self.chunk_registry)),
                Gauge("vllm_blend:compositions_retained", len(self.blocks.retained)),
                *store_gauges(self.composer, self.model_executor.driver_worker),
                *(metric for extension in self.extensions for metric in extension.gauges()),
            ]

    def extension(self, kind: type[E]) -> E | None:
        """Return the engine's extension of a class; None if the feature is off."""
        return next((extension for extension in self.extensions if isinstance(extension, kind)), None)
