"""The answers of a held-out measurement in a file: what every number comes from, small enough to be committed.

A line for each world and a line for each way to answer: which questions it answered exactly ("1"), in the order of the
questions, and what it said to the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_blend.pipeline.files import read_json, write_text
from vllm_blend.quality.held_out_worlds import world_of

WHAT = "answers of held-out questions"
NEEDED = ("command", "model", "weights", "dtype", "split", "runs")  # of `HeldOut.about`


@dataclass(frozen=True)
class Answered:
    """One way to answer all questions of a cell. `token_layers` is a share of full prefill's, and `ratio` is None for
    that one. `wrong` has the answers to the questions that are not `correct` ([questions] bool)."""

    setting: str
    ratio: float | None
    token_layers: float
    correct: np.ndarray
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """The questions of one kind of world: their ids, "SPLIT-SEED-NUMBER", and kinds, the fewest and most passages of a
    prompt, and a digest of all texts."""

    name: str
    questions: tuple[str, ...]
    kinds: tuple[str, ...]
    passages: tuple[int, int]
    digest: str
    left_out: tuple[str, ...] = ()  # questions whose prompts are too long for the model
    runs: tuple[Answered, ...] = ()

    @property
    def worlds(self) -> list[str]:
        """Return the world of each question."""
        return [world_of(question) for question in self.questions]


@dataclass(frozen=True)
class HeldOut:
    """A measurement. `about` says how it was made."""

    about: Mapping[str, Any]
    cells: tuple[Cell, ...]


def write_held_out(path: Path, held_out: HeldOut) -> None:
    cells = ",\n".join(map(_cell_text, held_out.cells))
    write_text(
        path, f'{{"about": {json.dumps(held_out.about, ensure_ascii=False, indent=1)},\n"cells": [\n{cells}\n]}}\n'
    )


def read_held_out(path: Path) -> HeldOut:
    """Return what `write_held_out` was given. Raises FileNotFoundError, or ValueError if the file holds anything
    else."""
    data = read_json(path, WHAT)
    try:
        found = HeldOut(dict(data["about"]), tuple(_read_cell(cell) for cell in data["cells"]))
        sizes = [(len(cell.questions), len(run.correct), run) for cell in found.cells for run in cell.runs]
        whole = all(count == length == run.correct.sum() + len(run.wrong) for count, length, run in sizes)
        whole = whole and all(name in found.about for name in NEEDED)
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise ValueError(f"{path} does not hold {WHAT}: give files that vllm_blend.quality.held_out wrote")
    return found


def find_read(folder: Path, planned: HeldOut) -> list[str]:
    """Return what the files of a folder have measured already of what is planned, as lines to show: the same model,
    setting and ratio over some of the same worlds of the same split. A run counts from its beginning on.

    Raises ValueError if the folder has JSON files of another kind, or damaged ones: then nothing is known for sure."""
    lines = []
    for path in sorted(folder.glob("*.json")):
        try:
            known = read_held_out(path)
        except ValueError as error:
            raise ValueError(f"--output: its folder must have no JSON files but such answers: {error}") from error
        if any(known.about[key] != planned.about[key] for key in ("split", "weights", "dtype")):
            continue
        worlds = {cell.name: set(cell.worlds) for cell in known.cells}
        shared = [cell.name for cell in planned.cells if worlds.get(cell.name, set()) & set(cell.worlds)]
        again = [run for run in planned.about["runs"] if run in known.about["runs"]]
        if shared and again:
            runs = ", ".join(f"{setting} at {100 * ratio:g}%" for setting, ratio in again)
            lines.append(f"{path} ({', '.join(shared)}): {runs}")
    return lines


def _cell_text(cell: Cell) -> str:
    worlds: dict[str, list[list[Any]]] = {}
    for question, kind in zip(cell.questions, cell.kinds, strict=True):
        world, _, number = question.rpartition("-")
        worlds.setdefault(world, []).append([int(number), kind])
    head = {"name": cell.name, "passages": cell.passages, "digest": cell.digest, "left_out": cell.left_out}
    runs = [
        {
            "setting": run.setting,
            "ratio": run.ratio,
            "token_layers": float(f"{run.token_layers:.6g}"),
            "correct": "".join("01"[int(one)] for one in run.correct),
            "wrong": run.wrong,
        }
        for run in cell.runs
    ]
    lines = [f' "{name}": {_dump(value)}' for name, value in head.items()]
    lines += [f' "worlds": [\n{_lines(list(worlds.items()))}]', f' "runs": [\n{_lines(runs)}]']
    return "{\n" + ",\n".join(lines) + "}"


def _read_cell(data: Mapping[str, Any]) -> Cell:
    asked = [(f"{world}-{number}", str(kind)) for world, numbers in data["worlds"] for number, kind in numbers]
    fewest, most = data["passages"]
    return Cell(
        data["name"],
        tuple(question for question, _ in asked),
        tuple(kind for _, kind in asked),
        (int(fewest), int(most)),
        str(data["digest"]),
        tuple(data["left_out"]),
        tuple(_read_run(run) for run in data["runs"]),
    )


def _read_run(data: Mapping[str, Any]) -> Answered:
    correct = np.array([one == "1" for one in data["correct"]], bool)
    ratio = None if data["ratio"] is None else float(data["ratio"])
    return Answered(data["setting"], ratio, float(data["token_layers"]), correct, tuple(data["wrong"]))


def _lines(values: Sequence[Any]) -> str:
    return ",\n".join(f"  {_dump(value)}" for value in values)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
