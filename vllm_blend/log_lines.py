"""Log lines of the server's process and of the engine process: text, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

# The id of the request for which something is done: lines that are logged meanwhile have it.
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
# One line for each request, in both processes: its logger.
REQUESTS_LOGGER = "vllm_blend.access"
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_ENGINE_TEXT = "%(asctime)s %(levelname)s engine %(name)s: %(message)s"
_PLAIN = re.compile(r"[!-~]+")  # printable, without blanks


class TextFormatter(logging.Formatter):
    """Formats a record as text, with the request's id behind it unless it is in the message."""

    def __init__(self, is_engine: bool = False) -> None:
        super().__init__(_ENGINE_TEXT if is_engine else _TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        line, request_id = super().formatMessage(record), REQUEST_ID.get()
        return line if request_id is None or request_id in line else f"{line} request_id={request_id}"


class JSONFormatter(logging.Formatter):
    """Formats a record as a JSON object; the fields of a request's line are keys of their own."""

    def __init__(self, is_engine: bool = False) -> None:
        super().__init__()
        self._process = {"process": "engine"} if is_engine else {}

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **self._process,
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        entry |= {"message": record.getMessage()} if fields is None else {"message": "request", **fields}
        if REQUEST_ID.get() is not None:
            entry.setdefault("request_id", REQUEST_ID.get())
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


@dataclass(frozen=True)
class LogSettings:
    """The log settings of a process. The server hands its own to the engine process."""

    level: int
    is_json: bool
    shows_requests: bool

    @classmethod
    def current(cls) -> LogSettings:
        """Return the settings of this process."""
        logger = logging.getLogger("vllm_blend")
        is_json = any(isinstance(handler.formatter, JSONFormatter) for handler in logger.handlers)
        return cls(logger.getEffectiveLevel(), is_json, logging.getLogger(REQUESTS_LOGGER).isEnabledFor(logging.INFO))

    def apply_to_engine(self) -> None:
        """Apply the settings to this process, an engine process, which logs to stderr."""
        handler = logging.StreamHandler()
        handler.setFormatter((JSONFormatter if self.is_json else TextFormatter)(is_engine=True))
        logging.basicConfig(level=self.level, handlers=[handler])
        if not self.shows_requests:
            logging.getLogger(REQUESTS_LOGGER).setLevel(logging.WARNING)


def log_request(fields: Mapping[str, Any]) -> None:
    """Log the line of a request."""
    logger = logging.getLogger(REQUESTS_LOGGER)
    if logger.isEnabledFor(logging.INFO):
        text = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
        logger.info("%s", text, extra={"fields": fields})


def _shown(value: Any) -> str:
    """Return a value for a line of text; one that could break the line, or be taken for two, is quoted as in JSON."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) and not text.startswith('"') else json.dumps(text)
