"""From a conversation to a prompt: the chat template's text, tokenized once, in which text parts are chunks.

With blending on, every text part of a user's or a tool's message is a chunk, except the last part that a user wrote: it
is the question, which is always computed, as are the assistant's messages and the template's own text. Only what stands
before the first part of a user or a tool is the prefix: chunks are encoded after it, so they are found again whatever
the question is and wherever it stands. `ParsedPrompt.question` says where that is, for rules that read it, unless the
template changes its text. Token ids are those of the whole conversation. A token that reaches over the edge of a part
belongs to the text between the parts; a part without a token of its own is merged with that text altogether.
"""

from __future__ import annotations

import copy
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache

import tokenizers
from transformers import PreTrainedTokenizerBase

from vllm_blend.chunks.chat_template import TEMPLATE_ERRORS, ChatTemplate, between_marks
from vllm_blend.chunks.composition import matching_prefix
from vllm_blend.chunks.messages import Message
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.prompt_parser import is_far_too_long

logger = logging.getLogger(__name__)

CHUNK_ROLES = ("user", "tool")
_PART = "ThePartSays0x5d2c90e7n{}e"


def chat_prompts(
    template: ChatTemplate, conversations: Sequence[Sequence[Message]], blends: bool, max_model_len: int
) -> list[ParsedPrompt | str]:
    """Return the prompts of conversations; with `blends`, their parts are chunks. A conversation of far more tokens
    than `max_model_len` stays text: it is refused for its length, by itself.

    Raises ValueError when the template refuses a conversation.
    """
    prompts: list[ParsedPrompt | str] = []
    for index, messages in enumerate(conversations):
        try:
            text = template.render(messages)
        except TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template does not take conversation {index}: {error}") from error
        fits = not is_far_too_long([text], template.tokenizer, max_model_len)
        prompts.append(_chat_prompt(template, messages, text, blends) if fits else text)
    if lost := [i for i, prompt in enumerate(prompts) if isinstance(prompt, ParsedPrompt) and prompt.num_unfound_parts]:
        logger.warning(
            "%d of %d conversations (the first is number %d) are plain prompts without any chunks: the chat template "
            "changes the text of their parts, or the tokenizer does not say which text a token stands for",
            len(lost),
            len(prompts),
            lost[0],
        )
    return prompts


def _chat_prompt(template: ChatTemplate, messages: Sequence[Message], text: str, blends: bool) -> ParsedPrompt:
    parts = _part_places(messages) if blends else []
    question = max((place for place in parts if messages[place[0]].role == "user"), default=None)
    places = [place for place in parts if place != question]
    spans = _find_parts(template, messages, places, text) if places else None
    begin = None if spans is None else _find_beginning(template, messages, parts[0], text)
    if spans is None or begin is None:
        return ParsedPrompt(_encode(template.tokenizer, text), text, num_unfound_parts=len(places))
    ids, offsets = _encode_with_offsets(template.tokenizer, text)
    if not offsets:
        return ParsedPrompt(ids, text, num_unfound_parts=len(places))
    starts, stops = zip(*offsets, strict=True)
    bounds, num_merged = [], 0
    for start, stop in spans:
        first, last = bisect_left(starts, start), bisect_right(stops, stop)
        num_merged += (first > 0 and stops[first - 1] > start) or (last < len(ids) and starts[last] < stop)
        if first < last < len(ids):  # the last token of a prompt is computed: the answer follows it
            bounds.append((first, last))
    if not bounds:
        return ParsedPrompt(ids, text, num_merged_parts=num_merged)
    asked = _find_parts(template, messages, [question], text) if question is not None else None
    return ParsedPrompt(
        ids,
        text,
        tuple(bounds),
        # A token that reaches over an edge of the question has a part of its first or last word.
        question=None if asked is None else (bisect_right(stops, asked[0][0]), bisect_left(starts, asked[0][1])),
        prefix_length=bisect_right(stops, begin, hi=bounds[0][0]),
        num_merged_parts=num_merged,
    )


def _part_places(messages: Sequence[Message]) -> list[tuple[int, int]]:
    """Return where the parts of users and tools are: (message, part)."""
    return [
        (index, part)
        for index, message in enumerate(messages)
        if message.role in CHUNK_ROLES
        for part, text in enumerate(message.texts)
        if text.strip()
    ]


def _find_beginning(
    template: ChatTemplate, messages: Sequence[Message], first: tuple[int, int], text: str
) -> int | None:
    """Return the character up to which the text of the conversation does not depend on the first part: where its
    text and that of the same conversation with a mark in the part's place differ. None if the template refuses it."""
    index, part = first
    texts = [list(message.texts) for message in messages]
    mark = _PART.format(0)
    is_alike = texts[index][part].lstrip()[0] == mark[0]
    texts[index][part] = "-" + mark if is_alike else mark  # it must not begin as the part does
    try:
        return matching_prefix(text, template.render(messages, texts))
    except (*TEMPLATE_ERRORS, ValueError):
        return None


def _find_parts(
    template: ChatTemplate, messages: Sequence[Message], places: Sequence[tuple[int, int]], text: str
) -> list[tuple[int, int]] | None:
    """Return where the parts stand in the text of the whole conversation: (start, stop) in characters. None if they
    do not stand there once each, in order and unchanged.

    The template is rendered again with marks in the places of the parts. White space around a part stays with its
    mark, as many templates strip it.
    """
    marks = {place: _PART.format(number) for number, place in enumerate(places)}
    parts = [messages[index].texts[part] for index, part in places]
    cores = [part.strip() for part in parts]
    texts = [list(message.texts) for message in messages]
    for (index, part), mark in marks.items():
        texts[index][part] = texts[index][part].replace(texts[index][part].strip(), mark, 1)
    try:
        between = between_marks(template.render(messages, texts), list(marks.values()))
    except (*TEMPLATE_ERRORS, ValueError):  # the template takes the texts, but not the marks
        return None
    if between is None or between[0] + "".join(map(str.__add__, cores, between[1:])) != text:
        return None
    spans, position, taken = [], 0, 0
    for number, (whole, core) in enumerate(zip(parts, cores, strict=True)):
        before, after = whole[: whole.index(core)], whole[len(whole.rstrip()) :]
        position += len(between[number])
        start = position - len(before) if between[number][taken:].endswith(before) else position
        position += len(core)
        taken = len(after) if between[number + 1].startswith(after) else 0
        spans.append((start, position + taken))
    return spans


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))  # the template writes special tokens itself


def _encode_with_offsets(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> tuple[list[int], Sequence[tuple[int, int]] | None]:
    """Return the ids of a text's tokens, and where the text of each starts and stops; None if the tokenizer does not
    know."""
    if not tokenizer.is_fast:
        return _encode(tokenizer, text), None
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[int] = encoded["input_ids"]
    backend = _without_trimming(tokenizer, len(tokenizer))
    if backend is None:
        return ids, encoded["offset_mapping"]
    encoding = backend.encode(text, add_special_tokens=False)
    return ids, encoding.offsets if encoding.ids == ids else None


@lru_cache(maxsize=4)
def _without_trimming(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> tokenizers.Tokenizer | None:
    """Return a copy of a tokenizer of `num_tokens` tokens whose offsets are true. None if its own are: some
    post-processors of byte-level tokenizers leave white space out of them."""
    processor = tokenizer.backend_tokenizer.post_processor
    if processor is None or b'"trim_offsets":true' not in processor.__getstate__():
        return None
    backend: tokenizers.Tokenizer = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.post_processor = None
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend
