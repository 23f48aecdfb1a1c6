"""Leaves a medium that keeps failing alone for a while."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class CircuitBreaker:
    """Opens after `threshold` failures in a row, and then lets one try through every `seconds`.

    There is one warning an outage. When `allows` has returned True and something was tried, `succeeded` or `failed`
    follows.
    """

    def __init__(
        self, what: str, consequence: str, threshold: int, seconds: float, redact: Callable[[str], str] = str
    ) -> None:
        """`redact` removes from the message of an error what must not be logged."""
        self.what, self.consequence, self.threshold, self.seconds = what, consequence, threshold, seconds
        self.redact = redact
        self.num_failures = 0
        self.num_refused = 0
        self._lock = threading.Lock()
        self._failures_in_a_row = 0
        self._retry_at = 0.0  # time.monotonic

    @property
    def is_open(self) -> bool:
        return self._failures_in_a_row >= self.threshold

    def allows(self) -> bool:
        """Return whether to try now; a refusal is counted."""
        with self._lock:
            if self.is_open:
                now = time.monotonic()
                if now < self._retry_at:
                    self.num_refused += 1
                    return False
                self._retry_at = now + self.seconds  # other threads wait for the result of this try
            return True

    def succeeded(self) -> None:
        with self._lock:
            if self.is_open:
                logger.info("%s works again", self.what)
            self._failures_in_a_row = 0

    def failed(self, error: BaseException) -> None:
        with self._lock:
            self.num_failures += 1
            self._failures_in_a_row += 1
            self._retry_at = time.monotonic() + self.seconds
            if self._failures_in_a_row == self.threshold:
                reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                message = "%s failed (%s): %s, tried again every %g s"
                logger.warning(message, self.what, self.redact(reason), self.consequence, self.seconds)
