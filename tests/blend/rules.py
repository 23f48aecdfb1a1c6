"""Selectors that are registered for the time of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_blend.blend.selectors import SELECTORS


@contextmanager
def selectors_restored() -> Iterator[None]:
    """Forget at the end which selectors were registered meanwhile."""
    before = dict(SELECTORS)
    try:
        yield
    finally:
        SELECTORS.clear()
        SELECTORS.update(before)
