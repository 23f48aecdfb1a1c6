"""Environment variables of `vllm serve`: honoured, refused by name, or named in a warning; never ignored in silence."""

from __future__ import annotations

import logging

import pytest

from tests.entrypoints.openai.servers import REUSE_DEMO
from vllm_blend.entrypoints.openai.tenancy import ANYONE, Tenants
from vllm_blend.entrypoints.serve import main, parse
from vllm_blend.unsupported.environment import REFUSED, apply_environment

pytestmark = pytest.mark.cpu_only


def test_the_key_of_the_environment_closes_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    _, options = parse([REUSE_DEMO])
    assert options.api_key == ["secret"]
    tenants = Tenants.from_options(options.api_key, options.api_keys)
    assert tenants.authenticate({"authorization": "Bearer secret"}) is not ANYONE
    assert parse([REUSE_DEMO, "--api-key", "other"])[1].api_key == ["other"]


def test_seconds_of_the_environment(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "65")
    assert parse([REUSE_DEMO])[1].timeout_keep_alive == 65
    assert parse([REUSE_DEMO, "--timeout-keep-alive", "7"])[1].timeout_keep_alive == 7
    assert "VLLM_HTTP_TIMEOUT_KEEP_ALIVE is ignored, as --timeout-keep-alive is given" in caplog.text
    with pytest.raises(ValueError, match="VLLM_HTTP_TIMEOUT_KEEP_ALIVE must be whole seconds"):
        apply_environment({}, {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "1.5"})


def test_an_empty_key_does_not_open_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", " ")
    assert main([REUSE_DEMO]) == 2
    assert "the environment variable VLLM_API_KEY is empty" in capsys.readouterr().err


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_server_would_not_do_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"the environment variable {name} is not supported: .*; unset it") as caught:
        apply_environment({}, {name: "1secret"})
    assert "1secret" not in str(caught.value)
    assert apply_environment({}, {name: "0"}) == apply_environment({}, {name: ""}) == {}


def test_what_changes_nothing_is_named_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    read = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_BLEND_ALIAS": "0", "HOME": "/"}
    # Kubernetes sets these beside a service of the name vllm, or vllm-router
    pod = {
        "VLLM_PORT": "tcp://10.0.0.1:80",
        "VLLM_PORT_80_TCP_ADDR": "10.0.0.1",
        "VLLM_ROUTER_SERVICE_HOST": "10.0.0.2",
    }
    with caplog.at_level(logging.WARNING):
        assert apply_environment({"port": 1}, read | pod) == {"port": 1}
        assert caplog.records == []
        apply_environment({}, {"VLLM_USE_V1": "1", "VLLM_ATTENTION_BACKEND": "secret"})
    [record] = caplog.records
    assert record.getMessage() == "environment variables that change nothing here: VLLM_ATTENTION_BACKEND, VLLM_USE_V1"
