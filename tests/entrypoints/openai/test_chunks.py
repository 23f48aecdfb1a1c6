"""/v1/chunks, and passages written in every way, over a real socket."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.entrypoints.openai.servers import TestServer, serving
from tests.waiting import DEADLINE

pytestmark = pytest.mark.cpu_only

PASSAGE = "Tulmaris Works is a maker of lamps that was set up in {}. The first ones were made by hand in a shed."
QUESTION = "Question: When was Tulmaris Works set up?"


def ask(server: TestServer, content: Any, salt: str, **fields: Any) -> dict[str, int]:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "cache_salt": salt, **fields}
    answer = server.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    details: dict[str, int] = answer.json()["usage"]["prompt_tokens_details"]
    return details


def send(server: TestServer, method: str, path: str, salt: str | None = None, **arguments: Any) -> httpx.Response:
    headers = {} if salt is None else {"X-Cache-Salt": salt}
    return httpx.request(method, server.url + path, headers=headers, timeout=DEADLINE, **arguments)


def store(server: TestServer, salt: str, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/chunks", json={"cache_salt": salt, **fields})
    assert answer.status_code == 200, answer.text
    stored: dict[str, Any] = answer.json()
    return stored


def test_a_stored_passage_is_reused_however_a_prompt_has_it(server: TestServer) -> None:
    """By its id, as a document, as a string, in a completion: the first prompt that has it finds its KV. A tenant that
    stored nothing finds nothing."""
    text, salt = PASSAGE.format(1841), "chunks-a"
    stored = store(server, salt, text=text)
    assert stored["num_tokens"] > 10 and stored["text"] == text
    ways: list[tuple[Any, dict[str, Any]]] = [
        (QUESTION, {"documents": [{"id": stored["id"], "score": 0.5}]}),
        (QUESTION, {"documents": [text]}),
        (f"{text}\n\n{QUESTION}", {}),
    ]
    for number, (content, fields) in enumerate(ways):
        own = ask(server, content, salt, **fields)
        assert own["reused_tokens"] >= stored["num_tokens"] and own["stored_tokens"] == 0
        if "id" not in str(fields):
            other = ask(server, content, f"chunks-other-{number}", **fields)
            assert other["cached_tokens"] == other["reused_tokens"] == 0
    body = {"documents": [{"id": stored["id"]}], "messages": [{"role": "user", "content": QUESTION}]}
    refused = server.post("/v1/chat/completions", json={**body, "cache_salt": "chunks-b"})
    assert refused.status_code == 400 and "never stored with this API key" in refused.json()["error"]["message"]
    store(server, salt, text=f"{text}\n\n", prefix="Read this.\n\n")
    prompt = {"prefix": "Read this.\n\n", "chunks": [f"{text}\n\n"], "suffix": QUESTION}
    answer = server.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, "cache_salt": salt})
    assert answer.json()["usage"]["prompt_tokens_details"]["stored_tokens"] == 0


def test_a_document_that_continues_another_is_stored_behind_it(server: TestServer) -> None:
    """So its KV is another one than that of the same text alone, and is found again wherever the page stands."""
    texts, salt = [PASSAGE.format(year) for year in (1861, 1862, 1863)], "pages"
    pages: list[Any] = [texts[0], {"text": texts[1], "continues": 0}, texts[2]]
    assert ask(server, QUESTION, salt, documents=texts)["stored_tokens"] > 0
    first = ask(server, QUESTION, salt, documents=pages)
    assert 0 < first["stored_tokens"] < first["reused_tokens"]
    moved: list[Any] = [texts[2], texts[0], {"text": texts[1], "continues": 1}]
    assert ask(server, QUESTION, salt, documents=moved)["stored_tokens"] == 0
    answer = server.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "a"}], "documents": ["b", {"text": "c", "continues": 1}]},
    )
    assert answer.status_code == 400 and "documents[1].continues is 1" in answer.json()["error"]["message"]


def test_chunks_of_a_completion_continue_a_page_by_either_field(server: TestServer) -> None:
    texts = [PASSAGE.format(year) for year in (1871, 1872)]
    pieces: dict[str, Any] = {"prefix": "Read this.\n\n", "chunks": texts, "suffix": QUESTION}

    def complete(prompt: dict[str, Any], **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 1, "cache_salt": "completion-pages", **fields}
        return server.post("/v1/completions", json=body)

    def stored(prompt: dict[str, Any], **fields: Any) -> int:
        count: int = complete(prompt, **fields).json()["usage"]["prompt_tokens_details"]["stored_tokens"]
        return count

    alone = stored(pieces)
    assert 0 < stored(pieces, blend={"continues": [None, 0]}) < alone
    assert stored(pieces | {"continues": [None, 0]}) == 0
    for prompt, fields, message in (
        (pieces | {"continues": [None, 0]}, {"blend": {"continues": [None, 0]}}, "are both given"),
        (pieces | {"continues": [None, 1]}, {}, "continues[1] is 1"),
        (pieces | {"continues": [None, False]}, {}, "continues"),
    ):
        answer = complete(prompt, **fields)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


def test_the_second_time_and_what_each_mode_does(server: TestServer) -> None:
    """A plain string in another order than before; documents off, reused and blended."""
    texts, salt = [PASSAGE.format(year) for year in (1801, 1802, 1803)], "modes"
    assert ask(server, "\n\n".join([*texts, QUESTION]), salt)["reused_tokens"] == 0
    assert ask(server, "\n\n".join([*texts[::-1], QUESTION]), salt)["stored_tokens"] > 0
    assert ask(server, "\n\n".join([texts[1], texts[2], texts[0], QUESTION]), salt)["reused_tokens"] > 0
    found = {
        mode: ask(server, QUESTION, salt, documents=texts, blend={"mode": mode}) for mode in ("off", "reuse", "blend")
    }
    assert found["off"]["reused_tokens"] == 0
    assert found["reuse"]["recomputed_tokens"] < found["blend"]["recomputed_tokens"]
    assert all(isinstance(value, int) for value in found["off"].values() if not isinstance(value, dict))


def test_documents_are_text_parts_to_a_template_that_takes_parts(server: TestServer) -> None:
    """Its prompts begin the question with a word, which stands behind the documents: these have the tokens of the same
    passages given as text parts, and are all reused in another order with another question."""
    texts, salt = [PASSAGE.format(year) for year in (1811, 1812, 1813)], "documents-as-parts"

    def ask(content: Any, **fields: Any) -> Any:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "return_token_ids": True}
        answer = httpx.post(
            f"{server.plain_url}/v1/chat/completions", json={**body, "cache_salt": salt, **fields}, timeout=DEADLINE
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def counts(answer: Any) -> tuple[int, int]:
        details = answer["usage"]["prompt_tokens_details"]
        return details["reused_tokens"], details["stored_tokens"]

    reuse = {"mode": "reuse"}
    reused, stored = counts(ask("Who makes lamps?", documents=texts, blend=reuse))
    assert reused == 0 and stored > 0
    again = ask(QUESTION, documents=texts[::-1], blend=reuse)
    assert counts(again) == (stored, 0)
    parts = ask([{"type": "text", "text": text} for text in (*texts[::-1], QUESTION)], blend=reuse)
    assert parts["prompt_token_ids"] == again["prompt_token_ids"] and counts(parts) == (stored, 0)
    chunk = {"text": PASSAGE.format(1814), "cache_salt": salt}
    made = httpx.post(f"{server.plain_url}/v1/chunks", json=chunk, timeout=DEADLINE).json()
    reused, stored = counts(ask(QUESTION, documents=[{"id": made["id"]}], blend=reuse))
    assert reused >= made["num_tokens"] and stored == 0


def test_keys_of_documents_are_for_the_template_of_the_server(server: TestServer) -> None:
    """A key that is nearly `title` is misspelt, unless the template shows it."""
    shows = "{% for d in documents or [] %}{{ d.titel }} {{ d.text }}{% endfor %}{{ messages[-1].content }}"
    body = {"messages": [{"role": "user", "content": "a"}], "documents": [{"text": "b", "titel": 3}], "max_tokens": 1}
    refused = server.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400 and "did you mean 'title'?" in refused.json()["error"]["message"]
    with serving(server.engine, chat_template=shows) as url:
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=DEADLINE).status_code == 200


def test_get_list_change_and_delete(server: TestServer) -> None:
    salt = "chunks-table"
    first, second = (store(server, salt, text=PASSAGE.format(year), ttl="5m") for year in (1, 2))
    assert first["expires_at"] == first["created_at"] + 300 and first["priority"] == 50
    assert store(server, salt, text=PASSAGE.format(1))["id"] == first["id"]
    same = send(server, "POST", "/v1/chunks", salt, json={"text": PASSAGE.format(1), "ttl": "5m"})
    assert same.json()["id"] == first["id"]  # the salt may be in the header here, too
    assert send(server, "GET", f"/v1/chunks/{second['id']}", salt).json() == second
    listed = send(server, "GET", "/v1/chunks?limit=1", salt).json()
    assert [each["id"] for each in listed["data"]] == [second["id"]] and listed["has_more"]
    rest = send(server, "GET", f"/v1/chunks?after={listed['last_id']}", salt).json()
    assert [each["id"] for each in rest["data"]] == [first["id"]] and not rest["has_more"]
    change = {"ttl": "2h", "priority": 9, "metadata": {"a": "b"}}
    changed = send(server, "PATCH", f"/v1/chunks/{second['id']}", salt, json=change).json()
    assert (changed["priority"], changed["metadata"]) == (9, {"a": "b"})
    assert changed["expires_at"] >= second["created_at"] + 7200
    assert send(server, "GET", f"/v1/chunks/{second['id']}").status_code == 404
    assert send(server, "GET", "/v1/chunks", "another").json()["data"] == []
    deleted = send(server, "DELETE", f"/v1/chunks/{second['id']}", salt).json()
    assert deleted == {"id": second["id"], "object": "chunk", "deleted": True}
    requests: list[tuple[str, dict[str, Any]]] = [("GET", {}), ("DELETE", {}), ("PATCH", {"json": {}})]
    for method, arguments in requests:
        answer = send(server, method, f"/v1/chunks/{second['id']}", salt, **arguments)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "chunk_not_found", "chunk_id")
    unlisted = send(server, "GET", f"/v1/chunks?after={second['id']}", salt)
    assert unlisted.status_code == 404 and unlisted.json()["error"]["param"] == "after"
    again = ask(server, QUESTION, salt, documents=[PASSAGE.format(2)])
    assert again["stored_tokens"] > 0, "its KV is gone"


@pytest.mark.parametrize("is_known", [False, True])
def test_a_document_that_names_no_text_is_the_field_to_blame(server: TestServer, is_known: bool) -> None:
    """Its id is unknown, or that of token ids."""
    name = store(server, "chunks-token-ids", token_ids=[5, 6, 7])["id"] if is_known else "chunk-" + "0" * 32
    question = [{"role": "user", "content": QUESTION}]
    body = {"messages": question, "documents": ["a", {"id": name}], "cache_salt": "chunks-token-ids"}
    answer = server.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "documents"
    assert error["message"].startswith("documents[1].id: the passage ")
    assert ("token ids" if is_known else "is unknown") in error["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "text and token_ids: give one of them"),
        ({"text": "a", "token_ids": [1]}, "text and token_ids: give one of them"),
        ({"text": " "}, "text is empty"),
        ({"text": "a", "prefix": "b", "messages": []}, "prefix and messages are both given"),
        ({"token_ids": [1], "title": "b"}, "token_ids are for chunks of completions"),
        ({"token_ids": [99999]}, "out of vocabulary"),
        ({"text": "a", "ttl": "soon"}, "ttl='soon' is no time"),
        ({"text": "a", "ttl": "5m", "retention_seconds": 5}, "ttl and retention_seconds are both given"),
        ({"text": "a", "retention_seconds": -1}, "retention_seconds=-1 must be more than 0"),
        ({"text": "a", "priority": 101}, "priority is 101"),
        ({"text": "a", "cache_salt": ""}, "cache_salt is empty"),
        ({"text": "a " * 3000}, "max_model_len"),
    ],
)
def test_what_cannot_be_stored(server: TestServer, body: dict[str, Any], message: str) -> None:
    answer = server.post("/v1/chunks", json=body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]
