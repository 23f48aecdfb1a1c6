"""Where the `documents` of a conversation stand: where its chat template renders them, or else before the question."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

from vllm_blend.chunks.chat_prompt import ConversationTexts
from vllm_blend.chunks.chat_template import TEMPLATE_ERRORS, between_marks, template_variables
from vllm_blend.chunks.messages import Message
from vllm_blend.entrypoints.openai.passages.documents import Document
from vllm_blend.prompt_pieces import Span

_BLANK_LINE = "\n\n"
_MARK = "TheDocumentSays0x7a31f5c2n{}e"
_MARKS = re.compile(_MARK.format("[0-9]+"))


def are_rendered(own: ConversationTexts, documents: Sequence[Document]) -> bool:
    """Return whether the template renders the text of every document."""
    if "documents" not in template_variables(own.template.text):
        return False
    marks = [_MARK.format(index) for index in range(len(documents))]
    try:
        text = render(own, documents, [*own.texts, *marks])
    except (*TEMPLATE_ERRORS, ValueError):
        return False
    return {*_MARKS.findall(text)} >= {*marks}


def show_documents(
    own: ConversationTexts, documents: Sequence[Document]
) -> tuple[ConversationTexts, list[tuple[int, Span]], bool]:
    """Put documents before the last message of a user: as parts of it if the template takes parts, else into its first
    text. Return the conversation, for each document the number of its text and where it stands in it, and whether they
    stand in a text.

    Raises ValueError if no user has said anything.
    """
    asked = [index for index, message in enumerate(own.messages) if message.role == "user" and message.texts]
    if not asked:
        raise ValueError(
            "documents need a user's message to stand in, as the chat template does not render them itself: add one, "
            "or leave documents out"
        )
    index, message = asked[-1], own.messages[asked[-1]]
    number = own.places.index((index, 0))
    shown = [document.shown + _BLANK_LINE for document in documents]
    kept = (*[0.0] * len(documents), *message.kept) if message.kept else ()
    parts = replace(message, texts=(*shown, *message.texts), kept=kept, in_parts=True)
    if _with_message(own, index, parts).formats[index] != "openai":
        changed = replace(message, texts=("".join(shown) + message.texts[0], *message.texts[1:]))
        ends = list(itertools.accumulate(map(len, shown)))
        return _with_message(own, index, changed), [(number, span) for span in itertools.pairwise([0, *ends])], True
    if _separates_parts(own, index):
        shown = [document.shown for document in documents]
    changed = replace(parts, texts=(*shown, *message.texts))
    return _with_message(own, index, changed), [(number + i, (0, len(text))) for i, text in enumerate(shown)], False


def _separates_parts(own: ConversationTexts, index: int) -> bool:
    """Return whether the template begins a new line between two parts of this message."""
    marks = [_MARK.format(number) for number in range(2)]
    marked = _with_message(own, index, replace(own.messages[index], texts=(*marks, "-"), kept=(), in_parts=True))
    try:
        between = between_marks(marked.render(marked.texts), marks)
    except (*TEMPLATE_ERRORS, ValueError):
        return False
    return between is not None and "\n" in between[1]


def _with_message(own: ConversationTexts, index: int, message: Message) -> ConversationTexts:
    return ConversationTexts(own.template, [*own.messages[:index], message, *own.messages[index + 1 :]])


def render(own: ConversationTexts, documents: Sequence[Document], texts: Sequence[str]) -> str:
    """Return the text of a conversation and its rendered documents, with these texts in the places of all their own."""
    count = len(own.texts)
    shown = [document.for_template(text) for document, text in zip(documents, texts[count:], strict=True)]
    return own.render(texts[:count], {"documents": shown} if documents else {})
