"""Run a sweep in several processes: each sweeps some of the questions, and the numbers are put back together."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

from vllm_blend.devices import resolve_device
from vllm_blend.quality.questions import Questions, nothing_fits
from vllm_blend.quality.session import EngineFacts, Session
from vllm_blend.quality.settings import Run
from vllm_blend.quality.sweep import Done, Known, Measured, Outcome, Progress, report_run, sweep

T = TypeVar("T")


@dataclass(frozen=True)
class Ready:
    """A worker's message: what it would measure, and with which engine. It waits for an answer."""

    engine: EngineFacts
    data: list[Questions]


@dataclass(frozen=True)
class Part:
    """A worker's message: what an engine has measured of one of its data sets."""

    index: int
    known: Known


@dataclass(frozen=True)
class Crew:
    """The processes of a sweep, and torch's threads in each of them."""

    workers: int
    threads: int


def make_crew(workers: int | None, device: str, data: Sequence[Questions], by_list: bool = False) -> Crew:
    """Return a crew of `workers` (None: one for each core that this process may use, or one on a GPU), but no worker
    without a question, or, `by_list`, without a list of them. They share the cores; a single worker is this process as
    it is. Raises ValueError for fewer than one."""
    if workers is not None and workers < 1:
        raise ValueError(f"the number of workers is {workers}: use 1 or more")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers is None:
        workers = cores if resolve_device(device).type == "cpu" else 1
    workers = min(workers, len(data) if by_list else max(len(questions.samples) for questions in data))
    threads = torch.get_num_threads()  # OMP_NUM_THREADS counts if it is set
    return Crew(workers, threads if workers == 1 else max(1, min(threads, cores // workers)))


def sweep_by(
    crew: Crew,
    model: str,
    data: Sequence[Questions],
    runs: Sequence[Run],
    batch: int,
    progress: Progress,
    **engine_args: Any,
) -> Iterator[list[Measured]]:
    """Sweep as `sweep` does, by the crew. The numbers are the same, up to the rounding of other batches; they come once
    all workers are done with an engine. What is stored is encoded, and counted in `encoding`, by each worker that meets
    it: always the instruction, and passages that questions share (those of `inputs/` share none).

    Raises the error of a worker, after ending the others, and RuntimeError if a worker dies without a message.
    """
    if crew.workers == 1:
        yield from sweep(model, data, runs, batch, progress, **engine_args)
        return
    shares = [split_questions(questions, crew.workers) for questions in data]
    own = [
        [replace(q, samples=tuple(q.samples[i] for i in s[worker])) for q, s in zip(data, shares, strict=True)]
        for worker in range(crew.workers)
    ]
    unreported = {run.key: run for run in reversed(runs)}
    for parts in _by_workers(crew, model, own, runs, batch, progress, engine_args):
        measured = [
            _merge(questions, share, [part[index] for part in parts])
            for index, (questions, share) in enumerate(zip(data, shares, strict=True))
        ]
        new = [unreported.pop(key) for key in measured[0].runs if key in unreported]
        for one in measured:
            progress(f"{one.questions.name}:")
            for run in new:
                report_run(one.questions, run, one.runs[run.key], progress)
        yield measured


def sweep_lists(
    crew: Crew,
    model: str,
    data: Sequence[Questions],
    runs: Sequence[Run],
    batch: int,
    progress: Progress,
    check: Callable[[EngineFacts, list[Questions]], None],
    known: Mapping[int, Known],
    done: Done,
    **engine_args: Any,
) -> Iterator[list[Measured]]:
    """Sweep as `sweep` does without `whole`, by a crew in which each worker measures some of the lists of questions, as
    they are: what questions of one list share is encoded once. No worker measures anything before `check` returns.

    Raises as `sweep_by` does.
    """
    if crew.workers == 1:

        def check_own(session: Session, fitting: list[Questions]) -> None:
            check(session.facts, fitting)

        yield from sweep(
            model, data, runs, batch, progress, whole=False, check=check_own, known=known, done=done, **engine_args
        )
        return

    def check_all(ready: list[Ready]) -> None:
        check(ready[0].engine, _in_turns([one.data for one in ready]))

    def done_by(worker: int, part: Part) -> None:
        done(worker + part.index * crew.workers, part.known)

    own = [list(data[worker :: crew.workers]) for worker in range(crew.workers)]
    known_by = [
        {index // crew.workers: one for index, one in known.items() if index % crew.workers == worker}
        for worker in range(crew.workers)
    ]
    for parts in _by_workers(crew, model, own, runs, batch, progress, engine_args, check_all, known_by, done_by):
        yield _in_turns(parts)


def _in_turns(parts: Sequence[Sequence[T]]) -> list[T]:
    """Undo the split of lists among workers: the first of each, then the second."""
    return [part[turn] for turn in range(len(parts[0])) for part in parts if turn < len(part)]


def _by_workers(
    crew: Crew,
    model: str,
    data: Sequence[list[Questions]],
    runs: Sequence[Run],
    batch: int,
    progress: Progress,
    engine_args: dict[str, Any],
    check: Callable[[list[Ready]], None] | None = None,
    known: Sequence[Mapping[int, Known]] = (),
    done: Callable[[int, Part], None] = lambda worker, part: None,
) -> Iterator[list[list[Measured]]]:
    """Yield, after each engine, what each worker has measured of its own `data`. With a `check`, workers wait
    until it has seen what all of them are ready for."""
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    connections: list[Connection] = []
    count = len({run.group for run in runs})
    arrived: dict[Connection, list[Any]] = {}
    num_results: Counter[Connection] = Counter()

    def collect(kind: type[T]) -> list[T]:
        """Return the next message of this kind from each worker, and see to all that arrive meanwhile."""
        while not all(arrived.values()):
            busy = [connection for connection in connections if num_results[connection] < count]
            for connection in wait(busy):
                assert isinstance(connection, Connection)
                worker = connections.index(connection)
                received = _receive(connection, processes[worker])
                if isinstance(received, str):
                    text = received.lstrip()
                    indent = received[: len(received) - len(text)]
                    progress(f"{indent}the first of {crew.workers} workers: {text}")
                elif isinstance(received, Part):
                    done(worker, received)
                else:
                    arrived[connection].append(received)
                    num_results[connection] += isinstance(received, list)
        found = [arrived[connection].pop(0) for connection in connections]
        assert all(isinstance(one, kind) for one in found)
        return found

    try:
        for worker, own in enumerate(data):
            ours, theirs = context.Pipe()
            own_known = known[worker] if known else {}
            arguments = (
                *(theirs, worker == 0, check is not None, crew.threads),
                *(model, own, runs, batch, own_known, engine_args),
            )
            processes.append(context.Process(target=_run_worker, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()  # only the worker keeps this end open, so its death ends the connection
            connections.append(ours)
            arrived[ours] = []
        if check is not None:
            check(collect(Ready))
            for connection in connections:
                connection.send(True)
        for engine in range(count):
            measured: list[list[Measured]] = collect(list)
            progress(f"engine {engine + 1} of {count} is done by {crew.workers} workers")
            yield measured
    finally:
        for process in processes:
            process.terminate()
            process.join()


def split_questions(questions: Questions, workers: int) -> list[list[int]]:
    """Return the indices of each worker's questions, ascending: equally many, and equally many of each kind, up to
    one."""
    kinds = [sample.kind or "" for sample in questions.samples]
    order = sorted(range(len(kinds)), key=kinds.__getitem__)
    return [sorted(order[worker::workers]) for worker in range(workers)]


def _run_worker(
    connection: Connection,
    reports_progress: bool,
    asks: bool,
    threads: int,
    model: str,
    data: Sequence[Questions],
    runs: Sequence[Run],
    batch: int,
    known: Mapping[int, Known],
    engine_args: dict[str, Any],
) -> None:
    """Run a worker's process: send each data set's results, those so far after each engine, or an error with its
    traceback, and, if it `reports_progress`, its progress in between. If it `asks`, it begins when it is answered."""
    torch.set_num_threads(threads)
    progress: Progress = connection.send if reports_progress else lambda text: None

    def check(session: Session, fitting: list[Questions]) -> None:
        if asks:
            connection.send(Ready(session.facts, fitting))
            connection.recv()

    def done(index: int, measured: Known) -> None:
        connection.send(Part(index, measured))

    try:
        for measured in sweep(
            model, data, runs, batch, progress, whole=False, check=check, known=known, done=done, **engine_args
        ):
            connection.send(measured)
    except Exception as error:
        connection.send((error, traceback.format_exc()))


def _receive(connection: Connection, process: Any) -> list[Measured] | Ready | Part | str:
    try:
        received = connection.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        raise RuntimeError(
            f"a worker ended without a message (exit code {process.exitcode}; -9 is how Linux ends one when memory "
            "runs out): use fewer workers, or one"
        ) from None
    if isinstance(received, (str, list, Ready, Part)):
        return received
    error, text = received
    raise error from RuntimeError(f"in a worker:\n{text}")


def _merge(questions: Questions, shares: Sequence[Sequence[int]], parts: Sequence[Measured]) -> Measured:
    """Put the parts of the workers together, as if one process had measured them all."""
    left_out = {name for part in parts for name in part.questions.left_out}
    fits = [sample.sample_id not in left_out for sample in questions.samples]
    places = [index for share in shares for index in share if fits[index]]
    order = sorted(range(len(places)), key=places.__getitem__)
    kept = tuple(sample for sample, good in zip(questions.samples, fits, strict=True) if good)
    if not kept:
        raise nothing_fits(questions, "context")
    names = tuple(s.sample_id for s in questions.samples if s.sample_id in left_out)
    all_of_them = replace(questions, samples=kept, left_out=names)
    outcomes = {key: join_outcomes([part.runs[key] for part in parts], order) for key in parts[0].runs}
    return Measured(all_of_them, join_outcomes([part.full for part in parts], order), outcomes)


def join_outcomes(parts: Sequence[Outcome], order: Sequence[int]) -> Outcome:
    """Return one outcome for several: lists with a number per question in `order`, and the sums of costs."""
    joined = Outcome()
    for name in (field.name for field in fields(Outcome)):
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], list):
            flat = [value for value_list in values for value in value_list]
            setattr(joined, name, [flat[index] for index in order])
        else:
            setattr(joined, name, sum(values))
    return joined
