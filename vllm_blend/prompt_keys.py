"""The keys that a prompt dict may have, and the one that every kind of prompt takes: `cache_salt`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_blend.checks import closest
from vllm_blend.kv_store.keys import salt_digest

_CHUNKED_OPTIONS = (
    "blend_selector",
    "blend_recompute_ratio",
    "relevance",
    "order",
    "chunk_ranking",
    "in_place_chunks",
    "continues",
    "encode_after",
)
# By kind of prompt. The first key is the one that tells the kind.
KNOWN_KEYS: dict[str, tuple[str, ...]] = {
    "chunked": ("chunks", "prefix", "suffix", *_CHUNKED_OPTIONS, "cache_salt"),
    "token": ("prompt_token_ids", "prompt", "cache_salt"),
    "text": ("prompt", "cache_salt"),
}
# vLLM's other keys. Callers write None for "not given"; any other value asks for something that no model here does.
REFUSED_KEYS: dict[str, str] = {
    "multi_modal_data": "models here read text only",
    "multi_modal_uuids": "models here read text only",
    "mm_processor_kwargs": "models here read text only",
    "token_type_ids": "they belong to cross-encoders, which are not among the models here",
    "prompt_embeds": "prompts are text or token ids",
    "encoder_prompt": "models here are decoders only",
    "decoder_prompt": "models here are decoders only",
}


def kind_of(prompt: Mapping[str, Any]) -> str:
    """Return which kind of prompt a dict is, having checked that it has no other keys than that kind has.

    Raises ValueError naming the key and the known ones.
    """
    kind = next((kind for kind, keys in KNOWN_KEYS.items() if keys[0] in prompt), None)
    if kind is None:
        raise ValueError(
            "a prompt dict needs 'prompt', 'prompt_token_ids', or 'prefix', 'chunks' and 'suffix'; got "
            f"{sorted(map(str, prompt))}"
        )
    for key, value in prompt.items():
        if key in REFUSED_KEYS and value is not None:
            raise ValueError(f"the prompt has {key!r}, which is not supported: {REFUSED_KEYS[key]}; leave it out")
    unknown = [key for key in prompt if key not in KNOWN_KEYS[kind] and key not in REFUSED_KEYS]
    if unknown:
        raise ValueError(
            f"unknown key(s) {unknown} in a {kind} prompt: the known ones are {sorted(KNOWN_KEYS[kind])}"
            + "".join(_hint(key, kind) for key in unknown)
        )
    return kind


def parse_salt(cache_salt: Any) -> bytes:
    """Return what stands for a prompt's `cache_salt` in every key, b"" for None. The errors do not show the salt."""
    if cache_salt is None:
        return b""
    if not isinstance(cache_salt, str):
        raise TypeError(f"cache_salt must be a non-empty string, not {type(cache_salt).__name__}")
    if not cache_salt:
        raise ValueError("cache_salt is empty: give a non-empty string, or leave it out")
    return salt_digest(cache_salt)


def _hint(key: Any, kind: str) -> str:
    if key in KNOWN_KEYS["chunked"]:
        return f"; {key!r} is for prompts with 'prefix', 'chunks' and 'suffix'"
    if key in KNOWN_KEYS["token"] or key in KNOWN_KEYS["text"]:
        return f"; give either {key!r} or 'chunks'"
    meant = closest(key, KNOWN_KEYS[kind])
    return f"; did you mean {meant!r} by {key!r}?" if meant else ""
