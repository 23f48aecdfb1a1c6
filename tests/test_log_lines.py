"""Log lines, as text and as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from vllm_blend.log_lines import REQUEST_ID, REQUESTS_LOGGER, JSONFormatter, LogSettings, TextFormatter, log_request


@pytest.fixture
def request_id() -> Iterator[str]:
    token = REQUEST_ID.set("r-1")
    yield "r-1"
    REQUEST_ID.reset(token)


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord("vllm_blend.x", logging.WARNING, "x.py", 1, message, None, None)


def test_lines_have_the_id_of_the_request_that_they_are_about(request_id: str) -> None:
    assert TextFormatter().format(record("odd")).endswith("WARNING vllm_blend.x: odd request_id=r-1")
    assert TextFormatter(is_engine=True).format(record("request r-1")).endswith("engine vllm_blend.x: request r-1")
    line = json.loads(JSONFormatter(is_engine=True).format(record("odd")))
    assert (line["message"], line["request_id"], line["process"], line["level"]) == ("odd", "r-1", "engine", "warning")


def test_lines_about_no_request_have_none() -> None:
    assert TextFormatter().format(record("odd")).endswith(": odd")
    assert json.loads(JSONFormatter().format(record("odd"))).keys() == {"time", "level", "logger", "message"}


def test_a_client_cannot_write_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, REQUESTS_LOGGER):
        log_request({"path": "/a\nERROR forged status=200", "quoted": '"', "status": 404, "none": None})
    [line] = caplog.records
    assert line.getMessage() == r'path="/a\nERROR forged status=200" quoted="\"" status=404 none=None'
    assert json.loads(JSONFormatter().format(line))["path"] == "/a\nERROR forged status=200"


@pytest.mark.parametrize("is_json", [True, False])
def test_the_engine_process_logs_as_the_server_does(is_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter() if is_json else TextFormatter())
    monkeypatch.setattr(logging.getLogger("vllm_blend"), "handlers", [handler])
    settings = LogSettings.current()
    assert settings.is_json is is_json
    assert settings.level == logging.getLogger("vllm_blend").getEffectiveLevel()
    assert settings.shows_requests is logging.getLogger(REQUESTS_LOGGER).isEnabledFor(logging.INFO)
