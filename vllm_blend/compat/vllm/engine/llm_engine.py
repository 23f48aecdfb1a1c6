"""`vllm.engine.llm_engine`."""

from vllm_blend.engine.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
