"""The passages that an HTTP request holds, as far as routing needs to know them.

The bodies are read by the server's own models, and texts are split as the server splits them. What differs: every piece
of plain text that may be a passage counts, whether it has been seen before or not, so that its first request already
goes where later ones will; tokens are estimated from characters; and a body that the server will refuse has none.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vllm_blend.chunks.chat_prompt import CHUNK_ROLES
from vllm_blend.chunks.messages import Message
from vllm_blend.entrypoints.openai import messages_request, responses_request
from vllm_blend.entrypoints.openai.errors import APIError
from vllm_blend.entrypoints.openai.passages import PassageFinder, parse_documents
from vllm_blend.entrypoints.openai.passages.finder import TextSection
from vllm_blend.entrypoints.openai.passages.text_pieces import split_text
from vllm_blend.entrypoints.openai.prompts import parse_messages
from vllm_blend.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm_blend.entrypoints.openai.protocol.completion import ChunkedPromptBody, CompletionRequest
from vllm_blend.entrypoints.openai.protocol.messages import MessagesRequest
from vllm_blend.entrypoints.openai.protocol.responses import ResponsesRequest
from vllm_blend.entrypoints.openai.strict_json import read_model

MAX_PASSAGES = 64  # of a request: the longest decide where it goes
CHARACTERS_PER_TOKEN = 4
_MODEL = "assistant"  # whose messages hold no passages
_SEPARATOR = "\n\n"

Passage = str | Sequence[int]


def passage_tokens(path: str, headers: Mapping[str, str], body: bytes, finder: PassageFinder) -> dict[str, int]:
    """Return the tokens of each passage of a request, by an id that depends on the passage and the tenant alone.

    The finder learns which texts all prompts begin with: these are no passages. There are at most `MAX_PASSAGES`; none
    for a path that generates nothing, and for a body that the server will refuse.
    """
    read = _READERS.get(path)
    if read is None:
        return {}
    try:
        salt, passages = read(body, finder, _key_of(headers))
    except (APIError, ValueError, TypeError):  # the replica says what is wrong
        return {}
    found = {_identify(salt, passage): num_tokens(passage) for passage in passages if len(passage)}
    return dict(heapq.nlargest(MAX_PASSAGES, found.items(), key=lambda item: (item[1], item[0])))


def num_tokens(passage: Passage) -> int:
    """Return about how many tokens a passage has."""
    return max(1, len(passage) // CHARACTERS_PER_TOKEN) if isinstance(passage, str) else len(passage)


_Found = tuple[str, list[Passage]]  # the salt, and the passages


def _completion(body: bytes, finder: PassageFinder, key: str) -> _Found:
    request = read_model(body, CompletionRequest)
    salt = _salt(key, request.cache_salt)
    passages: list[Passage] = []
    for prompt in request.prompts():
        if isinstance(prompt, ChunkedPromptBody):
            passages += [chunk.strip() if isinstance(chunk, str) else chunk for chunk in prompt.chunks]
        elif isinstance(prompt, str):
            passages += _in_texts(finder, salt, [("user", prompt)], question=0)
    return salt, passages


def _chat(body: bytes, finder: PassageFinder, key: str) -> _Found:
    return _in_chat(read_model(body, ChatCompletionRequest), finder, key)


def _messages(body: bytes, finder: PassageFinder, key: str) -> _Found:
    return _in_chat(messages_request.as_chat(read_model(body, MessagesRequest)), finder, key)


def _responses(body: bytes, finder: PassageFinder, key: str) -> _Found:
    return _in_chat(responses_request.as_chat(read_model(body, ResponsesRequest)), finder, key)


_READERS: dict[str, Callable[[bytes, PassageFinder, str], _Found]] = {
    "/v1/completions": _completion,
    "/v1/chat/completions": _chat,
    "/v1/messages": _messages,
    "/v1/responses": _responses,
}


def _in_chat(request: ChatCompletionRequest, finder: PassageFinder, key: str) -> _Found:
    salt = _salt(key, request.cache_salt)
    messages = parse_messages(request.messages)
    passages: list[Passage] = [document.text for document in parse_documents(request.documents)]
    texts: list[tuple[str, str]] = []  # role and text
    users = [number for number, message in enumerate(messages) if message.role == "user" and message.texts]
    question = None
    for number, message in enumerate(messages):
        named = _named_parts(message, holds_question=bool(users) and number == users[-1])
        passages += (part.strip() for part in named)
        texts += ((message.role, text) for text in message.texts[len(named) :])
        if users and number == users[-1]:
            question = len(texts) - 1
    return salt, passages + list(_in_texts(finder, salt, texts, question))


def _named_parts(message: Message, holds_question: bool) -> Sequence[str]:
    """Return the text parts of a message that are passages: those of a user's or a tool's that has several."""
    if message.role not in CHUNK_ROLES or len(message.texts) < 2:
        return ()
    return message.texts[:-1] if holds_question else message.texts


def _in_texts(
    finder: PassageFinder, salt: str, texts: Sequence[tuple[str, str]], question: int | None
) -> Iterator[str]:
    """Yield the pieces of texts that may be passages: not what all prompts begin with, nor the question."""
    whole = _SEPARATOR.join(text for _, text in texts)
    sections, start = [], 0
    for number, (role, text) in enumerate(texts):
        if role != _MODEL:
            pieces = [piece.moved(start) for piece in split_text(text)]
            sections.append(TextSection(pieces, int(number == question), int(role not in CHUNK_ROLES)))
        start += len(text) + len(_SEPARATOR)
    fixed = finder.find(whole, sections, salt, names_some=False).fixed or 0
    for section in sections:
        for piece in section.free:
            begin = max(piece.start, fixed)
            if piece.stop - begin >= finder.min_characters:
                yield whole[begin : piece.stop].strip()


def _key_of(headers: Mapping[str, str]) -> str:
    """Return what tells tenants apart: they share nothing, so that they need not share a replica."""
    given = headers.get("authorization") or headers.get("x-api-key") or ""
    return hashlib.sha256(given.encode("utf-8", "surrogateescape")).hexdigest()


def _salt(key: str, cache_salt: str | None) -> str:
    return f"{key}/{cache_salt or ''}"


def _identify(salt: str, passage: Any) -> str:
    content = passage if isinstance(passage, str) else " ".join(map(str, passage))
    kind = "text" if isinstance(passage, str) else "tokens"
    given = hashlib.blake2b(digest_size=16)
    for text in (salt, kind, content):  # each with its length, so that none can pass for the end of the one before
        encoded = text.encode("utf-8", "surrogatepass")
        given.update(len(encoded).to_bytes(8) + encoded)
    return given.hexdigest()
