"""Decide how much to recompute while chunk KV arrives, and which chunks to compute instead of loading them.

CacheBlend (Yao et al., EuroSys 2025, section 5.1): with a recompute ratio r, recomputing takes r x prefill(L), and
loading takes bytes(L) / throughput. The two overlap, so r can grow, at no cost in time, until recomputing takes as long
as loading; it never falls below the ratio that quality needs.

Here, KV that travels from host memory to a GPU arrives while the request itself is computed, and so does KV still on
disk for a prompt that starts early (`ChunkComposer.start_early`). KV from a server, or from a disk while other requests
are computed, is there before the request runs: recomputing more of it would not overlap with anything. For each chunk,
the controller decides whether loading it from a tier or computing it is faster.

Speeds are moving averages over what was measured in this process.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vllm_blend.kv_store.tiers import ChunkLoad

logger = logging.getLogger(__name__)

WEIGHT = 0.2  # of the newest measurement
MIN_PREFILL_TOKENS = 32  # smaller steps are mostly overhead, and do not count in the speed of prefill
RATIO_STEP = 0.01  # ratios are rounded down to multiples of it, so that noise in the speeds changes few answers
TRY_AGAIN = 16  # after as many choices in a row against a tier, it is measured again


class Average:
    """A moving average of seconds per unit. The first measurement is taken as it is."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, seconds: float, units: int) -> None:
        new = seconds / units
        self.value = new if self.value is None else (1 - WEIGHT) * self.value + WEIGHT * new


@dataclass(frozen=True)
class RatioChoice:
    """A recompute ratio, and the reason for it in words."""

    ratio: float
    reason: str


class LoadingController:
    """The moving averages, and the choices that follow from them. Several threads may use it."""

    def __init__(self, bytes_per_token: int) -> None:
        """Start without any measurement. `bytes_per_token` is the size of one token's K and V in all layers."""
        self.bytes_per_token = bytes_per_token
        self.num_raised = 0  # prompts with a ratio above the floor
        self.num_recomputed = 0  # chunks that were computed though a tier had them
        self.last_ratio: float | None = None
        self._lock = threading.Lock()
        self._loads: dict[str, Average] = {}  # seconds per byte
        self._prefill = Average()  # seconds per token
        self._against: dict[str, int] = {}  # choices in a row

    def loaded(self, what: ChunkLoad, seconds: float) -> None:
        """Note that a chunk has arrived from a tier."""
        with self._lock:
            self._loads.setdefault(what.tier, Average()).add(seconds, what.num_bytes)

    @property
    def knows_prefill(self) -> bool:
        return self._prefill.value is not None

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """Note that a step that only prefilled has computed `num_tokens` tokens."""
        if num_tokens >= MIN_PREFILL_TOKENS:
            with self._lock:
                self._prefill.add(seconds, num_tokens)

    def recompute(self, what: ChunkLoad) -> bool:
        """Return whether computing a chunk again is faster than loading it from its tier. Unmeasured tiers are loaded
        from."""
        with self._lock:
            load, prefill = self._seconds(what.tier, what.num_bytes), self._prefill.value
            if load is None or prefill is None:
                return False
            compute = prefill * what.num_tokens
            slower = load > compute
            count = self._against.get(what.tier, 0) + 1 if slower else 0
            again = count > TRY_AGAIN
            self._against[what.tier] = 0 if again else count
            recompute = slower and not again
            self.num_recomputed += recompute
        logger.debug(
            "a chunk of %d tokens is %s: loading it from the %s takes about %.2f ms, computing it %.2f ms%s",
            what.num_tokens,
            "computed" if recompute else "loaded",
            what.tier,
            load * 1e3,
            compute * 1e3,
            "; it is loaded to measure again" if again else "",
        )
        return recompute

    def choose_ratio(self, floor: float, loads: Mapping[str, int], num_context: int) -> RatioChoice:
        """Return the recompute ratio for a context of `num_context` tokens, of which `loads` has the bytes that are
        loaded from each tier while it is computed."""
        with self._lock:
            known = [seconds for tier, size in loads.items() if (seconds := self._seconds(tier, size)) is not None]
            prefill = self._prefill.value
            choice = _choose(floor, sum(known) or None, None if prefill is None else prefill * num_context)
            self.num_raised += choice.ratio > floor
            self.last_ratio = choice.ratio
        parts = ", ".join(f"{size / 2**20:.1f} MiB from the {tier}" for tier, size in loads.items() if size)
        logger.debug(
            "recompute ratio %.2f for %d tokens, %s: %s", choice.ratio, num_context, parts or "all there", choice.reason
        )
        return choice

    def gauges(self) -> Iterator[tuple[str, float]]:
        """Yield names and values, for metrics. Values that are not known yet are left out."""
        with self._lock:
            yield "controller_prompts_raised", self.num_raised
            yield "controller_chunks_recomputed", self.num_recomputed
            if self.last_ratio is not None:
                yield "controller_ratio", self.last_ratio
            if self._prefill.value:
                yield "controller_prefill_tokens_per_second", 1 / self._prefill.value
            for tier, average in self._loads.items():
                if average.value:
                    yield f"controller_{tier}_bytes_per_second", 1 / average.value

    def _seconds(self, tier: str, num_bytes: int) -> float | None:
        average = self._loads.get(tier)
        return None if average is None or average.value is None else average.value * num_bytes


def _choose(floor: float, load: float | None, prefill: float | None) -> RatioChoice:
    """Choose a ratio from the seconds that loading and a full prefill take; None if not known."""
    if load is None:
        return RatioChoice(floor, "nothing is loaded while it is computed, so the floor is kept")
    if prefill is None or prefill == 0:
        return RatioChoice(floor, "no prefill has been measured yet, so the floor is kept")
    hidden = math.floor(min(1.0, load / prefill) / RATIO_STEP + 1e-9) * RATIO_STEP
    times = f"loading takes about {load * 1e3:.2f} ms, a full prefill {prefill * 1e3:.2f} ms"
    if hidden <= floor:
        return RatioChoice(floor, f"{times}; recomputing the floor takes longer than loading")
    return RatioChoice(round(hidden, 4), f"{times}; a share of {hidden:.2f} hides behind loading")
