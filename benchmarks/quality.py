"""How good blended answers are, and what they cost: every setting x ratio x data set, as JSON, Markdown and a picture.

    python -m benchmarks.quality --quick --output results/quality_quick
    python -m benchmarks.quality --output benchmarks/results/quality

The settings are the lists in vllm_blend/pipeline/quality/catalogue.py: rules, then levers. Any model directory and
any data set in the same format will do; full prefill by the same model is what everything is compared with. Answers
are greedy, and nothing depends on time: the same command gives the same numbers, but for what another machine or number
of workers rounds differently. Where there is no matplotlib, --no-picture does without, and elsewhere

    python -m benchmarks.quality --draw benchmarks/results/quality.json

draws what is in a file.
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

from vllm_blend.pipeline.files import check_place, read_json, write_json
from vllm_blend.pipeline.quality.catalogue import QUICK_RATIOS, RATIOS, RULES, SETTINGS
from vllm_blend.pipeline.quality.intervals import LEVEL, RESAMPLES, check_seed
from vllm_blend.pipeline.quality.parallel import Crew, make_crew, sweep_by
from vllm_blend.pipeline.quality.picture import check_rows, draw, load_pyplot
from vllm_blend.pipeline.quality.questions import read_all
from vllm_blend.pipeline.quality.report import render
from vllm_blend.pipeline.quality.rows import make_rows, shortened
from vllm_blend.pipeline.quality.settings import find_settings, make_runs
from vllm_blend.pipeline.quality.sweep import Measured

ROOT = Path(__file__).resolve().parents[1]
DATASETS = [str(ROOT / "inputs" / name) for name in ("musique_s.json", "wikimqa_s.json", "samsum.json")]
SAMPLES, QUICK_SAMPLES = 60, 9  # to stay below 60 and 5 minutes on two cores


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=str(ROOT / "inputs" / "demo-model"), help="model directory or hub id")
    add("--datasets", nargs="+", default=DATASETS, metavar="FILE")
    add("--style", help="how they are asked (musique, wikimqa, samsum), where a file's name does not say it")
    add("--settings", nargs="+", metavar="NAME", help=f"of {', '.join(s.name for s in SETTINGS)} (default: all)")
    add("--ratios", nargs="+", type=float, metavar="RATIO", help="shares from 0 to 1, rising, 0 among them")
    add("--samples", type=int, help=f"of each data set, equally many of each kind (default: {SAMPLES})")
    add("--quick", action="store_true", help=f"{QUICK_SAMPLES} samples a data set, ratios {QUICK_RATIOS}")
    add("--batch", type=int, default=16, help="prompts in a step (default: %(default)s)")
    add("--workers", type=int, metavar="N", help="processes that share the questions (default: one a core, on a GPU 1)")
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--seed", type=int, default=0, help="of the bootstrap and the engine (default: %(default)s)")
    add("--output", type=Path, default=ROOT / "results" / "quality", help="writes this path + .json, .md and .png")
    add("--no-picture", action="store_true", help="write no .png, which needs matplotlib")
    add("--draw", type=Path, metavar="FILE", help="measure nothing: draw the picture of this .json beside it")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        if args.draw is not None:
            print("written:", draw_again(args.draw), file=sys.stderr)
            return
        paths = run(args, shlex.join(["python", "-m", "benchmarks.quality", *(sys.argv[1:] if argv is None else argv)]))
    except (ImportError, OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    print(paths[1].read_text(encoding="utf-8"))
    print("written:", *paths, file=sys.stderr)


def run(args: argparse.Namespace, command: str) -> list[Path]:
    """Measure and write; what can be wrong is found out before anything is computed. The JSON and the tables grow with
    every engine, so that an interrupted run leaves what it had."""
    if not args.no_picture:
        load_pyplot()
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
        write_json(paths[0], {"about": about, "rows": shortened(rows)})
        paths[1].write_text(render(about, rows, settings), encoding="utf-8")
    if args.no_picture:
        return paths[:2]
    draw(rows, paths[2], [setting.name for setting in RULES])
    return paths


def draw_again(file: Path) -> Path:
    """The picture of rows that were written before."""
    written = read_json(file, "rows")
    check_rows(written.get("rows") if isinstance(written, dict) else None, file)
    path = file.with_name(file.name.removesuffix(".json") + ".png")
    draw(written["rows"], path, [setting.name for setting in RULES])
    return path


def describe(
    args: argparse.Namespace, command: str, crew: Crew, measured: Sequence[Measured], seconds: float
) -> dict[str, Any]:
    """How it was measured."""
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
