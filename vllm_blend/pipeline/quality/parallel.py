"""A sweep by several processes: each runs all of it on some of the questions, and the numbers are put back together."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from vllm_blend.config import resolve_device
from vllm_blend.pipeline.quality.questions import Questions, nothing_fits
from vllm_blend.pipeline.quality.settings import Run
from vllm_blend.pipeline.quality.sweep import Measured, Outcome, Progress, report_run, sweep


@dataclass(frozen=True)
class Crew:
    """`threads` are torch's in each of the processes."""

    workers: int
    threads: int


@dataclass(frozen=True)
class _Part:
    """What a worker has measured on its questions of a data set. Outcomes go by the index of their run: the key of a
    run holds the id of a function, which is another one in another process."""

    left_out: tuple[str, ...]
    full: Outcome
    runs: dict[int, Outcome]


def make_crew(workers: int | None, device: str, data: Sequence[Questions]) -> Crew:
    """So many workers (None: one for each core that this process may use, or one on a GPU), none without a question.
    They share the cores; one alone is this process as it is. Raises ValueError for less than one."""
    if workers is not None and workers < 1:
        raise ValueError(f"the number of workers is {workers}: use 1 or more")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers is None:
        workers = cores if resolve_device(device).type == "cpu" else 1
    workers = min(workers, max(len(questions.samples) for questions in data))
    threads = torch.get_num_threads()  # OMP_NUM_THREADS counts, where it is set
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
    """As `sweep`, by the crew: the same numbers, to what batches of other questions round, once all have done with an
    engine. What is stored is encoded, and counted in `encoding`, by each worker that meets it: the instruction always,
    and passages that questions share (those of `inputs/` do not).

    An error of a worker is raised here, and ends the others; RuntimeError where one dies without a word.
    """
    if crew.workers == 1:
        yield from sweep(model, data, runs, batch, progress, **engine_args)
        return
    shares = [deal(questions, crew.workers) for questions in data]
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    connections: list[Connection] = []
    try:
        for worker in range(crew.workers):
            own = [
                replace(q, samples=tuple(q.samples[i] for i in s[worker])) for q, s in zip(data, shares, strict=True)
            ]
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, worker == 0, crew.threads, model, own, runs, batch, engine_args)
            processes.append(context.Process(target=_work, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()  # the worker's end alone keeps it open: its death is the end of what comes
            connections.append(ours)
        known: set[int] = set()
        count = len({run.group for run in runs})
        for engine in range(count):
            found: dict[Connection, list[_Part]] = {}
            while missing := [c for c in connections if c not in found]:
                ready = wait(missing)
                for connection, process in zip(connections, processes, strict=True):
                    if connection in ready:
                        received = _receive(connection, process)
                        if isinstance(received, str):
                            progress(f"the first of {crew.workers} workers: {received.strip()}")
                        else:
                            found[connection] = received
            parts = [found[connection] for connection in connections]
            measured = [
                _merge(questions, share, [part[index] for part in parts], runs)
                for index, (questions, share) in enumerate(zip(data, shares, strict=True))
            ]
            progress(f"engine {engine + 1} of {count} is done by {crew.workers} workers")
            new = [index for index in parts[0][0].runs if index not in known]
            for one in measured:
                progress(f"{one.questions.name}:")
                for index in new:
                    report_run(one.questions, runs[index], one.runs[runs[index].key], progress)
            known.update(new)
            yield measured
    finally:
        for process in processes:
            process.terminate()
            process.join()


def deal(questions: Questions, workers: int) -> list[list[int]]:
    """The indices of each worker's questions, rising: equally many, and of each kind, to one."""
    kinds = [sample.kind or "" for sample in questions.samples]
    order = sorted(range(len(kinds)), key=kinds.__getitem__)
    return [sorted(order[worker::workers]) for worker in range(workers)]


def _work(
    connection: Connection,
    tells: bool,
    threads: int,
    model: str,
    data: Sequence[Questions],
    runs: Sequence[Run],
    batch: int,
    engine_args: dict[str, Any],
) -> None:
    """A worker's process: what it has so far after each engine, or an error with its traceback; and between them, if it
    is the one that `tells`, its progress."""
    torch.set_num_threads(threads)
    progress: Progress = connection.send if tells else lambda text: None
    try:
        for measured in sweep(model, data, runs, batch, progress, whole=False, **engine_args):
            parts = []
            for one in measured:
                first = {run.key: index for index, run in reversed(list(enumerate(runs)))}
                outcomes = {first[key]: outcome for key, outcome in one.runs.items()}
                parts.append(_Part(one.questions.left_out, one.full, outcomes))
            connection.send(parts)
    except Exception as error:
        connection.send((error, traceback.format_exc()))


def _receive(connection: Connection, process: Any) -> list[_Part] | str:
    try:
        received = connection.recv()
    except EOFError:
        process.join()
        raise RuntimeError(
            f"a worker ended without a word (exit code {process.exitcode}; -9 is how Linux ends one when memory runs "
            "out): use fewer workers, or one"
        ) from None
    if isinstance(received, tuple):
        error, text = received
        raise error from RuntimeError(f"in a worker:\n{text}")
    return received


def _merge(
    questions: Questions, shares: Sequence[Sequence[int]], parts: Sequence[_Part], runs: Sequence[Run]
) -> Measured:
    """What the workers have, as if one had measured it all."""
    left_out = {name for part in parts for name in part.left_out}
    fits = [sample.sample_id not in left_out for sample in questions.samples]
    places = [index for share in shares for index in share if fits[index]]
    order = sorted(range(len(places)), key=places.__getitem__)
    kept = tuple(sample for sample, good in zip(questions.samples, fits, strict=True) if good)
    if not kept:
        raise nothing_fits(questions, "context")
    names = tuple(s.sample_id for s in questions.samples if s.sample_id in left_out)
    all_of_them = replace(questions, samples=kept, left_out=names)
    outcomes = {runs[index].key: _join([part.runs[index] for part in parts], order) for index in parts[0].runs}
    return Measured(all_of_them, _join([part.full for part in parts], order), outcomes)


def _join(parts: Sequence[Outcome], order: Sequence[int]) -> Outcome:
    """One outcome of several: lists of a number per question in `order`, costs in sum."""
    joined = Outcome()
    for name in (field.name for field in fields(Outcome)):
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], list):
            flat = [value for value_list in values for value in value_list]
            setattr(joined, name, [flat[index] for index in order])
        else:
            setattr(joined, name, sum(values))
    return joined
