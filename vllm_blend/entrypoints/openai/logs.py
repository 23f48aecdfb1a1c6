"""Log lines of the server: text, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JSONFormatter(logging.Formatter):
    """Formats a record as a JSON object; the fields of a request's line are keys of their own."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        entry |= {"message": record.getMessage()} if fields is None else {"message": "request", **fields}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def configure_logging(log_format: str, uvicorn_level: str) -> None:
    """Send the messages of this package, uvicorn and OpenTelemetry to stderr, in the given format.

    Handlers of other libraries stay as they are: `logging.config` would close them, and with some of them stderr.
    """
    is_json = log_format == "json"
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter() if is_json else logging.Formatter(TEXT_FORMAT))
    for name, level in (("vllm_blend", "INFO"), ("uvicorn", uvicorn_level.upper()), ("opentelemetry", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
