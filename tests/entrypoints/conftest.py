"""What tests of the server's commands share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from vllm_blend.log_lines import REQUESTS_LOGGER


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Put the loggers back that a server sets up: its handler writes to a stderr that ends with the test."""
    loggers = [logging.getLogger(name) for name in ("vllm_blend", "uvicorn", "opentelemetry", REQUESTS_LOGGER)]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
