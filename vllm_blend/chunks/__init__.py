"""Prompts made of registered chunks. `ChunkedLLM` is the front; here are the types it gives, takes and raises."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_blend.chunks.cascade import build_cascade_data_for_composition
    from vllm_blend.chunks.chunk import Chunk, ChunkInfo, ChunkType, Deletion
    from vllm_blend.chunks.chunked_llm import ChunkedLLM
    from vllm_blend.chunks.composition import ChunkComposition
    from vllm_blend.chunks.errors import ChunkInUseError, OutOfChunkMemoryError, UnknownChunkError
    from vllm_blend.chunks.preview import CompositionPreview
    from vllm_blend.chunks.registry import ChunkRegistry
    from vllm_blend.core.page_manager import PageManager

# Imported on first use: the engine imports modules of this package, and some of these import the engine.
_HOMES = {
    "Chunk": "chunks.chunk",
    "ChunkComposition": "chunks.composition",
    "ChunkInUseError": "chunks.errors",
    "ChunkInfo": "chunks.chunk",
    "ChunkRegistry": "chunks.registry",
    "ChunkType": "chunks.chunk",
    "ChunkedLLM": "chunks.chunked_llm",
    "CompositionPreview": "chunks.preview",
    "Deletion": "chunks.chunk",
    "OutOfChunkMemoryError": "chunks.errors",
    "PageManager": "core.page_manager",
    "UnknownChunkError": "chunks.errors",
    "build_cascade_data_for_composition": "chunks.cascade",
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
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"vllm_blend.{_HOMES[name]}"), name)
