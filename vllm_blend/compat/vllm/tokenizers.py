"""`vllm.tokenizers`."""

from .transformers_utils.tokenizer import get_tokenizer

__all__ = ["get_tokenizer"]
