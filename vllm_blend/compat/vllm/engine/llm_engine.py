"""`vllm.engine.llm_engine`."""

from __future__ import annotations

from vllm_blend.engine.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
