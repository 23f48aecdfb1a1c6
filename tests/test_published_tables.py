"""Tables of README and docs in sections that link results: each figure with decimals stands in a linked file, and
in a sweep's file (columns and rows, as `benchmarks.quality` writes) in the row of the same rule and ratio."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?:\.\./)?benchmarks/results/([\w.]+)\.(?:md|json)\)")
INTERVAL = re.compile(r"(\d+(?:\.\d+)?) \((-?\d+(?:\.\d+)?) to (-?\d+(?:\.\d+)?)\)")
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


def sweep_rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of a sweep over all questions, by column; none if the results are of another kind."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    data = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not isinstance(data, dict) or "token_layers" not in data.get("columns", ()):
        return []
    columns = data["columns"]
    if "kind" in columns:  # those of one kind are shorter
        data["rows"] = [row for row in data["rows"] if row[columns.index("kind")] == "all"]
    return [dict(zip(columns, row, strict=True)) for row in data["rows"]]


def held_out_rows(name: str, rule: str, ratio: float | None) -> str:
    """Return the rows of a rule at a ratio in the tables that `vllm_blend.quality.held_out` prints."""
    path = ROOT / "benchmarks" / "results" / f"{name}.md"
    text = path.read_text(encoding="utf-8") if name.startswith("held_out") and path.is_file() else ""
    rows = [[cell.strip() for cell in row.split("|")] for row in re.findall(r"(?m)^\|.*$", text)]
    share = "" if ratio is None else f"{100 * ratio:g}%"
    return "\n".join(" ".join(row) for row in rows if row[1] == rule and (ratio is None or row[2] == share))


def rule_of(label: str) -> tuple[str, float | None]:
    """Return the rule and the ratio that the first cell of a row is about, as sweeps name them."""
    plain = re.sub(r"[*`]|\([^)]*\)", "", label).strip().removeprefix("blend, ")
    share = re.search(r",? *(\d+(?:\.\d+)?)%$", plain)
    name = (plain[: share.start()] if share else plain).strip(" ,")
    if name not in ("full prefill", "plain reuse"):
        name = name.replace(" and ", "+").replace(" ", "_")
    return name, None if share is None else round(float(share[1]) / 100, 6)


def unsupported_speeds(linked: list[str], rule: str, row: str) -> list[str]:
    """Return the factors of a row that the linked results of two engines side by side do not have for its rule."""
    pages = [ROOT / "benchmarks" / "results" / f"{each}.md" for each in linked if each.startswith("side_by_side")]
    lines = [line for path in pages for line in path.read_text(encoding="utf-8").splitlines()]
    missing = []
    for factor, share in SPEED.findall(row):
        of_row = f", {share}% |" if share else {"full prefill": "tokens out |"}.get(rule, f"{rule} |")
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
    sweeps = [each for result in linked for each in sweep_rows(result)]
    own = [r for r in sweeps if r["setting"] == name and ratio in (None, r["ratio"])]
    figures = {f"{100 * value:.1f}" for r in own for value in r.values() if isinstance(value, float)}
    triples = {
        tuple(f"{100 * r[key]:.1f}" for key in ("score", "score_low", "score_high")) for r in own if r.get("score_low")
    }
    held_out = "\n".join(held_out_rows(each, name, ratio) for each in linked)
    triples |= {tuple(f"{float(n):.1f}" for n in found) for found in INTERVAL.findall(held_out)}
    figures |= set(re.findall(r"\d+(?:\.\d+)?", held_out))
    if (
        not own and not held_out.strip()
    ):  # results of another kind, or a row that is no rule's: anywhere in what is linked
        results = [ROOT / "benchmarks" / "results" / f"{each}.md" for each in linked]
        text = "".join(path.read_text(encoding="utf-8") for path in results if path.is_file())
        figures = {number.replace(",", "") for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)}
        triples = {tuple(f"{float(n):.1f}" for n in found) for found in INTERVAL.findall(text)}
    rest = row[len(label) + 1 :]
    missing = [
        " ".join(found)
        for found in INTERVAL.findall(rest)
        if tuple(f"{float(number):.1f}" for number in found) not in triples
    ]
    plain = (number.replace(",", "") for number in DECIMAL.findall(INTERVAL.sub("", rest)))
    return speeds + missing + [number for number in plain if not stands(number, figures)]


def stands(number: str, figures: set[str]) -> bool:
    digits = len(number.partition(".")[2])
    return any(f"{float(each):.{digits}f}" == number for each in figures if len(each.partition(".")[2]) >= digits)


ALL = [table for page in PAGES for table in tables(page.name, page.read_text(encoding="utf-8"))]


def test_the_tables_of_quality_are_found() -> None:
    assert {"README.md", "quickstart.md", "finetune.md"} <= {page for page, _, _ in ALL}
    [readme] = [rows for page, linked, rows in ALL if page == "README.md" and "held_out_test" in linked]
    assert len(readme) >= 4 and all(INTERVAL.search(row) for row in readme)


@pytest.mark.parametrize(("page", "linked", "rows"), ALL)
def test_every_figure_stands_in_the_linked_results(page: str, linked: list[str], rows: list[str]) -> None:
    assert [(row, found) for row in rows if (found := unsupported(linked, row))] == [], page


@pytest.mark.parametrize(
    ("row", "missing"),
    [
        ("| full prefill | 95.0 (88.3 to 100) | 93.3 (86.7 to 98.3) | 100 |", []),
        ("| full prefill | 95.0 (88.3 to 99) |", ["95.0 88.3 99"]),
        ("| plain reuse | 53.4 (40.0 to 66.7) | 3.8 |", ["53.4 40.0 66.7"]),
        ("| blend, question attention (the default), 15% | 20.8 |", []),
        ("| blend, question attention (the default), 15% | 14.1 |", ["14.1"]),  # that of 8%
        ("| plain reuse | 20.8 |", ["20.8"]),  # that of another rule
    ],
)
def test_a_wrong_figure_is_found(row: str, missing: list[str]) -> None:
    assert unsupported(["quality", "quality_reuse_model"], row) == missing


@pytest.mark.parametrize(
    ("row", "missing"),
    [
        ("| `relevant_passages`, 7% | 88.0 (85.4 to 90.6) [7] |", []),
        ("| `relevant_passages`, 15.5% | 88.0 (85.4 to 90.6) [7] |", ["88.0 85.4 90.6"]),  # that of 7%
        ("| plain reuse | 88.0 (85.4 to 90.6) |", ["88.0 85.4 90.6"]),  # that of another rule
        ("| full prefill | 98.4 (97.2 to 99.4) |", []),
    ],
)
def test_a_wrong_figure_of_held_out_questions_is_found(row: str, missing: list[str]) -> None:
    assert unsupported(["held_out_test", "quality_reuse_model"], row) == missing


@pytest.mark.parametrize(
    ("row", "missing"),
    [
        ("| full prefill | 98.4 (97.2 to 99.4) | 1.05 times |", []),
        ("| plain reuse | 11.4 times |", []),
        ("| `relevant_passages`, 7% | 6.07 times, at 8% |", []),
        ("| `relevant_passages`, 7% | 4.63 times, at 8% |", ["4.63 times"]),  # that of 15%
        ("| plain reuse | 6.07 times |", ["6.07 times"]),  # that of another rule
        ("| `relevant_passages`, 7% | 5.51 times, at 8% |", ["5.51 times"]),  # that of one prompt
    ],
)
def test_a_wrong_factor_beside_another_engine_is_found(row: str, missing: list[str]) -> None:
    assert unsupported(["held_out_test", "side_by_side_h200"], row) == missing
