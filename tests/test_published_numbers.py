"""Figures in paragraphs of README and docs that link results: each stands in a file that the paragraph links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?:\.\./)?(benchmarks/results/[\w.]+\.(?:md|json))(?:#[\w-]+)?\)")
# Times, ratios, shares in percent, and every number with digits after the point.
FIGURE = re.compile(r"(?<![\w.,])(\d[\d,]*\.\d+(?![\w.]*\d)|\d[\d,]*(?=%| ms\b| times\b|x(?!\w)))")
BLOCK, CODE = re.compile(r"```.*?```", re.DOTALL), re.compile(r"`[^`]*`")
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


def unsupported(paragraph: str) -> list[str]:
    """Return the figures that no number of the linked files equals after rounding to the figure's digits."""
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in LINK.findall(paragraph))
    numbers = [number.replace(",", "") for number in NUMBER.findall(text)]
    missing = []
    for figure in (found.replace(",", "") for found in FIGURE.findall(CODE.sub("", paragraph))):
        digits = len(figure.partition(".")[2])
        if not any(len(n.partition(".")[2]) >= digits and f"{float(n):.{digits}f}" == figure for n in numbers):
            missing.append(figure)
    return missing


def linking_paragraphs() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        parts = BLOCK.sub("", page.read_text(encoding="utf-8")).split("\n\n")
        found += [(page.name, part) for part in parts if LINK.search(part) and FIGURE.search(CODE.sub("", part))]
    return found


def test_there_are_figures_to_check() -> None:
    assert {"README.md", "chunk_api.md", "gpu.md", "offload.md"} <= {name for name, _ in linking_paragraphs()}


@pytest.mark.parametrize(("page", "paragraph"), linking_paragraphs())
def test_figures_stand_in_the_linked_results(page: str, paragraph: str) -> None:
    assert unsupported(paragraph) == [], page


def test_a_wrong_figure_is_found() -> None:
    for figure, found in (("22.9 times", "22.9"), ("0.57 of the time", "0.57"), ("99.7%", "99.7"), ("97%", "97")):
        assert unsupported(f"{figure} ([run](benchmarks/results/chunks_h200.md))") == [found]
