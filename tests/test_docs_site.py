"""The documentation's site: what it shows, and how links of the repository fit it. CI builds it with --strict."""

from __future__ import annotations

import posixpath
import re
import runpy
from pathlib import Path

import yaml

import vllm_blend

ROOT = Path(__file__).parents[1]
HOOK = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))
fit_links, notebook_page = HOOK["fit_links"], HOOK["notebook_page"]


def test_the_sites_navigation_has_every_page() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = [page for entry in nav for page in (next(iter(entry.values())) if isinstance(entry, dict) else [entry])]
    assert {page for page in listed if "/" not in page} - {"index.md", "CONTRIBUTING.md", "CHANGELOG.md"} == pages
    notebooks = sorted(page for page in listed if page.startswith("notebooks/"))
    assert notebooks == [f"notebooks/{path.stem}.md" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]


def test_the_api_page_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    names = re.findall(r"^::: vllm_blend\.([\w.]+)$", text, re.MULTILINE)
    assert sorted(names) == sorted(f"{home}.{name}" for name, home in vllm_blend._HOMES.items())


def test_the_citation_has_this_version_and_papers() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == vllm_blend.__version__ and citation["license"] == "Apache-2.0"
    for paper in citation["references"]:
        [identifier] = paper["identifiers"]
        assert re.fullmatch(r"arXiv:\d{4}\.\d{5}", identifier["value"]) and paper["title"] and paper["authors"]


def test_links_fit_the_site() -> None:
    links = "[a](docs/chunks.md#rules) [b](notebooks/01_quickstart.ipynb) [c](https://x.org) ![d](docs/images/p.svg)"
    expected = "[a](chunks.md#rules) [b](notebooks/01_quickstart.md) [c](https://x.org) ![d](images/p.svg)"
    assert fit_links(links, "README.md") == expected
    assert fit_links("[a](../benchmarks/results/h200.md)", "docs/gpu.md") == "[a](benchmarks/results/h200.md)"
    assert fit_links("[a](../README.md) [b](#x)", "docs/gpu.md") == "[a](index.md) [b](#x)"
    assert fit_links("[a](../docs/hooks.md) [b](02.ipynb)", "notebooks/01.ipynb") == "[a](../hooks.md) [b](02.md)"
    assert fit_links("[a](../../docs/selection.md)", "benchmarks/results/x.md") == "[a](../../selection.md)"


def test_no_page_of_the_site_links_a_file_that_it_lacks() -> None:
    shown = [*HOOK["added_files"](), *(path for path in (ROOT / "docs").rglob("*") if path.is_file())]
    sources = {path.relative_to(ROOT).as_posix() for path in shown}
    assert {"README.md", "docs/gpu.md", "notebooks/01_quickstart.ipynb", "benchmarks/results/h200.md"} <= sources
    dead = []
    for source in sorted(name for name in sources if name.endswith((".md", ".ipynb"))):
        for link, _ in HOOK["LINK"].findall((ROOT / source).read_text(encoding="utf-8")):
            if posixpath.normpath(posixpath.join(posixpath.dirname(source), link)) not in sources:
                dead.append((source, link))
    assert dead == []


def test_the_build_of_the_site_in_ci_may_fail() -> None:
    """MkDocs counts warnings where they are logged: with --quiet there are none, and --strict finds nothing."""
    [command] = re.findall(r"mkdocs build [^\n]*", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert "--strict" in command and not re.search(r"(?<!\S)(?:-q|--quiet)(?!\S)", command)


def test_notebooks_are_shown_with_their_outputs() -> None:
    page = notebook_page((ROOT / "notebooks" / "01_quickstart.ipynb").read_text())
    assert page.startswith("# 1. Quickstart") and "```python\nimport statistics" in page
    assert '<img alt="" src="data:image/png;base64,' in page and "title=" in page and "```text\nLLM(" in page
