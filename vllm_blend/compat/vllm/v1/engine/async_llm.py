"""`vllm.v1.engine.async_llm`."""

from vllm_blend.engine.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
