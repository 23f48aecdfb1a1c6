"""The RAG pipeline: retrieval, KV caches, and blended answers with their scores, as stages with files between them."""

from vllm_blend.pipeline.datasets import Sample, load_dataset, normalize_sample
from vllm_blend.pipeline.prompts import build_qa_prompt, prompt_for

__all__ = ["Sample", "build_qa_prompt", "load_dataset", "normalize_sample", "prompt_for"]
