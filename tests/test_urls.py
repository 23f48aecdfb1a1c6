"""No secret of a URL is in what is shown of it, nor in messages about it."""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_blend.checks import check_field_types
from vllm_blend.engine_args import EngineArgs
from vllm_blend.kv_store import objects
from vllm_blend.kv_store.options import ChunkStoreConfig
from vllm_blend.kv_store.remote import RemoteChunkStore
from vllm_blend.kv_store.store_config import RemoteStoreConfig
from vllm_blend.urls import HIDDEN, redact_repr, redact_secrets, redact_url

SECRET = "hunter2hunter2"
URLS = [
    f"redis://:{SECRET}@host:6379/0",
    f"redis://{SECRET}@host:6379/0",
    f"redis://user:{SECRET}@host:6379/0?db=1",
    f"redis://host:6379/0?password={SECRET}",
    f"redis://host:6379/0?db=1&password={SECRET}@x&username={SECRET}",
    f"redis://user:pa/{SECRET}@host/0",
    f"redis://user:pa?{SECRET}@host/0",
    f"redis://user:pa#{SECRET}@host/0",
    f"redis://user:p@{SECRET}@host/0",
    f"redis://:{SECRET}",
    f"unix://user:{SECRET}@/tmp/redis.sock",
    f"unix:///tmp/redis.sock?password={SECRET}",
    f"s3://bucket/folder?token={SECRET}",
    f"ftp://user:{SECRET}@host/folder#{SECRET}",
    f"redis:host?password={SECRET}",
    f"user:{SECRET}@host",
]


@pytest.mark.parametrize("url", URLS)
def test_secrets_are_not_shown(url: str) -> None:
    assert SECRET not in redact_url(url) and HIDDEN in redact_url(url)
    for text in (f"cannot reach {url}: refused", f"Port could not be cast to integer value as {SECRET!r}", repr(url)):
        assert SECRET not in redact_secrets(text, url) or "://" not in url
    if "://" in url:
        assert SECRET not in redact_repr(url) and SECRET not in redact_repr(url.encode())


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("file:///var/cache/chunks", "file:///var/cache/chunks"),
        ("s3://bucket/some/folder", "s3://bucket/some/folder"),
        ("redis://u:p@host:6379/0?db=1", "redis://***@host:6379/0?db=***"),
        ("redis://host?password=a@b", "redis://***"),
        ("unix:///tmp/redis.sock?db=1", "unix:///tmp/redis.sock?db=***"),
        ("a folder", "a folder"),
    ],
)
def test_the_rest_is(url: str, shown: str) -> None:
    assert redact_url(url) == shown
    assert redact_secrets(f"{url} is away", url) == f"{shown} is away"


@pytest.mark.parametrize(
    "name",
    ["Password", "username", "client_secret", "token", "api_key", "sig", "credential", "auth", "pwd"],
)
def test_a_short_value_is_hidden_where_its_name_says_that_it_is_secret(name: str) -> None:
    assert redact_secrets("no 7x3 here", f"redis://host/0?{name}=7x3") == "no *** here"
    assert redact_secrets("no 7x3 here", "redis://host/0?db=7x3") == "no 7x3 here"


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=8, max_size=20)


@given(secret=TEXT, where=st.sampled_from(["redis://u:{}@host:1/0", "redis://h/0?password={}", "redis://{}@h"]))
@example(secret="p@ss:w/o?r#d", where="redis://u:{}@host:1/0")
def test_any_password_is_hidden_quoted_and_not(secret: str, where: str) -> None:
    url = where.format(quote(secret, safe=""))
    for said in (secret, quote(secret, safe=""), url):
        text = redact_secrets(f"<<{said}>>", url)
        assert secret not in text and quote(secret, safe="") not in text and text.startswith("<<")


def test_configurations_do_not_show_it() -> None:
    url = URLS[0]
    args = EngineArgs(model="m", enable_blending=True, chunk_store_url=url)
    store = ChunkStoreConfig(url=url)
    for shown in (args, store, RemoteStoreConfig(url, "0" * 32)):
        assert SECRET not in repr(shown) and SECRET not in str(shown)
    wrong: Any = url.encode()
    with pytest.raises(ValueError, match="chunk_store_url=") as raised:
        check_field_types(EngineArgs(model="m", chunk_store_url=wrong))
    assert SECRET not in str(raised.value)
    with pytest.raises(ValueError, match="the engine does not blend") as raised:
        EngineArgs(model="m", chunk_store_url=url).create_engine_config()
    assert SECRET not in str(raised.value)


class Failing:
    """A client that repeats the URL in whatever goes wrong."""

    max_bytes = None

    def __init__(self, url: str, error: type[Exception]) -> None:
        self.url, self.error = url, error

    def __getattr__(self, name: str) -> Any:
        def fail(*_: object) -> None:
            raise self.error(f"{name} of {self.url} as {SECRET} failed")

        return fail


@pytest.mark.parametrize("url", [url for url in URLS if "://" in url])
@pytest.mark.parametrize("error", [OSError, objects.Rejected])
def test_what_a_client_says_is_logged_without_it(
    url: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm_blend.kv_store.remote.open_objects", lambda *_: Failing(url, error))
    caplog.set_level(logging.DEBUG)
    store = RemoteChunkStore(RemoteStoreConfig(url, "0" * 32, max_failures=1))
    key = "1" * 32
    assert store.get(key) is None and key not in store
    store.remove(key)
    assert "failed" in caplog.text and SECRET not in caplog.text and SECRET not in repr(store.stats.misses)


@pytest.mark.parametrize("client", ["RedisObjects", "FsspecObjects"])
@pytest.mark.parametrize("error", [ValueError, OSError, ImportError])
@pytest.mark.parametrize("url", URLS)
def test_what_a_client_says_of_a_url_it_does_not_take_is_raised_without_it(
    url: str, error: type[Exception], client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(url: str, *_: object) -> None:
        raise error(f"{SECRET} in {url} is no port")

    monkeypatch.setattr(objects, "RedisObjects", fail)
    monkeypatch.setattr(objects, "FsspecObjects", fail)
    with pytest.raises((ValueError, ImportError)) as raised:
        objects.open_objects(url, 1.0)
    assert SECRET not in str(raised.value)
    assert raised.value.__cause__ is None and raised.value.__suppress_context__ == ("://" in url)
