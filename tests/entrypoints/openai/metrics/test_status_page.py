"""The status page: plain HTML that reads fields which exist, and nothing from elsewhere."""

from __future__ import annotations

import asyncio
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tests.entrypoints.openai.metrics.sources import Source, blending_llm
from tests.entrypoints.openai.metrics.test_server_metrics import get
from vllm_blend.entrypoints.openai.metrics import ServerMetrics
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.outputs import CompletionOutput, RequestOutput
from vllm_blend.sampling_params import SamplingParams

VOID = {"meta", "link", "input"}


class Page(HTMLParser):
    """The elements of a page, each as its name, its attributes and those of the elements around it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.columns: dict[str, list[str]] = {}  # of each table or list, by what its rows are
        self._open: list[str] = []
        self._headers: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self._headers = []
        if tag == "th":
            self._headers += [str(attributes[name]) for name in ("data-column", "data-note") if name in attributes]
        if tag == "template":
            self._headers = self.columns[str(self.elements[-2][1]["data-list"])] = []
        if "data-item" in attributes:
            self._headers.append(str(attributes["data-item"]))
        if "data-rows" in attributes:
            self.columns[str(attributes["data-rows"])] = self._headers

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for each, attributes in self.elements if each == tag]

    def values(self, name: str) -> list[str]:
        return [str(attributes[name]) for _, attributes in self.elements if name in attributes]


def test_the_page_shows_what_the_server_tells(tmp_path: Path) -> None:
    metrics = ServerMetrics(Source(blending_llm(tmp_path).get_metrics()), "m", shows_passages=True, shows_tenants=True)
    output = RequestOutput("r", None, [1, 2], None, [CompletionOutput(0, "", [7])], True)
    output.num_cached_tokens, output.num_found_tokens = 1, {"disk": 1}
    with metrics.request(ParsedPrompt([1, 2], chunk_bounds=((0, 1),)), SamplingParams(), 0.0) as request:
        request.on_output(output)
    metrics.recorder.count_refused(429)
    status = asyncio.run(metrics.status())
    page = Page(get(metrics, "/").text)
    fields = page.values("data-field")
    assert len(fields) >= 30
    assert fields[:6] == [
        "model",
        "uptime_seconds",
        "reuse.recent.share",
        "reuse.recent.prompts",
        "reuse.share",
        "tokens.cached",
    ]
    for field in fields:
        found: Any = status
        for key in field.split("."):
            found = found[key]
        assert not isinstance(found, (dict, list)), field
    assert set(page.columns) == {"found", "tiers", "passages", "errors", "tenants"}
    for rows, columns in page.columns.items():
        assert status[rows], rows
        assert all(set(row) == set(columns) for row in status[rows]), rows


def test_the_page_needs_nothing_else_and_can_be_read_by_everyone() -> None:
    response = get(ServerMetrics(Source(), "m"), "/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    page = Page(response.text)
    assert page.values("src") == []
    assert set(page.values("href")) == {"data:,", "status", "metrics"}
    assert "innerHTML" not in response.text
    assert "://" not in response.text
    assert page.attributes("html") == [{"lang": "en"}]
    for tag in ("title", "h1", "main", "noscript"):
        assert page.attributes(tag), tag
    assert len(page.attributes("caption")) == len(page.attributes("table"))
    assert all(attributes["scope"] == "col" for attributes in page.attributes("th"))
    assert all(attributes["role"] == "img" and attributes["aria-labelledby"] for attributes in page.attributes("svg"))
