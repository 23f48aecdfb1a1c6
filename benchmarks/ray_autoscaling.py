"""Let Ray Serve start and end a second engine as load comes and goes, and count what becomes of every stream.

    python -m benchmarks.ray_autoscaling --output results/ray_autoscaling

The load is open: `--rate` streams begin every second, at random times, whether earlier ones have ended or not. An
application with one engine, and two at most, first stores every passage of the run on a disk that engines share. Then

1. the load comes, and lasts until `--answers` streams have been answered by the engine that Ray Serve starts;
2. the load goes, and only two clients remain, each of which asks for one long stream after another at the engine where
   its own passage is at home, until Ray Serve has ended one of the engines;
3. the load comes again, until another new engine has answered as many.

The exit status is 1 if any stream failed, if a phase did not end within `--deadline` seconds, if a new engine computed
a passage that the store had, or if no stream was running on the engine that Ray Serve ended.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from benchmarks.ray_requests import (
    OPTIONS,
    READ_SECONDS,
    Answer,
    Workload,
    ask,
    check_drawn,
    check_ray,
    command_of,
    make_workload,
    opening,
    serving,
    settings_of,
    write_report,
)
from benchmarks.run import describe, installed

ENGINE = "vllm-blend-engine"
LOOK_SECONDS = 0.1  # between looks at the engines' states


@dataclass(frozen=True)
class Stream:
    """One stream: the phase in which it was sent, what became of it, and when it ended (of `time.monotonic`)."""

    phase: str
    answer: Answer
    ended: float


@dataclass(frozen=True)
class Look:
    """How many engines Ray Serve had in each state, from a time on."""

    time: float
    states: dict[str, int]


@dataclass
class Run:
    """What has happened so far."""

    args: argparse.Namespace
    workload: Workload
    client: aiohttp.ClientSession
    streams: list[Stream] = field(default_factory=list)  # in the order in which they ended
    looks: list[Look] = field(default_factory=list)
    begun: dict[str, float] = field(default_factory=dict)  # when each phase did

    def of(self, phase: str) -> list[Stream]:
        return [each for each in self.streams if each.phase == phase]

    def engines(self, *phases: str) -> set[str]:
        return {each.answer.replica for phase in phases for each in self.of(phase) if each.answer.replica}

    async def stream(self, phase: str, passages: tuple[int, ...], max_tokens: int, rng: Random) -> None:
        args = argparse.Namespace(model=self.args.model, max_tokens=max_tokens)
        answer = await ask(self.client, args, self.workload.prompt(passages, rng), passages)
        self.streams.append(Stream(phase, answer, time.monotonic()))

    def since(self, phase: str) -> list[Look]:
        return [each for each in self.looks if each.time >= self.begun[phase]]

    async def watch(self) -> None:
        """Note every change of the engines' states."""
        while True:
            states = await asyncio.to_thread(engine_states)
            if not self.looks or states != self.looks[-1].states:
                self.looks.append(Look(time.monotonic(), states))
            await asyncio.sleep(LOOK_SECONDS)

    async def until(self, phase: str, has_come: Callable[[], bool]) -> None:
        """Wait for what ends a phase. Raises SystemExit after the deadline."""
        deadline = self.begun[phase] + self.args.deadline
        while not has_come():
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"phase {phase!r} did not end within {self.args.deadline:g} s: {self.looks[-1].states}"
                )
            await asyncio.sleep(LOOK_SECONDS)


def engine_states() -> dict[str, int]:
    from ray import serve

    deployment = serve.status().applications["default"].deployments[ENGINE]
    return {str(state): number for state, number in deployment.replica_states.items() if number}


def start(args: argparse.Namespace, store: str) -> None:
    from ray import serve

    from vllm_blend.ray import build_app

    options = OPTIONS | {
        "model": args.model,
        "chunk_store_path": store,
        "shutdown_timeout": args.shutdown_timeout,
        "max_replicas": 2,
        "target_requests": args.target_requests,
        "upscale_delay": args.upscale_delay,
        "downscale_delay": args.downscale_delay,
    }
    serve.run(build_app(options, replicas=1))


@asynccontextmanager
async def beside(coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a coroutine beside the body of the statement, and cancel it afterwards. Raises what it has raised."""
    task = asyncio.create_task(coroutine)
    try:
        yield
    finally:
        task.cancel()
        [result] = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, Exception):
            raise result


async def load(run: Run, phase: str) -> None:
    """Keep the open load up until an engine that is new in this phase has answered enough; then wait for the rest."""
    args, rng = run.args, Random(f"{run.args.seed} {phase}")
    drawn = run.workload.drawn("topics", int(2 * args.rate * args.deadline))
    old = run.engines(*run.begun)
    sent: list[asyncio.Task[None]] = []

    async def arrive() -> None:
        for passages in drawn:
            sent.append(asyncio.create_task(run.stream(phase, passages, args.max_tokens, rng)))
            await asyncio.sleep(rng.expovariate(args.rate))

    def is_enough() -> bool:
        answered = [each for each in run.of(phase) if each.answer.error is None and each.answer.replica not in old]
        return len(answered) >= int(args.answers)

    run.begun[phase] = time.monotonic()
    async with beside(arrive()):
        await run.until(phase, is_enough)
    await asyncio.gather(*sent)


async def quiet(run: Run, phase: str) -> None:
    """Keep one long stream after another on each of the two engines until one has gone; then wait for the rest."""
    is_over = False

    async def ask_on(passage: int) -> None:
        rng = Random(f"{run.args.seed} {phase} {passage}")
        while not is_over:
            await run.stream(phase, (passage,), run.args.long_tokens, rng)

    last = {each.answer.replica: each.answer.passages[0] for each in run.of("load")}  # a passage at home on each
    run.begun[phase] = time.monotonic()
    clients = [asyncio.create_task(ask_on(passage)) for passage in last.values()]
    await run.until(phase, lambda: any("STOPPING" in each.states for each in run.since(phase)))
    await run.until(phase, lambda: run.looks[-1].states == {"RUNNING": 1})
    is_over = True
    await asyncio.gather(*clients)


async def play(args: argparse.Namespace, workload: Workload) -> Run:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=READ_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{args.port}", timeout=timeout, connector=connector) as client:
        run = Run(args, workload, client)
        async with beside(run.watch()):
            run.begun["store"] = time.monotonic()
            for first in range(0, args.passages, args.per_prompt):
                passages = range(first, min(first + args.per_prompt, args.passages))
                await run.stream("store", tuple(passages), 1, Random(first))
            for phase, part in PHASES.items():
                await part(run, phase)
                print(phase, run.looks[-1].states, flush=True)
    return run


PHASES = {"load": load, "quiet": quiet, "load again": load}


def loaded(run: Run, phase: str) -> dict[str, Any]:
    """Return what became of a phase with load, in which an engine came. Times are seconds since its beginning."""
    begin, streams = run.begun[phase], run.of(phase)
    earlier = list(run.begun)[: list(run.begun).index(phase)]
    new = [each for each in streams if each.answer.replica in run.engines(phase) - run.engines(*earlier)]
    came = min(each.answer.sent for each in new)
    starting = min(each.time for each in run.since(phase) if "STARTING" in each.states)
    tiers: Counter[str] = Counter()
    for each in new:
        tiers.update(each.answer.tiers)
    return {
        "phase": phase,
        "streams": len(streams),
        "errors": errors(streams),
        "seconds_to_decision": round(starting - begin, 1),
        "seconds_to_new_engine": round(came - begin, 1),
        "by_new_engine": len(new),
        "tiers_of_new_engine": {name: count for name, count in sorted(tiers.items()) if count},
        "tokens_stored_by_new_engine": sum(each.answer.stored for each in new),
        "first_token_ms_before": median(each.answer.first for each in streams if each.answer.sent < came),
        "first_token_ms_after": median(each.answer.first for each in streams if each.answer.sent >= came),
    }


def unloaded(run: Run) -> dict[str, Any]:
    """Return what became of the phase without load, in which an engine went."""
    streams, looks = run.of("quiet"), run.since("quiet")
    decided = min(each.time for each in looks if "STOPPING" in each.states)
    gone = min(each.time for each in looks if each.time > decided and each.states == {"RUNNING": 1})
    [ended] = run.engines("load", "quiet") - run.engines("load again")
    cut = [each for each in streams if each.answer.replica == ended and each.answer.sent < decided < each.ended]
    return {
        "phase": "quiet",
        "streams": len(streams),
        "errors": errors(streams),
        "seconds_to_decision": round(decided - run.begun["quiet"], 1),
        "seconds_to_end": round(gone - run.begun["quiet"], 1),
        "running_on_it": len(cut),
        "finished_on_it": sum(each.answer.error is None for each in cut),
    }


def errors(streams: Sequence[Stream]) -> list[str]:
    return [each.answer.error for each in streams if each.answer.error is not None]


def median(seconds: Iterable[float | None]) -> float:
    """Return the median in milliseconds of those times that there are."""
    return round(1e3 * statistics.median(each for each in seconds if each is not None), 1)


def make_report(run: Run, command: str, about: dict[str, Any]) -> dict[str, Any]:
    begin = run.begun["store"]
    return {
        "command": command,
        "about": about,
        "settings": settings_of(run.args),
        "loads": [loaded(run, phase) for phase in ("load", "load again")],
        "quiet": unloaded(run),
        "phases": {phase: round(time - begin, 1) for phase, time in run.begun.items()},
        "engines": [[round(each.time - begin, 1), each.states] for each in run.looks],
        "first_token_s": [
            [each.phase, round(each.answer.sent - begin, 2), each.answer.replica, round(each.answer.first or 0.0, 4)]
            for each in run.streams
        ],
    }


def is_good(report: dict[str, Any]) -> bool:
    """Return whether nothing happened that the exit status has to tell."""
    quiet, loads = report["quiet"], report["loads"]
    failed = [error for each in (quiet, *loads) for error in each["errors"]]
    recomputed = any(each["tokens_stored_by_new_engine"] for each in loads)
    return not failed and not recomputed and 0 < quiet["running_on_it"] == quiet["finished_on_it"]


def render(report: dict[str, Any]) -> str:
    about, quiet = report["about"], report["quiet"]
    load = f"{about['load']} before and {about['load_after']} after"
    head = (
        "| phase | streams | failed | seconds until Ray Serve started an engine | until a stream was sent to it | "
        "streams that it answered | tokens that it read from the store's disk | passages' tokens that it computed | "
        "first token p50 before it, ms | after, ms |"
    )
    rows = [
        f"| {each['phase']} | {each['streams']} | {len(each['errors'])} | {each['seconds_to_decision']} | "
        f"{each['seconds_to_new_engine']} | {each['by_new_engine']} | {each['tiers_of_new_engine'].get('disk', 0)} | "
        f"{each['tokens_stored_by_new_engine']} | {each['first_token_ms_before']:.0f} | "
        f"{each['first_token_ms_after']:.0f} |"
        for each in report["loads"]
    ]
    failed = sorted({error for each in (quiet, *report["loads"]) for error in each["errors"]})
    return "\n".join(
        [
            *opening("A second engine comes and goes on Ray Serve", report, load),
            head,
            "|" + "---|" * (head.count("|") - 1),
            *rows,
            "",
            "## The engine that went",
            "",
            f"Between the two, without load: {quiet['streams']} long streams, of which {len(quiet['errors'])} failed. "
            f"Ray Serve began to end an engine after {quiet['seconds_to_decision']} s, and it was gone after "
            f"{quiet['seconds_to_end']} s. Streams that ran on it when its end began: {quiet['running_on_it']}; of "
            f"these it finished: {quiet['finished_on_it']}.",
            "",
            *(f"- `{error}`" for error in failed),
            *([""] if failed else []),
        ]
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="inputs/demo-model-reuse")
    add("--port", type=int, default=8123, help="of Ray Serve (default: %(default)s)")
    add("--rate", type=float, default=3.0, help="streams that begin in a second (default: %(default)s)")
    add("--answers", type=int, default=30, help="by the new engine, before the load goes (default: %(default)s)")
    add("--deadline", type=float, default=300.0, help="seconds for each phase (default: %(default)s)")
    add("--target-requests", type=float, default=2.2, help="running streams of each engine (default: %(default)s)")
    add("--upscale-delay", type=float, default=2.0)
    add("--downscale-delay", type=float, default=2.0)
    add("--shutdown-timeout", type=float, default=120.0, help="seconds to finish streams (default: %(default)s)")
    add("--passages", type=int, default=64)
    add("--passage-tokens", type=int, default=64)
    add("--topic", type=int, default=16, help="passages of a topic (default: %(default)s)")
    add("--per-prompt", type=int, default=4, help="passages of a stream of the load (default: %(default)s)")
    add("--zipf", type=float, default=1.0)
    add("--max-tokens", type=int, default=64, help="of a stream of the load (default: %(default)s)")
    add("--long-tokens", type=int, default=800, help="of a stream without load (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("results/ray_autoscaling"), help="files without their suffix")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    check_drawn(args)
    check_ray()
    workload = make_workload(args)
    about = describe("cpu") | {"ray": installed("ray")}
    with serving(args.port) as serve, tempfile.TemporaryDirectory() as folder:
        start(args, folder)
        run = asyncio.run(play(args, workload))
        serve.shutdown()  # before the folder is removed
    about["load_after"] = [round(each, 1) for each in os.getloadavg()]
    report = make_report(run, command_of("benchmarks.ray_autoscaling", argv), about)
    write_report(args.output, report, render(report))
    print(render(report))
    return int(not is_good(report))


if __name__ == "__main__":
    sys.exit(main())
