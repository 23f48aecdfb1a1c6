"""Processes of the package that are there in a moment: forked from one that has imported what they import.

A fresh interpreter imports for three seconds before an engine begins to load. Tests begin fresh ones, too: programs of
their own, and every process that a process of an engine starts.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests import settings
from vllm_blend.child_process import child_environment, send_settings, start_module

MODULES = ("vllm_blend.engine.process.main", "vllm_blend.executor.worker_process")
LAZY = ("transformers.modeling_utils",)  # which loading a tokenizer imports
SET_CHILD_SUBREAPER = 36  # as prctl(2) has it
MESSAGE_BYTES = 1 << 20
IDLE_SECONDS = 30.0  # after which the server gives its memory back


@dataclass(frozen=True)
class Request:
    """What a process is to run, and as whom. Its descriptors come beside it; they will have the numbers `fds`."""

    module: str
    variables: dict[str, str]
    folder: str
    fds: tuple[int, ...]


@dataclass(eq=False)
class Forked:
    """A child process, with what of `subprocess.Popen` the package uses."""

    pid: int
    returncode: int | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.005)  # as `Popen.wait` does with a timeout: the system tells of no end in time
        return status

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """Starts the process to fork from when one is asked for, and again when it has ended meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start_module(
        self, module: str, settings: bytes, pass_fds: Sequence[int] = (), variables: Mapping[str, str] | None = None
    ) -> Forked:
        """Start a process as `child_process.start_module` does."""
        reading, writing = os.pipe()
        request = Request(module, child_environment(variables), os.getcwd(), (0, 1, 2, *pass_fds))
        try:
            with self._lock:
                process = Forked(self._fork(request, [reading, 1, 2, *pass_fds]))
        finally:
            os.close(reading)
        with open(writing, "wb") as stdin:
            send_settings(stdin, settings, module)
        return process

    def close(self) -> None:
        if self._server is not None and self._control is not None:
            self._control.close()
            self._server.wait()

    def _fork(self, request: Request, fds: list[int]) -> int:
        """Return the id of a new child of this process."""
        answer = self._ask(request, fds)
        if not answer:
            self.close()
            self._start()
            answer = self._ask(request, fds)
        return int(answer)

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = start_module(__name__, str(theirs.fileno()).encode(), [theirs.fileno()])

    def _ask(self, request: Request, fds: list[int]) -> bytes:
        """Return the server's answer; nothing if there is no server. This process takes in what the process between the
        server and the new one leaves."""
        if self._control is None:
            return b""
        _take_in_orphans(True)
        try:
            socket.send_fds(self._control, [pickle.dumps(request)], fds)
            return self._control.recv(MESSAGE_BYTES)
        except (BrokenPipeError, ConnectionResetError):
            return b""
        finally:
            _take_in_orphans(False)


def _take_in_orphans(flag: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(SET_CHILD_SUBREAPER, int(flag), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def serve(control: socket.socket) -> tuple[Request, list[int]]:
    """Fork a process for each request. It returns in such a process, with its request."""
    while True:
        if not select.select([control], [], [], IDLE_SECONDS)[0]:
            sys.exit()
        data, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 16)
        if not data:
            sys.exit()
        ids, tell = os.pipe()
        between = os.fork()
        if between == 0:
            parent, pid = os.getpid(), os.fork()
            if pid:
                os.write(tell, str(pid).encode())
                os._exit(0)
            while os.getppid() == parent:  # until that has ended, and the process that asks is the parent
                time.sleep(0.0005)
            os.close(ids)
            os.close(tell)
            control.close()
            request: Request = pickle.loads(data)
            return request, fds
        os.waitpid(between, 0)
        control.send(os.read(ids, 20))
        for fd in (ids, tell, *fds):
            os.close(fd)


def run(request: Request, fds: list[int]) -> int:
    """Be the process that is asked for; return its exit status."""
    os.setsid()
    free = max(request.fds) + 1  # what is moved to its own number would be closed behind it
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, free) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(above, request.fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request.variables)
    sys.path[:] = request.variables["PYTHONPATH"].split(os.pathsep)
    os.chdir(request.folder)
    status: int = importlib.import_module(request.module).main()
    return status


if __name__ == "__main__":
    for each in (*MODULES, *LAZY):
        importlib.import_module(each)
    settings.run_as_without_bfloat16()
    gc.freeze()  # the processes share what they do not touch
    sys.exit(run(*serve(socket.socket(fileno=int(sys.stdin.read())))))
