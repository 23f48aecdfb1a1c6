"""Starts a module of the package as a process of its own."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

logger = logging.getLogger(__name__)


def import_path() -> str:
    """Return the PYTHONPATH with which another process imports what this one would."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def child_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of another process, with `variables` besides those of this one. It imports what this
    process would, features and registered classes included."""
    return os.environ | {"PYTHONPATH": import_path()} | dict(variables or {})


def send_settings(stream: IO[bytes], settings: bytes, module: str) -> None:
    """Write the settings of a process of `module` to its standard input, and close that."""
    try:
        with stream:
            stream.write(settings)
    except BrokenPipeError:  # it has died already, which its user finds out
        logger.warning("a process of %s did not read its settings", module)


def start_module(
    module: str, settings: bytes, pass_fds: Sequence[int] = (), variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter that runs `module`, with `settings` on its standard input, and with `variables` besides
    those of this process's environment.

    It imports nothing of the caller's `__main__`, and has a session of its own: a Ctrl-C or a SIGTERM to the caller's
    process group is the caller's affair. Settings go through a pipe, as they may hold the password of a store.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        env=child_environment(variables),
        start_new_session=True,
        pass_fds=pass_fds,
    )
    assert process.stdin is not None
    send_settings(process.stdin, settings, module)
    return process


def describe_status(status: int) -> str:
    """Say how a process ended, given its `returncode`."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"
