"""Score answers: SQuAD's exact match and F1 on normalised text, and Rouge-L; the best over a question's answers counts.

    python -m vllm_blend.pipeline.evaluate --predictions answers.json --group-by mode,kind

Predictions are a JSON list of {"prediction": str, "answers": flat or nested list, ...}, or such a list under "results".
SQuAD: Rajpurkar et al. 2016, section 6. Rouge-L: Lin 2004, as computed by `rouge-score` with stemming.
"""

from __future__ import annotations

import argparse
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from vllm_blend.pipeline.datasets import flatten_answers
from vllm_blend.pipeline.files import read_json, write_json

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Scores:
    """The scores of an answer, shares from 0 to 1."""

    exact_match: float
    f1: float
    rouge_l: float


def normalize_answer(text: str) -> str:
    """Return the text in lower case, without punctuation and articles, words separated by one space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def first_line(output: str) -> str:
    """Return the answer in a model's output: its first line that is not empty."""
    return output.strip().partition("\n")[0].strip()


def exact_match(prediction: str, answer: str) -> float:
    """Return 1.0 if both are the same after normalisation, else 0.0."""
    return float(bool(prediction.strip()) and normalize_answer(prediction) == normalize_answer(answer))


def f1_score(prediction: str, answer: str) -> float:
    """Return the F1 of the words that both share, counted with repetition. If one has no words left: 1.0 if neither
    has."""
    if not prediction.strip():
        return 0.0
    predicted, expected = normalize_answer(prediction).split(), normalize_answer(answer).split()
    if not predicted or not expected:
        return float(predicted == expected)
    shared = (Counter(predicted) & Counter(expected)).total()
    return 2 * shared / (len(predicted) + len(expected))


def rouge_l(prediction: str, answer: str) -> float:
    """Return the F-measure of the longest common subsequence of stemmed words."""
    f_measure: float = _rouge_scorer().score(answer, prediction)["rougeL"].fmeasure
    return f_measure


def best_score(metric: Callable[[str, str], float], prediction: str, answers: Any) -> float:
    """Return the metric's maximum over a flat or nested list of answers (or one answer). Raises ValueError for none."""
    flat = list(flatten_answers(answers))
    if not flat:
        raise ValueError("answers is empty: there is nothing to compare the prediction with")
    return max(metric(prediction, answer) for answer in flat)


def score_prediction(prediction: str, answers: Any) -> Scores:
    """Return all scores of a model's output, of which the first line counts. An empty output scores 0."""
    answer = first_line(prediction)
    return Scores(*(best_score(metric, answer, answers) for metric in (exact_match, f1_score, rouge_l)))


def evaluate(records: Sequence[dict[str, Any]], group_by: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the mean scores of each group of records and of all: [{*group_by, samples, exact_match, f1, rouge_l}],
    "all" last.

    Records are {"prediction", "answers", *group_by}. Raises ValueError that names the record and the field.
    """
    groups: dict[tuple[str, ...], list[Scores]] = {}
    for i, record in enumerate(records):
        for key in ("prediction", "answers", *group_by):
            if not isinstance(record, dict) or key not in record:
                raise ValueError(
                    f"record {i}: {key} is missing; a record is {{prediction, answers, {', '.join(group_by)}}}"
                )
        if not isinstance(record["prediction"], str):
            raise ValueError(f"record {i}: prediction must be a string, not {type(record['prediction']).__name__}")
        try:
            scores = score_prediction(record["prediction"], record["answers"])
        except ValueError as error:
            raise ValueError(f"record {i}: {error}") from error
        groups.setdefault(tuple(str(record[key]) for key in group_by), []).append(scores)
    rows = [{**dict(zip(group_by, names, strict=True)), **_mean(scores)} for names, scores in groups.items() if names]
    return [*rows, {**dict.fromkeys(group_by, "all"), **_mean([s for group in groups.values() for s in group])}]


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows of equal keys as a Markdown table, numbers to the right, shares (floats) as percentages."""
    if not rows:
        return ""
    cells = [list(rows[0])] + [[_cell(row[key]) for key in rows[0]] for row in rows]
    widths = [max(len(line[c]) for line in cells) for c in range(len(cells[0]))]
    right = [isinstance(value, (int, float)) for value in rows[0].values()]

    def line(parts: Iterable[str]) -> str:
        aligned = (p.rjust(w) if r else p.ljust(w) for p, w, r in zip(parts, widths, right, strict=True))
        return f"| {' | '.join(aligned)} |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True)) + "|"
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])


def _cell(value: Any) -> str:
    return f"{100 * value:.1f}" if isinstance(value, float) else str(value)


def _mean(scores: Sequence[Scores]) -> dict[str, Any]:
    if not scores:
        raise ValueError("there are no predictions to score: give a file with at least one")
    columns = [asdict(s) for s in scores]
    return {"samples": len(scores)} | {name: sum(c[name] for c in columns) / len(columns) for name in columns[0]}


@lru_cache(maxsize=1)
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # it loads nltk, so only when a summary is scored

    return RougeScorer(["rougeL"], use_stemmer=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Score predictions against their answers; print a table in percent.")
    parser.add_argument("--predictions", type=Path, required=True, help="JSON list of {prediction, answers, ...}")
    parser.add_argument("--group-by", default="", help="fields that make a row each, for example mode,kind")
    parser.add_argument("--output", type=Path, help="also write the rows to this JSON file")
    args = parser.parse_args(argv)
    try:
        data = read_json(args.predictions, "predictions")
        records = data.get("results") if isinstance(data, dict) else data
        if not isinstance(records, list):
            raise ValueError(f'{args.predictions}: expected a JSON list of records, or one under "results"')
        rows = evaluate(records, [key.strip() for key in args.group_by.split(",") if key.strip()])
    except (OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    print(format_table(rows))
    if args.output:
        write_json(args.output, rows)


if __name__ == "__main__":
    main()
