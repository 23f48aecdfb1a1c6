"""The benchmark's command, on a tiny shape: rows of several runs make one table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import kv_compress as benchmark

ROOT = Path(__file__).resolve().parents[2]


def test_variants_may_be_measured_one_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, table = tmp_path / "rows.jsonl", tmp_path / "table.md"
    asked = ["--small", "--requests", "4", "--tokens-out", "10", "--results", str(results), "--markdown", str(table)]
    benchmark.main([*asked, "--variants", "uncompressed"])
    benchmark.main([*asked, "--variants", "8x"])
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["variant"] for row in rows] == ["uncompressed", "8x"]
    assert all(row["tokens"] == 4 * 10 for row in rows)
    assert rows[0]["concurrent"] < rows[1]["concurrent"] == 4  # three of their prompts fill the pool
    assert rows[0]["compressions"] == 0 < rows[1]["compressions"]
    written = table.read_text()
    assert written.count("| uncompressed |") == written.count("| 8x |") == 1
    assert written in capsys.readouterr().out


def test_a_pool_of_so_many_bytes() -> None:
    """24 GiB of a model whose tokens take 128 KiB; metric and position take 8 bytes beside the 512 of a KV."""
    arguments = {"small": False, "tokens_in": None, "tokens_out": None, "requests": None, "pool_gib": None}
    named = argparse.Namespace(**arguments, backend="auto", metric="kv_compress", interval=None, new_token_limit=None)
    work = benchmark.described(named)
    assert work.blocks(compressed=False) - 1 == 24 * 2**30 // (16 * 128 * 2**10) == 12288
    assert work.blocks(compressed=True) - 1 == 12288 * 512 // 520
