"""The engine process: builds an engine, runs its steps, and between two steps does what the server's process asks.

It ends on SIGTERM, when the server's process is gone, or when steps keep failing. In the first two cases what the chunk
store still has to write is written.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

import msgspec
import torch
import zmq

from vllm_blend.core.turns import TurnQueue
from vllm_blend.engine.errors import EngineDeadError, QueueFullError
from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.engine.process.calls import run_call
from vllm_blend.engine.process.deltas import DeltaReporter
from vllm_blend.engine.process.heartbeat import Heart
from vllm_blend.engine.process.launch import Bootstrap
from vllm_blend.engine.process.messages import (
    Abort,
    Add,
    Answer,
    Call,
    Delta,
    Failed,
    FromEngine,
    Ready,
    Refused,
    Stop,
    ToEngine,
    describe_error,
    new_encoder,
)
from vllm_blend.engine.process.preparation import Preparation
from vllm_blend.engine.request_builder import NewRequest
from vllm_blend.log_lines import REQUEST_ID, log_request

logger = logging.getLogger("vllm_blend.engine.process.main")  # __name__ is "__main__" in the process

IDLE_SECONDS = 0.5  # between two looks at whether to end, while there is nothing to do
ANSWER_SECONDS = 0.02  # the same while a call waits for something
MESSAGES = 2048  # that are read between two steps
ADDED = 64  # requests that are added between two steps, in turn: a thousand prompts of a call must not hold up all
FAILED_STEPS = 3  # in a row: then the engine is given up
PARENT_SECONDS = 1.0  # between two looks at whether the server's process is there
LAST_SECONDS = 60.0  # to end in, when it is not


class EngineLoop:
    """The loop of the engine process. Sockets: PULL for what is asked, PUSH for what comes of it."""

    def __init__(self, engine: LLMEngine, receiver: zmq.Socket[bytes], sender: zmq.Socket[bytes]) -> None:
        self.engine, self._receiver, self._sender = engine, receiver, sender
        self._encoder, self._decoder = new_encoder(), msgspec.msgpack.Decoder(ToEngine)
        self._reporter = DeltaReporter()
        self._ids: dict[int, str] = {}  # of the requests that are unfinished, by number
        self._waiting: set[int] = set()  # calls
        self._answers: deque[tuple[int, Future[Any]]] = deque()
        self._arrived: TurnQueue[Add] = TurnQueue()  # by tenant and call
        self._num_arrived = 0
        self._preparation = Preparation(engine.prepare)
        self._failed_steps = 0
        self.num_turns = 0  # of the loop
        self.stopping = False

    def run(self) -> None:
        """Run until told to stop. Raises the error of a step that keeps failing."""
        while not self.stopping:
            self._receive()
            for new in self._preparation.take_done():
                self._add(new)
            if not self.engine.is_idle:
                self._step()
            self._report()
            self.num_turns += 1

    def send(self, message: FromEngine) -> None:
        self._sender.send(self._encoder.encode(message), copy=False)

    def _receive(self) -> None:
        """Do what is asked, the rest of much after the next step; wait for something to be asked if there is no step to
        run. Of the requests that have come, tenants and their calls have theirs added in turn."""
        if self.engine.is_idle and not self._answers and not self._preparation.done and not self._num_arrived:
            seconds = ANSWER_SECONDS if self._waiting or len(self._preparation) else IDLE_SECONDS
            if not self._receiver.poll(int(1000 * seconds)):
                self.engine.check_workers()
                return
        self._read()
        for _ in range(ADDED):
            flow = self._arrived.next()
            if flow is None or self.stopping:
                return
            new = self._arrived.take(flow)
            self._arrived.mark(flow)
            self._num_arrived -= 1
            if self.engine.needs_preparation(new.params):
                self._prepare(new)
            else:
                self._add(new)

    def _read(self) -> None:
        for _ in range(MESSAGES):
            if self.stopping:
                return
            try:
                data = self._receiver.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decoder.decode(data)
            except msgspec.MsgspecError as error:
                self._refuse(data, error)
            else:
                self._do(message)

    def _forget_arrived(self, numbers: Collection[int]) -> None:
        """Drop requests that have come, and were not added yet."""
        dropped: list[int] = []

        def is_dropped(new: Add) -> bool:
            if new.number in numbers:
                dropped.append(new.number)
            return new.number in numbers

        if self._num_arrived:
            self._arrived.drop(is_dropped)
            self._num_arrived -= len(dropped)

    def _do(self, message: ToEngine) -> None:
        match message:
            case Add():
                self._arrived.add((message.owner.name, message.call), message)
                self._num_arrived += 1
            case Abort():
                self._forget_arrived(frozenset(message.numbers))
                for number in message.numbers:
                    self._preparation.drop(number)
                ids = [self._ids.pop(number, None) for number in message.numbers]
                known = [request_id for request_id in ids if request_id is not None]
                self.engine.abort_request(known)
                for request_id in known:
                    log_request({"request_id": request_id, "finish_reason": "abort"})
            case Stop():
                self._stop(message)
            case Call():
                self._call(message)

    def _prepare(self, new: Add) -> None:
        """Prepare a request in another thread, while steps go on; it is added then."""
        try:
            self._preparation.add(new)
        except QueueFullError as error:
            self.send(Refused(new.number, describe_error(error), error.retry_after))

    def _add(self, new: Add) -> None:
        watch = self._reporter.watch(new.number, new.parsed, new.params.n)
        about = REQUEST_ID.set(new.request_id)
        try:
            self.engine.add(
                NewRequest(
                    new.request_id,
                    new.parsed,
                    new.params,
                    new.arrival_time,
                    priority=new.priority,
                    on_advance=watch,
                    owner=new.owner,
                    call=new.call,
                )
            )
        except Exception as error:
            if not isinstance(error, (ValueError, TypeError)):
                logger.exception("request %s could not be added", new.request_id)
                self.engine.abort_request(new.request_id)
            self.send(Refused(new.number, describe_error(error)))
        else:
            self._ids[new.number] = new.request_id
        finally:
            REQUEST_ID.reset(about)

    def _refuse(self, data: bytes, error: Exception) -> None:
        """Answer a request or a call with values of a wrong type, as only one that is wrong in itself has."""
        kind, number, *_ = msgspec.msgpack.decode(data)
        described = describe_error(ValueError(f"the request cannot be read: {error}"))
        self.send(Refused(number, described) if kind == Add.__name__ else Answer(number, None, described))

    def _stop(self, message: Stop) -> None:
        request_id = self._ids.get(message.number)
        if request_id is None:
            return
        self.engine.stop_completion(request_id, message.index)
        if not self.engine.has_request(request_id):
            del self._ids[message.number]
            log_request({"request_id": request_id, "finish_reason": "stop"})

    def _call(self, call: Call) -> None:
        try:
            result = run_call(self.engine, call.method, call.arguments)
        except Exception as error:
            self._answer_error(call.number, error)
            return
        if isinstance(result, Future):
            self._waiting.add(call.number)
            result.add_done_callback(lambda future: self._answers.append((call.number, future)))
        else:
            self.send(Answer(call.number, result))

    def _step(self) -> None:
        try:
            self.engine.step()
            self._failed_steps = 0
        except EngineDeadError:
            raise
        except Exception:
            self._failed_steps += 1
            if self._failed_steps == FAILED_STEPS:
                raise
            logger.exception("a step failed, and is tried again")

    def _report(self) -> None:
        news = self._reporter.take()
        if news is not None:
            self.send(news)
            last = {delta.number: delta for delta in news.deltas}
            for number in self._reporter.take_ended():
                request_id = self._ids.pop(number, None)
                if request_id is not None:
                    _log_end(request_id, last[number])
        while self._answers:
            number, future = self._answers.popleft()
            self._waiting.discard(number)
            error = future.exception()
            if error is None:
                self.send(Answer(number, future.result()))
            else:
                self._answer_error(number, error)

    def _answer_error(self, number: int, error: BaseException) -> None:
        trace = "" if isinstance(error, (ValueError, TypeError)) else "".join(traceback.format_exception(error))
        self.send(Answer(number, None, describe_error(error, trace)))


def _log_end(request_id: str, last: Delta) -> None:
    """Log the line of a request that has ended by itself, given its last news."""
    facts = last.facts
    assert facts is not None
    times = facts.metrics
    ended = times.finished_time or last.time
    log_request(
        {
            "request_id": request_id,
            "finish_reason": ",".join(tokens.finish_reason for tokens in last.tokens if tokens.finish_reason),
            "cached_tokens": facts.num_cached_tokens,
            "queue_seconds": None if times.time_in_queue is None else round(times.time_in_queue, 6),
            "seconds": round(ended - times.arrival_time, 6),
        }
    )


def main() -> int:
    """Run an engine process whose settings are on the standard input; return its exit status."""
    bootstrap: Bootstrap = pickle.load(sys.stdin.buffer)
    bootstrap.logs.apply_to_engine()
    torch.set_num_threads(bootstrap.num_threads)
    threading.Thread(target=_follow_parent, args=(bootstrap.parent,), daemon=True, name="follow-parent").start()
    context = zmq.Context()
    receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (receiver, sender):
        socket.set_hwm(0)
    receiver.bind(bootstrap.inbox)
    sender.connect(bootstrap.outbox)
    try:
        return _serve(bootstrap, context, receiver, sender)
    finally:
        context.destroy(linger=1000)
        if os.getppid() != bootstrap.parent:  # which removes the sockets' folder otherwise
            shutil.rmtree(os.path.dirname(bootstrap.inbox.removeprefix("ipc://")), ignore_errors=True)


def _serve(
    bootstrap: Bootstrap, context: zmq.Context[Any], receiver: zmq.Socket[bytes], sender: zmq.Socket[bytes]
) -> int:
    encoder = new_encoder()
    try:
        engine = LLMEngine(bootstrap.config)
        gc.collect()
        gc.freeze()  # what is loaded stays: no collection between two steps needs to look at it
        loop = EngineLoop(engine, receiver, sender)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the server's process reads its files again then
        signal.signal(signal.SIGTERM, lambda *_: setattr(loop, "stopping", True))
        dtype = str(engine.model_config.dtype).removeprefix("torch.")
        loop.send(Ready(engine.max_model_len, dtype, engine.default_sampling_settings))
        with Heart(context, bootstrap.outbox, lambda: loop.num_turns):
            loop.run()
    except Exception as error:
        logger.debug("the engine process ends", exc_info=True)
        sender.send(encoder.encode(Failed(describe_error(error, traceback.format_exc()))))
        return 1
    engine.shutdown()
    return 0


def _follow_parent(parent: int) -> None:
    """End this process when the server's process is gone: as SIGTERM does, or at once if that takes too long."""
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LAST_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
