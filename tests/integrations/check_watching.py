"""What watches the server takes it as it is: a browser its status page, and Prometheus' own tool its metrics."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.integrations.browser import Browser
from tests.integrations.servers import DEADLINE, NAME, QUESTION, ServerProcess

PASSAGES = [
    "Tulmaris Works makes lenses. It was founded in Jorholm long ago by a chemist of that town.",
    "Jorholm is the capital of Brianfour. Its market is held every year behind the old town hall.",
]


@pytest.fixture(scope="module")
def reused(server: ServerProcess) -> int:
    """Have two prompts answered that share their passages; return how many tokens the second one reused."""
    client = OpenAI(base_url=server.base_url, api_key="none")
    for passages in (PASSAGES, PASSAGES[::-1]):
        answer = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=4,
            extra_body={"documents": passages},
        )
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    count = getattr(answer.usage.prompt_tokens_details, "reused_tokens", 0)
    assert count > 0
    return int(count)


# The ratio of the brightness of text to that of the page, as WCAG 2 defines it, for all elements with text of their
# own; the least, and where it is.
CONTRAST = """
(() => {
  const rgb = colour => colour.match(/[\\d.]+/g).map(Number);
  const over = (front, back) => [0, 1, 2].map(i => front[i] * (front[3] ?? 1) + back[i] * (1 - (front[3] ?? 1)));
  const light = colour => {
    const [r, g, b] = colour.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const back = element => element
    ? over(rgb(getComputedStyle(element).backgroundColor), back(element.parentElement)) : [255, 255, 255];
  let least = [21, ""];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!own || ["SCRIPT", "NOSCRIPT", "TITLE", "title"].includes(element.tagName)) continue;
    const style = getComputedStyle(element), ground = back(element);
    const front = over(rgb(element instanceof SVGElement ? style.fill : style.color), ground);
    const [low, high] = [light(front), light(ground)].sort((a, b) => a - b), ratio = (high + 0.05) / (low + 0.05);
    if (ratio < least[0]) least = [ratio, element.outerHTML];
  }
  return least;
})()
"""
TOO_WIDE = """
[...document.querySelectorAll("body *")]
  .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map(e => e.outerHTML)
"""
RUNS = "document.getElementById('state')?.textContent === 'Running'"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.mark.chromium
def test_the_status_page_in_a_browser(server: ServerProcess, reused: int, browser: Browser) -> None:
    """Its script shows what the server says, the share of reused tokens first, and the hottest passages: of all checks
    that the server has answered."""
    bad = urllib.request.Request(f"{server.base_url}/completions", b"{}", {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(bad, timeout=DEADLINE)
    browser.show(1000, "light")
    browser.open(f"{server.url}/")
    browser.wait_for(RUNS)
    fields = browser.evaluate(
        "Object.fromEntries([...document.querySelectorAll('[data-field]')].map(e => [e.dataset.field, e.textContent]))"
    )
    with urllib.request.urlopen(f"{server.url}/status", timeout=DEADLINE) as response:
        status = json.load(response)
    assert re.fullmatch(r"(?!0 )[\d.]+ %", fields["reuse.share"])
    assert browser.evaluate("document.querySelector('dd').dataset.field") == "reuse.recent.share"
    assert int(fields["requests.finished"].replace(",", "")) >= 2, fields
    assert int(fields["tokens.reused"].replace(",", "")) >= reused
    assert re.fullmatch(r"[\d.]+ m?s", fields["first_token_seconds.p50"])
    assert fields["versions.torch"] == status["versions"]["torch"]
    text = browser.evaluate("document.querySelector('main').innerText")
    for shown in (*status["errors"], *status["tiers"], *status["found"]):
        assert shown["meaning"] in text
    assert "HTTP 400" in text and status["tiers"][0]["hits"] > 0
    assert status["passages"]
    for passage in status["passages"]:
        assert passage["text"] in browser.evaluate("document.body.textContent")
    for name in ("reused", "errors"):
        assert browser.evaluate(f"document.querySelectorAll('#chart-{name} rect').length") > 0
    assert browser.evaluate("document.querySelectorAll('#chart-first path').length") == 2
    ticks = browser.evaluate("[...document.querySelectorAll('#chart-reused text')].map(e => e.textContent)")
    assert ticks == ["0 %", "50 %", "100 %", "-15 min", "-30 min", "-45 min", "-60 min", "now"]
    browser.evaluate("document.querySelector('[value=day]').click()")
    ticks = browser.evaluate("[...document.querySelectorAll('#chart-first text')].map(e => e.textContent)")
    assert re.fullmatch(r"[\d.]+ m?s", ticks[2]) and ticks[3:] == ["-6 h", "-12 h", "-18 h", "-24 h", "now"]
    assert browser.errors == []


@pytest.mark.chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1000])
def test_the_status_page_can_be_read(
    server: ServerProcess, reused: int, browser: Browser, width: int, scheme: str
) -> None:
    """Nothing reaches beyond the window, and all text differs enough from what is behind it (WCAG 2, AA)."""
    browser.show(width, scheme)
    browser.open(f"{server.url}/")
    browser.wait_for(RUNS)
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert browser.evaluate(TOO_WIDE) == []
    ratio, element = browser.evaluate(CONTRAST)
    assert ratio >= 4.5, element
    assert browser.errors == []


@pytest.mark.promtool
def test_the_metrics_by_prometheus_own_tool(server: ServerProcess, reused: int) -> None:
    """It has nothing against them but the colon, which vLLM's names have."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=DEADLINE) as response:
        text = response.read()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=DEADLINE)
    complaints = (done.stdout + done.stderr).decode().splitlines()
    assert complaints and [line for line in complaints if "should not contain ':'" not in line] == []
