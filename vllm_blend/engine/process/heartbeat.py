"""Whether an engine process still works: it says so itself, twice a second, and how often its loop has come round.

A thread of the process sends the beats, so that they go on during a long step: where they stop, the process is stopped
or hangs as a whole. Where they go on and the loop does not come round, a step hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from vllm_blend.engine.process.messages import Beat, new_encoder
from vllm_blend.engine.timeouts import Timeouts

BEAT_SECONDS = 0.5


class Heart:
    """Sends the beats of an engine process while its context lasts; `num_turns` says how often the loop came round."""

    def __init__(self, context: zmq.Context[Any], outbox: str, num_turns: Callable[[], int]) -> None:
        self._context, self._outbox, self._num_turns = context, outbox, num_turns
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heart")

    def __enter__(self) -> Heart:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        encoder = new_encoder()
        with self._context.socket(zmq.PUSH) as sender:  # a socket belongs to one thread
            sender.set_hwm(0)
            sender.connect(self._outbox)
            while not self._stopped.wait(BEAT_SECONDS):
                sender.send(encoder.encode(Beat(self._num_turns())))
            sender.linger = 0


class Pulse:
    """What the server's process has heard of an engine process. One thread enters it, any thread may ask."""

    def __init__(self, pid: int, timeouts: Timeouts, now: Callable[[], float] = time.monotonic) -> None:
        self.pid, self.timeouts, self._now = pid, timeouts, now
        self._heard = self._turned = now()
        self._num_turns = -1

    def enter(self, beat: Beat) -> None:
        """Enter a beat."""
        self._heard = self._now()
        if beat.num_turns != self._num_turns:
            self._num_turns, self._turned = beat.num_turns, self._heard

    def problem(self) -> str | None:
        """Say why the process seems to hang; None if it does not."""
        silence, step = self._now() - self._heard, self._heard - self._turned
        if silence > self.timeouts.heartbeat:
            return (
                f"the engine process (pid {self.pid}) has said nothing for {silence:.0f} seconds, and "
                f"heartbeat_timeout={self.timeouts.heartbeat:g}: it is stopped or hangs; it is started again if it is "
                "killed"
            )
        if step > self.timeouts.step:
            return (
                f"a step of the engine process (pid {self.pid}) has taken {step:.0f} seconds so far, and "
                f"step_timeout={self.timeouts.step:g}: it hangs, or its prompts are too long for this machine; the "
                "process is started again if it is killed"
            )
        return None
