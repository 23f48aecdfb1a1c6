"""Log lines of the server: text, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import time
from typing import Any


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


def logging_config(log_format: str, uvicorn_level: str) -> dict[str, Any]:
    """Return the configuration (of `logging.config`) that sends messages to stderr in the given format."""
    formatter: dict[str, Any] = (
        {"()": JSONFormatter} if log_format == "json" else {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}
    )
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": formatter},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}},
        "loggers": {
            "vllm_blend": {"handlers": ["stderr"], "level": "INFO", "propagate": False},
            "uvicorn": {"handlers": ["stderr"], "level": uvicorn_level.upper(), "propagate": False},
        },
    }
