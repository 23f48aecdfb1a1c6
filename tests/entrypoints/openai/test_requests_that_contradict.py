"""What becomes of requests whose settings cut an answer, leave none, or ask for more of it, in all three APIs."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.entrypoints.openai.servers import TestServer
from tests.waiting import DEADLINE

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CITY = {"city": {"const": "Jorholm"}}
SCHEMA = {"type": "object", "properties": CITY, "required": ["city"], "additionalProperties": False}
ASKED = [{"role": "user", "content": "Hi"}]


def events(server: TestServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = httpx.post(server.url + path, json=body | {"stream": True}, timeout=DEADLINE)
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def post(server: TestServer, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    response = server.post(path, json=body)
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize(("stop", "is_cut"), [("holm", True), ("}]", False), ("!", False)])
def test_a_stop_string_within_a_call_is_the_reason(stop: str, is_cut: bool, server: TestServer) -> None:
    function = {"name": "f", "parameters": SCHEMA}
    chat = {"messages": ASKED, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    chat |= {"stop": stop, "max_tokens": 80, "temperature": 0, "parallel_tool_calls": False}
    [choice] = post(server, CHAT, chat)["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["arguments"].endswith("Jor" if is_cut else "}")
    assert choice["finish_reason"] == ("stop" if is_cut else "tool_calls")
    assert (choice["stop_reason"] == stop) is (stop != "!")
    last = [event["choices"][0] for event in events(server, CHAT, chat)][-1]
    assert (last["finish_reason"], last["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
    tool = {"name": "f", "input_schema": SCHEMA}
    body = {"messages": ASKED, "tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    body |= {"stop_sequences": [stop], "max_tokens": 80, "temperature": 0}
    answer = post(server, MESSAGES, body)
    expected = ("stop_sequence", stop) if is_cut else ("tool_use", None)
    assert (answer["stop_reason"], answer["stop_sequence"]) == expected


def test_a_function_without_parameters_takes_none(server: TestServer) -> None:
    """Not even where a model would like to give some."""
    for parameters, expected in (({}, "{}"), ({"parameters": SCHEMA}, '{"city"')):
        function = {"name": "f", **parameters}
        choice: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
        body = {"messages": ASKED, "tools": [{"type": "function", "function": function}], "tool_choice": choice}
        body |= {"max_tokens": 40, "temperature": 0, "logit_bias": {}}
        [answer] = post(server, CHAT, body)["choices"]
        arguments = answer["message"]["tool_calls"][0]["function"]["arguments"]
        assert "".join(arguments.split()).startswith(expected)
        assert parameters or json.loads(arguments) == {}


@pytest.mark.parametrize("stream", [False, True])
def test_responses_have_log_probabilities_if_they_are_asked_for(stream: bool, server: TestServer) -> None:
    body: dict[str, Any] = {"input": "Hi", "max_output_tokens": 12, "temperature": 0, "ignore_eos": True}
    asked = body | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}

    def part(given: dict[str, Any]) -> dict[str, Any]:
        answer = events(server, RESPONSES, given)[-1]["response"] if stream else post(server, RESPONSES, given)
        found: dict[str, Any] = answer["output"][-1]["content"][0]
        return found

    shown = part(asked)
    assert "".join(token["token"] for token in shown["logprobs"]) == shown["text"] != ""
    assert all(len(token["top_logprobs"]) == 2 and token["logprob"] <= 0 for token in shown["logprobs"])
    assert bytes(byte for token in shown["logprobs"] for byte in token["bytes"]).decode() == shown["text"]
    if stream:
        pieces = {
            kind: [each for each in events(server, RESPONSES, asked) if each["type"] == f"response.output_text.{kind}"]
            for kind in ("delta", "done")
        }
        [done] = pieces["done"]
        plain = [{"token": each["token"], "logprob": each["logprob"]} for each in shown["logprobs"]]
        assert [{"token": each["token"], "logprob": each["logprob"]} for each in done["logprobs"]] == plain
        assert [each for delta in pieces["delta"] for each in delta["logprobs"]] == done["logprobs"]
        for delta in pieces["delta"]:
            assert "".join(each["token"] for each in delta["logprobs"]) == delta["delta"]
        assert not any("bytes" in each for each in (*done["logprobs"], *done["logprobs"][0]["top_logprobs"]))
    assert part(body)["logprobs"] == []
    refused = post(server, RESPONSES, body | {"top_logprobs": 2}, 400)["error"]
    assert refused["param"] == "top_logprobs" and "needs include" in refused["message"]


CONTRADICTIONS: list[dict[str, Any]] = [
    {"structured_outputs": {"choice": ["a"]}, "min_tokens": 8},
    {"structured_outputs": {"choice": ["a"]}, "bad_words": ["a"]},
    {"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [40]},
    {"allowed_token_ids": [67], "bad_words": ["a"]},
]


@pytest.mark.parametrize("settings", CONTRADICTIONS, ids=str)
def test_settings_that_leave_no_answer_are_the_clients_fault(settings: dict[str, Any], server: TestServer) -> None:
    body = {"messages": ASKED, "max_tokens": 10, "temperature": 0} | settings
    refused = post(server, CHAT, body, 400)["error"]
    assert "no token is left to choose from" in refused["message"] and refused["type"] == "invalid_request_error"
    streamed = server.post(CHAT, json=body | {"stream": True})
    last = [line.removeprefix("data: ") for line in streamed.text.splitlines() if '"error"' in line][-1]
    assert json.loads(last)["error"]["message"] == refused["message"]


def test_a_prefilled_answer_goes_on(server: TestServer) -> None:
    """The prompt ends with the beginning, which is not part of the answer."""
    ended = post(server, MESSAGES, {"messages": ASKED, "max_tokens": 4, "temperature": 0})
    begun = [*ASKED, {"role": "assistant", "content": "Jor"}]
    answer = post(server, MESSAGES, {"messages": begun, "max_tokens": 4, "temperature": 0})
    chat = {"messages": begun, "max_tokens": 4, "temperature": 0, "continue_final_message": True}
    [choice] = post(server, CHAT, {**chat, "add_generation_prompt": False})["choices"]
    assert [block["text"] for block in answer["content"]] == [choice["message"]["content"]]
    assert answer["content"] != ended["content"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": ASKED}),
        (RESPONSES, {"input": "Hi"}),
        (MESSAGES, {"messages": ASKED, "max_tokens": 1}),
        (f"{MESSAGES}/count_tokens", {"messages": ASKED}),
    ],
)
def test_gpt_oss_is_refused_by_name(
    path: str, body: dict[str, Any], server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers have several channels, which no parser here reads; plain completions take its token ids."""
    monkeypatch.setattr(server.engine.model_config.hf_config, "model_type", "gpt_oss")
    refused = post(server, path, body, 400)["error"]
    assert refused["param"] == "model" and "gpt-oss" in refused["message"] and "openai-harmony" in refused["message"]
    post(server, "/v1/completions", {"prompt": [5], "max_tokens": 1, "return_token_ids": True})
