"""Tables of README and docs in sections that link results: each figure with decimals stands in a linked file, and
in a file that `benchmarks.real_text` has written in the row of the same rule and ratio."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?:\.\./)?benchmarks/results/([\w.]+)\.(?:md|json)\)")
INTERVAL = re.compile(r"(-?\d+(?:\.\d+)?) \((-?\d+(?:\.\d+)?) to (-?\d+(?:\.\d+)?)\)")
SPEED = re.compile(r"(\d[\d.]*) times(?:, at (\d+)%)?")  # beside another engine, of prompts at once
DECIMAL = re.compile(r"(?<![\w.])\d[\d,]*\.\d+(?![\w.])")
Table = tuple[str, list[str], list[str]]  # page, names of linked results, rows below the head


def tables(page: str, text: str) -> list[Table]:
    """Return the tables of a page's sections that link results."""
    found = []
    for section in re.split(r"(?m)^#+ ", text):
        linked = list(dict.fromkeys(LINK.findall(section)))
        for table in re.findall(r"(?m)(?:^\|.*\n)+", section + "\n"):
            if linked:
                found.append((page, linked, table.splitlines()[2:]))
    return found


def measured_rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of a file that `benchmarks.real_text` has written; none if the results are of another kind."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    data = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    rows = data.get("rows") if isinstance(data, dict) else None
    return rows if isinstance(rows, list) and rows and isinstance(rows[0], dict) and "agreement" in rows[0] else []


def rule_of(label: str) -> tuple[str, float | None]:
    """Return the rule and the ratio that the first cell of a row is about, as sweeps name them."""
    plain = re.sub(r"[*`]|\([^)]*\)", "", label).strip().removeprefix("blend, ")
    share = re.search(r",? *(\d+(?:\.\d+)?)%$", plain)
    name = (plain[: share.start()] if share else plain).strip(" ,")
    if name not in ("full prefill", "plain reuse"):
        name = name.replace(" and ", "+").replace(" ", "_")
    name = {"plain reuse": "none", "question_attention_without_mean_shift": "question_attention(mean_shift=0)"}.get(
        name, name
    )
    return name, None if share is None else round(float(share[1]) / 100, 6)


def unsupported_speeds(linked: list[str], rule: str, row: str) -> list[str]:
    """Return the factors of a row that the linked results of two engines side by side do not have for its rule."""
    pages = [ROOT / "benchmarks" / "results" / f"{each}.md" for each in linked if each.startswith("side_by_side")]
    lines = [line for path in pages for line in path.read_text(encoding="utf-8").splitlines()]
    missing = []
    for factor, share in SPEED.findall(row):
        ends = {"full prefill": "tokens out |", "none": "plain reuse |"}
        of_row = f", {share}% |" if share else ends.get(rule, f"{rule} |")
        own = [line for line in lines if line.startswith("| 128 RAG prompts at once") and of_row in line]
        if not stands(factor, {found for line in own for found in re.findall(r"([\d.]+)x", line)}):
            missing.append(f"{factor} times")
    return missing


def unsupported(linked: list[str], row: str) -> list[str]:
    """Return the figures of a row that the linked results do not have where they should."""
    label = row.strip("|").split("|")[0]
    name, ratio = rule_of(label)
    speeds = unsupported_speeds(linked, name, row)
    row = SPEED.sub("", row)
    own: list[dict[str, Any]] = []
    figures: set[str] = set()
    for measured in map(measured_rows, linked):
        full = {each["dataset"]: each["f1"] for each in measured if each["setting"] == "full prefill"}
        found = [r for r in measured if name in (r["rule"], r["setting"]) and ratio in (None, r["ratio"])]
        figures |= {f"{100 * value:.1f}" for r in found for value in r.values() if isinstance(value, float)}
        figures |= {f"{100 * r['f1'] / full[r['dataset']]:.1f}" for r in found}  # what is kept
        figures |= {f"{r['kl']:.3f}" for r in found}
        own += found
    triples = {
        tuple(f"{100 * r[f'{key}{end}']:.1f}" for end in ("", "_low", "_high"))
        for r in own
        for key in ("f1", "f1_gain", "agreement")
        if key in r
    }
    if not own:  # results of another kind, or a row that is no rule's: anywhere in what is linked
        results = [ROOT / "benchmarks" / "results" / f"{each}.md" for each in linked]
        text = "".join(path.read_text(encoding="utf-8") for path in results if path.is_file())
        figures = {number.replace(",", "") for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)}
        triples = {tuple(f"{float(n):.1f}" for n in numbers) for numbers in INTERVAL.findall(text)}
    rest = row[len(label) + 1 :]
    missing = [
        " ".join(numbers)
        for numbers in INTERVAL.findall(rest)
        if tuple(f"{float(number):.1f}" for number in numbers) not in triples
    ]
    plain = (number.replace(",", "") for number in DECIMAL.findall(INTERVAL.sub("", rest)))
    return speeds + missing + [number for number in plain if not stands(number, figures)]


def stands(number: str, figures: set[str]) -> bool:
    digits = len(number.partition(".")[2])
    return any(f"{float(each):.{digits}f}" == number for each in figures if len(each.partition(".")[2]) >= digits)


ALL = [table for page in PAGES for table in tables(page.name, page.read_text(encoding="utf-8"))]


def test_the_tables_of_quality_are_found() -> None:
    found = {page for page, linked, rows in ALL if any(map(measured_rows, linked)) and len(rows) >= 5}
    assert {"quickstart.md", "finetune.md"} <= found


@pytest.mark.parametrize(("page", "linked", "rows"), ALL)
def test_every_figure_stands_in_the_linked_results(page: str, linked: list[str], rows: list[str]) -> None:
    assert [(row, found) for row in rows if (found := unsupported(linked, row))] == [], page


@pytest.mark.parametrize(
    ("row", "missing"),
    [
        ("| full prefill | 94.0 | 141 |", []),
        ("| full prefill | 94.1 |", ["94.1"]),
        ("| blend, question attention, 15% | 20.7 |", []),
        ("| blend, question attention, 15% | 14.1 |", ["14.1"]),  # that of 8%
        ("| plain reuse | 20.7 |", ["20.7"]),  # that of another rule
        ("| plain reuse | 55.6 (0.0 to 100.0) |", ["55.6 0.0 100.0"]),
    ],
)
def test_a_wrong_figure_is_found(row: str, missing: list[str]) -> None:
    assert unsupported(["synthetic_demo_model"], row) == missing


@pytest.mark.parametrize(
    ("row", "missing"),
    [
        ("| full prefill | 1.05 times |", []),
        ("| plain reuse | 11.4 times |", []),
        ("| plain reuse | 6.07 times |", ["6.07 times"]),  # that of another rule
        ("| plain reuse | 9.93 times |", ["9.93 times"]),  # that of one prompt
    ],
)
def test_a_wrong_factor_beside_another_engine_is_found(row: str, missing: list[str]) -> None:
    assert unsupported(["side_by_side_h200"], row) == missing
