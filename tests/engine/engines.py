"""Engines and reference models for the tests: built once, reset between tests, checked for leaks after each."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import settings
from tests.engine.compare import record_chosen
from tests.engine.tiny_tokenizers import byte_level
from tests.kept import kept
from tests.models.tiny import save, tiny_hf_model
from vllm_blend import LLM, RequestOutput, SamplingParams
from vllm_blend.blend.metadata import default_fuse_metadata
from vllm_blend.engine import chunk_stores, composer
from vllm_blend.engine.extension import Extension
from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.features.offload.extension import ChunkOffload
from vllm_blend.inputs import ChunkedPrompt
from vllm_blend.kv_store.memory import MemoryChunkStore
from vllm_blend.kv_store.prefetch import ChunkLoader
from vllm_blend.kv_store.store_config import RemoteStoreConfig
from vllm_blend.pipeline.datasets import load_dataset, normalize_sample
from vllm_blend.pipeline.prompts import build_qa_prompt

E = TypeVar("E", bound=Extension)
ROOT = Path(__file__).resolve().parents[2]
DEMO = str(ROOT / "inputs" / "demo-model")
TINY_VOCABULARY = len(byte_level())
BLOCK_SIZE = settings.current().block_size
PATIENCE = 120.0  # seconds that engines wait for stored chunks: no machine is so slow that they would not come
CANDIDATES = 4  # likeliest tokens that outputs report in half precision, where comparing them needs several


def tiny_model(architecture: str, **overrides: Any) -> str:
    """Return the directory of a tiny random model of 96 positions with a tokenizer."""
    return _tiny_model(architecture, json.dumps(overrides, sort_keys=True))


@cache
def _tiny_model(architecture: str, overrides: str) -> str:
    directory = tempfile.mkdtemp(prefix=f"tiny-{architecture}-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    save(tiny_hf_model(architecture, vocab_size=TINY_VOCABULARY, **json.loads(overrides)), Path(directory))
    byte_level().save_pretrained(directory)
    return directory


@cache
def hf_model(directory: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def new_llm(model: str = DEMO, **arguments: Any) -> LLM:
    """An engine where the run wants it (see `tests/settings.py`), unless the arguments say otherwise.

    Chunks are encoded after their page alone, as most references here expect; `blend_encoding_context=None` is the
    engine's default.
    """
    blending = {"blend_encoding_context": "page"} if arguments.get("enable_blending") else {}
    with patience():
        llm = LLM(model, **(settings.current().engine_arguments() | blending | arguments))
    record_chosen(llm)
    return llm


@contextmanager
def patience() -> Iterator[None]:
    """Engines that are made meanwhile have `PATIENCE` with their chunk stores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composer, "ChunkLoader", partial(ChunkLoader, timeout=PATIENCE))
        patch.setattr(chunk_stores, "RemoteStoreConfig", partial(RemoteStoreConfig, timeout=PATIENCE))
        yield


def pages_for(tokens: int) -> dict[str, Any]:
    """Engine arguments for small pages that hold this many tokens and hardly more."""
    return {"block_size": BLOCK_SIZE, "num_gpu_blocks_override": -(-tokens // BLOCK_SIZE) + 1}


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


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
    key = (model, *sorted((k, _frozen(v)) for k, v in arguments.items()))
    llm = kept(("engine", *key), lambda: new_llm(model, **arguments))
    inner = llm.llm_engine
    llm.reset_prefix_cache()
    inner.chunk_store.clear()
    inner.decoder.cache_fuse_metadata.update(default_fuse_metadata(settings.current().torch_dtype))
    inner.decoder.old_kvs = []
    inner.scheduler.num_preemptions = 0
    assert_empty(llm)
    with threads(1):
        yield llm
    assert_empty(llm)


def assert_empty(llm: LLM) -> None:
    """Check that no request and no page is left. Chunks may still be arriving that no request waits for any more."""
    inner, deadline = llm.llm_engine, time.monotonic() + PATIENCE
    assert inner.get_num_unfinished_requests() == 0
    while inner.has_unfinished_requests() and time.monotonic() < deadline:
        assert inner.step() == []
    assert not inner.has_unfinished_requests()
    end_moves(llm)
    assert inner.blocks.num_free_blocks == inner.blocks.num_usable_blocks
    assert not inner.requests.groups


def feature(engine: LLMEngine, kind: type[E]) -> E:
    """Return a feature that the engine must have."""
    extension = engine.extension(kind)
    assert extension is not None
    return extension


def end_moves(llm: LLM) -> None:
    """Chunks may still travel when their request has ended; the pages that they own come back with the next step."""
    offload, deadline = llm.llm_engine.extension(ChunkOffload), time.monotonic() + PATIENCE
    if offload is not None:
        while offload.scheduler.moves and time.monotonic() < deadline:
            offload.scheduler.step({})
            time.sleep(0.001)
        assert not offload.scheduler.moves


def run(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def greedy(max_tokens: int = 8, **options: Any) -> SamplingParams:
    return _params({"temperature": 0.0, **options}, max_tokens)


def sampled(max_tokens: int = 12, **options: Any) -> SamplingParams:
    return _params({"temperature": 1.0, **options}, max_tokens)


def _params(options: dict[str, Any], max_tokens: int) -> SamplingParams:
    if not settings.current().exact:
        options = options | {"logprobs": max(CANDIDATES, options.get("logprobs") or 0)}
    return SamplingParams(max_tokens=max_tokens, **options)


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


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


def memory_store(llm: LLM) -> MemoryChunkStore:
    """Return the chunk store of an engine that has one in memory alone."""
    store = llm.llm_engine.chunk_store
    assert not store.below
    return store.memory


def close_store(llm: LLM) -> None:
    """Close the chunk store of an engine that has one on disk."""
    store = llm.llm_engine.chunk_store
    assert store.below
    store.close()
