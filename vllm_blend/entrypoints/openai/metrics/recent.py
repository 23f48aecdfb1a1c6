"""The last minutes of a server, for its status page."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LATENCY_SECONDS = 300.0  # how far back percentiles look
RATE_SECONDS = 10.0  # and rates
MAX_LATENCIES = 10_000


@dataclass
class _Second:
    """What was counted within a second."""

    number: int
    prompt_tokens: int = 0
    generation_tokens: int = 0
    requests: int = 0


@dataclass
class Recent:
    """Times to the first token, times between tokens and rates. `clock` counts seconds."""

    clock: Callable[[], float] = time.monotonic
    first_tokens: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_LATENCIES))
    steps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_LATENCIES))
    seconds: deque[_Second] = field(default_factory=lambda: deque(maxlen=int(RATE_SECONDS) + 2))

    def count_first_token(self, latency: float, num_prompt_tokens: int) -> None:
        self.first_tokens.append((self.clock(), latency))
        self._second().prompt_tokens += num_prompt_tokens

    def count_step(self, latency: float) -> None:
        self.steps.append((self.clock(), latency))

    def count_generated(self, num_tokens: int) -> None:
        self._second().generation_tokens += num_tokens

    def count_finished(self) -> None:
        self._second().requests += 1

    def percentiles(self, latencies: Sequence[tuple[float, float]]) -> dict[str, float | int | None]:
        """Return the median and the 99th percentile of latencies, in seconds, and how many there are."""
        since = self.clock() - LATENCY_SECONDS
        values = sorted(latency for at, latency in latencies if at >= since)
        return {"p50": _percentile(values, 0.5), "p99": _percentile(values, 0.99), "count": len(values)}

    def rates(self) -> dict[str, float]:
        """Return tokens and requests per second. The second that is not over does not count."""
        now = int(self.clock())
        past = [second for second in self.seconds if now - RATE_SECONDS <= second.number < now]
        names = ("prompt_tokens", "generation_tokens", "requests")
        return {name: sum(getattr(second, name) for second in past) / RATE_SECONDS for name in names}

    def _second(self) -> _Second:
        number = int(self.clock())
        if not self.seconds or self.seconds[-1].number != number:
            self.seconds.append(_Second(number))
        return self.seconds[-1]


def _percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least `share` of the sorted values do not exceed; None without values."""
    return values[math.ceil(share * len(values)) - 1] if values else None
