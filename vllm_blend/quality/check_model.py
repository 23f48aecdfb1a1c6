"""`vllm-blend check-model`: how little of a context may be recomputed before a model's answers suffer.

    vllm-blend check-model inputs/demo-model --dataset inputs/musique_s.json --max-loss 0.05

answers a data set in full and blended at rising ratios, and names the smallest ratio from which on the score stays
within the loss; with several rules (--selector A B), for each of them, and which of them costs least. A ratio is only
"enough" if the whole interval of its loss is within the allowed one. The interval is one for few questions; where it
reaches further, the verdict is that more questions are needed, and about how many. Fewer than --min-questions give no
verdict at all.

The exit status is 0 if a rule is enough on every data set, 3 if more questions are needed to say so, 1 if the model
should not be blended (or cannot be judged), and 2 for bad input or too little memory. A model for which recomputing
everything is not full prefill is refused, with the likely reason.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_blend.blend.selectors.question_attention import QuestionAttention
from vllm_blend.command_line import BAD_INPUT, CommandParser
from vllm_blend.pipeline.files import check_place, write_json
from vllm_blend.quality.catalogue import RATIOS, SETTINGS
from vllm_blend.quality.exactness import Difference, Limit, check_exactness, explain
from vllm_blend.quality.intervals import SmallSampleIntervals, check_seed
from vllm_blend.quality.questions import Questions, read_all
from vllm_blend.quality.report import NAMES, table
from vllm_blend.quality.rows import ALL, FULL, make_rows
from vllm_blend.quality.session import Answers, Session
from vllm_blend.quality.settings import Setting, make_runs, resolve_settings
from vllm_blend.quality.sweep import sweep

DEFAULT = Setting("the default rule")  # the engine's
FALLBACK = QuestionAttention.name
MIN_QUESTIONS = 50  # of a data set: after 50 equal answers, up to 7% may still differ
LEAST_SCORE = 0.1  # of full prefill: a model that can hardly answer has hardly anything to lose
FOUND, NOT_TO_BLEND, UNCERTAIN = 0, 1, 3  # exit statuses, beside BAD_INPUT
LEGEND = """\
Scores and shares are in percent, with 95% intervals in brackets. `ratio`: the share of the context that a rule may
recompute. `token-layers`: what the prefill computed, as a share of full prefill, with the question and with passes that
only choose tokens. Below 100 for `recompute all`, as what is exact anyway is reused: the prefix, and a chunk that
stands where it was encoded. `kept`: the share of full prefill's score. `recovered`: the share of what plain reuse loses
that the rule wins back; empty if reuse loses nothing. `same answer`: how many answers are full prefill's word for word.
`KL`: how far the distribution of the first answer token is from full prefill's, in nats, mean."""


@dataclass(frozen=True)
class Verdict:
    """The answer for a rule on a data set. `ratio` is None if the model should not be blended so, or cannot be judged.
    `certain` says that even the interval of the loss stays within the allowed loss. `token_layers` is the cost, as a
    share of full prefill's."""

    dataset: str
    setting: str
    ratio: float | None
    text: str
    certain: bool = False
    token_layers: float | None = None

    @property
    def status(self) -> int:
        """Return the exit status that this verdict alone would give."""
        if self.ratio is None:
            return NOT_TO_BLEND
        return FOUND if self.certain else UNCERTAIN


def decide(rows: Sequence[dict[str, Any]], setting: str, max_loss: float) -> Verdict:
    """Return the verdict from the rows of one data set: the smallest ratio below 1 from which on, at every larger one
    too, at most `max_loss` of full prefill's score is lost. It is the smallest one whose interval says so, if there is
    any; else the smallest one, uncertain."""
    overall = [row for row in rows if row["kind"] == ALL]
    full = next(row for row in overall if row["setting"] == FULL)
    name, metric = full["dataset"], full["metric"]
    if full[metric] < LEAST_SCORE:
        text = (
            f"{name}: cannot tell: full prefill itself has {NAMES[metric]} {100 * full[metric]:.1f}, so there is "
            "little to lose. Use a data set that the model can answer, in the form it knows (see --style)"
        )
        return Verdict(name, setting, None, text)
    ours = sorted((r for r in overall if r["setting"] == setting and r["ratio"] < 1), key=lambda r: r["ratio"])
    within = [row for row in ours if all(1 - r["kept"] <= max_loss for r in ours if r["ratio"] >= row["ratio"])]
    label = f"{name}, {setting}"
    lost = f"of full prefill's {NAMES[metric]} over {full['samples']} questions"
    if not within:
        last = ours[-1]
        text = (
            f"{label}: do not blend this model so: at {100 * last['ratio']:g}% recomputed it still loses {_loss(last)} "
            f"{lost}, and {100 * max_loss:g}% may be lost"
        )
        if last["kept_high"] is None or 1 - last["kept_high"] <= max_loss:
            text += "\n  so few questions do not rule out that it is within: ask more to be sure"
        return Verdict(name, setting, None, text)
    shown = [row for row in within if row["kept_low"] is not None and 1 - row["kept_low"] <= max_loss]
    row = (shown or within)[0]
    verdict = "is enough" if shown else "may be enough, but more questions are needed to say so"
    text = (
        f"{label}: {100 * row['ratio']:g}% {verdict}: it loses {_loss(row)} {lost} and computes "
        f"{100 * row['token_layers']:.1f}% of its token-layers"
    )
    if not shown:
        text += f"\n  a loss of more than {100 * max_loss:g}% is not ruled out: {_more_questions(row, max_loss)}"
    elif row is not within[0]:
        text += (
            f"\n  {100 * within[0]['ratio']:g}% may be enough too: it loses {_loss(within[0])}; "
            f"{_more_questions(within[0], max_loss)}"
        )
    kinds = [r for r in rows if (r["kind"] != ALL, r["setting"], r["ratio"]) == (True, setting, row["ratio"])]
    worst = min((r for r in kinds if r["kept"] is not None), key=lambda r: r["kept"], default=None)
    if worst is not None and 1 - worst["kept"] > max_loss:
        text += f"\n  of the kind {worst['kind']!r} alone it loses {_loss(worst)}"
    return Verdict(name, setting, row["ratio"], text, bool(shown), row["token_layers"])


def _more_questions(row: dict[str, Any], max_loss: float) -> str:
    """Return how many questions would show that a row's loss is within, if it stayed what it is: an interval's width
    falls with the square root of their number."""
    spare = max_loss - (1 - row["kept"])
    if row["kept_low"] is None or spare <= 0:
        return "ask many more questions, or allow a larger loss"
    needed = row["samples"] * ((row["kept"] - row["kept_low"]) / spare) ** 2
    if needed > 100 * row["samples"]:
        return "ask many more questions, or allow a larger loss"
    return f"ask about {math.ceil(needed / 50) * 50} questions"


class Inexact(Exception):
    """Recomputing everything is not full prefill: what was compared, and why the model is refused."""

    def __init__(self, full: Answers, found: Sequence[Difference], limit: Limit) -> None:
        super().__init__("recomputing everything does not give what full prefill gives")
        self.full, self.found, self.limit = full, found, limit


def check_model(args: argparse.Namespace, say: Any) -> int:
    """Run the command. Raises ValueError or OSError for bad input, RuntimeError if a batch does not fit the engine."""
    if not 0 <= args.max_loss < 1:
        raise ValueError(f"--max-loss {args.max_loss} is a share of full prefill's score: use a number in [0, 1)")
    check_seed(args.seed)
    settings = default_settings() if args.selectors is None else resolve_settings(args.selectors, SETTINGS)
    runs = make_runs(settings, args.ratios)
    if not any(0 < run.ratio < 1 for run in runs):
        raise ValueError("--ratios must include one between 0 and 1: the shares that a blend would recompute")
    if args.min_questions < 1:
        raise ValueError(f"--min-questions {args.min_questions} must be at least 1")
    data = read_all(args.dataset, args.style, args.samples)
    check_counts(data, args.min_questions)
    if args.output is not None:
        check_place(args.output, "--output")
    engine_args = {
        "dtype": args.dtype,
        "device": args.device,
        "seed": args.seed,
        "max_model_len": args.max_model_len,
        "tensor_parallel_size": args.tensor_parallel_size,
    }
    found: list[Difference] = []

    def check(session: Session, fitting: list[Questions]) -> None:
        for questions in fitting:
            if questions.left_out:
                say(f"{questions.name}: {len(questions.left_out)} samples are left out as too long")
        check_counts(fitting, args.min_questions)
        full, differences, limit = check_exactness(session, fitting[0])
        found.extend(differences)
        if not all(difference.within(limit) for difference in differences):
            raise Inexact(full, differences, limit)

    try:
        measured = list(sweep(args.model, data, runs, args.batch, say, check=check, **engine_args))[-1]
    except Inexact as error:
        reason = explain(args.model, data[0], error.full, error.found, error.limit, **engine_args)
        print("Refused: do not blend this model. Recomputing everything does not give what full prefill gives.")
        print(reason)
        refused = f"refused: {error}. {reason}"
        verdicts = [Verdict(questions.name, setting.name, None, refused) for questions in data for setting in settings]
        rows = []
    else:
        rows = make_rows(measured, runs, args.seed, SmallSampleIntervals)
        verdicts = _report(rows, settings, args.max_loss, found)
    if args.output is not None:
        about = {"model": args.model, "max_loss": args.max_loss, "seed": args.seed}
        results = [asdict(verdict) for verdict in verdicts]
        write_json(args.output, {"about": about, "verdicts": results, "rows": rows})
    return min((_worst(verdicts, setting.name) for setting in settings), key=(FOUND, UNCERTAIN, NOT_TO_BLEND).index)


def default_settings() -> list[Setting]:
    """Return the engine's rule, and the one that it falls back on, which needs no words in common."""
    return [DEFAULT, *resolve_settings([FALLBACK], SETTINGS)]


def _worst(verdicts: Sequence[Verdict], setting: str) -> int:
    """Return the exit status of a rule on all data sets."""
    own = (verdict.status for verdict in verdicts if verdict.setting == setting)
    return max(own, key=(FOUND, UNCERTAIN, NOT_TO_BLEND).index)


def check_counts(data: Sequence[Questions], least: int) -> None:
    """Raise ValueError for a data set with fewer questions than a verdict takes."""
    for questions in data:
        count = len(questions.samples)
        if count < least:
            raise ValueError(
                f"{questions.name} has {count} {'question' if count == 1 else 'questions'} that can be asked, too few "
                f"for a verdict: give at least {least} (see --samples), or allow fewer with --min-questions {count}"
            )


def _report(
    rows: Sequence[dict[str, Any]], settings: Sequence[Setting], max_loss: float, found: Sequence[Difference]
) -> list[Verdict]:
    verdicts = []
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        own = [row for row in rows if row["dataset"] == dataset]
        print(f"{table(own)}\n")
        verdicts += [decide(own, setting.name, max_loss) for setting in settings]
    print(f"{textwrap.fill(LEGEND, 120)}\n")
    for difference in found:
        print(difference)
    for verdict in verdicts:
        print(verdict.text)
    for line in summarize(verdicts):
        print(line)
    return verdicts


def summarize(verdicts: Sequence[Verdict]) -> list[str]:
    """Return what holds for all data sets, and which rule costs least of those that are enough on all of them."""
    lines, costs = [], {}
    datasets = {verdict.dataset for verdict in verdicts}
    for setting in dict.fromkeys(verdict.setting for verdict in verdicts):
        own = [verdict for verdict in verdicts if verdict.setting == setting]
        ratios = [verdict.ratio for verdict in own if verdict.ratio is not None]
        if len(ratios) == len(own) and len(datasets) > 1:
            lines.append(f"for all of them, {setting}: blend_recompute_ratio={max(ratios):g}")
        if _worst(own, setting) == FOUND:
            costs[setting] = statistics.fmean(verdict.token_layers or 0.0 for verdict in own)
    if len(costs) > 1:
        cheapest = min(costs, key=costs.__getitem__)
        lines.append(
            f"of those that are enough, {cheapest} costs least: {100 * costs[cheapest]:.1f}% of the token-layers"
        )
    return lines


def _loss(row: dict[str, Any]) -> str:
    """Return the share of full prefill's score that a row loses, with its interval."""
    text = f"{100 * (1 - row['kept']) + 0.0:.1f}%"
    if row["kept_low"] is None:
        return text
    if row["kept_high"] - row["kept_low"] > 1:
        return f"{text} (of so few questions that any loss is possible)"
    return f"{text} (95% interval {100 * (1 - row['kept_high']) + 0.0:.1f} to {100 * (1 - row['kept_low']) + 0.0:.1f}%)"


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="vllm-blend check-model",
        usage="vllm-blend check-model MODEL --dataset FILE [FILE ...] [options]",
        description=__doc__,
        epilog="\n  ".join(["settings, for --selector:", *(setting.name for setting in SETTINGS)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="model directory or Hugging Face id")
    add = parser.add_argument_group("questions").add_argument
    add("--dataset", nargs="+", required=True, metavar="FILE", help="data sets; each gets a verdict")
    add("--style", help="how to ask them (musique, wikimqa, samsum), if a file's name does not say it")
    add("--samples", type=int, metavar="N", help="questions of each data set, equally many of each kind (default: all)")
    add = parser.add_argument_group("what is compared").add_argument
    add(
        "--selector",
        "--setting",
        nargs="+",
        dest="selectors",
        metavar="NAME",
        help="rules to compare: any blend_selector, or a setting of the list below (default: the engine's rule, and "
        f"{FALLBACK}, which it falls back on)",
    )
    add("--ratios", nargs="+", type=float, default=list(RATIOS), metavar="RATIO", help="in rising order, with 0")
    add = parser.add_argument_group("the verdict").add_argument
    add(
        "--max-loss",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="share of full prefill's score that may be lost (default: %(default)s)",
    )
    add(
        "--min-questions",
        type=int,
        default=MIN_QUESTIONS,
        metavar="N",
        help="questions of a data set; fewer are an error (default: %(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the intervals (default: %(default)s)")
    add("--output", type=Path, metavar="FILE", help="also write verdicts and rows to this JSON file")
    add = parser.add_argument_group("the engine").add_argument
    add("--batch", type=int, default=16, metavar="N", help="prompts in a step (default: %(default)s)")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add("--device", default="auto", help="auto, cpu or cuda")
    add(
        "--max-model-len",
        type=int,
        metavar="N",
        help="tokens of the longest prompt with its answer (default: the model's)",
    )
    add(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share the model, each on a device of its own (default: %(default)s)",
    )
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
