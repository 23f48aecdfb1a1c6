"""Passages of requests: what is reused of a prompt, whichever way a client writes it."""

from vllm_blend.entrypoints.openai.passages.chat import chat_prompt
from vllm_blend.entrypoints.openai.passages.completions import completion_prompt
from vllm_blend.entrypoints.openai.passages.documents import Document, parse_documents
from vllm_blend.entrypoints.openai.passages.finder import PassageFinder
from vllm_blend.entrypoints.openai.passages.options import BlendOptions, parse_blend
from vllm_blend.entrypoints.openai.passages.usage import PromptTokensDetails, usage_details

__all__ = [
    "BlendOptions",
    "Document",
    "PassageFinder",
    "PromptTokensDetails",
    "chat_prompt",
    "completion_prompt",
    "parse_blend",
    "parse_documents",
    "usage_details",
]
