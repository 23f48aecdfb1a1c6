"""Measure the gain of keeping several variants of a passage's KV, each encoded after a different number of passages.

    python -m benchmarks.ordinals --output benchmarks/results/ordinals

A model tells entities apart by an ordinal: a passage that was encoded as the first one misleads as the fifth. A store
may hold variants of each passage, encoded after as many neutral passages ("filler") as will stand before it, of which
the nearest is used. Here the number of variants is varied with one kind of filler, and the filler with all variants.
Scores are those of plain reuse and of question attention at two ratios, over the same questions.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from vllm_blend.blend.encoding_contexts.ordinal import AfterFiller
from vllm_blend.quality.parallel import make_crew, sweep_by
from vllm_blend.quality.rows import ALL, FULL, estimate_columns, shortened
from vllm_blend.quality.sweep import Measured, Outcome

from benchmarks.quality import ROOT, describe
from vllm_blend.blend.encoding_contexts import ENCODING_CONTEXTS, ORDINALS
from vllm_blend.blend.encoding_contexts.filler import Filler
from vllm_blend.pipeline.files import check_place, write_json
from vllm_blend.quality.intervals import Bootstrap, check_seed
from vllm_blend.quality.questions import read_all
from vllm_blend.quality.settings import Run, Setting, find_settings, make_runs

RATIOS = (0.0, 0.08, 0.15)
DATASETS = [str(ROOT / "inputs" / name) for name in ("musique_s.json", "wikimqa_s.json")]
SAMPLES = 90
METRICS = ("f1", "exact_match")


class OneSentence(Filler):
    """Fillers of one sentence: the first of each passage."""

    def text(self, number: int, rng: Random) -> str:
        return super().text(number, rng).split(". ")[0].rstrip(".") + "."


class TwoJoined(Filler):
    """Fillers of twice the length."""

    def text(self, number: int, rng: Random) -> str:
        return f"{super().text(number, rng)} {super().text(number + 1, rng)}"


class OneKind(Filler):
    """Fillers that are all about people and their trade, in the same words but for names and years."""

    def text(self, number: int, rng: Random) -> str:
        return super().text(0, rng)


class SameForAll(Filler):
    """The same fillers before every passage."""

    def passages(self, count: int, seed: int) -> list[tuple[int, ...]]:
        return super().passages(count, 0)


class Shuffled(Filler):
    """Fillers with their words in random order."""

    def text(self, number: int, rng: Random) -> str:
        words = super().text(number, rng).split()
        rng.shuffle(words)
        return " ".join(words)


FILLERS = {
    "one sentence each": OneSentence,
    "two passages joined": TwoJoined,
    "all of one kind": OneKind,
    "the same for every passage": SameForAll,
    "words shuffled": Shuffled,
}
# At import, as each worker's process needs them too.
for _name, _kind in FILLERS.items():
    ENCODING_CONTEXTS[_name] = type(_kind.__name__, (AfterFiller,), {"name": _name, "filler_kind": _kind})


def _setting(name: str, **engine: Any) -> Setting:
    return Setting(name, {"blend_selector": "question_attention"}, engine, ratios=RATIOS)


PREFIX = _setting("prefix")
VARIANTS = [
    *(
        _setting(", ".join(map(str, ordinals)), blend_encoding_context="ordinal", blend_ordinals=list(ordinals))
        for ordinals in ((5,), (0, 8), (0, 4, 9), (0, 2, 5, 9, 14))
    ),
    _setting(", ".join(map(str, ORDINALS)), blend_encoding_context="ordinal"),
]
SETTINGS = [PREFIX, *VARIANTS, *(_setting(name, blend_encoding_context=name) for name in FILLERS)]

LEGEND = """\
Scores in percent with 95% bootstrap intervals over the questions; differences to chunks encoded after the prefix alone,
at the same ratio, over the same questions. `variants`: encodings of a passage that a store comes to hold when it may
stand at any place of these prompts, so also the KV memory as a multiple of one encoding. `encoding`: token-layers that
it took to encode each passage once, for the place where it stands, as a multiple of encoding it after the prefix."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=str(ROOT / "inputs" / "demo-model"), help="model directory or hub id")
    add("--datasets", nargs="+", default=DATASETS, metavar="FILE")
    add("--settings", nargs="+", metavar="NAME", help=f"beside {PREFIX.name!r}, of {[s.name for s in SETTINGS[1:]]}")
    add("--samples", type=int, default=SAMPLES, help="questions of each data set (default: %(default)s)")
    add("--batch", type=int, default=16, help="prompts in a step (default: %(default)s)")
    add("--workers", type=int, help="processes that share the questions (default: one a core, on a GPU 1)")
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--seed", type=int, default=0, help="seed of the bootstrap and the engine (default: %(default)s)")
    add("--output", type=Path, default=ROOT / "results" / "ordinals", help="writes this path + .json and .md")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    command = shlex.join(["python", "-m", "benchmarks.ordinals", *(sys.argv[1:] if argv is None else argv)])
    try:
        print(run(args, command).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")


def run(args: argparse.Namespace, command: str) -> Path:
    """Measure, and write after each engine what there is."""
    check_seed(args.seed)
    settings = [PREFIX, *find_settings(args.settings, SETTINGS[1:])]
    runs = make_runs(settings, RATIOS)
    data = read_all(args.datasets, limit=args.samples)
    crew = make_crew(args.workers, args.device, data)
    paths = [args.output.with_name(args.output.name + end) for end in (".json", ".md")]
    for path in paths:
        check_place(path, "--output")
    started = time.perf_counter()
    common: dict[str, Any] = {"dtype": args.dtype, "device": args.device, "seed": args.seed}
    for measured in sweep_by(crew, args.model, data, runs, args.batch, _say, **common):
        rows = make_rows(measured, [run for run in runs if run.setting in settings], args.seed)
        about = describe(args, command, crew, measured, time.perf_counter() - started)
        write_json(paths[0], {"about": about, "rows": shortened(rows)})
        paths[1].write_text(render(about, rows), encoding="utf-8")
    page: Path = paths[1]
    return page


def make_rows(measured: Sequence[Measured], runs: Sequence[Run], seed: int) -> list[dict[str, Any]]:
    """Return one row per data set (then for all of them together), setting and ratio. Shares are from 0 to 1."""
    places = max(len(sample.passages) for one in measured for sample in one.questions.samples)
    scopes = [(one.questions.name, [one]) for one in measured]
    if len(measured) > 1:
        scopes.append((ALL, list(measured)))
    return [row for name, parts in scopes for row in _rows_of(name, parts, runs, places, seed)]


def num_variants(setting: Setting, places: int) -> int:
    """Return how many encodings of a passage are made if it comes to stand at each of `places` places."""
    if not issubclass(ENCODING_CONTEXTS[setting.engine.get("blend_encoding_context", "prefix")], AfterFiller):
        return 1
    context = AfterFiller(Filler(lambda text: []), tuple(setting.engine.get("blend_ordinals", ORDINALS)))
    return len({context.ordinal(place) for place in range(places)})


def _rows_of(
    name: str, parts: Sequence[Measured], runs: Sequence[Run], places: int, seed: int
) -> Iterator[dict[str, Any]]:
    samples = [sample for part in parts for sample in part.questions.samples]
    kinds = np.array([sample.kind or "" for sample in samples])
    bootstrap = Bootstrap(len(samples), seed)
    by_setting: dict[str, list[Run]] = {}
    for run in runs:
        if all(run.key in part.runs for part in parts):
            by_setting.setdefault(run.setting.name, []).append(run)

    def row(setting: str, ratio: float | None, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        columns: dict[str, Any] = {"dataset": name, "setting": setting, "ratio": ratio, "samples": len(samples)}
        for metric in METRICS:
            values = _values(outcomes, metric)
            columns |= estimate_columns(metric, bootstrap.mean(values))
            columns |= {f"{metric} {kind}": float(values[kinds == kind].mean()) for kind in sorted({*kinds} - {""})}
        return columns

    yield row(FULL, None, [part.full for part in parts])
    after_prefix = {run.ratio: run for run in by_setting[PREFIX.name]}
    encoding = {n: sum(part.runs[r.key].encoding for part in parts for r in own) for n, own in by_setting.items()}
    for run in (run for own in by_setting.values() for run in own):
        outcomes = [part.runs[run.key] for part in parts]
        columns = row(run.setting.name, run.ratio, outcomes)
        theirs = [part.runs[after_prefix[run.ratio].key] for part in parts]
        for metric in METRICS:
            difference = bootstrap.difference(_values(outcomes, metric), _values(theirs, metric))
            columns |= estimate_columns(f"{metric}_over_prefix", difference)
        columns["variants"] = num_variants(run.setting, places)
        yield columns | {"encoding": encoding[run.setting.name] / encoding[PREFIX.name]}


def _values(outcomes: Sequence[Outcome], metric: str) -> np.ndarray:
    return np.concatenate([outcome.values(metric) for outcome in outcomes])


def render(about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Return a table per data set: a line per setting, the ratios side by side."""
    lines = ["# Variants of a passage's KV, by the number of passages before it", "", f"    {about['command']}", ""]
    for name, value in about.items():
        if name != "command":
            lines.append(f"- {name}: {', '.join(value) or 'none' if isinstance(value, list) else value}")
    lines += ["", LEGEND]
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        own = {(row["setting"], row["ratio"]): row for row in rows if row["dataset"] == dataset}
        full = own[FULL, None]
        title = "All together" if dataset == ALL else dataset
        lines += ["", f"## {title}, {full['samples']} questions: full prefill has F1 {100 * full['f1']:.1f}", ""]
        heads = ["encoded after", "variants", "encoding"]
        for ratio in RATIOS:
            heads += ["plain reuse" if ratio == 0 else f"question attention {100 * ratio:g}%", "over the prefix"]
        lines += [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
        for setting in dict.fromkeys(setting for setting, _ in own if setting != FULL):
            found = [own[setting, ratio] for ratio in RATIOS]
            cells = [_shown(setting), str(found[0]["variants"]), f"{found[0]['encoding']:.1f}"]
            for row in found:
                cells += [_percent(row, "f1"), "" if setting == PREFIX.name else _percent(row, "f1_over_prefix")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _shown(setting: str) -> str:
    if setting in FILLERS:
        return f"as many passages, {setting}"
    return "the prefix" if setting == PREFIX.name else f"{setting} passages"


def _percent(row: dict[str, Any], name: str) -> str:
    value, low, high = (100 * row[f"{name}{end}"] + 0.0 for end in ("", "_low", "_high"))
    return f"{value:.1f} ({low:.1f} to {high:.1f})"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
