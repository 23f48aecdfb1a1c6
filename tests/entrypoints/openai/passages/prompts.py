"""Prompts as the server makes them of requests, with a tiny tokenizer and no engine."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from tests.engine.tiny_tokenizers import byte_level
from vllm_blend.chunks.chat_template import make_chat_template
from vllm_blend.chunks.messages import parse_conversations
from vllm_blend.entrypoints.openai.passages import (
    PassageFinder,
    chat_prompt,
    completion_prompt,
    parse_blend,
    parse_documents,
)
from vllm_blend.inputs import ParsedPrompt

INSTRUCTION = "Use the following pieces of context to answer the question at the end."
PASSAGES = [
    "The quick brown fox jumps over the lazy dog.",
    "Where did the dog go? It went over the fox, naïvely.",
    "def f(x): return x  # 敏捷的 😀",
    "The lazy dog jumps over the quick brown fox.",
]
FINDER: dict[str, Any] = {"min_characters": 16}


def completion(
    finder: PassageFinder,
    prompt: Any,
    salt: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    blends: bool = True,
    **blend: Any,
) -> ParsedPrompt:
    chosen = tokenizer or byte_level()
    return completion_prompt(finder, prompt, parse_blend(blend or None), salt, chosen, len(chosen), 8192, blends)


def chat(
    finder: PassageFinder,
    messages: list[dict[str, Any]],
    template: str,
    documents: Any = None,
    salt: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    blends: bool = True,
    trusts: bool = False,
    **blend: Any,
) -> ParsedPrompt:
    chosen = tokenizer or byte_level()
    made = make_chat_template(chosen, template, "auto", None, None, True, False)
    [parsed] = parse_conversations([messages])
    options = parse_blend(blend or None)
    limits = (len(chosen), 8192, blends, trusts)
    return chat_prompt(finder, made, parsed, parse_documents(documents), options, salt, *limits)


def chunk_texts(prompt: ParsedPrompt, tokenizer: PreTrainedTokenizerBase | None = None) -> list[str]:
    backend = (tokenizer or byte_level()).backend_tokenizer
    return [backend.decode(prompt.token_ids[a:b], skip_special_tokens=False) for a, b in prompt.chunk_bounds]


def stuffed(*passages: str, question: str, instruction: str = INSTRUCTION) -> str:
    """Return a prompt as LangChain's stuff chain writes it."""
    return "\n\n".join([instruction, *passages, question])
