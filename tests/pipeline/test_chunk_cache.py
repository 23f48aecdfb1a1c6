"""Chunks of the folders that cannot be used: each is counted, and the first of each kind are told."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_blend.pipeline.chunk_cache import MOST_NAMED, ChunkCache

pytestmark = pytest.mark.cpu_only


def test_a_cause_that_many_chunks_share_is_not_told_of_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [f"chunk {index}" for index in range(MOST_NAMED + 4)]

    def identify(prefix: str, texts: list[str], encode_after: Any) -> tuple[None, list[SimpleNamespace]]:
        return None, [SimpleNamespace(key=text) for text in texts]

    model = SimpleNamespace(dtype="float32")
    engine: Any = SimpleNamespace(identify_chunks=identify, chunk_store={}, fingerprint=model)
    chunks: Any = [SimpleNamespace(text=name, chunk_id=name, text_before="") for name in names]
    cache = ChunkCache(engine, tmp_path, "", "prefix")
    with caplog.at_level(logging.WARNING):
        assert cache.load(chunks) == ["missing"] * len(names)
    assert cache.counts == {"missing": len(names)} and cache.num_hits == 0
    told = [record.getMessage() for record in caplog.records]
    assert all(name in line for name, line in zip(names, told[:MOST_NAMED], strict=False))
    assert len(told) == MOST_NAMED + 1 and "more stored chunks are missing" in told[-1]
