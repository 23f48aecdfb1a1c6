"""The passages that a request is routed by: the same ones, whichever way a client sends them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_blend.entrypoints.openai.passages import PassageFinder
from vllm_blend.ray.passages import MAX_PASSAGES, num_tokens, passage_tokens

SYSTEM = "You answer questions by what the passages say. Answer within five words."
LENSES = "Tulmaris Works makes lenses for telescopes, and has done so since it was founded by two brothers."
JORHOLM = "Jorholm is a harbour town in the north, whose people live on fish, on glass and on travellers."
QUESTION = "What does Tulmaris Works make?"


def found(path: str, body: Any, finder: PassageFinder | None = None, **headers: str) -> dict[str, int]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return passage_tokens(path, headers, data, PassageFinder() if finder is None else finder)


def chunked(*chunks: Any, **fields: Any) -> dict[str, Any]:
    return {"prompt": {"prefix": "Read.", "chunks": list(chunks), "suffix": QUESTION}, **fields}


def chat(*messages: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages], **fields}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


NAMED = {
    "completion": ("/v1/completions", chunked(LENSES, JORHOLM)),
    "documents": ("/v1/chat/completions", chat(("user", QUESTION), documents=[{"text": JORHOLM}, LENSES])),
    "parts": ("/v1/chat/completions", chat(("user", parts(LENSES, JORHOLM, QUESTION)))),
    "tool": (
        "/v1/chat/completions",
        chat(("user", QUESTION), ("assistant", "I look."), ("tool", parts(LENSES, JORHOLM)), ("user", "Well?")),
    ),
    "plain": ("/v1/chat/completions", chat(("system", SYSTEM), ("user", f"{LENSES}\n\n{JORHOLM}\n\n{QUESTION}"))),
    "anthropic": (
        "/v1/messages",
        chat(("user", parts(LENSES, JORHOLM, QUESTION)), max_tokens=8),
    ),
    "responses": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": t} for t in (LENSES, JORHOLM, "?")]}]},
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_passage_has_one_id_however_it_is_sent(name: str) -> None:
    path, body = NAMED[name]
    finder = PassageFinder()
    found(path, body, finder)  # a system prompt is known from its second time on
    assert found(path, body, finder) == found("/v1/completions", chunked(LENSES, JORHOLM))
    assert len(found("/v1/completions", chunked(LENSES, JORHOLM))) == 2


def test_plain_text_has_passages_at_once_and_no_instruction() -> None:
    prompts = [f"{SYSTEM}\n\n{text}\n\n{QUESTION}" for text in (LENSES, JORHOLM, LENSES)]
    finder = PassageFinder()
    first, second, third = (found("/v1/completions", {"prompt": prompt}, finder) for prompt in prompts)
    [lenses] = found("/v1/completions", chunked(LENSES))
    assert lenses in first  # beside the instruction, which may be a passage as long as no other prompt begins with it
    assert second == found("/v1/completions", chunked(JORHOLM))
    assert third == found("/v1/completions", chunked(LENSES))


def test_token_ids_are_passages() -> None:
    tokens = found("/v1/completions", {"prompt": {"chunks": [[5, 6, 7], [56, 7]], "suffix": [1]}})
    assert sorted(tokens.values()) == [2, 3]
    assert tokens.keys() & found("/v1/completions", {"prompt": {"chunks": [[5, 6, 7]], "suffix": [2]}}).keys()


def test_tenants_have_ids_of_their_own() -> None:
    body = chunked(LENSES)
    ids = [
        found("/v1/completions", body),
        found("/v1/completions", body, authorization="Bearer a"),
        found("/v1/completions", body, authorization="Bearer b"),
        found("/v1/completions", chunked(LENSES, cache_salt="pepper"), authorization="Bearer b"),
    ]
    assert len({key for each in ids for key in each}) == 4
    assert passage_tokens("/v1/completions", {"x-api-key": "k"}, json.dumps(body).encode(), PassageFinder()) != ids[0]


def test_no_id_tells_the_key_or_the_text() -> None:
    [key] = found("/v1/completions", chunked("secret passage"), authorization="Bearer secret")
    assert len(key) == 32 and set(key) <= set("0123456789abcdef")


def test_only_the_longest_passages_decide() -> None:
    chunks = [f"passage {number} " + "word " * number for number in range(MAX_PASSAGES + 20)]
    kept = found("/v1/completions", chunked(*chunks))
    assert len(kept) == MAX_PASSAGES
    assert min(kept.values()) >= num_tokens(chunks[20].strip())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models", chunked(LENSES)),
        ("/v1/completions", b"not JSON"),
        ("/v1/completions", b"\xff\xfe"),
        ("/v1/completions", {"prompt": {"chunks": "no list", "suffix": ""}}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", chat(("user", QUESTION), documents=[{"text": ""}])),
        ("/v1/chat/completions", chat(("user", 7))),
        ("/v1/messages", chat(("user", [{"type": "image"}]), max_tokens=8)),
        ("/v1/responses", {"input": [{"type": "computer_call"}]}),
        ("/v1/completions", {"prompt": [1, 2, 3]}),
        ("/v1/completions", {"prompt": QUESTION}),
    ],
)
def test_what_has_no_passages_or_will_be_refused_has_no_ids(path: str, body: Any) -> None:
    assert found(path, body) == {}


def test_no_salt_passes_for_the_beginning_of_a_passage() -> None:
    ids = [
        {*found("/v1/completions", chunked(passage, cache_salt=salt))}
        for salt, passage in (("a text b", "c"), ("a", "b text c"))
    ]
    assert ids[0].isdisjoint(ids[1])
