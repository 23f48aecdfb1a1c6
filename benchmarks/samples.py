"""Keeps the single measurements behind a median, where `benchmarks.run` asks for them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "BENCHMARK_SAMPLES"  # a file to add to


def record(name: str, seconds: Sequence[float]) -> None:
    """Add the times of one row to the file that the variable names, as a line of JSON. Without it, do nothing."""
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, "seconds": list(seconds)}) + "\n")


def read(path: Path) -> list[dict[str, object]]:
    """Return what `record` has written, in order; nothing if there is no such file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
