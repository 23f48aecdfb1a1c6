"""A model's chat template, split around the chunks.

The template is rendered once with marks where contents go; what it puts before, between and behind them is tokenized on
its own and stands between the chunks of a composition. No text is put together and nothing is tokenized again: the ids
equal those of the whole conversation wherever no token of the tokenizer would reach across a seam, and the template
strips no whitespace from the contents (see `preview_composition`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

_SYSTEM, _USER = "TheSystemSays0x1f3b5d79", "TheUserSays0x2e4c6a88"

# What a template raises, or runs into, that does not fit its messages.
TEMPLATE_ERRORS = (TemplateError, TypeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class TemplateSplit:
    """Token ids before the system prompt, between it and what the user says, and behind that. Without a system prompt
    `middle` is empty and `head` is what stands before the user's part."""

    head: tuple[int, ...]
    middle: tuple[int, ...]
    tail: tuple[int, ...]


def conversation(system: str | None, user: str) -> list[dict[str, Any]]:
    """Return the messages that a composition stands for."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": user}]


def split_template(
    tokenizer: PreTrainedTokenizerBase, with_system: bool, chat_template: str | None = None, **template_kwargs: Any
) -> TemplateSplit:
    """Split the tokenizer's chat template, or the one given. Raises ValueError where there is none, or where it does
    not show every content once, unchanged and in order."""
    if chat_template is None and tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template: give chat_template, or leave use_chat_template out")
    try:
        text = render(
            tokenizer,
            conversation(_SYSTEM if with_system else None, _USER),
            chat_template,
            add_generation_prompt=True,
            **template_kwargs,
        )
    except TEMPLATE_ERRORS as error:  # some say so that they take no system prompt
        what = "a system prompt and a question" if with_system else "a question alone"
        raise ValueError(
            f"the chat template does not take {what} ({error}): give chat_template, or leave system_chunk_id out"
        ) from error
    between = between_marks(text, [_SYSTEM, _USER] if with_system else [_USER])
    if between is None:
        raise ValueError(
            "the chat template does not show the system prompt and the user's message once each, unchanged and in this "
            "order, so it cannot be split around chunks: give chat_template, or build the prompt without"
        )
    head, middle, tail = between if with_system else (between[0], "", between[1])
    return TemplateSplit(*(tuple(tokenizer.encode(part, add_special_tokens=False)) for part in (head, middle, tail)))


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], chat_template: str | None, **options: Any
) -> str:
    """Return the text that the chat template makes of messages. Raises one of `TEMPLATE_ERRORS` when it refuses them,
    and ValueError when the options do not fit."""
    return str(tokenizer.apply_chat_template(messages, chat_template=chat_template, tokenize=False, **options))


def between_marks(text: str, marks: Sequence[str]) -> list[str] | None:
    """Return what stands before, between and behind the marks in `text`; None unless each is there once, in order."""
    if any(text.count(mark) != 1 for mark in marks):
        return None
    pieces, rest = [], text
    for mark in marks:
        before, found, rest = rest.partition(mark)
        if not found:  # it stands before another one
            return None
        pieces.append(before)
    return [*pieces, rest]
