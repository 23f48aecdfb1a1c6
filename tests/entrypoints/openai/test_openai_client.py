"""The `openai` client, which checks every answer against OpenAI's types, gets what the offline engine gives."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.entrypoints.openai.servers import NAME, TEMPLATE, TestServer
from vllm_blend import LLM, SamplingParams

pytestmark = pytest.mark.cpu_only

PASSAGES = ["Tulmaris Works makes lenses.\n\n", "Tulmaris Works was founded in Jorholm.\n\n"]
QUESTION = "Question: Where was Tulmaris Works founded?\nAnswer:"
PROMPT = "".join(PASSAGES) + QUESTION
MESSAGES: Any = [
    {"role": "system", "content": "Answer the question."},
    {"role": "user", "content": [{"type": "text", "text": passage.strip()} for passage in PASSAGES]},
    {"role": "user", "content": "Question: What does Tulmaris Works make?"},
]
GREEDY: Any = {"temperature": 0, "max_tokens": 12}
OFFLINE = SamplingParams(temperature=0, max_tokens=12, logprobs=2)


@pytest.fixture(scope="module")
def client(server: TestServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", _strict_response_validation=True, max_retries=0)


def test_models(client: openai.OpenAI, offline: LLM) -> None:
    assert [model.id for model in client.models.list()] == [NAME, "alias"]
    found: Any = client.models.retrieve("alias")
    assert found.id == "alias" and found.max_model_len == offline.llm_engine.max_model_len
    with pytest.raises(openai.NotFoundError, match="'other' does not exist: this server has 'demo', 'alias'"):
        client.models.retrieve("other")


def test_completions(client: openai.OpenAI, offline: LLM) -> None:
    ids = offline.get_tokenizer().encode(PROMPT)
    chunked: Any = {"prefix": "", "chunks": PASSAGES, "suffix": QUESTION}
    answer = client.completions.create(model=NAME, prompt=[PROMPT, QUESTION], logprobs=2, **GREEDY)
    expected = offline.generate([PROMPT, QUESTION], OFFLINE, use_tqdm=False)
    assert [choice.text for choice in answer.choices] == [output.outputs[0].text for output in expected]
    assert [choice.index for choice in answer.choices] == [0, 1]
    first, entries = answer.choices[0].logprobs, expected[0].outputs[0].logprobs
    assert first is not None and entries is not None and first.token_logprobs is not None
    token_ids = expected[0].outputs[0].token_ids
    chosen = [entry[token].logprob for entry, token in zip(entries, token_ids, strict=True)]
    assert first.token_logprobs == pytest.approx(chosen, abs=1e-4)
    assert "".join(first.tokens or []) == answer.choices[0].text  # the token that ends it is empty
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in expected)
    assert answer.usage.completion_tokens == sum(len(output.outputs[0].token_ids) for output in expected)
    for prompt in (ids, [ids]):
        assert client.completions.create(model=NAME, prompt=prompt, **GREEDY).choices[0].text == answer.choices[0].text
    same = client.completions.create(model=NAME, prompt="", extra_body={"prompt": chunked}, **GREEDY)
    [output] = offline.generate(chunked, OFFLINE, use_tqdm=False)
    assert same.choices[0].text == output.outputs[0].text


def test_echo(server: TestServer, offline: LLM) -> None:
    """OpenAI's types have no null for the first token of an echo; its servers, and vLLM's, have."""
    body = {"prompt": QUESTION, "echo": True, "logprobs": 1, "max_tokens": 0}
    [choice] = server.post("/v1/completions", json=body).json()["choices"]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    [output] = offline.generate(QUESTION, params, use_tqdm=False)
    assert choice["text"] == QUESTION and choice["finish_reason"] == "length"
    assert output.prompt_logprobs is not None
    expected = [
        None if entry is None else entry[token].logprob
        for entry, token in zip(output.prompt_logprobs, output.prompt_token_ids, strict=True)
    ]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected[1:], abs=1e-4)
    assert "".join(choice["logprobs"]["tokens"]) == QUESTION, "BOS is not part of the text"


def test_chat(client: openai.OpenAI, offline: LLM) -> None:
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY)
    [expected] = offline.chat(MESSAGES, OFFLINE, use_tqdm=False, chat_template=TEMPLATE)
    [choice] = answer.choices
    assert choice.message.content == expected.outputs[0].text and choice.message.role == "assistant"
    assert choice.finish_reason == expected.outputs[0].finish_reason
    assert choice.logprobs is not None and choice.logprobs.content is not None
    entries = expected.outputs[0].logprobs
    assert entries is not None
    for given, entry, token in zip(choice.logprobs.content, entries, expected.outputs[0].token_ids, strict=True):
        assert (given.token or "\n", given.logprob) == (  # the token that ends the text is not part of it
            entry[token].decoded_token,
            pytest.approx(entry[token].logprob, abs=1e-4),
        )
        assert len(given.top_logprobs) == 2 and given.top_logprobs[0].logprob >= given.top_logprobs[1].logprob
    assert answer.usage is not None and answer.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_where_answers_end(client: openai.OpenAI) -> None:
    """At the end of the line by themselves, before a stop string, or at `max_tokens`."""
    ways: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
        ({}, (" Jorholm", "stop", None)),
        ({"stop": "holm"}, (" Jor", "stop", "holm")),
        ({"max_tokens": 2, "extra_body": {"ignore_eos": True}}, (" Jor", "length", None)),
    ]
    for fields, expected in ways:
        asked: Any = {"temperature": 0} | fields
        [choice] = client.completions.create(model=NAME, prompt=PROMPT, **asked).choices
        assert (choice.text, choice.finish_reason, getattr(choice, "stop_reason", None)) == expected


def test_answers_of_a_schema_are_whole(client: openai.OpenAI) -> None:
    """The newline that ends other answers is white space in JSON, until the JSON is complete."""
    schema: Any = {"const": {"made": ["lenses", True]}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "made", "schema": schema}}
    newlines: Any = {"logit_bias": {"201": 100}}
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, response_format=form, temperature=0, max_tokens=400, **newlines
    )
    [choice] = answer.choices
    text = choice.message.content or ""
    assert json.loads(text) == schema["const"] and "\n" in text
    assert choice.finish_reason == "stop"


def test_seeds_repeat_draws(client: openai.OpenAI) -> None:
    def draw(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model=NAME, messages=MESSAGES, n=3, seed=seed, max_completion_tokens=8, extra_body={"top_k": 50}
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    assert draw(1) == draw(1)


def test_streamed_chat(client: openai.OpenAI, offline: LLM) -> None:
    [expected] = offline.chat(MESSAGES, OFFLINE, use_tqdm=False, chat_template=TEMPLATE)
    options: Any = {"include_usage": True}
    *chunks, last = client.chat.completions.create(
        model=NAME, messages=MESSAGES, stream=True, stream_options=options, **GREEDY
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.outputs[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert last.choices == [] and last.usage is not None
    assert last.usage.completion_tokens == len(expected.outputs[0].token_ids)


def test_streamed_completions(server: TestServer, client: openai.OpenAI, offline: LLM) -> None:
    """OpenAI's types have no null `finish_reason` for them: the strict client refuses the streams of any server."""
    [expected] = offline.generate(PROMPT, OFFLINE, use_tqdm=False)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as usual:
        chunks = list(usual.completions.create(model=NAME, prompt=PROMPT, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.outputs[0].text
    with pytest.raises(openai.APIResponseValidationError):
        list(client.completions.create(model=NAME, prompt=PROMPT, stream=True, **GREEDY))


def test_asynchronous_client(server: TestServer, offline: LLM) -> None:
    """Two clients at once, one of which streams."""

    async def ask() -> tuple[str | None, str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", _strict_response_validation=True) as client:

            async def streamed() -> str:
                chunks = await client.chat.completions.create(model=NAME, messages=MESSAGES, stream=True, **GREEDY)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

            whole = client.chat.completions.create(model=NAME, messages=MESSAGES, **GREEDY)
            answer, text = await asyncio.gather(whole, streamed())
            return answer.choices[0].message.content, text

    [expected] = offline.chat(MESSAGES, OFFLINE, use_tqdm=False, chat_template=TEMPLATE)
    assert asyncio.run(ask()) == (expected.outputs[0].text, expected.outputs[0].text)
