"""Measure settings on held-out worlds, and keep every answer.

    python -m vllm_blend.quality.held_out inputs/demo-model --split development --families 3 --samples 240 \\
        --settings question_attention auto@0.08 "oracle: gold passages" --ratios 0.08 0.15 --output answers.json

answers questions about generated worlds in full, by plain reuse, and by every setting at every ratio, and prints a
table with intervals over the worlds. A setting is a name of `catalogue.py` (its oracles too) or a `blend_selector`;
NAME@RATIO,RATIO has ratios of its own.

    python -m vllm_blend.quality.held_out --report answers.json more.json --over question_attention@0.15

makes the tables of such files again and computes nothing else. With --by-budget it is a table of budgets instead: what
each setting reaches at which ratio, and the highest of the oracles.

Numbers of the test split are read once for each claim. A rule that is changed after a look at them has been chosen by
them, and its next numbers there are too good. So before it begins, a run on the test split looks at all files beside
--output, the record of what was read, and refuses what was measured before with the same weights over any of the same
worlds, unless it is told so by --again (the tables then show both). Full prefill and plain reuse are no claims, and may
be measured as often as they are needed. A run that is interrupted has been read as well: it goes on, with the same
arguments and --resume, after the worlds that FILE.unfinished has beside the output.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import vllm_blend
from vllm_blend.blend.selectors import AUTO, BEST
from vllm_blend.pipeline.files import check_place
from vllm_blend.quality.catalogue import ONLY_CHOSEN, ORACLES, SETTINGS
from vllm_blend.quality.held_out_budgets import render_budgets
from vllm_blend.quality.held_out_file import (
    Answered,
    Cell,
    HeldOut,
    find_read,
    read_held_out,
    write_held_out,
)
from vllm_blend.quality.held_out_parts import FinishedParts
from vllm_blend.quality.held_out_report import check_baseline, render
from vllm_blend.quality.held_out_worlds import digest_of, held_out_questions
from vllm_blend.quality.intervals import check_seed
from vllm_blend.quality.parallel import Crew, join_outcomes, make_crew, sweep_lists
from vllm_blend.quality.questions import Questions, nothing_fits
from vllm_blend.quality.rows import FULL
from vllm_blend.quality.session import EngineFacts
from vllm_blend.quality.settings import PLAIN_REUSE, RECOMPUTE_ALL, Run, RunKey, make_runs, resolve_settings
from vllm_blend.quality.splits import DEVELOPMENT, SPLITS, TEST
from vllm_blend.quality.sweep import Measured, Outcome
from vllm_blend.quality.worlds import STYLES

NO_CLAIMS = (PLAIN_REUSE.name, RECOMPUTE_ALL.name)


def run(args: argparse.Namespace, command: str) -> HeldOut:
    """Measure and write. Mistakes are found before anything is computed. The file grows with every engine, and one
    beside it with every few worlds (see `FinishedParts`).

    Raises ValueError or OSError for bad input, and RuntimeError if a batch does not fit the engine.
    """
    runs = _make_runs(args)
    check_baseline(args.over, [(FULL, None), *((one.setting.name, one.ratio) for one in runs)])
    parts = _make_parts(args)
    check_seed(args.seed)
    check_place(args.output, "--output")
    finished = FinishedParts(args.output, runs, args.resume)
    if args.output.exists() and args.split == TEST.name and not args.resume:
        raise ValueError(f"--output {args.output} exists, and records what was read: give another file beside it")
    engine_args = {"dtype": args.dtype, "device": args.device, "seed": args.seed, "max_model_len": args.max_model_len}
    data = [questions for cell in parts for questions in cell]
    crew = make_crew(args.workers, args.device, data, by_list=True)
    started: list[HeldOut] = []

    def begin(engine: EngineFacts, data: list[Questions]) -> None:
        about = _describe(args, command, runs, crew, engine)
        started.append(HeldOut(about, tuple(_cells(parts, [Measured(questions, Outcome(), {}) for questions in data]))))
        is_new = args.split == TEST.name and not args.again and not args.resume
        if is_new and (found := find_read(args.output.parent, started[0])):
            raise ValueError(
                "on the test split, numbers are read once for each claim, and these files have them:\n  "
                + "\n  ".join(found)
                + "\nshow them with --report, take other worlds (--first-world), or measure with --again"
            )
        finished.begin(about, data)  # which refuses other arguments, so the output that they are not of stays
        if args.split == TEST.name:
            write_held_out(args.output, started[0])

    def say(text: str) -> None:
        if not text.startswith(" "):  # scores of a few questions
            print(text, file=sys.stderr, flush=True)

    held_out: HeldOut | None = None
    for measured in sweep_lists(
        *(crew, args.model, data, runs, args.batch, say, begin, finished.known, finished.add), **engine_args
    ):
        held_out = replace(started[0], cells=tuple(_cells(parts, measured, runs)))
        write_held_out(args.output, held_out)
    assert held_out is not None
    finished.remove()
    return held_out


def _make_runs(args: argparse.Namespace) -> list[Run]:
    settings = resolve_settings(args.settings, [*SETTINGS, *ORACLES, *ONLY_CHOSEN])
    common = tuple(args.ratios)
    settings = [setting if setting.ratios is not None else replace(setting, ratios=common) for setting in settings]
    ratios = sorted({0.0, *(ratio for setting in settings for ratio in setting.ratios or ())})
    return make_runs(settings, ratios)


def _make_parts(args: argparse.Namespace) -> list[list[Questions]]:
    """Return the questions of each cell, a few worlds at a time."""
    if len(set(args.families)) < len(args.families):
        raise ValueError(f"--families {args.families}: give each number once")
    split, counts = SPLITS[args.split], (args.samples, args.per_world, args.first_world)
    return [
        held_out_questions(split, number, args.worlds, *counts, args.titles, args.pages) for number in args.families
    ]


def _cells(parts: Sequence[Sequence[Questions]], measured: Sequence[Measured], runs: Sequence[Run] = ()) -> list[Cell]:
    """Put what was measured of each cell's parts together."""
    remaining = list(measured)
    return [_cell(cell[0], [remaining.pop(0) for _ in cell], runs) for cell in parts]


def _cell(questions: Questions, measured: Sequence[Measured], runs: Sequence[Run]) -> Cell:
    samples = [sample for one in measured for sample in one.questions.samples]
    left_out = tuple(name for one in measured for name in one.questions.left_out)
    if not samples:
        raise nothing_fits(replace(questions, samples=(), left_out=left_out), "context")
    order = range(len(samples))
    full = join_outcomes([one.full for one in measured], order) if runs else Outcome()
    first: dict[RunKey, Run] = {}
    for run in runs:
        if all(run.key in one.runs for one in measured):
            first.setdefault(run.key, run)
    ways: list[tuple[str, float | None, Outcome]] = [(FULL, None, full)] if runs else []
    for key, run in first.items():
        ways.append((run.setting.name, run.ratio, join_outcomes([one.runs[key] for one in measured], order)))
    sizes = [len(sample.passages) for sample in samples]
    return Cell(
        questions.name,
        tuple(sample.sample_id for sample in samples),
        tuple(sample.kind or "" for sample in samples),
        (min(sizes), max(sizes)),
        digest_of(samples),
        left_out,
        tuple(_answered(name, ratio, outcome, full) for name, ratio, outcome in ways),
    )


def _answered(name: str, ratio: float | None, outcome: Outcome, full: Outcome) -> Answered:
    correct = outcome.values("exact_match") > 0
    wrong = tuple(text for text, right in zip(outcome.texts, correct, strict=True) if not right)
    return Answered(name, ratio, outcome.token_layers / full.token_layers, np.asarray(correct, bool), wrong)


def _describe(
    args: argparse.Namespace, command: str, runs: Sequence[Run], crew: Crew, engine: EngineFacts
) -> dict[str, Any]:
    """Return how it is measured. `runs` are those that are claims, see `find_read`."""
    return {
        "command": command,
        "date": str(date.today()),
        "commit": _commit(),
        "model": Path(args.model).name,
        "weights": engine.weights,
        "dtype": engine.dtype,
        "device": engine.device,
        "split": args.split,
        "seed of the engine": args.seed,
        "versions": [f"{module.__name__} {module.__version__}" for module in (vllm_blend, torch, transformers)],
        "python": platform.python_version(),
        AUTO: BEST,
        "threads": crew.threads,
        "workers": crew.workers,
        "runs": [[one.setting.name, one.ratio] for one in runs if one.setting.name not in NO_CLAIMS],
    }


def _commit() -> str:
    """Return the commit of the package's checkout, and whether it was changed since."""
    folder = Path(vllm_blend.__file__).parent
    try:
        found = [
            subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown: the package is not in a git checkout"
    return found[0] + (" and uncommitted changes" if found[1] else "")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_blend.quality.held_out",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", nargs="?", help="model directory or Hugging Face id")
    add("--split", choices=[DEVELOPMENT.name, TEST.name], default=DEVELOPMENT.name, help="(default: %(default)s)")
    add("--families", nargs="+", type=int, default=[4, 8], metavar="N", help="a table for each; one has 5 passages")
    add("--worlds", choices=STYLES, default=STYLES[0], help="words lead to passages less surely in wild ones")
    add("--titles", action="store_true", help="passages with titles, as 2WikiMultihopQA's (default: MuSiQue's form)")
    add(
        "--pages",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="prompts say which passage continues which (default: they do)",
    )
    add("--samples", type=int, default=500, help="questions in a table (default: %(default)s)")
    add("--per-world", type=int, default=3, help="questions about a world, kinds in turn (default: %(default)s)")
    add("--first-world", type=int, default=0, metavar="N", help="leave out N worlds (default: %(default)s)")
    add("--settings", nargs="+", default=[], metavar="NAME", help="names or selectors; NAME@RATIO,RATIO")
    add("--ratios", nargs="+", type=float, default=[0.08, 0.15], metavar="RATIO", help="(default: 0.08 0.15)")
    add("--batch", type=int, default=16, help="prompts in a step (default: %(default)s)")
    add("--workers", type=int, default=1, help="processes that share the worlds (default: %(default)s)")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--max-model-len", type=int, help="tokens of the longest prompt with its answer (default: the model's)")
    add("--seed", type=int, default=0, help="seed of the intervals and the engine (default: %(default)s)")
    add("--output", type=Path, metavar="FILE", help="JSON file for the answers, required to measure")
    add("--resume", action="store_true", help="go on with a run that was interrupted")
    add("--again", action="store_true", help="measure what was read before on the test split")
    add("--report", nargs="+", type=Path, metavar="FILE", help="print the tables of such files, and compute nothing")
    add("--by-budget", action="store_true", help="print a table of settings by ratio: what each budget can reach")
    add(
        "--over", metavar="NAME", help="the setting that others are compared with, or NAME@RATIO (default: plain reuse)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    if (args.model is None) == (args.report is None) or (args.report is None and args.output is None):
        parser.error("give a MODEL and --output FILE to measure, or --report FILE... alone")
    if args.by_budget and args.over is not None:
        parser.error("--by-budget compares with nothing: leave out --over")
    words = sys.argv[1:] if argv is None else argv
    try:
        check_seed(args.seed)
        if args.report is not None:
            files = [read_held_out(path) for path in args.report]
        else:
            files = [run(args, shlex.join(["python", "-m", "vllm_blend.quality.held_out", *words]))]
        print(render_budgets(files, args.seed) if args.by_budget else render(files, args.over, args.seed))
    except (OSError, ValueError, RuntimeError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    main()
