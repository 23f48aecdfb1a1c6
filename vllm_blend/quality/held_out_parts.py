"""What an interrupted held-out measurement has finished: a file beside its output that grows with every few worlds.

A line says what is measured, and each further line what one engine found for one list of questions. The file goes when
the output has everything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_blend.pipeline.files import write_text
from vllm_blend.quality.held_out_worlds import digest_of
from vllm_blend.quality.questions import Questions
from vllm_blend.quality.settings import Run
from vllm_blend.quality.sweep import Known, Outcome

CHANGES_NOTHING = ("command", "date", "threads", "workers")  # of `HeldOut.about`


class FinishedParts:
    """The lines of such a file, and what is `known` by them: the outcomes of each list of questions, by its index."""

    def __init__(self, output: Path, runs: Sequence[Run], resume: bool) -> None:
        """Raises ValueError if there is a file and it is not to be resumed, if there is none to resume, and if it is
        damaged anywhere but at its end."""
        self.path = output.with_name(f"{output.name}.unfinished")
        self._runs = {run.key: run for run in reversed(runs)}
        self._named = [[run.setting.name, run.ratio] for run in runs]
        self.known: dict[int, Known] = {}
        self._lines: list[str] = []
        if self.path.exists() != resume:
            raise ValueError(
                f"--resume: there is no {self.path} of an interrupted run: leave it out"
                if resume
                else f"{self.path} is of an interrupted run: go on with --resume, or delete the file"
            )
        if resume:
            *self._lines, _ = self.path.read_text(encoding="utf-8").split("\n")  # the last one may be cut off
            try:
                for line in self._lines[1:]:
                    self._read(json.loads(line))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"--resume: {self.path} is damaged ({error!r}): delete it and begin again") from error

    def begin(self, about: Mapping[str, Any], data: Sequence[Questions]) -> None:
        """Write what is measured, or compare it with what the file says. Raises ValueError that names a difference."""
        head = {name: value for name, value in about.items() if name not in CHANGES_NOTHING}
        head |= {"all runs": self._named, "questions": [digest_of(one.samples) for one in data]}
        line = json.dumps(head, ensure_ascii=False)
        if self._lines:
            known = json.loads(self._lines[0])
            if different := sorted(name for name in {*head, *known} if head.get(name) != known.get(name)):
                raise ValueError(
                    f"--resume: {self.path} is of another measurement, as {', '.join(different)} differ: give the same "
                    "arguments, or delete it and begin again"
                )
        write_text(self.path, "".join(f"{one}\n" for one in self._lines or [line]))

    def add(self, index: int, measured: Known) -> None:
        """Append what was measured of the list of questions of an index."""
        full, outcomes = measured
        runs = [[self._runs[key].setting.name, self._runs[key].ratio, asdict(one)] for key, one in outcomes.items()]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"part": index, "full": asdict(full), "runs": runs}, ensure_ascii=False) + "\n")

    def remove(self) -> None:
        """Delete the file, as the output has everything."""
        self.path.unlink()

    def _read(self, line: Mapping[str, Any]) -> None:
        keys = {(run.setting.name, run.ratio): key for key, run in self._runs.items()}
        _, outcomes = self.known.setdefault(line["part"], (Outcome(**line["full"]), {}))
        for name, ratio, outcome in line["runs"]:
            if (name, ratio) in keys:  # or else `begin` says that the runs differ
                outcomes[keys[name, ratio]] = Outcome(**outcome)
