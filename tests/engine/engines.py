"""Engines and reference models for the tests: built once, reset between tests, checked for leaks after each."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.engine.tiny_tokenizers import byte_level
from tests.models.tiny import save, tiny_hf_model
from vllm_blend import LLM, RequestOutput, SamplingParams
from vllm_blend.blend.metadata import default_fuse_metadata
from vllm_blend.inputs import ChunkedPrompt
from vllm_blend.pipeline.datasets import load_dataset, normalize_sample
from vllm_blend.pipeline.prompts import build_qa_prompt

ROOT = Path(__file__).resolve().parents[2]
DEMO = str(ROOT / "inputs" / "demo-model")
TINY_VOCABULARY = len(byte_level())
LOGPROB_TOLERANCE = 1e-4


@cache
def tiny_model(architecture: str, **overrides: Any) -> str:
    """Directory of a tiny random model of 96 positions with a tokenizer."""
    directory = tempfile.mkdtemp(prefix=f"tiny-{architecture}-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    save(tiny_hf_model(architecture, vocab_size=TINY_VOCABULARY, **overrides), Path(directory))
    byte_level().save_pretrained(directory)
    return directory


@cache
def hf_model(directory: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@cache
def _built(model: str, arguments: tuple[tuple[str, Any], ...]) -> LLM:
    return LLM(model, dtype="float32", device="cpu", **{k: _thawed(v) for k, v in arguments})


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _thawed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def engine(model: str = DEMO, **arguments: Any) -> Iterator[LLM]:
    """An engine as good as new, which must come back empty: no request left, every page free.

    It runs on one thread: on work this small, several mostly wait for one another, and long on a busy machine.
    """
    llm = _built(model, tuple(sorted((k, _frozen(v)) for k, v in arguments.items())))
    inner = llm.llm_engine
    llm.reset_prefix_cache()
    inner.chunk_store.clear()
    inner.decoder.cache_fuse_metadata.update(default_fuse_metadata(torch.float32))
    inner.decoder.old_kvs = []
    inner.scheduler.num_preemptions = 0
    assert_empty(llm)
    with threads(1):
        yield llm
    assert_empty(llm)


def assert_empty(llm: LLM) -> None:
    inner = llm.llm_engine
    assert not inner.has_unfinished_requests()
    assert inner.get_num_unfinished_requests() == 0
    assert inner.blocks.num_free_blocks == inner.blocks.num_usable_blocks
    assert not inner.processor.groups


def run(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def greedy(max_tokens: int = 8, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **settings)


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


@torch.inference_mode()
def hf_logprobs(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """[tokens, vocabulary] log-probabilities of what follows each token, from one plain forward pass."""
    return model(torch.tensor([list(ids)])).logits[0].float().log_softmax(-1)


def assert_logprobs_match(output: RequestOutput, model: PreTrainedModel) -> None:
    """Every reported log-probability of a request, prompt and output, against transformers."""
    assert output.error is None
    prompt = output.prompt_token_ids
    for completion in output.outputs:
        expected = hf_logprobs(model, [*prompt, *completion.token_ids])
        assert completion.logprobs is not None
        for offset, (entry, token) in enumerate(zip(completion.logprobs, completion.token_ids, strict=True)):
            assert token in entry
            for candidate, logprob in entry.items():
                assert abs(logprob.logprob - expected[len(prompt) - 1 + offset, candidate]) <= LOGPROB_TOLERANCE
        if output.prompt_logprobs is not None:
            assert len(output.prompt_logprobs) == len(prompt)
            assert output.prompt_logprobs[0] is None
            for position, known in enumerate(output.prompt_logprobs[1:]):
                assert known is not None
                assert prompt[position + 1] in known
                for candidate, logprob in known.items():
                    assert abs(logprob.logprob - expected[position, candidate]) <= LOGPROB_TOLERANCE


def assert_same_logprobs(left: RequestOutput, right: RequestOutput, tolerance: float = LOGPROB_TOLERANCE) -> None:
    """Two outputs have the same tokens with the same log-probabilities."""
    assert left.error is None
    assert right.error is None
    for a, b in zip(left.outputs, right.outputs, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs is not None
        assert b.logprobs is not None
        for mine, theirs in zip(a.logprobs, b.logprobs, strict=True):
            for token in mine.keys() & theirs.keys():
                assert abs(mine[token].logprob - theirs[token].logprob) <= tolerance


@cache
def _samples(dataset: str) -> list[dict[str, Any]]:
    return load_dataset(ROOT / "inputs" / dataset)


def demo_prompt(index: int, passages: int | None = None, **options: Any) -> ChunkedPrompt:
    """A question of the demo data set over its first passages, as prefix, chunks and suffix."""
    sample = normalize_sample(_samples("musique_s.json")[index], index)
    chosen = range(len(sample.passages) if passages is None else passages)
    return {**build_qa_prompt(sample, "musique_s.json", list(chosen)), **options}  # type: ignore[typeddict-item]


def ids_of(llm: LLM, prompt: ChunkedPrompt) -> list[int]:
    """The token ids of a chunked prompt: its pieces one by one, BOS once."""
    tokenizer = llm.get_tokenizer()
    pieces = [prompt["prefix"], *prompt["chunks"], prompt["suffix"]]
    ids = [tokenizer.bos_token_id]
    for piece in pieces:
        ids += tokenizer.encode(piece, add_special_tokens=False) if isinstance(piece, str) else list(piece)
    return ids
