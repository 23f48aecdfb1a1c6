"""The RAG pipeline: data sets, retrieval, KV caches, blended answers and their scores, as stages with files between."""

from vllm_blend.pipeline.datasets import Sample, load_dataset, normalize_sample
from vllm_blend.pipeline.prompts import build_qa_prompt, prompt_for

__all__ = ["Sample", "build_qa_prompt", "load_dataset", "normalize_sample", "prompt_for"]
