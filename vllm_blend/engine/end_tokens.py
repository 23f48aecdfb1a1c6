"""The tokens that end a text, from wherever a model says so."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from vllm_blend.checks import is_whole, require
from vllm_blend.chunks.chat_template import TEMPLATE_ERRORS, render

logger = logging.getLogger(__name__)

# Special tokens that end a text, a turn, or a message that a tool is to answer, by the names that models give them.
NAMES = frozenset(
    {
        *("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>"),
        *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<EOT>", "<end_of_utterance>"),
        *("<|eom_id|>", "<|return|>", "<|call|>"),
    }
)
HARMONY_END, HARMONY_RETURN = "<|end|>", "<|return|>"  # of gpt-oss: the first ends a part of an answer
_ANSWER = "TheAssistantSays0x4d6c8b9a"


def eos_token_ids(
    generation: Mapping[str, Any], hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> set[int]:
    """Return every token that ends a text.

    Each source counts: the generation config, the model config (for a GGUF file its tokens eos, eot and eom) and the
    tokenizer's eos. If no generation config names any, as with a GGUF file alone, these count too: the special tokens
    whose names say so, and the one that the chat template writes after an assistant's message.
    """
    stated = generation.get("eos_token_id")
    ids: set[int] = set()
    for entry in (stated, getattr(hf_config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)):
        tokens = entry if isinstance(entry, list) else [] if entry is None else [entry]
        require(
            all(is_whole(token) for token in tokens),
            f"eos_token_id={entry!r} of the model must be a token id or a list of them: see generation_config.json, "
            "config.json",
        )
        ids.update(tokens)
    return ids if stated is not None or tokenizer is None else ids | _implied(tokenizer)


def _implied(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    names = NAMES - {HARMONY_END} if HARMONY_RETURN in special else NAMES
    after = _after_answer(tokenizer)
    written = [name for name in special if after.startswith(name)]
    return {special[name] for name in (*names, *sorted(written, key=len)[-1:]) if name in special}


def _after_answer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the chat template writes after an assistant's message, if it has one that takes such a message."""
    if tokenizer.chat_template is None:
        return ""
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = render(tokenizer, messages, None)
    except (*TEMPLATE_ERRORS, ValueError) as error:
        logger.info("the chat template does not say which token ends an answer: %s", error)
        return ""
    return text.rpartition(_ANSWER)[2].lstrip()
