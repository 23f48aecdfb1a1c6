"""The last minutes, hours and day of a server, for its status page."""

from __future__ import annotations

import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

LATENCY_SECONDS = 300.0  # how far back percentiles look
RATE_SECONDS = 10.0  # and rates
SHARE_MINUTES = 5  # and the share of reused tokens
MAX_LATENCIES = 10_000
HOUR, DAY = (60, 60), (1200, 72)  # seconds of a period, and how many are kept
MAX_SAMPLES = 256  # times to the first token that a period keeps, drawn evenly from all


@dataclass
class _Second:
    """What was counted within a second."""

    number: int
    prompt_tokens: int = 0
    generation_tokens: int = 0
    requests: int = 0


@dataclass
class Period:
    """What was counted within a period of a timeline."""

    number: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompts: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    first_tokens: list[float] = field(default_factory=list)

    def count_first_token(self, latency: float, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        self.prompts += 1
        self.prompt_tokens += num_prompt_tokens
        self.cached_tokens += num_cached_tokens
        if len(self.first_tokens) < MAX_SAMPLES:
            self.first_tokens.append(latency)
        elif (place := random.randrange(self.prompts)) < MAX_SAMPLES:
            self.first_tokens[place] = latency


class Timeline:
    """Equal periods, of which the last ones are kept."""

    def __init__(self, clock: Callable[[], float], seconds: int, count: int) -> None:
        self._clock, self.seconds, self.count = clock, seconds, count
        self._periods: deque[Period] = deque(maxlen=count)
        self._first = self._now()

    @property
    def period(self) -> Period:
        """Return the period that runs."""
        number = self._now()
        if not self._periods or self._periods[-1].number != number:
            self._periods.append(Period(number))
        return self._periods[-1]

    def last(self, count: int) -> list[Period]:
        """Return what is kept of the last periods, the running one included. Those without anything are left out."""
        since = self._now() - count
        return [period for period in self._periods if period.number > since]

    def points(self) -> dict[str, Any]:
        """Return the timeline as the status page draws it: a point for every period since the server started, as far
        back as they are kept, the oldest first. A number that a period does not have is None."""
        kept = {period.number: period for period in self._periods}
        now = self._now()
        points = []
        for number in range(max(self._first, now - self.count + 1), now + 1):
            period = kept.get(number, Period(number))
            times = sorted(period.first_tokens)
            points.append(
                {
                    "reused": share(period.cached_tokens, period.prompt_tokens),
                    "first_token_p50": percentile(times, 0.5),
                    "first_token_p99": percentile(times, 0.99),
                    "errors": period.errors.total(),
                }
            )
        return {"seconds": self.seconds, "count": self.count, "points": points}

    def _now(self) -> int:
        return int(self._clock() // self.seconds)


class Recent:
    """Times to the first token, times between tokens, rates, reuse and errors. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.first_tokens: deque[tuple[float, float]] = deque(maxlen=MAX_LATENCIES)
        self.steps: deque[tuple[float, float]] = deque(maxlen=MAX_LATENCIES)
        self.seconds: deque[_Second] = deque(maxlen=int(RATE_SECONDS) + 2)
        self.hour, self.day = Timeline(clock, *HOUR), Timeline(clock, *DAY)

    def count_first_token(self, latency: float, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        self.first_tokens.append((self.clock(), latency))
        self._second().prompt_tokens += num_prompt_tokens
        for timeline in (self.hour, self.day):
            timeline.period.count_first_token(latency, num_prompt_tokens, num_cached_tokens)

    def count_step(self, latency: float) -> None:
        self.steps.append((self.clock(), latency))

    def count_generated(self, num_tokens: int) -> None:
        self._second().generation_tokens += num_tokens

    def count_finished(self) -> None:
        self._second().requests += 1

    def count_error(self, kind: str, count: int = 1) -> None:
        for timeline in (self.hour, self.day):
            timeline.period.errors[kind] += count

    def errors(self) -> Counter[str]:
        """Return the errors of the last hour by kind."""
        total: Counter[str] = Counter()
        for period in self.hour.last(self.hour.count):
            total += period.errors
        return total

    def reuse(self) -> dict[str, float | int | None]:
        """Return how many prompts there were in the last minutes, and which share of their tokens was reused."""
        periods = self.hour.last(SHARE_MINUTES)
        cached, prompt = sum(each.cached_tokens for each in periods), sum(each.prompt_tokens for each in periods)
        return {"prompts": sum(each.prompts for each in periods), "share": share(cached, prompt)}

    def percentiles(self, latencies: Sequence[tuple[float, float]]) -> dict[str, float | int | None]:
        """Return the median and the 99th percentile of latencies, in seconds, and how many there are."""
        since = self.clock() - LATENCY_SECONDS
        values = sorted(latency for at, latency in latencies if at >= since)
        return {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99), "count": len(values)}

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


def share(part: float, whole: float) -> float | None:
    """Return which share of a whole a part is; None if there is nothing."""
    return part / whole if whole else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least `share` of the sorted values do not exceed; None without values."""
    return values[math.ceil(share * len(values)) - 1] if values else None
