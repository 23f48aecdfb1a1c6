"""`LLM`: the class people use from Python."""

from __future__ import annotations

import itertools
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from vllm_blend.checks import a_type, is_whole
from vllm_blend.chunks.chat_prompt import chat_prompts
from vllm_blend.chunks.chat_template import make_chat_template
from vllm_blend.chunks.messages import parse_conversations
from vllm_blend.engine.driver import Inbox
from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.engine.lock import current
from vllm_blend.engine.metrics import Metric
from vllm_blend.engine_args import EngineArgs, show_options
from vllm_blend.entrypoints.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from vllm_blend.inputs import ParsedPrompt, PromptType
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.keys import ChunkId
from vllm_blend.outputs import CompletionOutput, RequestOutput
from vllm_blend.prompt_keys import parse_salt
from vllm_blend.sampling_params import SamplingParams
from vllm_blend.unsupported import refuse_methods
from vllm_blend.unsupported.llm_methods import UNSUPPORTED_LLM_METHODS

logger = logging.getLogger(__name__)
T = TypeVar("T")
Own = TypeVar("Own", bound="LLM")
ChatMessages = list[dict[str, Any]]


@refuse_methods(UNSUPPORTED_LLM_METHODS)
class LLM:
    """A model that answers batches of prompts, with vLLM's arguments (see `EngineArgs`).

    `enable_blending=True` and prompts of the form {"prefix", "chunks", "suffix"} reuse the KV cache of the chunks.
    Several threads may use one `LLM`: their requests run in the same steps. As a context manager it shuts down at the
    end.
    """

    @show_options
    def __init__(self, model: str, tokenizer: str | None = None, **engine_args: Any) -> None:
        self.llm_engine = LLMEngine.from_engine_args(EngineArgs(model=model, tokenizer=tokenizer, **engine_args))
        self._ids = itertools.count()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        *,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        arrival_time: float | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs in the order of the prompts.

        A list of integers is one prompt, given as token ids. `use_tqdm` may be a function that makes the progress bar,
        as `tqdm` does. `priority` has an integer for each prompt; with `scheduling_policy="priority"` lower ones go
        first. `prompt_token_ids` is vLLM's earlier name for prompts of token ids, and `lora_request` must be None.
        `arrival_time` (seconds since the epoch) is that of this call unless told otherwise.

        A single bad prompt raises ValueError or TypeError. In a batch a bad prompt fails alone: its output has `error`
        set and no text; if every prompt is bad, the first error is raised.
        """
        arrival_time = time.time() if arrival_time is None else arrival_time
        _check_no_lora(lora_request)
        batch = as_batch(prompts, prompt_token_ids)
        if priority is not None and len(priority) != len(batch):
            raise ValueError(f"{len(priority)} priorities for {len(batch)} prompts: give one per prompt, or None")
        if not batch:
            return []
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        each = [sampling_params] * len(batch) if isinstance(sampling_params, SamplingParams) else list(sampling_params)
        if len(each) != len(batch):
            raise ValueError(
                f"{len(each)} sampling_params for {len(batch)} prompts: give one for all, or one per prompt"
            )
        for index, params in enumerate(each):
            if not isinstance(params, SamplingParams):
                raise TypeError(f"sampling_params[{index}] is {a_type(params)}: give SamplingParams")
        for params in each:
            self.llm_engine.prepare(params)
        priorities = [0] * len(batch) if priority is None else priority
        inbox, ids = Inbox(), []
        failed: dict[str, Exception] = {}
        try:
            for prompt, params, rank in zip(batch, each, priorities, strict=True):
                ids.append(self._add(inbox, prompt, params, arrival_time, rank, failed))
                if priority is None:  # else a later prompt may have to go first
                    self.llm_engine.run_full_steps()
            if len(failed) == len(batch):
                raise next(iter(failed.values()))
            finished = {request_id: _failed_output(request_id, error) for request_id, error in failed.items()}
            self._run(inbox, finished, use_tqdm)
        finally:  # also after a Ctrl-C: what was queued must not run with the next call
            self.llm_engine.driver.close(inbox)
        return [finished[request_id] for request_id in ids]

    def chat(
        self,
        messages: ChatMessages | Sequence[ChatMessages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Complete a conversation, or several, rendered by the tokenizer's chat template (or the one given).

        The content of a message is a string or a list of text parts; `chat_template_content_format` says whether the
        template gets these joined by newlines ("string") or as a list ("openai"), "auto" finds out what it reads.
        `chat_template_kwargs` are variables of the template. `cache_salt` as in a prompt, for all conversations.

        With `enable_blending`, the text parts of user and tool messages are chunks, whatever order they come in; the
        last part that a user wrote is the question, which is always computed. Token ids are those of the whole
        conversation all the same. `output.blend` says what was reused, and how many parts share a token with their
        neighbour. Where the template changes the text of parts, a warning says so and the prompt is a plain one.

        Raises ValueError or TypeError that names what is wrong with a message or an argument before anything runs.
        """
        unsupported = {
            "lora_request": lora_request,
            "tokenization_kwargs": tokenization_kwargs,
            "mm_processor_kwargs": mm_processor_kwargs,
        }
        for name, value in unsupported.items():
            if value:
                raise ValueError(f"{name}={value!r} is not supported by this engine: leave it out")
        arrival_time = time.time()
        with self.llm_engine.lock:  # which the tokenizer belongs to
            template = make_chat_template(
                self.get_tokenizer(),
                chat_template,
                chat_template_content_format,
                tools,
                chat_template_kwargs,
                add_generation_prompt,
                continue_final_message,
            )
            blends = self.llm_engine.config.blend.enable_blending
            salt, limit = parse_salt(cache_salt), self.llm_engine.max_model_len
            trusts = self.llm_engine.config.model.trusted_chunks
            prompts: list[Any] = [
                replace(prompt, salt=salt) if isinstance(prompt, ParsedPrompt) else prompt
                for prompt in chat_prompts(template, parse_conversations(messages), blends, limit, trusts)
            ]
        return self.generate(prompts, sampling_params, use_tqdm, arrival_time=arrival_time)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the most likely continuations of every prompt that a beam search finds; outputs in the order of the
        prompts.

        At most `concurrency_limit` prompts are searched at a time; None: all. Each token of a sequence is a request of
        its own, so leave prefix caching on. Raises ValueError or TypeError before any work if a prompt or a setting is
        wrong, and for chunked prompts that would be blended.
        """
        _check_no_lora(lora_request)
        run = partial(self.generate, use_tqdm=False)
        return beam_search(self.llm_engine, run, as_batch(prompts, None), params, use_tqdm, concurrency_limit)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what `generate` and `chat` use without sampling_params: vLLM's defaults, changed by the model's
        generation config (see `generation_config` of the engine). The caller may change it."""
        return SamplingParams(**self.llm_engine.default_sampling_settings)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer. Raises ValueError if the engine has none. Where other threads use this object, hold
        `llm_engine.lock` to use it."""
        return self.llm_engine.get_tokenizer()

    def set_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.llm_engine.set_tokenizer(tokenizer)

    def encode_chunks(
        self,
        prefix: str | Sequence[int],
        chunks: Sequence[str | Sequence[int]],
        continues: Sequence[int | None] | None = None,
        encode_after: Sequence[str | Sequence[int]] | None = None,
        cache_salt: str | None = None,
    ) -> list[ChunkKV]:
        """Compute and store the KV of `chunks` for prompts with this `prefix`, wherever they stand in these. Return the
        KV that a prompt of these chunks needs. `continues`, `encode_after` and `cache_salt` as in a `ChunkedPrompt`."""
        return self.llm_engine.encode_chunks(prefix, chunks, continues, encode_after, cache_salt)

    def load_chunk(self, chunk: ChunkId, kv: ChunkKV) -> None:
        """Put KV from elsewhere into the chunk store; `llm_engine.identify_chunks` gives the id."""
        self.llm_engine.load_chunk(chunk, kv)

    def apply_model(self, func: Callable[[nn.Module], T]) -> list[T]:
        """Return `func` of the model, one result per worker. Raises ValueError if ranks share the model."""
        self.llm_engine.check_one_rank("apply_model")
        with self.llm_engine.lock, current(self.llm_engine.device):
            model = self.llm_engine.model_executor.driver_worker.model_runner.model
            assert isinstance(model, nn.Module)  # as every model is that `load_model` built
            return [func(model)]

    def collective_rpc(
        self,
        method: str | Callable[..., T],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[T]:
        """Call a method of the worker, by name, or a function with the worker as its first argument; return a list with
        the result, as there is one worker. The call runs in this process, so `timeout` must be None."""
        if timeout is not None:
            raise ValueError(f"timeout={timeout!r}: the call runs in this process and cannot be cut off; leave it None")
        self.llm_engine.check_one_rank("collective_rpc")
        with self.llm_engine.lock, current(self.llm_engine.device):
            worker = self.llm_engine.model_executor.driver_worker
            call = partial(method, worker) if callable(method) else getattr(worker, method)
            return [call(*args, **(kwargs or {}))]

    def get_metrics(self) -> list[Metric]:
        return self.llm_engine.get_metrics()

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes, for example between measurements. Stored chunks stay."""
        self.llm_engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Free the model and the KV cache, write what the chunk stores still have to write, and close them. Any later
        call but `shutdown` is a RuntimeError. Calls that other threads are in end with that error too."""
        self.llm_engine.shutdown()

    def __repr__(self) -> str:
        """Return the model and the settings that decide what it computes, in a line."""
        engine = self.llm_engine
        dtype = str(engine.model_config.dtype).removeprefix("torch.")
        blend = engine.config.blend
        ratio = "" if blend.recompute_ratio is None else f" at {blend.recompute_ratio:g}"
        rule = f", blends by {blend.selector}{ratio}" if blend.enable_blending else ""
        used = [feature.name for feature in engine.config.features if feature.is_on]
        features = f", {', '.join(used)}" if used else ""
        device = engine.model_executor.driver_worker.device
        size = engine.config.tensor_parallel_size
        ranks = f" x {size}" if size > 1 else ""
        return f"{type(self).__name__}({engine.config.model.model!r}, {dtype} on {device}{ranks}{rule}{features})"

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _add(
        self,
        inbox: Inbox,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float,
        priority: int,
        failed: dict[str, Exception],
    ) -> str:
        """Queue a prompt, or put the error with which it is refused into `failed`. Return its id."""
        engine = self.llm_engine
        with engine.lock:
            # Requests that were added to the engine directly may have taken an id.
            request_id = next(filter(engine.driver.is_free, map(str, self._ids)))
            engine.driver.expect(request_id, inbox)
            try:
                engine.add_request(request_id, prompt, params, arrival_time, final_only=True, priority=priority)
            except (ValueError, TypeError) as error:
                engine.driver.stop_expecting(request_id, inbox)
                failed[request_id] = error
        return request_id

    def _run(self, inbox: Inbox, finished: dict[str, RequestOutput], use_tqdm: bool | Callable[..., tqdm]) -> None:
        """Wait for the outputs that `finished` lacks, and put them there."""
        total = len(inbox.request_ids) + len(finished)
        new_bar = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=not use_tqdm)
        with new_bar(total=total, initial=len(finished), desc="Processed prompts") as bar:

            def arrived() -> bool:
                while inbox.outputs:
                    output = inbox.outputs.popleft()
                    finished[output.request_id] = output
                    bar.update()
                return len(finished) == total

            self.llm_engine.driver.wait(inbox, arrived)


def as_batch(prompts: PromptType | Sequence[PromptType] | None, prompt_token_ids: Any) -> list[PromptType]:
    """Return the prompts of a call one by one. A list of integers is a single prompt."""
    if prompt_token_ids is not None:
        if prompts is not None:
            raise ValueError("prompts and prompt_token_ids are both given: give one of them")
        warnings.warn("prompt_token_ids is deprecated: give token ids as prompts", DeprecationWarning, stacklevel=3)
        prompts = prompt_token_ids
    if isinstance(prompts, bytes) or not isinstance(prompts, (str, dict, Sequence)):
        raise TypeError(f"prompts is {a_type(prompts)}: give a prompt or a list of prompts")
    given: Any = prompts
    is_one = isinstance(given, (str, dict)) or (bool(given) and is_whole(given[0]))
    return [given] if is_one else list(given)


def _check_no_lora(lora_request: object) -> None:
    if lora_request is not None:
        raise ValueError(f"lora_request={lora_request!r}: LoRA adapters are not supported; leave it None")


def _failed_output(request_id: str, error: Exception) -> RequestOutput:
    logger.warning("prompt %s was refused: %s", request_id, error)
    completion = CompletionOutput(index=0, text="", token_ids=[], finish_reason="error")
    return RequestOutput(request_id, None, [], None, [completion], finished=True, error=str(error))
