"""A few questions of the demo data set over a few of their passages: short prompts, quick to compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.pipeline.stages import MODEL, ROOT
from vllm_blend.pipeline.datasets import load_dataset
from vllm_blend.pipeline.files import write_json

__all__ = ["MODEL", "ROOT", "small_samples", "write_small"]

PASSAGES = 4


def small_samples(count: int = 3) -> list[dict[str, Any]]:
    """The first `count` samples, each with its gold passages among the first four."""
    samples = []
    for raw in load_dataset(ROOT / "inputs/musique_s.json")[:count]:
        gold = raw["gold"]
        others = [index for index in range(len(raw["ctxs"])) if index not in gold]
        kept = sorted([*sorted(gold), *others][:PASSAGES])
        samples.append(raw | {"ctxs": [raw["ctxs"][i] for i in kept], "gold": [kept.index(i) for i in gold]})
    return samples


def write_small(folder: Path, count: int = 3) -> Path:
    """The data set as a file."""
    return write_json(folder / "musique_small.json", small_samples(count))
