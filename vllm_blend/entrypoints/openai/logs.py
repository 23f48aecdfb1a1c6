"""Where the log lines of the server go."""

from __future__ import annotations

import logging

from vllm_blend.log_lines import REQUESTS_LOGGER, JSONFormatter, TextFormatter


def configure_logging(log_format: str, uvicorn_level: str, logs_requests: bool) -> None:
    """Send the messages of this package, uvicorn and OpenTelemetry to stderr, in the given format.

    Handlers of other libraries stay as they are: `logging.config` would close them, and with some of them stderr.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter() if log_format == "json" else TextFormatter())
    for name, level in (("vllm_blend", "INFO"), ("uvicorn", uvicorn_level.upper()), ("opentelemetry", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
    # The engine process does as this one does.
    logging.getLogger(REQUESTS_LOGGER).setLevel("NOTSET" if logs_requests else "WARNING")
