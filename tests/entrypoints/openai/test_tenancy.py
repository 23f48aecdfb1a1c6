"""API keys: who may come in, what belongs to whom, and that no key is ever shown."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from vllm_blend.entrypoints.openai.app import create_app
from vllm_blend.entrypoints.openai.errors import APIError
from vllm_blend.entrypoints.openai.options import ServerOptions
from vllm_blend.entrypoints.openai.tenancy import ANYONE, Tenants, read_keys


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
    path.write_text("# tenants\nalice key-1\n\n  alice key-2\nkey-3\n")
    assert read_keys(path) == [("alice", "key-1"), ("alice", "key-2"), (None, "key-3")]
    for text, message in (("alice key 1\n", "line 1 of .* has 3 words"), ("# none\n", "has no key")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_keys(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_keys(tmp_path / "missing")
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


def test_keys_over_http(caplog: pytest.LogCaptureFixture) -> None:
    """Everything needs a key but what load balancers ask for. The log has the tenant, and no key."""

    async def check_health() -> None:
        return None

    engine: Any = SimpleNamespace(
        config=SimpleNamespace(model=SimpleNamespace(model="m")), max_model_len=8, check_health=check_health
    )
    options = ServerOptions(api_key=["secret-1", "secret-2"])
    app = create_app(engine, options)
    assert "secret" not in repr(options)

    async def ask(path: str, headers: dict[str, str]) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path, headers=headers)

    def status(path: str, headers: dict[str, str]) -> int:
        return asyncio.run(ask(path, headers)).status_code

    caplog.set_level(logging.INFO)
    assert status("/v1/models", bearer("secret-2")) == 200
    for path in ("/v1/models", "/tokenize", "/openapi.json", "/v1/nothing"):
        assert status(path, {}) == status(path, bearer("secret")) == 401
    for path in ("/health", "/ping", "/version"):
        assert status(path, {}) == 200
    answer = asyncio.run(ask("/v1/models", bearer("wrong-key")))
    assert answer.headers["www-authenticate"] == "Bearer" and answer.json()["error"]["code"] == "invalid_api_key"
    assert "tenant=key-2" in caplog.text
    assert "secret" not in caplog.text and "wrong-key" not in caplog.text + answer.text
