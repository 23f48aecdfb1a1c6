"""Tokens, bytes and offsets of log-probabilities join to the text: whole, streamed, and with the prompt."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.engine.tiny_tokenizers import SENTENCE_PIECE, TEXTS, byte_fallback, byte_level, sentence_piece
from tests.entrypoints.openai.servers import TestServer
from tests.waiting import DEADLINE
from vllm_blend.detokenizer import TokenTexts, token_bytes_function

ANSWER = "敏捷 naïve 😀 dog\n"
FORCED = {"structured_outputs": {"choice": [ANSWER]}, "max_tokens": 80, "temperature": 0}


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", *SENTENCE_PIECE])
def test_texts_and_bytes_join_to_the_text_however_it_arrives(name: str) -> None:
    made = {"byte_level": byte_level, "byte_fallback": byte_fallback}
    tokenizer = made[name]() if name in made else sentence_piece(name)
    generator = random.Random(4)
    for _ in range(40):
        text = "".join(generator.choice([*TEXTS, " dog", "é", "😀😃", "\n\n", "狐", " x"]) for _ in range(3))
        if name == "unigram":  # which has no bytes
            text = "".join(character for character in text if character in TEXTS[0])
        prompt = tokenizer.encode("Where? ", add_special_tokens=False)
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        for context, expected in (([], text), (prompt, None)):
            reader, found, position = TokenTexts(tokenizer, True, context), [], 0
            while position < len(ids):
                count = generator.randrange(1, 5)
                found += reader.read(ids[position : position + count], ends=position + count >= len(ids))
                position += count
            joined = "".join(each for each, _ in found)
            assert b"".join(own for _, own in found) == joined.encode() and found[-1] == ("", b"")
            assert joined.strip() == text.strip() and (
                expected is None or name == "gemma" or joined == expected.lstrip(" ") or joined == expected
            )


def test_bytes_of_a_token_alone_are_its_own() -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        bytes_of = token_bytes_function(tokenizer, len(tokenizer))
        own = [bytes_of(token) for token in tokenizer.encode("a é 狐", add_special_tokens=False)]
        assert b"".join(own).lstrip() == "a é 狐".encode() and max(map(len, own)) <= 4
        assert bytes_of(tokenizer.eos_token_id) == b"</s>"


def chat(server: TestServer, stream: bool) -> tuple[str, list[dict[str, Any]]]:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hi"}],
        "logprobs": True,
        "top_logprobs": 2,
        **FORCED,
    }
    text, content = "", []
    for choice in _choices(server, "/v1/chat/completions", body, stream):
        text += (choice.get("delta") or choice.get("message") or {}).get("content") or ""
        content += (choice["logprobs"] or {"content": []})["content"]
    return text, content


def _choices(server: TestServer, path: str, body: dict[str, Any], stream: bool) -> list[dict[str, Any]]:
    response = httpx.post(server.url + path, json=body | {"stream": stream}, timeout=DEADLINE)
    assert response.status_code == 200, response.text
    if not stream:
        choices: list[dict[str, Any]] = response.json()["choices"]
        return choices
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return [choice for line in lines for choice in json.loads(line)["choices"]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chats_tokens_join_to_its_text(stream: bool, server: TestServer) -> None:
    text, content = chat(server, stream)
    assert text == ANSWER == "".join(token["token"] for token in content)
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == ANSWER
    assert len(content) > len(ANSWER.split()) and any(not token["token"] and token["bytes"] for token in content)
    for token in content:
        for top in token["top_logprobs"]:
            assert bytes(top["bytes"]).decode("utf-8", "replace") == top["token"]
    if stream:
        assert content == chat(server, False)[1]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_completions_tokens_and_offsets_join_to_its_text(stream: bool, echo: bool, server: TestServer) -> None:
    prompt = "Who? 狐狸 é."
    body = {"prompt": prompt, "logprobs": 2, "echo": echo, **FORCED}
    text, tokens, offsets, tops = "", [], [], []
    for choice in _choices(server, "/v1/completions", body, stream):
        text += choice["text"]
        tokens += choice["logprobs"]["tokens"]
        offsets += choice["logprobs"]["text_offset"]
        tops += choice["logprobs"]["top_logprobs"]
    assert text == (prompt if echo else "") + ANSWER == "".join(tokens)
    assert [text[start:stop] for start, stop in pairwise([*offsets, len(text)])] == tokens
    assert any(key.startswith("bytes:\\x") for top in tops for key in top or {})
