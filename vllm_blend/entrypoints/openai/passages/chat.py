"""The prompt of a conversation: its template's text, tokenized once, in which text parts, documents and passages that
are found in plain text are chunks.

- The text parts of a user's or a tool's message that has several are passages, each of them, as in `LLM.chat`.
- `documents` are rendered by the chat template if it reads them. Otherwise they stand at the beginning of the last
  user's message, each with its title on a line of its own: as text parts before its own if the template takes parts,
  else as text before its text. A blank line follows each, unless the template itself puts parts on lines of their own.
- In all other texts but the assistant's, passages are found that are known.

The last part that a user wrote holds the question: in it passages are found up to the last piece, which is the question
and always computed.

Control tokens are none in texts of users and tools and in documents: they are text there, unless the engine trusts
chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from vllm_blend.chunks.chat_prompt import CHUNK_ROLES, ConversationTexts
from vllm_blend.chunks.chat_template import TEMPLATE_ERRORS, ChatTemplate
from vllm_blend.chunks.messages import Message
from vllm_blend.chunks.slots import Slot, find_beginning, find_slots, render_literal
from vllm_blend.entrypoints.openai.passages.document_places import are_rendered, render, show_documents
from vllm_blend.entrypoints.openai.passages.documents import Document, continues_of
from vllm_blend.entrypoints.openai.passages.finder import FoundPassages, PassageFinder, TextSection
from vllm_blend.entrypoints.openai.passages.options import BlendOptions, parse_pages
from vllm_blend.entrypoints.openai.passages.text_pieces import split_text
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.kv_store.keys import salt_digest
from vllm_blend.prompt_parser import is_far_too_long, parse_prompt
from vllm_blend.prompt_pieces import Span, control_tokens, tokenize

logger = logging.getLogger(__name__)

_MODEL = "assistant"  # whose messages hold no passages
_NAMED = "its documents, and the text parts of messages that have several, but for the question"


def chat_prompt(
    finder: PassageFinder,
    template: ChatTemplate,
    messages: Sequence[Message],
    documents: Sequence[Document],
    blend: BlendOptions,
    salt: str | None,
    vocab_size: int,
    max_model_len: int,
    blends: bool,
    trusts: bool = False,
) -> ParsedPrompt:
    """Return a conversation as token ids with its chunks; `documents` are those of `parse_documents`, and `blends` says
    whether the engine blends.

    Raises ValueError that names the field, also if the template refuses the conversation.
    """
    blend.check(blends)
    if blend.order == "free" or blend.relevance is not None:
        name = "order" if blend.order == "free" else "relevance"
        raise ValueError(
            f"blend.{name} is for the chunks of /v1/completions: a chat template puts text between passages, so they "
            f"stay where they are; leave blend.{name} out"
        )
    prompt = _Conversation.from_request(template, messages, documents)
    try:
        text, literal = prompt.render_literal(trusts)
    except TEMPLATE_ERRORS as error:
        raise ValueError(f"the chat template does not take the conversation: {error}") from error
    earlier, source = blend.continues, "blend.continues[{}]"
    if earlier is None and (earlier := continues_of(documents)):
        earlier = earlier + [None] * (len(prompt.named) - len(earlier))  # text parts continue nothing
        source = "documents[{}].continues"
    pages = parse_pages(earlier, len(prompt.named), _NAMED)
    tokenizer = template.tokenizer
    if is_far_too_long([text], tokenizer, max_model_len):
        return parse_prompt(text, tokenizer, vocab_size, max_model_len)  # which refuses it for its length
    digest = b"" if salt is None else salt_digest(salt)
    if not blends or blend.is_off:
        return ParsedPrompt(tokenize(tokenizer, text, literal).ids, text, salt=digest)
    parsed = prompt.with_chunks(finder, text, literal, salt, pages, source)
    texts = prompt.texts
    finder.see((texts[number][start:stop] for number, (start, stop) in prompt.named), salt)
    return replace(parsed, salt=digest, **blend.settings(parsed))


@dataclass(frozen=True)
class _Conversation:
    """The texts of a conversation by number: those of its messages, then those of documents that its template renders.

    `named` are the passages that the request names, documents first: the number of a text, and where in it. `question`
    is the number of the last text that a user wrote. Text `shown_in` begins with `num_shown` characters of documents.
    """

    own: ConversationTexts
    documents: tuple[Document, ...]  # that the template renders
    named: tuple[tuple[int, Span], ...]
    question: int | None
    shown_in: int | None = None
    num_shown: int = 0

    @classmethod
    def from_request(
        cls, template: ChatTemplate, messages: Sequence[Message], documents: Sequence[Document]
    ) -> _Conversation:
        """Return the texts of a request. Raises ValueError if there is no place for its documents."""
        own = ConversationTexts(template, template.fit(messages))
        rendered = tuple(documents) if documents and are_rendered(own, documents) else ()
        count, shown_in, num_shown = len(own.texts), None, 0
        shown: set[int] = set()  # texts that are documents as a whole
        named = [(count + index, (0, len(document.text))) for index, document in enumerate(rendered)]
        if documents and not rendered:
            own, named, in_text = show_documents(own, documents)
            if in_text:
                shown_in, (_, num_shown) = named[-1]
            else:
                shown = {number for number, _ in named}
        users = (n for n in own.part_numbers() if own.role_of(n) == "user" and n not in shown)
        question = max(users, default=None)
        for number in own.part_numbers():
            if number != question and number not in shown and len(own.messages[own.places[number][0]].texts) > 1:
                start = num_shown if number == shown_in else 0
                if own.texts[number][start:].strip():
                    named.append((number, (start, len(own.texts[number]))))
        return cls(own, rendered, tuple(named), question, shown_in, num_shown)

    @cached_property
    def texts(self) -> list[str]:
        return [*self.own.texts, *(document.text for document in self.documents)]

    def render(self, texts: Sequence[str]) -> str:
        """Return the whole text, with these texts in the places of the conversation's own."""
        return render(self.own, self.documents, texts)

    def render_literal(self, trusts: bool) -> tuple[str, list[Span]]:
        """Return the whole text, and the spans of it in which control tokens are text, none with `trusts`."""
        if trusts:
            return self.render(self.texts), []
        given = [(n, *field) for n, each in enumerate(self.documents) for field in each.fields.items()]
        shown = [(number, key) for number, key, value in given if isinstance(value, str)]
        count, values = len(self.texts), [self.documents[number].fields[key] for number, key in shown]

        def render_fields(texts: Sequence[str]) -> str:
            fields = [dict(each.fields) for each in self.documents]
            for (number, key), value in zip(shown, texts[count:], strict=True):
                fields[number][key] = value
            documents = [replace(each, fields=own) for each, own in zip(self.documents, fields, strict=True)]
            return render(self.own, documents, texts[:count])

        texts = [*self.texts, *values]
        numbers = [*self.own.literal_numbers(), *range(len(self.own.texts), len(texts))]
        return render_literal(render_fields, texts, numbers, control_tokens(self.own.template.tokenizer))

    def with_chunks(
        self,
        finder: PassageFinder,
        whole: str,
        literal: Sequence[Span],
        salt: str | None,
        pages: tuple[int | None, ...],
        source: str,
    ) -> ParsedPrompt:
        """Return the prompt with its chunks, `whole` being its text. If the template changes the texts of passages, or
        tokens do not say where they stand, it is a plain prompt. `pages` has the passage that each named one continues;
        `source` is the field that they come from, with {} for a number. Raises ValueError if one continues another that
        stands after it."""
        tokens = tokenize(self.own.template.tokenizer, whole, literal)
        slots = self._find_slots(whole, finder.detects) if tokens.have_offsets else None
        plain = ParsedPrompt(tokens.ids, whole, num_unfound_parts=len(self.named) if slots is None else 0)
        if not slots:
            return plain
        places = _Places(self, slots, whole)
        found = finder.find(whole, places.sections(), salt, bool(self.named))
        chunks: list[tuple[Span, int | None]] = [(places.span(*each), i) for i, each in enumerate(self.named)]
        chunks = sorted(chunks + [(span, None) for span in found.chunks])
        bounds, numbers, retention, num_merged = [], [], [], 0
        for span, index in chunks:
            own, is_shared = tokens.within([span])
            num_merged += is_shared
            if own:
                bounds += own
                numbers.append(index)
                retention.append(places.kept_seconds(span))
        if not bounds:
            return replace(plain, num_merged_parts=num_merged)
        begin = places.beginning(chunks[0][0][0], found)
        return ParsedPrompt(
            tokens.ids,
            whole,
            tuple(bounds),
            continues=_chunks_continued(numbers, pages, source) if pages else (),
            prefix_length=tokens.count_before(begin, bounds[0][0]),
            retention=tuple(retention) if any(retention) else (),
            num_merged_parts=num_merged,
        )

    def _find_slots(self, whole: str, detects: bool) -> dict[int, Slot] | None:
        """Return where texts stand in the whole one: those of named passages, and if they are found, too, the question
        and all texts in which passages are looked for. None if not even those of named passages are."""
        named = sorted({number for number, _ in self.named})
        question = [self.question] if self.question is not None else []
        searched = [
            n
            for n, text in enumerate(self.own.texts)
            if (detects or self.own.kept_seconds(n)) and text.strip() and self.own.role_of(n) != _MODEL
        ]
        tries = [sorted({*named, *question, *searched}), sorted({*named, *question}), named]
        for numbers in tries if named else tries[:1]:
            slots = find_slots(self.render, self.texts, numbers, whole)
            if slots is not None:
                return slots
        return None if named else {}


def _chunks_continued(
    passages: Sequence[int | None], pages: Sequence[int | None], source: str
) -> tuple[int | None, ...]:
    """Return the chunk that each chunk continues, or None: `passages` has the named passage that each is, if it is one,
    and `pages` the one that each of those continues, from the field `source`. Raises ValueError for one that stands
    behind it."""
    place = {passage: chunk for chunk, passage in enumerate(passages)}
    found: list[int | None] = []
    for chunk, passage in enumerate(passages):
        earlier = None if passage is None else pages[passage]
        found.append(None if earlier is None else place.get(earlier))
        if (found[-1] or 0) > chunk:
            raise ValueError(
                f"{source.format(passage)} is {earlier}, but that passage stands behind it in the prompt: a passage "
                "continues an earlier one, or None"
            )
    return tuple(found)


@dataclass(frozen=True)
class _Places:
    """Where the texts of a conversation stand in the whole one, by number."""

    conversation: _Conversation
    slots: dict[int, Slot]
    whole: str

    def span(self, number: int, span: Span) -> Span:
        """Return the characters of the whole text that stand for some of text `number`."""
        slot, text = self.slots[number], self.conversation.texts[number]
        base = slot.core - (len(text) - len(text.lstrip()))
        return slot.start if span[0] == 0 else base + span[0], slot.stop if span[1] == len(text) else base + span[1]

    def sections(self) -> list[TextSection]:
        """Return the pieces of all texts in which passages are looked for, in the order of the whole text."""
        given = self.conversation
        named = {number for number, (_, stop) in given.named if stop == len(given.texts[number])}
        numbers = [number for number in self.slots if number not in named]
        kept = given.question if given.question is not None else max(numbers, default=None)
        sections = []
        for number in numbers:
            start, stop = self._own_text(number)
            pieces = [piece.moved(start) for piece in split_text(self.whole[start:stop])]
            is_system = given.own.role_of(number) not in CHUNK_ROLES
            is_stored = not is_system and given.own.kept_seconds(number) > 0
            sections.append(TextSection(pieces, int(number == kept), int(is_system), is_stored))
        return sections

    def kept_seconds(self, span: Span) -> float:
        """Return for how many seconds a chunk is to be kept, as the text in which it stands asks for."""
        within = (kept for slot, kept in self._kept if slot.start <= span[0] < slot.stop)
        return max(within, default=0.0)

    @cached_property
    def _kept(self) -> list[tuple[Slot, float]]:
        """Return the texts that ask for being kept, and for how many seconds."""
        own = self.conversation.own
        kept = ((slot, own.kept_seconds(n)) for n, slot in self.slots.items() if n < len(own.texts))
        return [(slot, seconds) for slot, seconds in kept if seconds > 0]

    def beginning(self, first_chunk: int, found: FoundPassages) -> int:
        """Return where what stands before all chunks ends: before the first text of a user or a tool, and before
        documents. It goes on with what has always stood there. If a passage stands in a system prompt, it is what has
        always stood before."""
        given = self.conversation
        candidates = [n for n in self.slots if n >= len(given.own.texts) or given.own.role_of(n) in CHUNK_ROLES]
        first = candidates[0] if candidates else None
        base = None if first is None else find_beginning(given.render, given.texts, first, self.whole)
        if base is None or base > first_chunk:
            base = next(slot.core for slot in reversed(self.slots.values()) if slot.start <= first_chunk)
        return min(first_chunk, max(base, found.fixed or 0))

    def _own_text(self, number: int) -> Span:
        """Return where the text of a message stands, without documents before it."""
        given = self.conversation
        length = len(given.texts[number])
        return self.span(number, (given.num_shown if number == given.shown_in else 0, length))
