"""The server's side of the engine process: one thread that starts it, hears it, and starts it again when it dies."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from vllm_blend.config import EngineConfig
from vllm_blend.engine.errors import EngineDeadError, QueueFullError, ShuttingDownError
from vllm_blend.engine.process.calls import check_call
from vllm_blend.engine.process.heartbeat import Pulse
from vllm_blend.engine.process.launch import EngineProcess
from vllm_blend.engine.process.messages import (
    Answer,
    Beat,
    Call,
    Error,
    Failed,
    FromEngine,
    Outputs,
    Ready,
    Refused,
    ToEngine,
    raisable,
)
from vllm_blend.engine.timeouts import DEFAULT_TIMEOUTS, Timeouts

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1  # between two looks at whether the process is alive
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 1.0, 60.0  # before a process that died early is started again
STOP_SECONDS = 75.0  # in which a process writes what its chunk store has to write
LONG_LIFE_SECONDS = 60.0  # a process that served as long did not die of how it was started
SHUT_DOWN = "the engine has been shut down"


class Listener(Protocol):
    """Hears what an engine process does. The client's thread calls it, so its methods must not wait."""

    def advanced(self, news: Outputs) -> None:
        """Requests have advanced."""

    def refused(self, number: int, error: Exception) -> None:
        """A request was not taken."""

    def died(self, error: EngineDeadError) -> None:
        """The process has ended, and with it all its requests."""


class EngineClient:
    """Keeps an engine process running. Any thread may call any method."""

    def __init__(self, config: EngineConfig, listener: Listener, timeouts: Timeouts = DEFAULT_TIMEOUTS) -> None:
        self._config, self._listener, self._timeouts = config, listener, timeouts
        self._num_threads = torch.get_num_threads()  # what is set here holds there, too
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # for the sending socket, and for what follows
        self._process: EngineProcess | None = None  # while it is ready
        self._pulse: Pulse | None = None  # of the process that is ready, or was
        self._calls: dict[int, Future[Any]] = {}
        self._problem = "the engine process is being started"
        self._closing = threading.Event()
        self._ready: Future[Ready] = Future()  # the first process
        self._thread = threading.Thread(target=self._run, name="engine-client", daemon=True)

    def start(self) -> None:
        """Start the process. `wait_ready` says how that went."""
        self._thread.start()

    def wait_ready(self) -> Ready:
        """Wait until the engine is loaded. Raises the error with which its process ended instead."""
        return self._ready.result()

    @property
    def pid(self) -> int | None:
        """Return the id of the process; None while none is ready."""
        process = self._process
        return None if process is None else process.pid

    def check_health(self) -> None:
        """Raise EngineDeadError, saying why, unless an engine process is ready and does not hang."""
        if self._process is None:
            raise self._dead()
        if self._pulse is not None and (problem := self._pulse.problem()) is not None:
            raise EngineDeadError(problem)

    def send(self, message: ToEngine) -> None:
        """Send a message. Raises EngineDeadError if there is no engine process, and TypeError or ValueError for what
        cannot be sent."""
        with self._lock:
            if self._process is None:
                raise self._dead()
            self._process.send(message)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Have a method of `calls.CALLS` run between two steps. Raises ValueError or TypeError for one that is not
        there; the future has the result, or the method's error, or EngineDeadError."""
        check_call(method, arguments)
        number, future = next(self._numbers), Future[Any]()
        self._calls[number] = future
        try:
            self.send(Call(number, method, list(arguments)))
        except BaseException:
            self._calls.pop(number, None)
            raise
        return future

    @property
    def num_calls(self) -> int:
        """Return how many calls have not been answered yet."""
        return len(self._calls)

    def fail_calls(self, error: EngineDeadError) -> None:
        """End the calls that have not been answered yet by an error."""
        for number in list(self._calls):
            future = self._calls.pop(number, None)
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(error)

    def shut_down(self) -> None:
        """End the process when its chunk store is written, and wait for that. It does nothing the second time."""
        with self._lock:
            self._closing.set()
            self._process, self._problem = None, SHUT_DOWN
        if self._thread.is_alive():
            self._thread.join()

    def _dead(self) -> EngineDeadError:
        return (ShuttingDownError if self._closing.is_set() else EngineDeadError)(self._problem)

    def _run(self) -> None:
        delay = 0.0
        while not self._closing.wait(delay):
            began = time.monotonic()
            try:
                problem = self._serve()
            except Exception as error:  # it could not be started, say because the disk is full
                problem = f"the engine process could not be run: {error}"
                if self._ready.done():
                    logger.exception("the engine process could not be run")
                else:
                    self._ready.set_exception(error)
            if not self._ready.done():
                self._ready.set_exception(EngineDeadError(problem))
            if self._ready.exception() is not None:  # what never ran is not started again
                return
            if self._closing.is_set():
                return
            lived_long = time.monotonic() - began > LONG_LIFE_SECONDS
            delay = 0.0 if lived_long else min(max(FIRST_DELAY_SECONDS, 2 * delay), LONGEST_DELAY_SECONDS)
            self._problem = f"{problem}; it is being started again"
            logger.error("%s in %.0f s", self._problem, delay)

    def _serve(self) -> str:
        """Start a process and hear it until it has ended; return how it ended."""
        process = EngineProcess(self._config, self._num_threads)
        failure: Error | None = None
        stop_by: float | None = None
        hangs = False
        try:
            while True:
                message = process.receive(POLL_SECONDS)
                if isinstance(message, Failed):
                    failure = message.error
                elif message is not None:
                    self._take(process, message)
                elif not process.is_alive:
                    break
                hangs = self._log_problem(hangs)
                if self._closing.is_set():
                    if stop_by is None:
                        process.terminate()
                        stop_by = time.monotonic() + STOP_SECONDS
                    elif time.monotonic() > stop_by:
                        logger.warning("the engine process did not end within %.0f seconds: it is killed", STOP_SECONDS)
                        break
        finally:
            with self._lock:
                self._process, self._problem = None, "the engine process has ended"  # how, is said below
            process.end()
        problem = process.describe_end()
        if failure is not None:
            problem += f" after {failure.kind}: {failure.message}"
            if not self._ready.done():
                self._ready.set_exception(raisable(failure))
        self._problem = SHUT_DOWN if self._closing.is_set() else problem
        self._fail_all()
        return problem

    def _log_problem(self, was_known: bool) -> bool:
        """Log that the process begins to hang, or goes on after all; return whether it hangs."""
        if self._process is None or self._pulse is None:
            return was_known
        problem = self._pulse.problem()
        if problem is not None and not was_known:
            logger.error("%s", problem)
        elif problem is None and was_known:
            logger.warning("the engine process goes on")
        return problem is not None

    def _take(self, process: EngineProcess, message: FromEngine) -> None:
        match message:
            case Outputs():
                self._listener.advanced(message)
            case Answer():
                future = self._calls.pop(message.number, None)
                if future is not None and future.set_running_or_notify_cancel():
                    if message.error is None:
                        future.set_result(message.result)
                    else:
                        future.set_exception(raisable(message.error))
            case Beat():
                if self._pulse is not None:
                    self._pulse.enter(message)
            case Refused():
                error = raisable(message.error)
                if message.retry_after is not None:
                    error = QueueFullError(message.error.message.removeprefix("QueueFullError: "), message.retry_after)
                self._listener.refused(message.number, error)
            case Ready():
                with self._lock:
                    if not self._closing.is_set():
                        self._pulse = Pulse(process.pid, self._timeouts)
                        self._process = process
                if self._ready.done():
                    logger.warning("the engine process runs again")
                else:
                    self._ready.set_result(message)

    def _fail_all(self) -> None:
        """Fail everything that the process was doing."""
        self._listener.died(self._dead())
        self.fail_calls(self._dead())
