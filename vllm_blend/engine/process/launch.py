"""Starts an engine process, with the sockets to it, and ends it.

Its settings go through a pipe; everything else goes through two ZeroMQ sockets in a folder that only this user can
enter.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from vllm_blend.child_process import describe_status, start_module
from vllm_blend.config import EngineConfig
from vllm_blend.engine.process.messages import FromEngine, ToEngine, new_encoder
from vllm_blend.executor.backends import choose_backend
from vllm_blend.log_lines import LogSettings

logger = logging.getLogger(__name__)

MODULE = "vllm_blend.engine.process.main"
SOCKET_PATH_BYTES = 90  # a socket's path may have 107 bytes, and ours end in a name


@dataclass(frozen=True)
class Bootstrap:
    """What an engine process reads from its standard input."""

    config: EngineConfig
    inbox: str  # where it listens
    outbox: str  # where the server's process listens
    parent: int  # the server's process: when it is gone, the engine ends
    logs: LogSettings
    num_threads: int  # of torch's operators on a CPU


def pickle_config(bootstrap: Bootstrap) -> bytes:
    """Return the settings as bytes. Raises ValueError for a function that another process cannot import."""
    overrides = bootstrap.config.model.hf_overrides
    fix = "define it at the top level of a module that can be imported, or give a dict"
    if callable(overrides) and getattr(overrides, "__module__", None) == "__main__":
        raise ValueError(f"hf_overrides={overrides!r} is not known in the engine's process: {fix}")
    try:
        return pickle.dumps(bootstrap)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"the engine's settings cannot be passed to its process ({error}): {fix}") from error


class EngineProcess:
    """A running engine process. `receive` is for one thread; `send` may be called from one thread at a time."""

    def __init__(self, config: EngineConfig, num_threads: int) -> None:
        self._encoder = new_encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._context = zmq.Context()
        self._folder = _private_folder()
        inbox, outbox = (f"ipc://{self._folder}/{name}" for name in ("in", "out"))
        try:
            settings = pickle_config(Bootstrap(config, inbox, outbox, os.getpid(), LogSettings.current(), num_threads))
            self._receiver = self._socket(zmq.PULL)
            self._receiver.bind(outbox)
            self._sender = self._socket(zmq.PUSH)
            self._sender.connect(inbox)  # what is sent before the process listens waits here
            self._process = start_module(MODULE, settings, variables=_variables(config))
        except BaseException:
            self._close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, message: ToEngine) -> None:
        """Send a message, without waiting. Raises TypeError for what cannot be sent, and ValueError for a number that
        is too large for that."""
        try:
            encoded = self._encoder.encode(message)
        except OverflowError as error:
            raise ValueError("an integer of the request has more than 64 bits: give a smaller one") from error
        self._sender.send(encoded)

    def receive(self, timeout: float) -> FromEngine | None:
        """Return the next message; None if there is none within `timeout` seconds."""
        if not self._receiver.poll(int(1000 * timeout)):
            return None
        message: FromEngine = self._decoder.decode(self._receiver.recv(copy=False).buffer)
        return message

    def describe_end(self) -> str:
        """Say how the process ended."""
        return f"the engine process {describe_status(self._process.wait())}"

    def terminate(self) -> None:
        """Have the process end when it has written what its chunk store has to write; at once while it loads."""
        self._process.terminate()

    def end(self) -> None:
        """Kill the process if it has not ended, and close the sockets."""
        try:
            if self.is_alive:
                self._process.kill()
            self._process.wait()
        finally:
            self._close()

    def _socket(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        socket.set_hwm(0)  # nothing is dropped, and sending never waits
        socket.linger = 0
        return socket

    def _close(self) -> None:
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


def _variables(config: EngineConfig) -> Mapping[str, str]:
    """Return what the environment of the engine process has besides that of this one."""
    if choose_backend(config) != "ray":
        return {}
    from vllm_blend.executor.ray_cluster import environment_of_engine  # Ray may not be installed

    return environment_of_engine()


def _private_folder() -> str:
    """Make a folder for sockets, whose paths must be short."""
    folder = tempfile.mkdtemp(prefix="vllm-blend-")
    if len(os.fsencode(folder)) <= SOCKET_PATH_BYTES:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix="vllm-blend-", dir="/tmp")
