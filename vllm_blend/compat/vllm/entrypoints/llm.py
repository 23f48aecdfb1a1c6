"""`vllm.entrypoints.llm`."""

from vllm_blend.entrypoints.llm import LLM

__all__ = ["LLM"]
