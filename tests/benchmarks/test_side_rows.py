"""Every row for a GPU is work that our engine does or refuses by name: here on a tiny model, and a 32nd of its size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import shapes
from benchmarks.kv_compress import TINY
from benchmarks.side import worker
from benchmarks.side.rows import PROFILES, Group, Row
from benchmarks.side.turns import OURS
from tests.engine.engines import threads

pytestmark = [pytest.mark.cpu_only, pytest.mark.slow]
GPU = PROFILES["gpu"]()
SIZES = ("tokens", "context", "passage", "requests", "batch", "tokens_in", "tokens_out")
SMALLER = {
    "device": "cpu",
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "num_gpu_blocks_override": 400,
    "blend_chunk_cache_gib": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shape") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(shapes.SHAPES, "tiny", TINY | {"vocab_size": 2048, "max_position_embeddings": 32768})
        shapes.write_shape("tiny", folder)
    return folder


def smaller(work: dict[str, Any]) -> dict[str, Any]:
    def scale(value: int | list[int]) -> int | list[int]:
        return max(4, value // 32) if isinstance(value, int) else [max(4, each // 32) for each in value]

    one = work.get("requests") == 1
    return work | {
        name: scale(work[name]) for name in SIZES if name in work and not (one and name in ("requests", "tokens_out"))
    }


def told(row: Row) -> dict[str, Any]:
    counts = {"warm_up": 1, "repeats": 1}
    return {"name": row.name, "kind": row.kind, "work": smaller(row.work), "ours": row.ours, **counts}


@pytest.mark.parametrize("group", GPU.groups, ids=lambda group: group.name)
def test_our_engine_does_the_work_of_every_row(
    group: Group, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker of a turn runs in this process, which has already imported what a new process would for each group."""
    given = group.options | group.ours
    options = given | {name: value for name, value in SMALLER.items() if name in given or name == "device"}
    rows = [row for row in GPU.rows if row.group == group.name]
    spec = {"model": str(model), "options": options, "seed": 0, "vocabulary": 512, "rows": [told(row) for row in rows]}
    spec_file = tmp_path / "spec.json"
    spec_file.write_text(json.dumps({**spec, "side": OURS}))
    with (tmp_path / "events").open("w+") as file, threads(1):
        monkeypatch.setattr(sys, "argv", ["worker.py", str(spec_file), str(file.fileno())])
        worker.main()
        file.seek(0)
        events = [json.loads(line) for line in file]
    assert [event for event in events if event["event"] in ("refused", "failed")] == []
    assert events[-1] == {"event": "done"}
    ended = {event["row"]: event["samples"] for event in events if event["event"] == "end"}
    assert ended.keys() == {row.name for row in rows} and all(len(samples) == 1 for samples in ended.values())
