"""Run one side's rows of a group in a process of its own, with limits, and see that the device is free again.

A row that runs past its limit is ended with its process, and a new process goes on with the rows after it. So a turn
ends within `start_limit` and `row_limit` a row, however an engine hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
WORKER = ROOT / "benchmarks" / "side" / "worker.py"
EXIT_SECONDS = 30.0  # for an engine to close what it has opened
OURS, VLLM, TRANSFORMERS, LLAMA = "ours", "vllm", "transformers", "llama.cpp"


@dataclass(frozen=True)
class Side:
    """An engine, and the interpreter that has it."""

    name: str
    python: str = sys.executable

    def environment(self) -> dict[str, str]:
        """Return the variables of its processes: ours imports this checkout, others only what they have installed."""
        told = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "BENCHMARK_SAMPLES")}
        told |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return told | ({"PYTHONPATH": str(ROOT)} if self.name == OURS else {})


@dataclass
class Turn:
    """What one turn of a side has measured."""

    side: str
    group: str
    number: int
    samples: dict[str, list[float]] = field(default_factory=dict)  # row -> seconds of a unit of work
    prompts: dict[str, str] = field(default_factory=dict)  # row -> a hash of the token ids
    failed: dict[str, str] = field(default_factory=dict)  # row -> why there are none
    starts: list[dict[str, Any]] = field(default_factory=list)  # seconds and versions of each process


@dataclass(frozen=True)
class Limits:
    """Seconds after which a process that starts, or a row, is given up."""

    start: float = 600.0
    row: float = 300.0


def run_turn(side: Side, turn: Turn, spec: dict[str, Any], limits: Limits) -> None:
    """Run all rows of a spec on a side, and put what comes of each into the turn."""
    left: list[dict[str, Any]] = list(spec["rows"])
    while left:
        _run_process(side, turn, {**spec, "side": side.name, "rows": left}, limits)
        left = [row for row in left if row["name"] not in turn.samples and row["name"] not in turn.failed]


def _run_process(side: Side, turn: Turn, spec: dict[str, Any], limits: Limits) -> None:
    """Run one process until it has done all rows, or has failed: then at least one row more is in `turn.failed`."""
    with tempfile.TemporaryDirectory() as folder, Path(folder, "errors").open("w+") as errors:
        spec_file = Path(folder, "spec.json")
        spec_file.write_text(json.dumps(spec), encoding="utf-8")
        reading, writing = os.pipe()
        process = subprocess.Popen(
            [side.python, str(WORKER), str(spec_file), str(writing)],
            cwd=folder,  # nothing to import
            env=side.environment(),
            pass_fds=[writing],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        os.close(writing)
        patience = 0.0
        try:
            with os.fdopen(reading, "rb", buffering=0) as events:
                if _follow(process, events, turn, spec, limits, errors):
                    patience = EXIT_SECONDS
        finally:
            _end(process, patience)


def _follow(
    process: subprocess.Popen[bytes],
    events: IO[bytes],
    turn: Turn,
    spec: dict[str, Any],
    limits: Limits,
    errors: IO[str],
) -> bool:
    """Put the events of a process into the turn, and return whether it has come to its own end."""
    names: list[str] = [row["name"] for row in spec["rows"]]
    current: str | None = None  # the row that runs; None while the engine starts, or between rows
    reader, ready = _Reader(process, events), False
    while True:
        limit = limits.row if ready else limits.start
        event = reader.next(limit)
        if event is None:
            what = "the engine did not start" if not ready else "it did not end"
            ended = process.poll()
            if ended is None and not reader.closed:
                reason = f"{what} within {limit:g} s"
            else:
                ended = process.wait(timeout=60)
                reason = f"its process ended with status {ended}: {tail(errors)}"
            failed = names if not ready else [current] if current else _first_left(names, turn)
            for name in failed:
                turn.failed[name] = reason
            return False
        kind = event.pop("event")
        if kind == "ready":
            ready = True
            turn.starts.append(event)
        elif kind == "refused":
            turn.failed |= dict.fromkeys(names, event["error"])
            return True
        elif kind == "begin":
            current = event["row"]
        elif kind == "failed":
            turn.failed[event["row"]], current = event["error"], None
        elif kind == "end":
            turn.samples[event["row"]], turn.prompts[event["row"]] = event["samples"], event["prompts"]
            current = None
        else:
            return True  # done


def _first_left(names: Sequence[str], turn: Turn) -> list[str]:
    return [name for name in names if name not in turn.samples and name not in turn.failed][:1]


class _Reader:
    """Reads lines of JSON from a process, waits no longer than it is told, and notices that the process is gone."""

    def __init__(self, process: subprocess.Popen[bytes], events: IO[bytes]) -> None:
        self.process, self.events, self.buffer, self.closed = process, events, b"", False

    def next(self, limit: float) -> dict[str, Any] | None:
        """Return the next event, or None if there is none within `limit` seconds or the process has ended."""
        deadline = time.monotonic() + limit
        with selectors.DefaultSelector() as selector:
            selector.register(self.events, selectors.EVENT_READ)
            while b"\n" not in self.buffer:
                gone = self.process.poll() is not None
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                if not selector.select(0 if gone else min(left, 5.0)):
                    if gone:  # children may hold the pipe open
                        return None
                    continue
                read = os.read(self.events.fileno(), 1 << 16)
                if not read:
                    self.closed = True
                    return None
                self.buffer += read
        line, _, self.buffer = self.buffer.partition(b"\n")
        event: dict[str, Any] = json.loads(line)
        return event


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    """End a process and all that it has started (they share its session), after some seconds to end by itself."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)


def tail(errors: IO[str]) -> str:
    """Return the last line that a process has written to its standard error."""
    errors.seek(0)
    lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it wrote nothing"


class DeviceMemory:
    """Waits until a GPU's memory is as free as it was at first: a side must not find the rest of another."""

    SLACK = 512  # MiB

    def __init__(self, device: str) -> None:
        self.device = device
        self.before = used_memory() if device == "gpu" else 0

    def wait(self, seconds: float = 120.0) -> None:
        """Raise RuntimeError if the memory is not free within so many seconds."""
        if self.device != "gpu":
            return
        deadline = time.monotonic() + seconds
        while (used := used_memory()) > self.before + self.SLACK:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{used} MiB of the GPU are in use, {self.before} were before: end what holds them")
            time.sleep(1.0)


def used_memory() -> int:
    """Return the MiB in use on the first GPU that this process may see."""
    return int(query_gpu("memory.used").split()[0])


def query_gpu(what: str) -> str:
    """Return what nvidia-smi says of the first GPU that this process may see. Raises RuntimeError if it cannot run."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits", "-i", visible]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"{' '.join(command)} failed ({error}): --profile cpu needs no GPU") from error
