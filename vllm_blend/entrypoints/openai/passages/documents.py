"""The field `documents` of a chat request: checked, and as the text that a model reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_blend.checks import a_type, is_whole
from vllm_blend.entrypoints.openai.passages.stored import ID_PREFIX, StoredPassage

_TEXT_KEYS = (
    "text",
    "snippet",
    "content",
    "page_content",
)  # of an object's fields, what a passage is most often called
_TITLE = "title"
_READS_EVERY_KEY = ("items", "tojson")  # what a template has that shows all of a document


@dataclass(frozen=True)
class Document:
    """A passage that a request brings along. `fields` are those that templates may show, the text among them as `key`,
    and `continues` is the number of an earlier document, which it continues on its page."""

    text: str
    title: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    key: str = "text"
    continues: int | None = None

    @property
    def shown(self) -> str:
        """Return the text that stands for the document where no template renders it: its title (if any) on a line of
        its own, and its text."""
        return f"{self.title}\n{self.text}" if self.title else self.text

    def for_template(self, text: str) -> dict[str, Any]:
        """Return the document as chat templates read it, with another text in the place of its own."""
        return {**self.fields, self.key: text}


def parse_documents(
    documents: Any, find_chunk: Callable[[str], StoredPassage] | None = None, template: str = ""
) -> list[Document]:
    """Return the documents of a request: objects with a `text` and perhaps a `title`, strings, or Cohere's
    {"id", "data": {...}}; with the number of an earlier document as `continues` if it goes on with that one's page. A
    retriever's `score` is left out, so that a passage has the same text for every question. {"id": "chunk-..."} stands
    for the passage that /v1/chunks gave this id; `find_chunk` returns it.

    Other keys are the affair of the `template` (the text of the chat template), which may show any of them. One that it
    does not name, and that is nearly "title" in a document without that, is an error.

    Raises TypeError or ValueError that names the document and the field.
    """
    if documents is None:
        return []
    if isinstance(documents, (str, bytes, Mapping)) or not isinstance(documents, Sequence):
        raise TypeError(f"documents is {a_type(documents)}: give a list of documents")
    parsed = [_parse(each, index, find_chunk) for index, each in enumerate(documents)]
    if not any(mark in template for mark in _READS_EVERY_KEY):
        for index, document in enumerate(parsed):
            _check_keys(document, f"documents[{index}]", template)
    return parsed


def continues_of(documents: Sequence[Document]) -> list[int | None] | None:
    """Return the document that each continues; None if none does."""
    numbers = [document.continues for document in documents]
    return None if all(number is None for number in numbers) else numbers


def _parse(given: Any, index: int, find_chunk: Callable[[str], StoredPassage] | None) -> Document:
    name = f"documents[{index}]"
    if isinstance(given, str):
        return Document(text := _check_text(given, name), fields={"text": text})
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise TypeError(
            f"{name} is {a_type(given)}: give a string, or an object such as {{'title': '...', 'text': '...'}}"
        )
    fields = {key: value for key, value in given.items() if key != "data"}
    data = given.get("data")
    if isinstance(data, Mapping):
        fields |= data
    elif data is not None:
        fields["text"] = data
    fields.pop("score", None)
    continues = _check_continues(fields.pop("continues", None), index, f"{name}.continues")
    title = fields.get("title")
    if not isinstance(title, str | None):
        raise TypeError(f"{name}.title is {a_type(title)}: give a string")
    title = None if title is None else _check_surrogates(title.strip(), f"{name}.title") or None
    key = next((key for key in _TEXT_KEYS if fields.get(key) is not None), None)
    if key is not None:
        return Document(_check_text(fields[key], f"{name}.{key}"), title, fields, key, continues)
    chunk = fields.get("id")
    if isinstance(chunk, str) and chunk.startswith(ID_PREFIX):
        if find_chunk is None:
            raise ValueError(f"{name}.id={chunk!r} names a stored passage, but this server keeps none")
        try:
            found = find_chunk(chunk)
        except ValueError as error:  # it is unknown, or has no text
            raise ValueError(f"{name}.id: {error}") from error
        title = title or found.title
        shown = {} if title is None else {"title": title}
        return Document((found.text or "").strip(), title, {**fields, **shown}, continues=continues)
    shown = {each: value for each, value in fields.items() if each not in ("id", "doc_id", "title")}
    text = "\n".join(f"{each}: {value}" for each, value in shown.items() if isinstance(value, str | int | float))
    if not text:
        raise ValueError(f"{name} has no text: give {{'text': '...'}}, or the id of a passage of /v1/chunks")
    rest = {each: value for each, value in fields.items() if each not in shown}
    return Document(_check_text(text, name), title, rest, continues=continues)


def _check_keys(document: Document, name: str, template: str) -> None:
    if document.title is not None:
        return
    for key in document.fields:
        if key != _TITLE and _is_misspelt(key) and key not in template:
            raise ValueError(f"{name} has the key {key!r}, which nothing reads: did you mean 'title'?")


def _is_misspelt(key: str) -> bool:
    """Return whether a key is "title" but for one letter that is missing or too much, or for two that are swapped. A
    document may have a hundred thousand keys, so each costs little."""
    if not len(_TITLE) - 1 <= len(key) <= len(_TITLE) + 1 or not key[0].isalpha():
        return False
    key = key.lower()
    if len(key) < len(_TITLE):
        return key in _shortened(_TITLE)
    if len(key) > len(_TITLE):
        return _TITLE in _shortened(key)
    swapped = {f"{key[:i]}{key[i + 1]}{key[i]}{key[i + 2 :]}" for i in range(len(key) - 1)}
    return key == _TITLE or _TITLE in swapped


def _shortened(word: str) -> set[str]:
    return {word[:i] + word[i + 1 :] for i in range(len(word))}


def _check_text(text: Any, name: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{name} is {a_type(text)}: give a string")
    if not text.strip():
        raise ValueError(f"{name} has no text: leave it out, or give it some")
    return _check_surrogates(text.strip(), name)


def _check_surrogates(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds half of a surrogate pair, which is not a character: remove it") from error
    return text


def _check_continues(number: Any, index: int, name: str) -> int | None:
    if number is None:
        return None
    if not is_whole(number):
        raise TypeError(f"{name} is {number!r}: give the number of an earlier document")
    if not 0 <= number < index:
        hint = f"from 0 to {index - 1}" if index else "and none stands before this one: leave it out"
        raise ValueError(f"{name} is {number}: give the number of an earlier document, {hint}")
    return int(number)
