"""`benchmarks.host_time` measures both ways of decoding, with its stand-in for the device, and compares two sides."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import host_time
from benchmarks.host_time import LABELS, MODEL, ROOT, run_turn, table, text_token_ids

pytestmark = pytest.mark.cpu_only


@pytest.mark.skipif(sys.platform != "linux", reason="the CPU time of another process is read from a clock of Linux")
@pytest.mark.parametrize(
    ("modes", "params"),
    [
        (["offline", "streaming"], {}),
        (["offline"], {"repetition_penalty": 1.05}),  # prepared for a kernel that is not run
    ],
)
def test_a_turn_measures_everything(modes: list[str], params: dict[str, Any]) -> None:
    spec: dict[str, Any] = {"requests": 4, "prompt": 8, "tokens": 40, "repeats": 1, "seed": 0, "device_ms": 20.0}
    spec |= {
        "model": str(MODEL),
        "modes": modes,
        "params": params,
        "token_ids": text_token_ids()[:500],
    }
    found = run_turn(ROOT, spec)
    assert list(found) == [name for name in LABELS if "streaming" in modes or name.startswith("offline")]
    assert all(len(samples) == 1 and samples[0] > 0 for samples in found.values())
    if "streaming" in modes:
        assert found["stream_wall"][0] > 18.0  # the device's time is in it, by another clock than its own
        assert found["stream_tokens_an_output"][0] >= 1.0


def test_a_turn_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker.py").write_text("import json, sys\njson.load(open(sys.argv[1]))['model']\n")
    monkeypatch.setattr(host_time, "FOLDER", tmp_path)
    with pytest.raises(RuntimeError, match="KeyError"):
        run_turn(ROOT, {"modes": ["offline"]})


def test_the_table_compares_two_sides() -> None:
    turns = {
        "this": [{"offline_cpu": [1.0, 1.1, 0.9]}, {"offline_cpu": [1.0, 1.0, 1.0]}],
        "other": [{"offline_cpu": [3.0, 3.0, 3.0]}, {"offline_cpu": [3.0, 3.3, 2.7]}],
    }
    head, _, row = table(turns)
    assert "other over this" in head
    assert row.startswith("| `LLM.generate`: CPU ms a step | 1.00 | 3.00 | 3.00x (")
