"""From a conversation to a prompt: the chat template's text, tokenized once, in which text parts are chunks.

With blending on, every text part of a user's or a tool's message is a chunk, except the last part that a user wrote: it
is the question, which is always computed, as are the assistant's messages and the template's own text. Only what stands
before the first part of a user or a tool is the prefix: chunks are encoded after it, so they are found again whatever
the question is and wherever it stands. Token ids are those of the whole conversation. A token that reaches over the
edge of a part belongs to the text between the parts; a part without a token of its own is merged with that text
altogether.

Texts of users and tools are text: control tokens in them (`<|im_start|>`) are none, unless the engine trusts chunks.
Nor are special tokens in what models and the makers of tools have written.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from vllm_blend.chunks.chat_template import TEMPLATE_ERRORS, ChatTemplate
from vllm_blend.chunks.messages import ContentFormat, Message
from vllm_blend.chunks.slots import find_beginning, find_slots, render_literal
from vllm_blend.hidden_tokens import hidden_tokens
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.prompt_parser import is_far_too_long
from vllm_blend.prompt_pieces import Span, control_tokens, tokenize

logger = logging.getLogger(__name__)

CHUNK_ROLES = ("user", "tool")
TRUSTED_ROLES = ("system", "developer", "assistant")


def chat_prompts(
    template: ChatTemplate,
    conversations: Sequence[Sequence[Message]],
    blends: bool,
    max_model_len: int,
    trusts: bool = False,
) -> list[ParsedPrompt | str]:
    """Return the prompts of conversations; with `blends`, their parts are chunks. A conversation of far more tokens
    than `max_model_len` stays text: it is refused for its length, by itself. `trusts` is the option `trusted_chunks`.

    Raises ValueError when the template refuses a conversation.
    """
    prompts: list[ParsedPrompt | str] = []
    for index, messages in enumerate(conversations):
        try:
            if not trusts:
                template, messages = hide_special_tokens(template, messages)
            conversation = ConversationTexts(template, template.fit(messages))
            text, literal = conversation.render_literal(trusts)
        except TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template does not take conversation {index}: {error}") from error
        fits = not is_far_too_long([text], template.tokenizer, max_model_len)
        prompts.append(revealed(_chat_prompt(conversation, text, literal, blends), template) if fits else text)
    if lost := [i for i, prompt in enumerate(prompts) if isinstance(prompt, ParsedPrompt) and prompt.num_unfound_parts]:
        logger.warning(
            "%d of %d conversations (the first is number %d) are plain prompts without any chunks: the chat template "
            "changes the text of their parts, or the tokenizer does not say which text a token stands for",
            len(lost),
            len(prompts),
            lost[0],
        )
    return prompts


def hide_special_tokens(template: ChatTemplate, messages: Sequence[Message]) -> tuple[ChatTemplate, list[Message]]:
    """Hide the special tokens in what models and the makers of tools write: assistants' messages, all fields of
    messages but the role, and tools. A document may have a model repeat <|im_start|>, which would begin a turn when the
    answer comes back in the next request. The prompt's text must be `revealed`."""
    hide = hidden_tokens(template.tokenizer).hide

    def hidden(value: Any) -> Any:
        if isinstance(value, str):
            return hide(value)
        if isinstance(value, Mapping):
            return {hidden(key): hidden(each) for key, each in value.items()}
        return [hidden(each) for each in value] if isinstance(value, list) else value

    try:
        kept = [
            replace(
                message,
                fields={key: value if key == "role" else hidden(value) for key, value in message.fields.items()},
                texts=tuple(map(hide, message.texts)) if message.role == "assistant" else message.texts,
            )
            for message in messages
        ]
        return replace(template, options={**template.options, "tools": hidden(template.options.get("tools"))}), kept
    except RecursionError:
        raise ValueError("a message or a tool is nested too deeply: flatten it") from None


def revealed(prompt: ParsedPrompt, template: ChatTemplate) -> ParsedPrompt:
    """Return a prompt with the special tokens in its text that `hide_special_tokens` has hidden."""
    if prompt.text is None:
        return prompt
    return replace(prompt, text=hidden_tokens(template.tokenizer).reveal(prompt.text)[0])


def _chat_prompt(conversation: ConversationTexts, text: str, literal: Sequence[Span], blends: bool) -> ParsedPrompt:
    texts, render = conversation.texts, conversation.render
    parts = conversation.part_numbers() if blends else []
    question = max((part for part in parts if conversation.role_of(part) == "user"), default=None)
    chunks = [part for part in parts if part != question]
    slots = find_slots(render, texts, chunks, text) if chunks else None
    begin = None if slots is None or list(slots) != chunks else find_beginning(render, texts, parts[0], text)
    tokens = tokenize(conversation.template.tokenizer, text, literal)
    if slots is None or begin is None or not tokens.have_offsets:
        return ParsedPrompt(tokens.ids, text, num_unfound_parts=len(chunks))
    bounds, num_merged = tokens.within((slot.start, slot.stop) for slot in slots.values())
    if not bounds:
        return ParsedPrompt(tokens.ids, text, num_merged_parts=num_merged)
    return ParsedPrompt(
        tokens.ids,
        text,
        tuple(bounds),
        prefix_length=tokens.count_before(begin, bounds[0][0]),
        num_merged_parts=num_merged,
    )


class ConversationTexts:
    """The texts of a conversation's messages one after another, each with a number: what `find_slots` looks for."""

    def __init__(self, template: ChatTemplate, messages: Sequence[Message]) -> None:
        self.template, self.messages = template, messages
        self.places = [(index, part) for index, each in enumerate(messages) for part in range(len(each.texts))]
        self.texts = [text for message in messages for text in message.texts]

    def render(self, texts: Sequence[str], variables: Mapping[str, Any] | None = None) -> str:
        """Return the conversation's text, with other texts in the places of its own; `variables` of the template are
        added to its options."""
        rest = iter(texts)
        nested = [[next(rest) for _ in message.texts] for message in self.messages]
        template = self.template
        if variables:
            template = replace(template, options={**template.options, **variables})
        return template.render(self.messages, nested, self.formats)

    @cached_property
    def formats(self) -> tuple[ContentFormat, ...]:
        """Return how the template is given each content."""
        return self.template.formats_of(self.messages)

    def render_literal(self, trusts: bool) -> tuple[str, list[Span]]:
        """Return the conversation's text, and the spans of it in which control tokens are text, none with `trusts`."""
        if trusts:
            return self.render(self.texts), []
        return render_literal(self.render, self.texts, self.literal_numbers(), control_tokens(self.template.tokenizer))

    def literal_numbers(self) -> list[int]:
        """Return the numbers of the texts that neither the program nor the model has written."""
        return [number for number in range(len(self.texts)) if self.role_of(number) not in TRUSTED_ROLES]

    def role_of(self, number: int) -> str:
        return self.messages[self.places[number][0]].role

    def kept_seconds(self, number: int) -> float:
        """Return for how many seconds a text is to be kept, 0 if nothing asks for that."""
        index, part = self.places[number]
        kept = self.messages[index].kept
        return kept[part] if kept else 0.0

    def part_numbers(self) -> list[int]:
        """Return the numbers of the parts of users and tools."""
        return [n for n, text in enumerate(self.texts) if text.strip() and self.role_of(n) in CHUNK_ROLES]
