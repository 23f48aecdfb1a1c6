"""What a test run says at its end. Workers of pytest-xdist hand what they saw to the process that started them."""

from __future__ import annotations

from typing import Any

import torch

from tests import memory, settings, tolerances

_of_workers: list[dict[str, Any]] = []


def of_this_process() -> dict[str, Any]:
    """Return what this process has seen, in types that go from one process to another."""
    too_often = [f"excused too often: {kind}" for kind in tolerances.too_often()]
    return {"peak_gib": memory.peak_gib(), "lines": tolerances.report(), "faults": too_often}


def add_worker(seen: dict[str, Any]) -> None:
    """Keep what `of_this_process` returned in a worker."""
    _of_workers.append(seen)


def lines() -> list[str]:
    """Return what was measured, a line each."""
    return [*(line for seen in _all() for line in seen["lines"]), f"peak memory: {_peak_gib():.1f} GiB"]


def faults() -> list[str]:
    """Return what is wrong with the run as a whole."""
    found = [fault for seen in _all() for fault in seen["faults"]]
    has_gpu = torch.cuda.is_available()  # CUDA's libraries and pinned memory take as much again
    if settings.current().device == "cpu" and not has_gpu and _peak_gib() > memory.LIMIT_GIB:
        found.append(f"the tests took {_peak_gib():.1f} GiB, more than {memory.LIMIT_GIB:g}")
    return found


def _all() -> list[dict[str, Any]]:
    return [of_this_process(), *_of_workers]


def _peak_gib() -> float:
    """Return the sum of the processes' peaks, which is at least the peak of their sum."""
    peaks: list[float] = [seen["peak_gib"] for seen in _all()]
    return sum(peaks)
