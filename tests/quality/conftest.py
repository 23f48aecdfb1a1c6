"""Workers of tests that are there in a moment."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest

from tests.forked import context, end_server


@pytest.fixture(scope="module")
def fork_server_ends() -> Iterator[None]:
    yield
    end_server()


@pytest.fixture
def forked_workers(fork_server_ends: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked from a server that has everything imported. test_ordinals.py has them begin afresh."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
