"""API keys: who may come in, what belongs to whom, and that no key is ever shown."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from tests.entrypoints.openai.servers import fake_engine
from vllm_blend.entrypoints.openai.app import create_app
from vllm_blend.entrypoints.openai.errors import APIError
from vllm_blend.entrypoints.openai.generation import TokenCounter
from vllm_blend.entrypoints.openai.options import ServerOptions
from vllm_blend.entrypoints.openai.tenancy import ANYONE, Limits, Tenant, Tenants, Usage, read_keys
from vllm_blend.kv_store.owners import Owner


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_everyone_is_one_tenant_without_keys() -> None:
    tenant = Tenants().authenticate({})
    assert tenant is ANYONE and tenant.combined_salt(None) is None and tenant.combined_salt("a") == "a"


def test_salts_of_tenants_and_requests() -> None:
    tenants = Tenants([("a", "key-a"), ("a", "key-a2"), ("b", "key-b"), (None, "key-c")])
    a, a2, b, c = (tenants.authenticate(bearer(key)) for key in ("key-a", "key-a2", "key-b", "key-c"))
    assert a == a2 and a.name == "a" and c.name == "key-4"
    salts = [tenant.combined_salt(salt) for tenant in (a, b, c) for salt in (None, "x", "y")]
    assert len(set(salts)) == 9 and None not in salts
    assert a == Tenants([("a", "key-a")]).authenticate(bearer("key-a"))  # the salt outlives a restart
    assert tenants.authenticate({"x-api-key": "key-b"}) == b
    with pytest.raises(ValueError, match="cache_salt is empty"):
        a.combined_salt("")


@pytest.mark.parametrize("headers", [{}, bearer("key"), bearer(""), {"authorization": "key-a"}, bearer("key-a key-b")])
def test_wrong_keys(headers: dict[str, str]) -> None:
    with pytest.raises(APIError) as caught:
        Tenants([("a", "key-a")]).authenticate(headers)
    assert caught.value.status_code == 401 and "key-a" not in caught.value.detail


def test_files_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        "# tenants\nalice key-1 requests=8\n\n  alice key-2 tokens-per-minute=500\n"
        "key-3==  requests=2 weight=3 store-mib=64\n"
    )
    both = [Limits(requests=8), Limits(tokens_per_minute=500), Limits(requests=2, weight=3, store_mib=64)]
    assert read_keys(path) == list(zip(("alice", "alice", None), ("key-1", "key-2", "key-3=="), both, strict=True))
    alice = Tenants.from_options(None, str(path)).authenticate(bearer("key-1"))
    assert alice.limits == Limits(requests=8, tokens_per_minute=500)
    assert alice.owner == Owner("alice")
    nameless = Tenants.from_options(None, str(path)).authenticate(bearer("key-3=="))
    assert nameless.owner == Owner("key-3", 3, 64 << 20)
    for text, message in (
        ("alice key 1\n", "line 1 of .* has 3 words"),
        ("# none\n", "has no key"),
        ("alice key request=8\n", "line 1 of .* has the limit 'request=8': write requests=N"),
        ("key requests=0\n", "has the limit 'requests=0'"),
        ("key requests=1 requests=2\n", "line 1 has the limit requests twice"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_keys(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_keys(tmp_path / "missing")
    path.write_text("alice key-1 requests=1\nalice key-2 requests=2\n")
    with pytest.raises(ValueError, match="alice has the limit requests twice"):
        Tenants.from_options(None, str(path))
    path.write_text("alice key-1\nbob key-1\n")
    with pytest.raises(ValueError, match="given twice") as caught:
        Tenants.from_options(None, str(path))
    assert "key-1" not in str(caught.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("key-2 a\nb\n", "'key-2' is that of a key without"),
        ("anyone a\n", "'anyone'"),
        ("bob \u043a\n", "printable ASCII"),
    ],
)
def test_keys_that_could_not_be_told_apart_or_sent(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        Tenants.from_options(None, str(path))


def ask(app: FastAPI, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(get())


@pytest.mark.parametrize("prefix", ["", "/gateway/llm"])
def test_keys_over_http(prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    """Everything needs a key but what load balancers ask for, behind a proxy that keeps its path, too. The log has the
    tenant, and no key."""
    options = ServerOptions(api_key=["secret-1", "secret-2"], root_path=prefix and f"{prefix}/")
    app = create_app(fake_engine(), options)
    assert "secret" not in repr(options)

    def status(path: str, headers: dict[str, str]) -> int:
        kept, stripped = (ask(app, before + path, headers).status_code for before in (prefix, ""))
        assert kept == stripped
        return kept

    caplog.set_level(logging.INFO)
    assert status("/v1/models", bearer("secret-2")) == 200
    for path in ("/v1/models", "/tokenize", "/openapi.json", "/v1/nothing", "/healthy", "/health/x", "/gateway"):
        assert status(path, {}) == status(path, bearer("secret")) == 401
    for path in ("/health", "/ready", "/ping", "/version", "/"):
        assert status(path, {}) == 200
    answer = ask(app, f"{prefix}/v1/messages/x", bearer("secret-1"))
    assert answer.status_code == 404 and answer.json()["type"] == "error"  # Anthropic's shape
    answer = ask(app, f"{prefix}/v1/models", bearer("wrong-key"))
    assert answer.headers["www-authenticate"] == "Bearer" and answer.json()["error"]["code"] == "invalid_api_key"
    assert "tenant=key-2" in caplog.text
    assert "secret" not in caplog.text and "wrong-key" not in caplog.text + answer.text


def test_ready_means_that_a_request_would_be_taken() -> None:
    options = ServerOptions(api_key=["secret"])
    full, down, draining = (create_app(fake_engine(*states), options) for states in ((True,), (False, True), ()))
    draining.state.server.is_draining = True
    answers = [(ask(app, "/health"), ask(app, "/ready")) for app in (full, down, draining)]
    assert [(health.status_code, ready.status_code) for health, ready in answers] == [
        (200, 503),
        (503, 503),
        (503, 503),
    ]
    codes = [ready.json()["error"]["code"] for _, ready in answers]
    assert codes == ["queue_full", "engine_unavailable", "shutting_down"]
    assert answers[0][1].headers["retry-after"] == "2"


def test_limits_of_a_tenant() -> None:
    """Requests at a time, and a bucket of tokens that fills by the minute and may be owed some."""
    now = [0.0]
    usage, limits = Usage(clock=lambda: now[0]), Limits(requests=2, tokens_per_minute=600)
    usage.enter(limits)
    usage.enter(limits)
    with pytest.raises(APIError, match="2 of your requests run or wait") as caught:
        usage.enter(limits)
    assert caught.value.status_code == 429 and caught.value.headers == {"Retry-After": "1"}
    usage.leave()
    usage.count(limits, 650)
    with pytest.raises(APIError, match="the 600 tokens that you may in a minute: try again in 6 seconds"):
        usage.enter(limits)
    now[0] = 5.1
    usage.enter(limits)
    usage.leave()
    now[0] = 1000.0  # it holds the tokens of one minute, not more
    usage.count(limits, 600)
    with pytest.raises(APIError, match="try again in 1 second"):
        usage.enter(limits)
    assert usage.num_requests == 1
    Usage().enter(Limits())


def test_limits_over_http(tmp_path: Path) -> None:
    """They are a tenant's, whatever key it uses; what needs no engine is not limited, and an error takes no place."""
    path = tmp_path / "keys"
    path.write_text("alice a1 requests=1\nalice a2\nbob b\n")
    tenants = Tenants.from_options(None, str(path))
    app = create_app(fake_engine(), ServerOptions(api_keys=str(path)), tenants=tenants)

    async def post(key: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post("/v1/completions", headers=bearer(key), json={"prompt": 5.5})

    def statuses(*keys: str) -> list[int]:
        return [asyncio.run(post(key)).status_code for key in keys]

    assert statuses("a1", "a1", "a2", "b") == [400] * 4
    usage = tenants.authenticate(bearer("a1")).usage
    usage.enter(Limits())
    assert statuses("a1", "a2", "b") == [429, 429, 400]
    assert ask(app, "/v1/models", bearer("a1")).status_code == 200
    answer = asyncio.run(post("a2"))
    assert answer.headers["retry-after"] == "1" and answer.json()["error"]["code"] == "too_many_requests"


def test_keys_that_are_read_again(tmp_path: Path) -> None:
    """A tenant keeps its passages, and what it has asked for, when its keys change. A key without a name is itself,
    whatever its number is."""
    path = tmp_path / "keys"
    path.write_text("alice a1 requests=1\nx\ny\n")
    tenants = Tenants.from_options(None, str(path))
    alice, y = (tenants.authenticate(bearer(key)) for key in ("a1", "y"))
    path.write_text("alice a3 requests=2\ny\n")
    tenants.replace(Tenants.from_options(None, str(path), tenants))
    for key in ("a1", "x"):
        with pytest.raises(APIError, match="not one of this server's"):
            tenants.authenticate(bearer(key))
    new = tenants.authenticate(bearer("a3"))
    assert (new.salt, new.limits.requests) == (alice.salt, 2) and new.usage is alice.usage
    renumbered = tenants.authenticate(bearer("y"))
    assert renumbered.salt == y.salt and renumbered.usage is y.usage and renumbered.name != y.name


@pytest.mark.parametrize("is_delta", [False, True])
def test_tokens_are_counted_as_they_come(is_delta: bool) -> None:
    now = [0.0]
    tenant = Tenant("a", None, Limits(tokens_per_minute=100), Usage(clock=lambda: now[0]))
    counter = TokenCounter(tenant, 60, is_delta)
    for tokens in ([1] * 10, [1] * 25, [1] * 5) if is_delta else ([1] * 10, [1] * 35, [1] * 40):
        tenant.usage.enter(tenant.limits)
        counter.on_output(cast(Any, SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)])))
    with pytest.raises(APIError, match="the 100 tokens"):
        tenant.usage.enter(tenant.limits)
