"""Watches a server while `benchmarks.serving` loads it: its memory, its pages, and when a process of it was killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

ENGINE = "vllm_blend.engine.process.main"  # as its command line has it
SAMPLE_SECONDS, HEALTH_SECONDS, IDLE_SECONDS = 5.0, 0.25, 60.0
MIB = 1 << 20


@dataclass
class Watch:
    """What was seen of a server. `server` is its process id; None: nothing is watched. `kills` are (process id or
    "engine", seconds after the beginning). Linux only, if there is a server."""

    server: int | None
    kills: Sequence[tuple[str, float]] = ()
    # seconds since the beginning, and resident bytes of the server and of its engine (0: there is none)
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    outages: list[list[float]] = field(default_factory=list)  # from an engine's kill until health, since the epoch
    killed: list[tuple[str, float]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)  # the server's status when all requests had ended
    _begun: float = field(default_factory=time.monotonic)
    _is_down: bool = False

    @asynccontextmanager
    async def running(self, client: aiohttp.ClientSession) -> AsyncIterator[None]:
        """Watch, and kill what is to be killed, until the requests of the body have ended; then wait for the pages."""
        self._begun = time.monotonic()
        tasks = [asyncio.create_task(self._sample())]
        tasks += [asyncio.create_task(self._kill(client, *kill)) for kill in self.kills]
        try:
            yield
            if self.server is not None:
                self.end = await _idle_status(client)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def until_healthy(self, client: aiohttp.ClientSession) -> None:
        """Wait while an engine that was killed is away."""
        while self._is_down:
            await asyncio.sleep(HEALTH_SECONDS)

    def was_down(self, begun: float, ended: float) -> bool:
        """Return whether a killed engine was away at a time between two, in seconds since the epoch."""
        return any(begun <= end and start <= ended for start, end in self.outages)

    def growth(self) -> tuple[float, float]:
        """Return by how many bytes the memory of the server and of its engine grew, from the second quarter of the run
        to the last, as medians. The first quarter fills caches. Engines that began in mid-run are not compared."""
        whole = [sample for sample in self.samples if sample[1]]
        quarter = len(whole) // 4
        if quarter == 0:
            return 0.0, 0.0
        early, late = whole[quarter : 2 * quarter], whole[-quarter:]
        server, engine = (median(s[at] for s in late) - median(s[at] for s in early) for at in (1, 2))
        return server, 0.0 if self.outages else engine

    def problems(self, growth_mib: float) -> list[str]:
        """Return what is wrong with the server."""
        if self.server is None:
            return []
        found = [
            f"the memory of the {name} grew by {grown / MIB:.0f} MiB"
            for name, grown in zip(("server", "engine"), self.growth(), strict=True)
            if grown > growth_mib * MIB
        ]
        requests = self.end["requests"]
        if requests["running"] or requests["waiting"] or self.end["kv_cache_usage"]:
            found.append(f"{requests} and {self.end['kv_cache_usage']:.2%} of the pages are left in the end")
        return [*found, *(f"{process} was not killed" for process, _ in self.kills[len(self.killed) :])]

    def report(self) -> str:
        """Return what to print."""
        if self.server is None or not self.samples:
            return ""
        quarters = [self.samples[(len(self.samples) - 1) * part // 4] for part in range(5)]
        lines = [
            f"resident MiB of the {name} after 0, 1/4, 1/2, 3/4 and all of the time: "
            + ", ".join(f"{sample[at] / MIB:.0f}" for sample in quarters)
            for at, name in ((1, "server"), (2, "engine"))
        ]
        lines += [f"{process} was killed after {seconds:.0f} s" for process, seconds in self.killed]
        lines += [f"the server was without an engine for {end - start:.1f} s" for start, end in self.outages]
        requests = self.end["requests"]
        lines.append(
            f"in the end {requests['running']:g} requests run, {requests['waiting']:g} wait, and "
            f"{self.end['kv_cache_usage']:.2%} of the pages are used"
        )
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return {
            "resident_mib": [[round(s), a // MIB, b // MIB] for s, a, b in self.samples],
            "killed": self.killed,
            "seconds_without_engine": [round(end - start, 1) for start, end in self.outages],
            "end": {name: self.end.get(name) for name in ("requests", "kv_cache_usage", "tiers")},
        }

    async def _sample(self) -> None:
        while self.server is not None:
            engine = find_engine(self.server)
            memory = resident_bytes(self.server), 0 if engine is None else resident_bytes(engine)
            self.samples.append((time.monotonic() - self._begun, *memory))
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _kill(self, client: aiohttp.ClientSession, process: str, seconds: float) -> None:
        await asyncio.sleep(self._begun + seconds - time.monotonic())
        pid = find_engine(self.server) if process == "engine" and self.server is not None else int(process)
        if pid is None:
            raise RuntimeError(f"the server {self.server} has no engine to kill after {seconds:g} seconds")
        if process == "engine":
            self._is_down = True
            outage = [time.time(), float("inf")]
            self.outages.append(outage)
        os.kill(pid, signal.SIGKILL)
        self.killed.append((process, time.monotonic() - self._begun))
        if process == "engine":
            while find_engine(self.server or 0) in (None, pid) or not await _is_healthy(client):
                await asyncio.sleep(HEALTH_SECONDS)
            outage[1] = time.time()
            self._is_down = False


async def _is_healthy(client: aiohttp.ClientSession) -> bool:
    async with client.get("/health") as response:
        return response.status == 200


async def _idle_status(client: aiohttp.ClientSession) -> dict[str, Any]:
    """Return a server's status when it has nothing to do, or after a time in which it should have had."""
    stop = time.monotonic() + IDLE_SECONDS
    while True:
        async with client.get("/status", raise_for_status=True) as response:
            status: dict[str, Any] = await response.json()
        requests = status["requests"]
        if requests["running"] == requests["waiting"] == status["kv_cache_usage"] == 0 or time.monotonic() > stop:
            return status
        await asyncio.sleep(1.0)  # the server asks its engine no more than twice a second


def find_engine(server: int) -> int | None:
    """Return the process id of a server's engine; None while there is none."""
    for children in Path(f"/proc/{server}/task").glob("*/children"):  # by the thread that has started them
        for pid in _read(children).split():
            if ENGINE in _read(Path(f"/proc/{pid}/cmdline")):
                return int(pid)
    return None


def resident_bytes(pid: int) -> int:
    """Return the memory that a process holds, in bytes; 0 for one that has ended."""
    lines = _read(Path(f"/proc/{pid}/status")).splitlines()
    return 1024 * int(next((line.split()[1] for line in lines if line.startswith("VmRSS")), 0))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
