"""`vllm-blend check-model`: whether a model may be blended, and how.

    vllm-blend check-model Qwen/Qwen2.5-1.5B-Instruct --data hotpot_dev_distractor_v1.json --samples 200

asks questions of data sets in full and by several rules, ratios and companies, and compares the answers: F1 and exact
match with those of the data set, agreement and KL with those of full prefill. The verdict names the cheapest setting
that keeps enough, or says not to blend. It is kept beside the model, or in the folder that --chunk-store-path names,
where `vllm-blend serve` finds it. --quick takes a few questions and settings for a first look, and keeps no verdict.

The exit status is 0 if a setting passes on every data set, 3 if more questions are needed to say so, 1 if the model
should not be blended (or cannot be judged), and 2 for bad input or too little memory. A model for which recomputing
everything is not full prefill is refused, with the likely reason.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_blend.command_line import BAD_INPUT, CommandParser
from vllm_blend.engine_args import EngineArgs
from vllm_blend.entrypoints.verdicts import identity, keep_verdict, writable_place
from vllm_blend.pipeline.files import check_place, write_json
from vllm_blend.quality.intervals import check_seed
from vllm_blend.quality.questions import read_all
from vllm_blend.quality.settings import COMPANIES, QUICK_RULES, RATIOS, RULES, make_settings
from vllm_blend.quality.table import LEGEND, make_rows, render
from vllm_blend.quality.verdict import State, Thresholds, Verdict, as_json, decide
from vllm_blend.quality.yardstick import Plan, Wording, Yardstick, check_counts, measure_model

MIN_QUESTIONS = 50  # of a data set
QUICK_QUESTIONS = 16  # of all data sets together: about nine minutes of CPU time for a model of 0.5B
QUICK_CHECKED = 2  # of them, for exactness


def check_model(args: argparse.Namespace) -> int:
    """Run the command. Raises ValueError or OSError for bad input, RuntimeError if a batch does not fit the engine."""
    limits = Thresholds(args.min_agreement, args.max_f1_loss)
    plan, samples = make_plan(args)
    data = read_all(args.data, samples, args.seed)
    check_counts(data, plan.least)
    if args.output is not None:
        check_place(args.output, "--output")
    place, name = None, ""
    if not args.quick:
        place, name = _place(args)
    yardstick = measure_model(args.model, data, plan, say, **engine_arguments(args))
    rows = [row for measured in yardstick.measured for row in make_rows(measured, args.seed)]
    verdict = refusal(yardstick) if yardstick.reason else decide(rows, plan.settings, limits)
    report(yardstick, rows, verdict)
    found = {"model": args.model, "dtype": yardstick.dtype} | as_json(verdict, rows, limits)
    if args.output is not None:
        write_json(args.output, found | {"rows": rows})
    if place is not None:
        keep_verdict(place, name, found)
        print(f"\nThe verdict is kept in {place}")
    return verdict.status


def make_plan(args: argparse.Namespace) -> tuple[Plan, int | None]:
    """Return what to measure, and how many questions of each data set (None: all)."""
    check_seed(args.seed)
    rules = args.rules or (QUICK_RULES if args.quick else RULES)
    settings = make_settings(rules, args.ratios, args.companies)
    if args.min_questions < 1:
        raise ValueError(f"--min-questions {args.min_questions} must be at least 1")
    wording = Wording(args.style, args.instruction, args.template)
    if not args.quick:
        return Plan(settings, wording, args.min_questions, args.batch), args.samples
    samples = args.samples or max(1, QUICK_QUESTIONS // len(args.data))
    return Plan(settings, wording, 1, args.batch, QUICK_CHECKED), samples


def _place(args: argparse.Namespace) -> tuple[Path | None, str]:
    """Return where the verdict is kept (None: nowhere), and what it is about."""
    config = EngineArgs(model=args.model, enable_blending=True, **engine_arguments(args)).create_engine_config()
    place = writable_place(config, args.chunk_store_path)
    if place is None:
        say(f"the verdict will not be kept: {args.model} has no place for it; give --chunk-store-path")
    return place, identity(config)


def refusal(yardstick: Yardstick) -> Verdict:
    text = "Refused: do not blend this model. Recomputing everything does not give what full prefill gives."
    return Verdict(State.FAILS, None, f"{text}\n{yardstick.reason}")


def report(yardstick: Yardstick, rows: Sequence[dict[str, Any]], verdict: Verdict) -> None:
    """Print the tables and the verdict."""
    for measured in yardstick.measured:
        questions = measured.questions
        print(f"{questions.name}, {len(questions.samples)} questions, {yardstick.dtype} on {yardstick.device}\n")
        print(f"{render([row for row in rows if row['dataset'] == questions.name])}\n")
    if rows:
        print(f"{textwrap.fill(LEGEND, 120)}\n")
        print("\n".join(map(str, yardstick.check.found)))
    print(f"\n{verdict.text}" if rows else verdict.text)


def say(text: str) -> None:
    """Tell the user what goes on, beside the results."""
    print(text, file=sys.stderr, flush=True)


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    names = ("tokenizer", "dtype", "device", "max_model_len", "tensor_parallel_size", "seed", "blend_chunk_cache_gib")
    return {name: getattr(args, name) for name in names}


def add_question_flags(parser: argparse.ArgumentParser, is_required: bool = True) -> None:
    """Add the flags that say what is asked, how, and what is compared."""
    add = parser.add_argument_group("questions").add_argument
    files = "data sets as published (HotpotQA, 2WikiMultihopQA, MuSiQue, SQuAD, LongBench, CacheBlend's) or of your own"
    add("--data", "--dataset", dest="data", nargs="+", required=is_required, metavar="FILE", help=files)
    add("--samples", type=int, metavar="N", help="questions of each data set, drawn with --seed (default: all)")
    add(
        "--style",
        help="ask as musique, wikimqa, samsum or by-name, as the file is called (default: by the chat template)",
    )
    add("--instruction", default="", metavar="TEXT", help="what stands before the passages")
    add("--template", default="", metavar="TEXT", help="what stands after them, with {question} in it")
    add = parser.add_argument_group("what is compared").add_argument
    rules = f"rules, any blend_selector, with RULE@RATIO,RATIO for ratios of its own (default: {' '.join(RULES)})"
    add("--rules", nargs="+", metavar="RULE", help=rules)
    shares = " ".join(f"{ratio:g}" for ratio in RATIOS)
    add(
        "--ratios",
        nargs="+",
        type=float,
        default=list(RATIOS),
        metavar="RATIO",
        help=f"shares that are recomputed (default: {shares})",
    )
    company = "what chunks are encoded after, any blend_encoding_context (default: %(default)s)"
    add("--companies", nargs="+", default=list(COMPANIES), metavar="NAME", help=company)
    add("--seed", type=int, default=0, metavar="N", help="seed of questions and intervals (default: %(default)s)")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the engine").add_argument
    add("--batch", type=int, default=16, metavar="N", help="prompts at a time (default: %(default)s)")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--tokenizer", help="tokenizer directory or id, if it is not the model's")
    longest = "tokens of the longest prompt with its answer (default: the model's)"
    add("--max-model-len", type=int, metavar="N", help=longest)
    add = parser.add_argument_group("its memory").add_argument
    ranks = "ranks that share the model, each on a device of its own (default: %(default)s)"
    add("--tensor-parallel-size", type=int, default=1, metavar="N", help=ranks)
    kept = "memory for the chunks of a batch, in GiB (default: %(default)s)"
    add("--blend-chunk-cache-gib", type=float, default=4.0, metavar="X", help=kept)


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="vllm-blend check-model",
        usage="vllm-blend check-model MODEL --data FILE [FILE ...] [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="model directory, GGUF file or Hugging Face id")
    add_question_flags(parser)
    limits = Thresholds()
    add = parser.add_argument_group("the verdict").add_argument
    agreement = "share of answers that must be full prefill's (default: %(default)s)"
    add("--min-agreement", type=float, default=limits.min_agreement, metavar="SHARE", help=agreement)
    loss = "F1 that may be lost, from 0 to 1; more if the interval goes through zero (default: %(default)s)"
    add("--max-f1-loss", type=float, default=limits.max_f1_loss, metavar="X", help=loss)
    fewest = "questions of a data set; fewer are an error (default: %(default)s)"
    add("--min-questions", type=int, default=MIN_QUESTIONS, metavar="N", help=fewest)
    quick = f"take {QUICK_QUESTIONS} questions and {len(QUICK_RULES)} rules, for a first look; keeps no verdict"
    add("--quick", action="store_true", help=quick)
    add = parser.add_argument_group("where results go").add_argument
    add(
        "--chunk-store-path",
        metavar="FOLDER",
        help="keep the verdict in this chunk store's folder (default: beside the model)",
    )
    add("--output", type=Path, metavar="FILE", help="also write verdict and rows to this JSON file")
    add_engine_flags(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        return check_model(args)
    except (OSError, ValueError, RuntimeError) as error:  # 1 would be a verdict
        parser.exit(BAD_INPUT, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
