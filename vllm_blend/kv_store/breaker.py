"""What keeps failing is left alone for a while."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Breaker:
    """Opens after `threshold` failures in a row, and then lets one try through every `seconds`.

    One warning an outage. An `allows` that was true is followed by `succeeded` or `failed` once something was tried.
    """

    def __init__(
        self, what: str, consequence: str, threshold: int, seconds: float, redact: Callable[[str], str] = str
    ) -> None:
        """`redact` takes from a message of an error what must not be logged."""
        self.redact = redact
        self.what, self.consequence, self.threshold, self.seconds = what, consequence, threshold, seconds
        self.num_failures = 0
        self.num_refused = 0
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._retry_at = 0.0  # time.monotonic

    @property
    def is_open(self) -> bool:
        return self._in_a_row >= self.threshold

    def allows(self) -> bool:
        """Whether to try now; a refusal is counted."""
        with self._lock:
            if self.is_open:
                now = time.monotonic()
                if now < self._retry_at:
                    self.num_refused += 1
                    return False
                self._retry_at = now + self.seconds  # the others wait for what becomes of this try
            return True

    def succeeded(self) -> None:
        with self._lock:
            if self.is_open:
                logger.info("%s works again", self.what)
            self._in_a_row = 0

    def failed(self, error: BaseException) -> None:
        with self._lock:
            self.num_failures += 1
            self._in_a_row += 1
            self._retry_at = time.monotonic() + self.seconds
            if self._in_a_row == self.threshold:
                logger.warning(
                    "%s failed (%s): %s, tried again every %g s",
                    self.what,
                    self.redact(_say(error)),
                    self.consequence,
                    self.seconds,
                )


def _say(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
