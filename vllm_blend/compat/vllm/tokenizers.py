"""`vllm.tokenizers`."""

from __future__ import annotations

from .transformers_utils.tokenizer import get_tokenizer

__all__ = ["get_tokenizer"]
