"""`vllm.engine.async_llm_engine`."""

from vllm_blend.engine.async_llm import AsyncLLM as AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
