"""A large body, or a large answer, does not hold up other requests: what is too much is refused before it is looked at
item by item, and what is not is read and written while the event loop goes on."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.entrypoints.openai.servers import TestServer
from vllm_blend.engine import async_request
from vllm_blend.entrypoints.openai import completions, json_size, strict_json
from vllm_blend.entrypoints.openai.errors import APIError
from vllm_blend.entrypoints.openai.json_size import count_outside_strings
from vllm_blend.entrypoints.openai.protocol import common
from vllm_blend.entrypoints.openai.protocol.completion import CompletionRequest
from vllm_blend.entrypoints.openai.strict_json import parse_json, read_model
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.prompt_parser import parse_prompt
from vllm_blend.sampling_params import SamplingParams

pytestmark = pytest.mark.cpu_only

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "a " * 50}], "max_tokens": 1}


def values(value: Any) -> dict[str, int]:
    """Count JSON's punctuation by what the text was made of."""
    if isinstance(value, dict):
        inner = [values(each) for each in value.values()]
        own = {"{": 1, ":": len(value), ",": max(0, len(value) - 1)}
    elif isinstance(value, list):
        inner = [values(each) for each in value]
        own = {"[": 1, ",": max(0, len(value) - 1)}
    else:
        return {}
    return {sign: own.get(sign, 0) + sum(each.get(sign, 0) for each in inner) for sign in ",:[{"}


@pytest.mark.parametrize("slice_bytes", (1, 2, 3, 7, 1 << 18))
def test_values_are_counted_outside_of_strings(monkeypatch: pytest.MonkeyPatch, slice_bytes: int) -> None:
    monkeypatch.setattr(json_size, "_SLICE_BYTES", slice_bytes)
    rng = np.random.default_rng(0)

    def random_value(depth: int) -> Any:
        kind = rng.integers(4 if depth else 2)
        if kind == 0:
            return "".join(rng.choice(list('a\\",:[{}]é\n'), rng.integers(9)))
        if kind == 1:
            return int(rng.integers(1000))
        items = [random_value(depth - 1) for _ in range(rng.integers(4))]
        return items if kind == 2 else {f'{i}\\":,'[: i + 3]: each for i, each in enumerate(items)}

    for _ in range(50):
        value = [random_value(4) for _ in range(3)]
        text = json.dumps(value, ensure_ascii=bool(rng.integers(2))).encode()
        assert {sign: count_outside_strings(text)[sign] for sign in ",:[{"} == values(value), text


@pytest.mark.parametrize(
    "body, says",
    (
        (b'{"prompt": [' + b"7," * (1 << 20) + b"7,7]}", "more than 1048576 values"),
        (b'{"prompt": [' + b"{}," * (1 << 17) + b"{}]}", "more than 131072 objects, lists and keys"),
        (b'{"own": {' + b'"a":7,' * (1 << 17) + b'"a":7}}', "more than 131072 objects, lists and keys"),
        (b"[" * (1 << 19), "more than 131072 objects, lists and keys"),
    ),
)
def test_too_many_values_are_refused_before_they_are_parsed(
    monkeypatch: pytest.MonkeyPatch, body: bytes, says: str
) -> None:
    monkeypatch.setattr(strict_json, "parse_json", lambda _: pytest.fail("it was parsed"))
    with pytest.raises(APIError, match=says) as caught:
        read_model(body, CompletionRequest)
    assert caught.value.status_code == 413 and caught.value.code == "body_too_large"


def test_text_is_not_taken_for_values() -> None:
    text = '[1, {"a": 2}], ' * 100_000
    assert read_model(json.dumps({"prompt": text}).encode(), CompletionRequest).prompt == text


@pytest.mark.parametrize(
    "text",
    (
        '{"a": 18446744073709551616, "a": -0.0, "b": [1e-7, 1E+2, 123456789012345678901234567890, -0]}',
        '\ufeff{"a": "\\ud83d\\ude00\\u0000\x7f\\/", "\\u00e9": null}',
        " [true, false, 0.1, 5e-324, 1.7976931348623157e308, 1e400] ",
    ),
)
def test_both_parsers_find_the_same(text: str) -> None:
    assert repr(parse_json(text.encode())) == repr(json.loads(text.removeprefix("\ufeff")))


def test_lists_of_integers_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_whole", lambda _: pytest.fail("it was looked at"))
    many = list(range(100_000))
    body = CompletionRequest.model_validate({"prompt": [many, many], "allowed_token_ids": many})
    assert body.prompts() == [many, many] and body.allowed_token_ids == many


@pytest.mark.parametrize(
    "field, wrong, param",
    (
        ("prompt", [1.5] * 50_000, "prompt[0]"),
        ("allowed_token_ids", [7] * 50_000 + [1.5] * 50_000, "allowed_token_ids[50000]"),
        ("prompt", [[7, "a"]] * 50_000, "prompt[0][1]"),
        ("stop_token_ids", ["a"] * 50_000, "stop_token_ids[0]"),
        ("logit_bias", {str(token): "a" for token in range(50_000)}, "logit_bias"),
    ),
)
def test_only_the_first_wrong_item_is_told(field: str, wrong: Any, param: str) -> None:
    with pytest.raises(APIError) as caught:
        read_model(json.dumps({"prompt": "a", field: wrong}).encode(), CompletionRequest)
    assert caught.value.param == param and len(caught.value.detail) < 400
    cause: Any = caught.value.__cause__
    assert cause.error_count() < 12  # one for each type that the field may have


@pytest.mark.parametrize(
    "path, fields, param, says",
    (
        (COMPLETIONS, {"prompt": [9999] * 100_000}, None, "the prompt has 100000 tokens: shorten it"),
        (COMPLETIONS, {"allowed_token_ids": [7] * 2049}, "allowed_token_ids", "the vocabulary has 2048 tokens"),
        (COMPLETIONS, {"stop_token_ids": [7] * 2049}, "stop_token_ids", "the vocabulary has 2048 tokens"),
        (COMPLETIONS, {"logit_bias": {str(i): 1 for i in range(2049)}}, "logit_bias", "the vocabulary has 2048 tokens"),
        (COMPLETIONS, {"stop": ["a" * 9000] * 2}, "stop", "18000 characters: give at most 16384"),
        (COMPLETIONS, {"bad_words": ["a" * 9000] * 2}, "bad_words", "18000 characters: give at most 16384"),
        (COMPLETIONS, {"n": 1025}, "n", "at most 1024 completions"),
        (COMPLETIONS, {"prompt": ["a"] * 100, "n": 11}, "n", "n=11 for 100 prompts"),
        (
            COMPLETIONS,
            {"prompt": [[7] * 1000] * 20, "echo": True, "logprobs": 20},
            "logprobs",
            "420000 log-probabilities of prompts, and may have 262144",
        ),
        (CHAT, ASKED | {"n": 1025}, "n", "at most 1024 completions"),
        (CHAT, ASKED | {"n": 1000, "prompt_logprobs": 20}, "logprobs", "and may have 262144"),
        (COMPLETIONS, {"vllm_xargs": {str(i): 1 for i in range(1025)}}, "vllm_xargs", "give at most 1024"),
        ("/detokenize", {"tokens": [7] * 140_000}, "tokens", "send at most 131072 at a time"),
        ("/v1/messages", {"messages": [7] * 100_000, "max_tokens": 1}, "messages[0]", "messages[0] is 7"),
        ("/v1/responses", {"input": "a", "metadata": {str(i): "" for i in range(1025)}}, "metadata", "at most 1024"),
    ),
)
def test_what_is_too_much_is_refused(
    server: TestServer, path: str, fields: dict[str, Any], param: str | None, says: str
) -> None:
    body = ({"prompt": "a", "max_tokens": 1} if path == COMPLETIONS else {}) | fields
    response = server.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == 400 and says in error["message"] and error["param"] == param, error


class Ticks:
    """Counts the turns of an event loop, while it runs."""

    def __init__(self) -> None:
        self.count, self._runs = 0, True

    def __enter__(self) -> Ticks:
        self._tick()
        return self

    def __exit__(self, *_: object) -> None:
        self._runs = False

    def _tick(self) -> None:
        self.count += 1
        if self._runs:
            asyncio.get_running_loop().call_soon(self._tick)


def test_a_long_body_is_read_beside_the_loop(server: TestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the reading thread waits, the loop answers another request."""
    read, entered, answered = strict_json.read_model, threading.Event(), threading.Event()

    def read_late(*arguments: Any) -> Any:
        entered.set()
        assert answered.wait(60), "the event loop waits for the body to be read"
        return read(*arguments)

    monkeypatch.setattr(strict_json, "read_model", read_late)
    long = threading.Thread(target=server.post, args=(COMPLETIONS,), kwargs={"json": {"prompt": "a " * 200_000}})
    long.start()
    assert entered.wait(60)
    assert server.post("/tokenize", json={"prompt": "a"}).status_code == 200
    answered.set()
    long.join(60)
    assert not long.is_alive()


def test_a_long_body_is_validated_once(server: TestServer, caplog: pytest.LogCaptureFixture) -> None:
    response = server.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, "own": "a" * 100_000})
    assert response.status_code == 200
    assert ["own" in record.getMessage() for record in caplog.records].count(True) == 1


@pytest.mark.parametrize("kind, num_written", [("whole", 1), ("stream", 2), ("chat", 1)])
def test_a_long_answer_is_written_beside_the_loop(
    server: TestServer, monkeypatch: pytest.MonkeyPatch, kind: str, num_written: int
) -> None:
    threads = []
    real = server.app.state.server.in_converting_thread

    async def noting(function: Any, *arguments: Any) -> Any:
        def write() -> Any:
            threads.append(threading.current_thread().name)
            return function(*arguments)

        return await real(write)

    monkeypatch.setattr(server.app.state.server, "in_converting_thread", noting)
    echo = {"prompt": [[7, 9] * 60] * 2, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": kind == "stream"}
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20, "max_tokens": 60}
    path, fields = (CHAT, chat | {"ignore_eos": True}) if kind == "chat" else (COMPLETIONS, echo)
    response = server.post(path, json=fields)
    assert response.status_code == 200
    assert [name.startswith("converting") for name in threads] == [True] * num_written
    if kind == "whole":
        assert [len(choice["logprobs"]["tokens"]) for choice in response.json()["choices"]] == [121, 121]
    threads.clear()
    assert server.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).status_code == 200
    assert not threads


@pytest.mark.parametrize("num_tokens, thread", ((20, "server"), (200, "convert")))
def test_many_log_probabilities_are_made_beside_the_loop(
    server: TestServer, monkeypatch: pytest.MonkeyPatch, num_tokens: int, thread: str
) -> None:
    engine, threads = server.engine, []
    make = async_request.AsyncRequest._with_texts

    def noting(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name.partition("_")[0])
        return make(*arguments)

    monkeypatch.setattr(async_request.AsyncRequest, "_with_texts", noting)

    async def generate() -> Any:
        params = SamplingParams(max_tokens=1, prompt_logprobs=4)
        prompt = parse_prompt([7, 9] * (num_tokens // 2), None, engine.vocab_size)
        return [output async for output in engine.generate(prompt, params, f"of {num_tokens}")][-1]

    output = server.call(generate())
    assert len(output.prompt_logprobs) == num_tokens and output.prompt_logprobs[1][9].decoded_token is not None
    assert threads == [thread]


def test_the_prompts_of_a_call_begin_one_by_one(server: TestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two of them the loop does what else there is to do."""
    seen: list[int] = []
    add = server.engine._add
    turns = Ticks()

    async def noting(prompt: ParsedPrompt, *arguments: Any) -> Any:
        if not seen:
            turns.__enter__()
        seen.append(turns.count)
        return await add(prompt, *arguments)

    monkeypatch.setattr(server.engine, "_add", noting)
    response = server.post(COMPLETIONS, json={"prompt": ["a"] * 20, "max_tokens": 1})

    async def stop() -> None:
        turns.__exit__()

    server.call(stop())
    assert response.status_code == 200 and len(set(seen)) == 20


def test_many_prompts_are_tokenized_in_slices(server: TestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests have their turn at the tokenizer between them."""
    sizes: list[int] = []
    prepare = completions._prepare

    def noted(body: Any, own: Any, prompts: Sequence[Any], salt: str | None) -> Any:
        sizes.append(len(prompts))
        return prepare(body, own, prompts, salt)

    monkeypatch.setattr(completions, "_prepare", noted)
    monkeypatch.setattr(completions, "_SLICE_CHARACTERS", 512)
    prompts: list[Any] = ["a b"] * 20 + ["a " * 200] * 8 + [{"prefix": "a", "chunks": ["b " * 99], "suffix": "?"}] * 4
    body = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "blend": {"mode": "off"}}
    sliced = server.post("/v1/completions", json=body).json()
    assert sum(sizes) == len(prompts) and len(sizes) == 6, sizes
    monkeypatch.setattr(completions, "_SLICE_CHARACTERS", 1 << 16)
    whole = server.post("/v1/completions", json=body).json()
    assert sizes[-1] == len(prompts) and sliced["choices"] == whole["choices"]
