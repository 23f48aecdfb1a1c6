"""One engine that answers prompts greedily: freely, or with full prefill's answers forced upon them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from vllm_blend.blend.encoding_contexts import make_encoding_context
from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.engine_args import EngineArgs
from vllm_blend.inputs import ChunkedPrompt, PromptType
from vllm_blend.outputs import CompletionOutput
from vllm_blend.pipeline.evaluate import first_line
from vllm_blend.quality.forced import Forced, Recorder
from vllm_blend.quality.probe import Probe
from vllm_blend.sampling_params import SamplingParams

# With these, every step runs the model's modules on all of a prompt that was not stored as a chunk: see `Probe`.
ENGINE: dict[str, Any] = {
    "enable_blending": True,
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "async_scheduling": False,
}


@dataclass(frozen=True)
class Answer:
    """A greedy answer: its first line, and its tokens with the one that ends it."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Truth:
    """Full prefill's answer, with the distribution of each of its tokens: [vocabulary] log-probabilities."""

    answer: Answer
    log_probs: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Following:
    """How a prompt followed full prefill's answer: the KL divergence at each token, and whether it would have given the
    same answer of itself."""

    kl: tuple[float, ...]
    agrees: bool


class Session:
    """An engine with a probe. As a context manager it frees the engine's memory at the end.

    Methods raise ValueError or TypeError for a bad prompt, and RuntimeError if a prompt fails or the engine has too
    little memory for a batch.
    """

    def __init__(self, model: str, batch: int = 16, **engine_args: Any) -> None:
        if batch < 1:
            raise ValueError(f"the batch is {batch}: use 1 or more")
        arguments: dict[str, Any] = {"max_num_seqs": batch} | engine_args | ENGINE
        self.config = EngineArgs(model=model, **arguments).create_engine_config()
        self.engine = LLMEngine(self.config)
        self.batch = batch
        self.dtype: torch.dtype = self.engine.model_executor.driver_worker.dtype
        self.token_layers = 0.0  # of the prefills of the last call
        self._probe = Probe(self.engine.model_executor.driver_worker.model_runner.model)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._probe.close()
        self.engine.shutdown()  # ends other ranks, too, before the next engine needs their memory
        del self.engine, self._probe
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def num_held(self, tokens: int) -> int:
        """Return how many prompts of so many tokens fit the chunk store and, with their answers, the KV cache."""
        engine, answer = self.engine, 64
        blocks = -(-(tokens + answer) // engine.config.cache.block_size)
        in_cache = self.engine.model_executor.driver_worker.model_runner.cache.num_blocks // blocks
        shared = len(engine.composer.finder.encoding.company(is_alone=False))
        in_store = engine.composer.store.budget_bytes // engine.composer.bytes_per_token - shared
        return min(in_cache, max(0, in_store) // tokens)

    def use_company(self, name: str) -> None:
        """Have chunks encoded after what the encoding context `name` says, from now on. Chunks that were encoded
        otherwise stay in the store under keys of their own."""
        composer = self.engine.composer
        encoding = make_encoding_context(name, self.engine.tokenizer, self.engine.hf_config.vocab_size)
        composer.finder = replace(composer.finder, encoding=encoding)

    def encode(self, prompts: Sequence[ChunkedPrompt]) -> float:
        """Encode those chunks of prompts that are not stored, and return the token-layers that it took."""
        plain: list[PromptType] = [prompt | {"blend_selector": "none"} for prompt in prompts]
        composer = self.engine.composer
        for attempt in range(2):
            self.answer(plain, 1)
            first, encoded = self.token_layers, composer.num_encoded
            self.answer(plain, 1)
            if composer.num_encoded == encoded:
                return max(0.0, first - self.token_layers)
            if not attempt:  # chunks of earlier prompts that were used often stay longer than new ones
                composer.store.clear()
        gib = composer.store.budget_bytes / 2**30
        raise RuntimeError(
            f"the chunks of {len(prompts)} prompts do not fit the store of {gib:.3g} GiB together: use a smaller "
            "batch, or raise blend_chunk_cache_gib"
        )

    def answer(self, prompts: Sequence[PromptType], max_tokens: int) -> list[Answer]:
        """Return the greedy answers: the first lines of what follows the prompts."""
        found = self._run(prompts, lambda index: _greedy(max_tokens))
        return [_answer(completion) for completion in found]

    def truths(self, prompts: Sequence[PromptType], max_tokens: int) -> list[Truth]:
        """Return the same with the distribution of every token."""
        recorders = [Recorder() for _ in prompts]
        found = self._run(prompts, lambda index: _greedy(max_tokens, recorders[index]))
        return [Truth(_answer(c), tuple(recorder.rows)) for c, recorder in zip(found, recorders, strict=True)]

    def follow(
        self, prompts: Sequence[PromptType], truths: Sequence[Truth], batch: int | None = None
    ) -> list[Following]:
        """Have prompts say full prefill's answers, `batch` of them at a time, and compare every token."""
        forced = [Forced(truth.answer.token_ids, truth.log_probs) for truth in truths]
        self._run(prompts, lambda index: _saying(len(truths[index].answer.token_ids), forced[index]), batch)
        return [Following(tuple(each.kl), each.agrees) for each in forced]

    def _run(
        self, prompts: Sequence[PromptType], params: Callable[[int], SamplingParams], batch: int | None = None
    ) -> list[CompletionOutput]:
        """Run prompts to their ends, and count the token-layers of their prefills."""
        probe, size = self._probe, batch or self.batch
        probe.token_layers, probe.num_drawn = 0.0, 0
        found: list[CompletionOutput] = []
        for start in range(0, len(prompts), size):
            indices = range(start, min(start + size, len(prompts)))
            found += self._run_batch({index: (prompts[index], params(index)) for index in indices})
        decoded = probe.num_drawn - len(prompts)  # rows that pass every layer to draw the next token
        self.token_layers = probe.token_layers - decoded * probe.num_layers
        return found

    def _run_batch(self, requests: dict[int, tuple[PromptType, SamplingParams]]) -> list[CompletionOutput]:
        engine, finished = self.engine, {}
        preemptions = engine.scheduler.num_preemptions
        try:
            for index, (prompt, params) in requests.items():
                engine.add_request(str(index), prompt, params, final_only=True)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.error:
                        raise RuntimeError(f"prompt {output.request_id} failed: {output.error}")
                    [finished[int(output.request_id)]] = output.outputs
        except BaseException:  # queued requests must not run with the next batch
            engine.abort_request([str(index) for index in requests])
            raise
        if engine.scheduler.num_preemptions != preemptions:
            raise RuntimeError(
                f"the KV cache has no room for {len(requests)} prompts at a time, so that some were computed twice: "
                "use a smaller batch, or raise num_gpu_blocks_override"
            )
        return [finished[index] for index in requests]


def _greedy(max_tokens: int, *processors: Recorder) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, stop=["\n"], logits_processors=list(processors))


def _saying(count: int, forced: Forced) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, logits_processors=[forced]
    )


def _answer(completion: CompletionOutput) -> Answer:
    return Answer(first_line(completion.text), tuple(completion.token_ids))
