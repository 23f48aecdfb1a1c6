"""Prompts made of registered chunks: the types that `ChunkedLLM` gives, takes and raises."""

from __future__ import annotations

import importlib
from typing import Any

from vllm_blend.chunks.chunk import (
    Chunk,
    ChunkInfo,
    ChunkInUseError,
    ChunkType,
    Deletion,
    OutOfChunkMemoryError,
    UnknownChunkError,
)
from vllm_blend.chunks.composition import ChunkComposition
from vllm_blend.chunks.registry import ChunkRegistry

# Public names of this package that live above it. They are looked up on first use: chunks import no engine.
_LIVES_ABOVE = {
    "ChunkedLLM": "vllm_blend.entrypoints.chunked_llm",
    "CompositionPreview": "vllm_blend.entrypoints.composition_preview",
    "PageManager": "vllm_blend.core.page_manager",
    "build_cascade_data_for_composition": "vllm_blend.features.cascade.planner",
}

__all__ = [
    "Chunk",
    "ChunkComposition",
    "ChunkInUseError",
    "ChunkInfo",
    "ChunkRegistry",
    "ChunkType",
    "ChunkedLLM",
    "CompositionPreview",
    "Deletion",
    "OutOfChunkMemoryError",
    "PageManager",
    "UnknownChunkError",
    "build_cascade_data_for_composition",
]


def __getattr__(name: str) -> Any:
    if name not in _LIVES_ABOVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LIVES_ABOVE[name]), name)
