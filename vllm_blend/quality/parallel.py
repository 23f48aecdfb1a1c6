"""Run a sweep in several processes: each sweeps some of the questions, and the numbers are put back together."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from vllm_blend.devices import resolve_device
from vllm_blend.quality.questions import Questions, nothing_fits, select_fitting
from vllm_blend.quality.session import Session
from vllm_blend.quality.settings import Run
from vllm_blend.quality.sweep import Measured, Outcome, Progress, report_run, sweep


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
    check: Callable[[Session, list[Questions]], None],
    **engine_args: Any,
) -> Iterator[list[Measured]]:
    """Sweep as `sweep` does without `whole`, by a crew in which each worker measures some of the lists of questions, as
    they are: what questions of one list share is encoded once. `check` looks at an engine of this process first.

    Raises as `sweep_by` does.
    """
    if crew.workers == 1:
        yield from sweep(model, data, runs, batch, progress, whole=False, check=check, **engine_args)
        return
    with Session(model, batch, **engine_args | runs[0].engine) as session:
        check(session, [select_fitting(questions, session.engine, whole=False) for questions in data])
    own = [list(data[worker :: crew.workers]) for worker in range(crew.workers)]
    for parts in _by_workers(crew, model, own, runs, batch, progress, engine_args):
        remaining = [iter(part) for part in parts]
        yield [next(remaining[index % crew.workers]) for index in range(len(data))]


def _by_workers(
    crew: Crew,
    model: str,
    data: Sequence[list[Questions]],
    runs: Sequence[Run],
    batch: int,
    progress: Progress,
    engine_args: dict[str, Any],
) -> Iterator[list[list[Measured]]]:
    """Yield, after each engine, what each worker has measured of its own `data`."""
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    connections: list[Connection] = []
    try:
        for worker, own in enumerate(data):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, worker == 0, crew.threads, model, own, runs, batch, engine_args)
            processes.append(context.Process(target=_run_worker, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()  # only the worker keeps this end open, so its death ends the connection
            connections.append(ours)
        count = len({run.group for run in runs})
        for engine in range(count):
            found: dict[Connection, list[Measured]] = {}
            while missing := [c for c in connections if c not in found]:
                ready = wait(missing)
                for connection, process in zip(connections, processes, strict=True):
                    if connection in ready:
                        received = _receive(connection, process)
                        if isinstance(received, str):
                            text = received.lstrip()
                            indent = received[: len(received) - len(text)]
                            progress(f"{indent}the first of {crew.workers} workers: {text}")
                        else:
                            found[connection] = received
            progress(f"engine {engine + 1} of {count} is done by {crew.workers} workers")
            yield [found[connection] for connection in connections]
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
    threads: int,
    model: str,
    data: Sequence[Questions],
    runs: Sequence[Run],
    batch: int,
    engine_args: dict[str, Any],
) -> None:
    """Run a worker's process: send its results so far after each engine, or an error with its traceback, and, if it
    `reports_progress`, its progress in between."""
    torch.set_num_threads(threads)
    progress: Progress = connection.send if reports_progress else lambda text: None
    try:
        for measured in sweep(model, data, runs, batch, progress, whole=False, **engine_args):
            connection.send(measured)
    except Exception as error:
        connection.send((error, traceback.format_exc()))


def _receive(connection: Connection, process: Any) -> list[Measured] | str:
    try:
        received = connection.recv()
    except EOFError:
        process.join()
        raise RuntimeError(
            f"a worker ended without a message (exit code {process.exitcode}; -9 is how Linux ends one when memory "
            "runs out): use fewer workers, or one"
        ) from None
    if isinstance(received, tuple):
        error, text = received
        raise error from RuntimeError(f"in a worker:\n{text}")
    parts: list[Measured] | str = received
    return parts


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
