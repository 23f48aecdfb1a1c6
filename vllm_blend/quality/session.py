"""Collect greedy answers of one engine, with the distribution of their first tokens and what they cost."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.engine_args import EngineArgs
from vllm_blend.inputs import PromptType
from vllm_blend.outputs import RequestOutput
from vllm_blend.pipeline.evaluate import first_line
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
    text: str
    token_ids: tuple[int, ...]
    first: torch.Tensor  # [vocabulary] float32 log-probabilities of the first token, on the host


@dataclass(frozen=True)
class Answers:
    """Answers in the order of the prompts. `token_layers` counts their prefills, with the passes that only choose
    tokens; `encoding` counts the computation of chunks that were not stored."""

    answers: tuple[Answer, ...]
    token_layers: float
    encoding: float = 0.0


@dataclass(frozen=True)
class EngineFacts:
    """What a record of measurements says of the engine: a digest of its weights, its data type and its device."""

    weights: str
    dtype: str
    device: str


class Session:
    """An engine with a probe. As a context manager it frees the engine's memory at the end."""

    def __init__(self, model: str, batch: int = 16, **engine_args: Any) -> None:
        if batch < 1:
            raise ValueError(f"the batch is {batch}: use 1 or more")
        arguments: dict[str, Any] = {"max_num_seqs": batch} | engine_args | ENGINE
        self.engine = LLMEngine.from_engine_args(EngineArgs(model=model, **arguments))
        self.batch = batch
        self.dtype: torch.dtype = self.engine.model_executor.driver_worker.dtype
        self.true_attention: dict[tuple[int, ...], torch.Tensor] = {}  # of prompts, see true_attention.py
        self._num_encoded = 0  # chunks, by the last run
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

    @property
    def facts(self) -> EngineFacts:
        dtype = str(self.dtype).removeprefix("torch.")
        return EngineFacts(self.engine.fingerprint.weights, dtype, str(self.engine.device))

    def answer(self, prompts: Sequence[PromptType], max_tokens: int) -> Answers:
        """Return the first line of what follows each prompt. Chunks that are not stored are encoded first, and counted
        apart.

        Raises ValueError or TypeError for a bad prompt, and RuntimeError if a prompt fails or the engine has too little
        memory for a batch.
        """
        parts = [self._batch(prompts[i : i + self.batch], max_tokens) for i in range(0, len(prompts), self.batch)]
        answers = tuple(answer for part in parts for answer in part.answers)
        return Answers(answers, sum(part.token_layers for part in parts), sum(part.encoding for part in parts))

    def _batch(self, prompts: Sequence[PromptType], max_tokens: int) -> Answers:
        found = self._run(prompts, max_tokens)
        if not self._num_encoded:
            return found
        again = self._run(prompts, max_tokens)
        if self._num_encoded:
            # Chunks of earlier prompts that were used often stay longer than new ones (see `MemoryChunkStore`).
            self.engine.composer.store.clear()
            found = self._run(prompts, max_tokens)
            again = self._run(prompts, max_tokens)
        if self._num_encoded:
            gib = self.engine.composer.store.budget_bytes / 2**30
            raise RuntimeError(
                f"the chunks of {len(prompts)} prompts do not fit the store of {gib:.3g} GiB together: use a smaller "
                "batch, or raise blend_chunk_cache_gib"
            )
        return Answers(again.answers, again.token_layers, max(0.0, found.token_layers - again.token_layers))

    def _run(self, prompts: Sequence[PromptType], max_tokens: int) -> Answers:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, stop=["\n"])
        probe, engine = self._probe, self.engine
        probe.token_layers, probe.num_drawn = 0.0, 0
        encoded = engine.composer.num_encoded
        preemptions = engine.scheduler.num_preemptions
        first: dict[int, torch.Tensor] = {}
        finished: dict[int, RequestOutput] = {}
        try:
            for index, prompt in enumerate(prompts):
                engine.add_request(str(index), prompt, params)
            while engine.has_unfinished_requests():
                probe.logits.clear()
                for output, logits in _rows(engine.step(), probe.logits):
                    index = int(output.request_id)
                    if index not in first:
                        first[index] = logits.float().log_softmax(0).cpu()
                    if output.finished:
                        finished[index] = output
        except BaseException:  # queued requests must not run with the next batch
            engine.abort_request([str(index) for index in range(len(prompts))])
            raise
        if engine.scheduler.num_preemptions != preemptions:
            raise RuntimeError(
                f"the KV cache has no room for {len(prompts)} prompts at a time, so that some were computed twice: "
                "use a smaller batch, or raise num_gpu_blocks_override"
            )
        self._num_encoded = engine.composer.num_encoded - encoded
        decoded = probe.num_drawn - len(prompts)  # rows that pass every layer to draw the next token
        answers = []
        for index in range(len(prompts)):
            [completion] = finished[index].outputs
            answers.append(Answer(first_line(completion.text), tuple(completion.token_ids), first[index]))
        return Answers(tuple(answers), probe.token_layers - decoded * probe.num_layers)


def _rows(outputs: Sequence[RequestOutput], logits: Sequence[torch.Tensor]) -> list[tuple[RequestOutput, torch.Tensor]]:
    """Return the outputs of a step, each with the logits that its token was drawn from. An engine that runs one step at
    a time reports requests in the order of their rows; the check that each token is the likeliest of its row confirms
    it."""
    for output in outputs:
        if output.error:
            raise RuntimeError(f"prompt {output.request_id} failed: {output.error}")
    rows = torch.cat(list(logits)).unbind() if logits else ()
    if len(rows) != len(outputs):
        raise RuntimeError(f"a step reported {len(outputs)} requests, but drew tokens from {len(rows)} rows of logits")
    for output, row in zip(outputs, rows, strict=True):
        token = output.outputs[0].token_ids[-1]
        if row[token] < row.max():
            raise RuntimeError(f"token {token} of prompt {output.request_id} is not the likeliest of its row")
    return list(zip(outputs, rows, strict=True))
