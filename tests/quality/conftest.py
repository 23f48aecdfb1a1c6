"""Workers of tests that are there in a moment."""

from __future__ import annotations

import multiprocessing

import pytest

from tests.forked import context


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked from a server that has everything imported. test_ordinals.py has them begin afresh."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
