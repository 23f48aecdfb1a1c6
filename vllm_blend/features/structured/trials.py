"""Has grammars tried in another process (`trial.py`), and ends it when one takes too long."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_blend.features.structured.vocabulary import Vocabulary

_SCRIPT = Path(__file__).with_name("trial.py")
START_SECONDS = 300.0  # the longest that the process may take to start and to read a vocabulary
TOO_MUCH = "it is too large or too complex: make it simpler"


class ProcessEnded(Exception):
    """The process ended while it was asked."""


@dataclass(eq=False)
class Trials:
    """The process in which grammars for one vocabulary are tried. It is started when it is needed, and ends with this
    object, or with the process that started it. One thread at a time may use it."""

    vocabulary: Vocabulary
    seconds: float
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def try_out(self, grammar: str, is_source: bool) -> tuple[str, str]:
        """Return a grammar as `trial.compile_grammar` takes it, and what is wrong with it: nothing if it can be
        compiled, and answered with, within the limits. `is_source`: it is as a user wrote it.

        Raises RuntimeError if the process cannot be started.
        """
        process = self._started()
        try:
            reply = _ask(process, {"grammar": grammar, "is_source": is_source}, self.seconds)
        except TimeoutError:
            self.close()
            return grammar, f"compiling and trying it took more than {self.seconds:g} s: {TOO_MUCH}"
        except ProcessEnded:
            self.close()
            return grammar, TOO_MUCH
        return str(reply["grammar"]), str(reply["error"])

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        # -P: the script's folder is no place to import from
        command = [sys.executable, "-P", str(_SCRIPT)]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
            )
            weakref.finalize(self, _end, process)
            self._process = process
            _ask(process, self.vocabulary.description(), START_SECONDS)
        except (OSError, ProcessEnded, TimeoutError) as error:
            self.close()
            raise RuntimeError(
                f"structured outputs try each new form in a process of their own, which could not be started "
                f"({' '.join(command)}): {error}"
            ) from error
        return process


def _ask(process: subprocess.Popen[bytes], message: dict[str, Any], seconds: float) -> Any:
    """Send a line and return the answer. Raises TimeoutError if it takes longer, and ProcessEnded."""
    assert process.stdin is not None and process.stdout is not None
    deadline = time.monotonic() + seconds
    data = memoryview(json.dumps(message).encode() + b"\n")
    try:
        while data:
            data = data[process.stdin.write(data) or 0 :]
    except BrokenPipeError:
        raise ProcessEnded("it ended while it was told") from None
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError(f"no answer within {seconds:g} s")
        piece = process.stdout.read(1 << 16)
        if not piece:
            raise ProcessEnded("it ended without an answer")
        line += piece
    return json.loads(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()
