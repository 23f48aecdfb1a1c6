"""`vllm-blend check-model`: how little of a context may be recomputed before a model's answers suffer.

    vllm-blend check-model inputs/demo-model --dataset inputs/musique_s.json --max-loss 0.05

answers a data set in full and blended at rising ratios, and names the smallest ratio from which on the score stays
within the loss. The interval of a loss is one for few questions (intervals.py); if it reaches beyond the allowed loss,
the verdict says so, and fewer than --min-questions give no verdict. The exit status is 0 if there is such a ratio, 1 if
the model should not be blended (or cannot be judged), and 2 for bad input or too little memory. A model for which
recomputing everything is not full prefill is refused, with the likely reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vllm_blend.pipeline.files import check_place, write_json
from vllm_blend.quality.catalogue import RATIOS, SETTINGS
from vllm_blend.quality.exactness import Difference, check_exactness, explain
from vllm_blend.quality.intervals import SmallSampleIntervals, check_seed
from vllm_blend.quality.questions import Questions, read_all, select_fitting
from vllm_blend.quality.report import NAMES, table
from vllm_blend.quality.rows import ALL, FULL, make_rows
from vllm_blend.quality.session import Session
from vllm_blend.quality.settings import Run, Setting, find_settings, make_runs
from vllm_blend.quality.sweep import Measured, Outcome, answer_in_full, answer_run

DEFAULT = Setting("the default rule")  # the engine's
MIN_QUESTIONS = 50  # of a data set: after 50 equal answers, up to 7% may still differ
LEAST_SCORE = 0.1  # of full prefill: a model that can hardly answer has hardly anything to lose
FOUND, NOT_TO_BLEND, BAD_INPUT = 0, 1, 2


@dataclass(frozen=True)
class Verdict:
    """The answer for a data set. `ratio` is None if the model should not be blended, or cannot be judged. `certain`
    says that even the interval of the loss stays within the allowed loss."""

    dataset: str
    ratio: float | None
    text: str
    certain: bool = False


def decide(rows: Sequence[dict[str, Any]], setting: str, max_loss: float) -> Verdict:
    """Return the verdict from the rows of one data set: the smallest ratio below 1 from which on, at every larger one
    too, at most `max_loss` of full prefill's score is lost."""
    overall = [row for row in rows if row["kind"] == ALL]
    full = next(row for row in overall if row["setting"] == FULL)
    name, metric = full["dataset"], full["metric"]
    if full[metric] < LEAST_SCORE:
        text = (
            f"{name}: cannot tell: full prefill itself has {NAMES[metric]} {100 * full[metric]:.1f}, so there is "
            "little to lose. Use a data set that the model can answer, in the form it knows (see --style)"
        )
        return Verdict(name, None, text)
    ours = sorted((r for r in overall if r["setting"] == setting and r["ratio"] < 1), key=lambda r: r["ratio"])
    good: dict[str, Any] | None = None
    for row in reversed(ours):
        if 1 - row["kept"] > max_loss:
            break
        good = row
    if good is None:
        last = ours[-1]
        text = (
            f"{name}: do not blend this model: at {100 * last['ratio']:g}% recomputed it still loses {_loss(last)} of "
            f"full prefill's {NAMES[metric]}, and {100 * max_loss:g}% may be lost"
        )
        return Verdict(name, None, text)
    text = (
        f"{name}: {100 * good['ratio']:g}% is enough: it loses {_loss(good)} of full prefill's {NAMES[metric]} and "
        f"computes {100 * good['token_layers']:.1f}% of its token-layers ({good['samples']} questions)"
    )
    certain = good["kept_low"] is not None and 1 - good["kept_low"] <= max_loss
    if not certain:
        text += f"\n  so few questions do not rule out a loss of more than {100 * max_loss:g}%: ask more to be sure"
    kinds = [r for r in rows if (r["kind"] != ALL, r["setting"], r["ratio"]) == (True, setting, good["ratio"])]
    worst = min((r for r in kinds if r["kept"] is not None), key=lambda r: r["kept"], default=None)
    if worst is not None and 1 - worst["kept"] > max_loss:
        text += f"\n  of the kind {worst['kind']!r} alone it loses {_loss(worst)}"
    return Verdict(name, good["ratio"], text, certain)


def check_model(args: argparse.Namespace, say: Any) -> int:
    """Run the command. Raises ValueError or OSError for bad input, RuntimeError if a batch does not fit the engine."""
    if not 0 <= args.max_loss < 1:
        raise ValueError(f"--max-loss {args.max_loss} is a share of full prefill's score: use a number in [0, 1)")
    check_seed(args.seed)
    setting = DEFAULT if args.setting is None else find_settings([args.setting], SETTINGS)[0]
    if setting.ratios is not None:  # a sweep's ratios; here the ratios that were asked for count
        setting = replace(setting, ratios=None)
    runs = make_runs([setting], args.ratios)
    if not any(0 < run.ratio < 1 for run in runs):
        raise ValueError("--ratios must include one between 0 and 1: the shares that a blend would recompute")
    if args.min_questions < 1:
        raise ValueError(f"--min-questions {args.min_questions} must be at least 1")
    data = read_all(args.dataset, args.style, args.samples)
    check_counts(data, args.min_questions)
    if args.output is not None:
        check_place(args.output, "--output")
    engine_args = {"dtype": args.dtype, "device": args.device, "seed": args.seed, "max_model_len": args.max_model_len}
    engine_args |= setting.engine
    with Session(args.model, args.batch, **engine_args) as session:
        data = [select_fitting(questions, session.engine) for questions in data]
        for questions in data:
            if questions.left_out:
                say(f"{questions.name}: {len(questions.left_out)} samples are left out as too long")
        check_counts(data, args.min_questions)
        full, found, limit = check_exactness(session, data[0])
        if exact := all(difference.within(limit) for difference in found):
            measured = [_measure(session, questions, runs, say) for questions in data]
    if not exact:
        reason = explain(args.model, data[0], full, found, limit, **engine_args)
        print("Refused: do not blend this model. Recomputing everything does not give what full prefill gives.")
        print(reason)
        refused = f"refused: recomputing everything does not give what full prefill gives. {reason}"
        verdicts, rows = [Verdict(questions.name, None, refused) for questions in data], []
    else:
        rows = make_rows(measured, runs, args.seed, SmallSampleIntervals)
        verdicts = _report(data, rows, setting, args.max_loss, found)
    if args.output is not None:
        about = {"model": args.model, "max_loss": args.max_loss, "setting": setting.name, "seed": args.seed}
        results = [asdict(verdict) for verdict in verdicts]
        write_json(args.output, {"about": about, "verdicts": results, "rows": rows})
    return FOUND if all(verdict.ratio is not None for verdict in verdicts) else NOT_TO_BLEND


def check_counts(data: Sequence[Questions], least: int) -> None:
    """Raise ValueError for a data set with fewer questions than a verdict takes."""
    for questions in data:
        count = len(questions.samples)
        if count < least:
            raise ValueError(
                f"{questions.name} has {count} {'question' if count == 1 else 'questions'} that can be asked, too few "
                f"for a verdict: give at least {least} (see --samples), or allow fewer with --min-questions {count}"
            )


def _measure(session: Session, questions: Questions, runs: Sequence[Run], say: Any) -> Measured:
    one = Measured(questions, Outcome(), {})
    say(f"{questions.name}: {len(questions.samples)} questions")
    reference = answer_in_full(session, one)
    for run in {run.key: run for run in runs}.values():
        one.runs[run.key] = answer_run(session, questions, run, reference, say)
    return one


def _report(
    data: Sequence[Questions],
    rows: Sequence[dict[str, Any]],
    setting: Setting,
    max_loss: float,
    found: Sequence[Difference],
) -> list[Verdict]:
    verdicts = []
    for questions in data:
        own = [row for row in rows if row["dataset"] == questions.name]
        print(f"{table(own)}\n")
        verdicts.append(decide(own, setting.name, max_loss))
    for difference in found:
        print(difference)
    for verdict in verdicts:
        print(verdict.text)
    ratios = [verdict.ratio for verdict in verdicts]
    known = [ratio for ratio in ratios if ratio is not None]
    if len(ratios) > 1 and len(known) == len(ratios):
        print(f"for all of them: blend_recompute_ratio={max(known):g}")
    return verdicts


def _loss(row: dict[str, Any]) -> str:
    """Return the share of full prefill's score that a row loses, with its interval."""
    text = f"{100 * (1 - row['kept']) + 0.0:.1f}%"
    if row["kept_low"] is None:
        return text
    return f"{text} (95% interval {100 * (1 - row['kept_high']) + 0.0:.1f} to {100 * (1 - row['kept_low']) + 0.0:.1f}%)"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-blend check-model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="model directory or Hugging Face id")
    add("--dataset", nargs="+", required=True, metavar="FILE", help="data sets; each gets a verdict")
    add("--style", help="how to ask them (musique, wikimqa, samsum), if a file's name does not say it")
    add("--max-loss", type=float, default=0.05, help="share of full prefill's score (default: %(default)s)")
    add("--setting", metavar="NAME", help=f"of {', '.join(s.name for s in SETTINGS)} (default: the engine's rule)")
    add("--ratios", nargs="+", type=float, default=list(RATIOS), metavar="RATIO", help="in rising order, with 0")
    add("--samples", type=int, help="questions of each data set, equally many of each kind (default: all)")
    add(
        "--min-questions",
        type=int,
        default=MIN_QUESTIONS,
        metavar="N",
        help="questions of a data set; fewer are an error (default: %(default)s)",
    )
    add("--batch", type=int, default=16, help="prompts in a step (default: %(default)s)")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--max-model-len", type=int, help="tokens of the longest prompt with its answer (default: the model's)")
    add("--seed", type=int, default=0, help="seed of the intervals (default: %(default)s)")
    add("--output", type=Path, metavar="FILE", help="also write verdicts and rows to this JSON file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        return check_model(args, lambda text: print(text, file=sys.stderr, flush=True))
    except (OSError, ValueError, RuntimeError) as error:  # 1 would be a verdict
        parser.exit(BAD_INPUT, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
