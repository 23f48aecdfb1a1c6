"""An inference engine in which a prompt's passages are reusable KV cache, behind vLLM's API."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vllm_blend import openmp as openmp  # first: it sets what OpenMP reads when torch is imported
from vllm_blend.import_names import warn_of_shadowed_names

if TYPE_CHECKING:
    from vllm_blend.blend.selectors import Evidence, LooksAt, Selector, register_selector
    from vllm_blend.config import BlendConfig
    from vllm_blend.engine.async_llm import AsyncLLM
    from vllm_blend.engine.llm_engine import LLMEngine
    from vllm_blend.engine_args import EngineArgs
    from vllm_blend.entrypoints.beam_search import BeamSearchParams
    from vllm_blend.entrypoints.chunked_llm import ChunkedLLM
    from vllm_blend.entrypoints.llm import LLM
    from vllm_blend.features.offload.kv_cache_manager import KVCacheManager
    from vllm_blend.inputs import ChunkedPrompt, TextPrompt, TokensPrompt
    from vllm_blend.outputs import BlendStats, CompletionOutput, RequestOutput
    from vllm_blend.sampling_params import RequestOutputKind, SamplingParams
    from vllm_blend.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

# Imported on first use: reading a data set must not load the engine.
_HOMES = {
    "AsyncLLM": "engine.async_llm",
    "BeamSearchParams": "entrypoints.beam_search",
    "BlendConfig": "config",
    "BlendStats": "outputs",
    "ChunkedLLM": "entrypoints.chunked_llm",
    "ChunkedPrompt": "inputs",
    "CompletionOutput": "outputs",
    "EngineArgs": "engine_args",
    "Evidence": "blend.selectors",
    "KVCacheManager": "features.offload.kv_cache_manager",
    "LLM": "entrypoints.llm",
    "LLMEngine": "engine.llm_engine",
    "LooksAt": "blend.selectors",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
    "Selector": "blend.selectors",
    "StructuredOutputsParams": "structured_outputs",
    "TextPrompt": "inputs",
    "TokensPrompt": "inputs",
    "register_selector": "blend.selectors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "BlendConfig",
    "BlendStats",
    "ChunkedLLM",
    "ChunkedPrompt",
    "CompletionOutput",
    "EngineArgs",
    "Evidence",
    "KVCacheManager",
    "LLMEngine",
    "LooksAt",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "Selector",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "register_selector",
]

warn_of_shadowed_names()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
