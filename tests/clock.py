"""Time that tests make pass, in place of the machine's: what is late or due then does not depend on how busy it is."""

from __future__ import annotations

from types import ModuleType

import pytest


class Clock:
    """Stands still until it is told to go on. Takes the place of the module `time`, of which it has `monotonic`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """The clock of these modules until the test ends."""
        self.now = 1000.0  # seconds
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
