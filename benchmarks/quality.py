"""Measure how good blended answers are, and what they cost: every setting x ratio x data set.

    python -m benchmarks.quality --quick --output results/quality_quick
    python -m benchmarks.quality --output benchmarks/results/quality

writes JSON, Markdown and a picture. The settings are the lists in vllm_blend/quality/catalogue.py: rules, then levers.
Any model directory and any data set in the same format will do; everything is compared with full prefill by the same
model. Answers are greedy, and nothing depends on time: the same command gives the same numbers, up to what another
machine or number of workers rounds differently. --no-picture does without matplotlib, and

    python -m benchmarks.quality --report benchmarks/results/quality.json

makes the tables and the picture of such a file again.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from vllm_blend.pipeline.files import check_place
from vllm_blend.pipeline.timeline import load_pyplot
from vllm_blend.quality.catalogue import QUICK_RATIOS, RATIOS, RULES, SETTINGS
from vllm_blend.quality.intervals import LEVEL, RESAMPLES, check_seed
from vllm_blend.quality.parallel import Crew, make_crew, sweep_by
from vllm_blend.quality.picture import WITHOUT, draw
from vllm_blend.quality.questions import read_all
from vllm_blend.quality.report import render
from vllm_blend.quality.rows import make_rows
from vllm_blend.quality.settings import find_settings, make_runs
from vllm_blend.quality.sweep import Measured
from vllm_blend.quality.sweep_file import read_sweep, write_sweep

ROOT = Path(__file__).resolve().parents[1]
DATASETS = [str(ROOT / "inputs" / name) for name in ("musique_s.json", "wikimqa_s.json", "samsum.json")]
SAMPLES, QUICK_SAMPLES = 60, 9  # to stay below 60 and 5 minutes on two cores


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=str(ROOT / "inputs" / "demo-model"), help="model directory or hub id")
    add("--datasets", nargs="+", default=DATASETS, metavar="FILE")
    add("--style", help="how to ask them (musique, wikimqa, samsum), if a file's name does not say it")
    add("--settings", nargs="+", metavar="NAME", help=f"of {', '.join(s.name for s in SETTINGS)} (default: all)")
    add("--ratios", nargs="+", type=float, metavar="RATIO", help="shares from 0 to 1, in rising order, with 0")
    add("--samples", type=int, help=f"questions of each data set, equally many of each kind (default: {SAMPLES})")
    add("--quick", action="store_true", help=f"{QUICK_SAMPLES} samples a data set, ratios {QUICK_RATIOS}")
    add("--batch", type=int, default=16, help="prompts in a step (default: %(default)s)")
    add("--workers", type=int, metavar="N", help="processes that share the questions (default: one a core, on a GPU 1)")
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--seed", type=int, default=0, help="seed of the bootstrap and the engine (default: %(default)s)")
    add("--output", type=Path, default=ROOT / "results" / "quality", help="writes this path + .json, .md and .png")
    add("--no-picture", action="store_true", help="write no .png, which needs matplotlib")
    add("--report", type=Path, metavar="FILE", help="measure nothing: write the tables and the picture of this .json")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        command = shlex.join(["python", "-m", "benchmarks.quality", *(sys.argv[1:] if argv is None else argv)])
        paths = run(args, command) if args.report is None else report(args.report, with_picture=not args.no_picture)
    except (ImportError, OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    print(paths[1].read_text(encoding="utf-8"))
    print("written:", *paths, file=sys.stderr)


def run(args: argparse.Namespace, command: str) -> list[Path]:
    """Measure and write. Mistakes are found before anything is computed. The JSON and the tables grow with every
    engine, so that an interrupted run leaves what it had."""
    if not args.no_picture:
        load_pyplot(WITHOUT)
    check_seed(args.seed)
    settings = find_settings(args.settings, SETTINGS)
    runs = make_runs(settings, args.ratios or (QUICK_RATIOS if args.quick else RATIOS))
    limit = args.samples if args.samples is not None else (QUICK_SAMPLES if args.quick else SAMPLES)
    data = read_all(args.datasets, args.style, limit)
    crew = make_crew(args.workers, args.device, data)
    paths = [args.output.with_name(args.output.name + end) for end in (".json", ".md", ".png")]
    for path in paths:
        check_place(path, "--output")
    started = time.perf_counter()
    common: dict[str, Any] = {"dtype": args.dtype, "device": args.device, "seed": args.seed}
    for measured in sweep_by(crew, args.model, data, runs, args.batch, _say, **common):
        rows = make_rows(measured, runs, args.seed)
        about = describe(args, command, crew, measured, time.perf_counter() - started)
        write_sweep(paths[0], about, settings, rows)
        report(paths[0], with_picture=False)
    return report(paths[0], with_picture=not args.no_picture)


def report(file: Path, *, with_picture: bool) -> list[Path]:
    """Write the tables, and the picture, of an earlier run's file beside it."""
    about, settings, rows = read_sweep(file)
    paths = [file.with_name(file.name.removesuffix(".json") + end) for end in (".json", ".md", ".png")]
    paths[1].write_text(render(about, rows, settings), encoding="utf-8")
    if not with_picture:
        return paths[:2]
    draw(rows, paths[2], [setting.name for setting in RULES])
    return paths


def describe(
    args: argparse.Namespace, command: str, crew: Crew, measured: Sequence[Measured], seconds: float
) -> dict[str, Any]:
    """Return how it was measured."""
    left_out = [name for one in measured for name in one.questions.left_out]
    return {
        "command": command,
        "date": str(date.today()),
        "model": Path(args.model).name,
        "dtype": args.dtype,
        "device": args.device,
        "questions": [f"{len(one.questions.samples)} of {one.questions.name}" for one in measured],
        "left out as too long": left_out,
        "seed": args.seed,
        "intervals": f"{100 * LEVEL:g}%, percentiles of {RESAMPLES} resamples",
        "torch": torch.__version__,
        "workers": crew.workers,
        "threads of each": crew.threads,
        "machine": platform.processor() or platform.machine(),
        "minutes": round(seconds / 60, 1),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
