"""`vllm.renderers.hf`."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from vllm_blend.engine.setup import LoadedModelConfig

__all__ = ["resolve_chat_template"]


def resolve_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
    tools: list[dict[str, Any]] | None,
    *,
    model_config: LoadedModelConfig,
) -> str | None:
    """Return the template that is given or named, else the tokenizer's own, else None."""
    if chat_template is None and tokenizer.chat_template is None:
        return None
    return str(tokenizer.get_chat_template(chat_template, tools=tools))
