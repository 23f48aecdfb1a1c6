"""What the test run says of its own memory."""

from __future__ import annotations

import weakref
from collections import OrderedDict

import pytest
import torch

from tests import kept, memory, run_summary

pytestmark = pytest.mark.cpu_only


class Dropped:
    """Holds memory and itself."""

    def __init__(self) -> None:
        self.tensor, self.me = torch.ones(2 * memory.COLLECT_AFTER, dtype=torch.uint8), self


def test_what_is_dropped_is_freed_once_it_is_much() -> None:
    memory.free_dropped()
    before, dropped = memory.resident_bytes(), weakref.ref(Dropped())
    grown = memory.resident_bytes()
    assert grown > before + memory.COLLECT_AFTER
    memory.free_dropped()
    assert dropped() is None and memory.resident_bytes() < grown - memory.COLLECT_AFTER
    assert memory.peak_gib() * 2**30 > grown - (16 << 20)  # the kernel counts in batches


def test_the_two_engines_that_were_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_kept", OrderedDict())
    first, second = weakref.ref(kept.kept("a", Dropped)), weakref.ref(kept.kept("b", Dropped))
    assert kept.kept("a", Dropped) is first()
    kept.kept("c", Dropped)
    assert list(kept._kept) == ["a", "c"]
    assert second() is None, "the memory of the other is free"


def test_a_run_that_took_too_much_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any("GiB" in fault for fault in run_summary.faults())
    with monkeypatch.context() as patch:
        patch.setattr(memory, "LIMIT_GIB", memory.peak_gib() / 2)
        assert any("GiB, more than" in fault for fault in run_summary.faults())


def test_what_workers_saw_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_summary, "_of_workers", [])
    monkeypatch.setattr(memory, "LIMIT_GIB", memory.peak_gib() + 2)
    seen = run_summary.of_this_process() | {"peak_gib": 1.0, "lines": ["what it measured"], "faults": []}
    run_summary.add_worker(seen)
    assert not run_summary.faults() and "what it measured" in run_summary.lines()
    run_summary.add_worker(seen | {"peak_gib": 1.5, "faults": ["excused too often: drawn tokens"]})
    assert "excused too often: drawn tokens" in run_summary.faults()
    assert any("GiB, more than" in fault for fault in run_summary.faults())
