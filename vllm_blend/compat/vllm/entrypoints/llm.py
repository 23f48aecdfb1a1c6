"""`vllm.entrypoints.llm`."""

from __future__ import annotations

from vllm_blend.entrypoints.llm import LLM

__all__ = ["LLM"]
