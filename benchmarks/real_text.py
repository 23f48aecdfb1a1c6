"""Measure what rules and companies keep of full prefill's answers, for any model and any data sets: the table of docs.

    python -m benchmarks.real_text MODEL --data hotpot_dev_distractor_v1.json --samples 200 --output results/real_text

writes JSON, with the numbers of every question, and Markdown. The measures, the flags and the defaults are those of
`vllm-blend check-model`. Answers are greedy, and nothing depends on time: the same command gives the same numbers, up
to what another machine rounds differently.

    python -m benchmarks.real_text --report results/real_text.json

makes the Markdown of such a file again.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from vllm_blend.pipeline.files import check_place, read_json, write_text
from vllm_blend.quality.check_model import add_engine_flags, add_question_flags, engine_arguments, make_plan, say
from vllm_blend.quality.measures import Measured
from vllm_blend.quality.questions import read_all
from vllm_blend.quality.settings import Setting, make_settings
from vllm_blend.quality.table import LEGEND, columns_of, make_rows, render
from vllm_blend.quality.yardstick import Plan, Yardstick, measure_model


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="model directory, GGUF file or Hugging Face id")
    add_question_flags(parser, is_required=False)
    add = parser.add_argument_group("the table").add_argument
    add("--over", metavar="RULE", help="also show the differences to this rule, such as auto@0.15")
    add("--quick", action="store_true", help="few questions and rules, as check-model takes them")
    add("--name", help="the model's name on the page (default: its file's)")
    add("--note", action="append", default=[], metavar="TEXT", help="a line for the page: the data's licence and split")
    add("--output", type=Path, default=Path("results/real_text"), help="writes this path + .json and .md")
    add("--report", type=Path, metavar="FILE", help="measure nothing: write the Markdown of this .json")
    add_engine_flags(parser)
    parser.set_defaults(min_questions=1)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        if args.report is not None:
            path = report(args.report)
        elif args.model is None or args.data is None:
            raise ValueError("give a MODEL and --data FILE, or --report FILE")
        else:
            path = report(run(args, sys.argv[1:] if argv is None else argv))
    except (OSError, RuntimeError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    print(path.read_text(encoding="utf-8"))
    print(f"written: {path.with_suffix('.json')}, {path}", file=sys.stderr)


def run(args: argparse.Namespace, argv: Sequence[str]) -> Path:
    """Measure, and write the JSON. Mistakes are found before anything is computed."""
    plan, samples = make_plan(args)
    data = read_all(args.data, samples, args.seed)
    over = _compared(args, plan)
    path: Path = args.output.with_name(f"{args.output.name}.json")
    check_place(path, "--output")
    started = time.perf_counter()
    yardstick = measure_model(args.model, data, plan, say, **engine_arguments(args))
    if yardstick.reason is not None:
        raise ValueError(f"{args.model} cannot be measured. {yardstick.reason}")
    found = {
        "about": describe(args, argv, yardstick, time.perf_counter() - started),
        "rows": [row for one in yardstick.measured for row in make_rows(one, args.seed, over)],
        "questions": {one.questions.name: columns_of(one) for one in yardstick.measured},
    }
    parts = [f"{json.dumps(name)}: {_dump(part)}" for name, part in found.items()]
    return write_text(path, "{\n" + ",\n".join(parts) + "\n}\n")


def report(file: Path) -> Path:
    """Write the Markdown of an earlier run's file beside it."""
    found = read_json(file, "rows")
    if not isinstance(found, dict) or not {"about", "rows"} <= found.keys():
        raise ValueError(f"{file} holds no rows: give a .json that benchmarks.real_text has written")
    return write_text(file.with_suffix(".md"), page(found))


def page(found: dict[str, Any]) -> str:
    """Return the page of a file's content."""
    about, rows = dict(found["about"]), found["rows"]
    lines = [f"# What blending keeps: {about['model']}", "", f"    {about.pop('command')}", ""]
    lines += [f"- {name}: {', '.join(value) if isinstance(value, list) else value}" for name, value in about.items()]
    lines += ["", LEGEND]
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        own = [row for row in rows if row["dataset"] == dataset]
        lines += ["", f"## {dataset}, {own[0]['questions']} questions", "", render(own)]
    return "\n".join(lines) + "\n"


def describe(args: argparse.Namespace, argv: Sequence[str], yardstick: Yardstick, seconds: float) -> dict[str, Any]:
    """Return how it was measured. Files of absolute paths are named without their folders."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in argv]
    measured = yardstick.measured
    return {
        "command": shlex.join(["python", "-m", "benchmarks.real_text", *words]),
        "date": str(date.today()),
        "model": args.name or Path(args.model).name,
        "dtype": yardstick.dtype,
        "questions": [_named(one) for one in measured],
        "notes": args.note or ["none"],
        "computing the chunks took": _encoding(measured),
        "recomputing everything": str(yardstick.check.found[-1]),
        "intervals": "95%, over questions: paired bootstrap, Wilson's for agreement",
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name() if yardstick.device.startswith("cuda") else platform.machine(),
        "minutes": f"{seconds / 60:.1f}",
    }


def _named(one: Measured) -> str:
    asking = one.questions.asking
    assert asking is not None
    return f"{len(one.questions.samples)} of {one.questions.name} ({one.questions.form}, asked by {asking.name})"


def _encoding(measured: Sequence[Measured]) -> list[str]:
    return [
        f"{100 * work / one.full.work:.0f}% of full prefill's work on {one.questions.name} after {company}"
        for one in measured
        for company, work in one.encoding.items()
    ]


def _compared(args: argparse.Namespace, plan: Plan) -> Setting | None:
    """Return the setting that others are compared with. Raises ValueError if it is not measured."""
    if args.over is None:
        return None
    [over, *others] = make_settings([args.over], args.ratios, args.companies[:1])
    if others or over not in plan.settings:
        raise ValueError(f"--over {args.over} is not measured: name one of --rules with one ratio, RULE@RATIO")
    return over


def _dump(part: Any) -> str:
    """Return JSON with a line for each row, and for each list of numbers."""
    if isinstance(part, list):
        return "[\n " + ",\n ".join(json.dumps(row, ensure_ascii=False) for row in part) + "\n]"
    lines = [f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in part.items()]
    return "{\n " + ",\n ".join(lines) + "\n}"


if __name__ == "__main__":
    main()
