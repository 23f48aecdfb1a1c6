"""The prompt of a completion: text in which known passages are found, token ids, or prefix, chunks and suffix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from vllm_blend.entrypoints.openai.passages.finder import PassageFinder, TextSection
from vllm_blend.entrypoints.openai.passages.options import BlendOptions, parse_pages, parse_scores
from vllm_blend.entrypoints.openai.passages.text_pieces import split_text
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.kv_store.keys import salt_digest
from vllm_blend.prompt_parser import parse_prompt
from vllm_blend.prompt_pieces import tokenize

_CHUNKS = "the prompt's chunks"


def completion_prompt(
    finder: PassageFinder,
    prompt: Any,
    blend: BlendOptions,
    salt: str | None,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    max_model_len: int,
    blends: bool,
    trusts: bool = False,
) -> ParsedPrompt:
    """Return a completion's prompt as token ids with its chunks. `prompt` is a string, a list of token ids, or
    {"prefix", "chunks", "suffix"} (a ChunkedPrompt); `blends` says whether the engine blends.

    The token ids of a string are those of the whole string, whatever is found in it. Raises ValueError or TypeError
    that names the field.
    """
    blend.check(blends)
    if isinstance(prompt, Mapping):
        prompt = _with_options(dict(prompt), blend)
    parsed = parse_prompt(prompt, tokenizer, vocab_size, max_model_len, trusts)
    if isinstance(prompt, dict):
        finder.see((chunk for chunk in prompt.get("chunks", ()) if isinstance(chunk, str)), salt)
    else:
        _check_nothing_needs_chunks(blend)
        if isinstance(prompt, str) and blends and not blend.is_off:
            parsed = _with_found(finder, parsed, prompt, salt, tokenizer)
    if blend.is_off:
        parsed = ParsedPrompt(parsed.token_ids, parsed.text, is_composed=parsed.is_composed)
    parsed = replace(parsed, **blend.settings(parsed))
    return parsed if salt is None else replace(parsed, salt=salt_digest(salt))


def _with_options(prompt: dict[str, Any], blend: BlendOptions) -> dict[str, Any]:
    """Return a prompt of pieces with what the request says about blending, which must not be said twice."""
    chunks = prompt.get("chunks")
    num_chunks = len(chunks) if isinstance(chunks, list | tuple) else 0
    if blend.relevance is not None:
        if prompt.get("relevance") is not None:
            raise ValueError("blend.relevance and prompt.relevance are both given: give one of them")
        parse_scores(blend.relevance, num_chunks, _CHUNKS)
        prompt["relevance"] = blend.relevance
    if blend.continues is not None:
        if prompt.get("continues") is not None:
            raise ValueError("blend.continues and prompt.continues are both given: give one of them")
        parse_pages(blend.continues, num_chunks, _CHUNKS)
        prompt["continues"] = blend.continues
    if blend.order == "free":
        prompt["order"] = blend.order
    return prompt


def _check_nothing_needs_chunks(blend: BlendOptions) -> None:
    needed = 'the prompt as {"prefix", "chunks", "suffix"}'
    parse_scores(blend.relevance, 0, needed)
    parse_pages(blend.continues, 0, needed)
    if blend.order == "free":
        raise ValueError(
            "blend.order='free' is for chunks that follow one another: give the prompt as "
            '{"prefix", "chunks", "suffix"}, or leave blend.order out'
        )


def _with_found(
    finder: PassageFinder, parsed: ParsedPrompt, text: str, salt: str | None, tokenizer: PreTrainedTokenizerBase
) -> ParsedPrompt:
    """Return a prompt of text with the chunks that are found in it. The last piece holds the question."""
    if not finder.detects:
        return parsed
    found = finder.find(text, [TextSection(split_text(text), num_kept=1)], salt, False)
    tokens = tokenize(tokenizer, text) if found.chunks else None
    if tokens is None or not tokens.have_offsets:
        return parsed
    num_special = len(parsed.token_ids) - len(tokens.ids)  # BOS
    if parsed.token_ids[num_special:] != tokens.ids:
        return parsed
    bounds, num_merged = tokens.within(found.chunks)
    if not bounds:
        return parsed
    fixed = tokens.count_before(found.fixed or 0, bounds[0][0])
    return replace(
        parsed,
        chunk_bounds=tuple((start + num_special, stop + num_special) for start, stop in bounds),
        prefix_length=num_special + fixed,
        num_merged_parts=num_merged,
    )
