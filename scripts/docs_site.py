"""A hook of MkDocs (mkdocs.yml): add what the pages link to outside docs/, and make links fit the site.

Links are written for the repository. In the site README.md is the first page, the pages of docs/ lie at the top, and
other Markdown files keep their paths. Notebooks become pages with their committed outputs; nothing is run.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[1]
ADDED = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "CITATION.cff",
    "LICENSE",
    "inputs/README.md",
    "notebooks/*.ipynb",
)
RESULTS = tuple(f"benchmarks/results/*.{kind}" for kind in ("md", "png", "json", "jsonl"))
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)([^)]*)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside docs/."""
    from mkdocs.structure.files import File  # the rest of this file is of use, and tested, without MkDocs

    for path in added_files():
        source = path.relative_to(ROOT).as_posix()
        if path.suffix in (".md", ".ipynb"):
            text = path.read_text(encoding="utf-8")
            text = notebook_page(text) if path.suffix == ".ipynb" else text
            files.append(File.generated(config, site_path(source), content=fit_links(text, source)))
        else:
            files.append(File.generated(config, source, abs_src_path=str(path)))
    return files


def added_files() -> list[Path]:
    """Return the files outside docs/ that are part of the site."""
    return [path for pattern in (*ADDED, *RESULTS) for path in sorted(ROOT.glob(pattern))]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make the links of a page of docs/ fit."""
    return markdown if page.file.generated_by else fit_links(markdown, f"docs/{page.file.src_uri}")


def site_path(source: str) -> str:
    """Return where a file of the repository lies in the site."""
    if source == "README.md":
        return "index.md"
    return source.removeprefix("docs/").replace(".ipynb", ".md")


def fit_links(markdown: str, source: str) -> str:
    """Return the text of `source`, a path in the repository, with its relative links as the site needs them."""
    folder = posixpath.dirname(site_path(source))

    def fit(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        return f"]({posixpath.relpath(site_path(target), folder or '.')}{match[2]})"

    return LINK.sub(fit, markdown)


def notebook_page(text: str) -> str:
    """Return a notebook as Markdown, with its pictures in the page."""
    pieces = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            pieces.append(source)
            continue
        pieces.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                pieces.append(f'<img alt="" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">')
            elif "text/html" in data:
                pieces.append("".join(data["text/html"]))
            else:
                pieces.append("```text\n" + "".join(output.get("text", data.get("text/plain", ""))).rstrip() + "\n```")
    return "\n\n".join(pieces) + "\n"
