"""The README and the pages of docs name only what exists, and the README's example prints what it says."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_blend
from vllm_blend.blend.selectors import SELECTORS, make_selector

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
MAX_LINES = 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_links_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w/.-])(?:scripts|examples|inputs|configs|vllm_blend|benchmarks)/[\w./-]*\w", text))
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert link.startswith("http") or (page.parent / link).exists(), link
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        ast.parse(block)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL))
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip()) for heading in plain}


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "benchmarks").rglob("*.md"))], ids=lambda page: page.name)
def test_links_and_their_anchors_hold(page: Path) -> None:
    dead = []
    for link, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
        target = page.parent / link if link else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(f"{link}#{anchor}")
    assert dead == []


def test_anchors_are_made_as_on_the_site() -> None:
    assert {"two-commands", "what-it-keeps"} <= anchors(README)


def test_every_page_can_be_reached_from_the_readme() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_LINES
    reached = {match for page in PAGES for match in re.findall(r"\((?:docs/)?([\w]+\.md)", page.read_text("utf-8"))}
    assert [page.name for page in PAGES[1:] if page.name not in reached] == []


def test_the_example_prints_what_the_readme_says() -> None:
    text = README.read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```\n\n((?:    [^\n]*\n)+)", text, re.DOTALL)
    run = subprocess.run([sys.executable, "-c", code[0]], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line.strip() for line in run.stdout.splitlines()] == [line.strip() for line in code[1].splitlines()]


def test_the_rules_are_known() -> None:
    text = (ROOT / "docs" / "chunks.md").read_text(encoding="utf-8")
    listed = re.search(r"Selection rules:\s(.*?), or your own", text, re.DOTALL)
    assert listed is not None
    names = re.findall(r"`(\w+)`", listed[1])
    assert set(names) == set(SELECTORS) and [make_selector(name).name for name in names] == names
    assert "register_selector" in vllm_blend.__all__
