"""What the test run says of its own memory."""

from __future__ import annotations

import weakref

import pytest
import torch

from tests import conftest, memory

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


def test_a_run_that_took_too_much_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any("GiB" in fault for fault in conftest.faults())
    monkeypatch.setattr(memory, "LIMIT_GIB", memory.peak_gib() / 2)
    assert any("GiB, more than" in fault for fault in conftest.faults())
