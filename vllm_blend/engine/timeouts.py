"""When an engine process counts as hanging."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timeouts:
    """How long the server's process believes in an engine process that says nothing, and in a step that does not end.
    In seconds."""

    heartbeat: float = 60.0
    step: float = 600.0


DEFAULT_TIMEOUTS = Timeouts()
