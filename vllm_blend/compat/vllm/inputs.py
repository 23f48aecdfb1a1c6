"""Prompt types, as `vllm.inputs` has them."""

from vllm_blend.inputs import ChunkedPrompt, PromptType, TextPrompt, TokensPrompt

__all__ = ["ChunkedPrompt", "PromptType", "TextPrompt", "TokensPrompt"]
