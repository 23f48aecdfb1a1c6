"""What watches the server takes it as it is: a browser its status page, and Prometheus' own tool its metrics."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from html import unescape
from pathlib import Path

import pytest
from openai import OpenAI

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


@pytest.mark.chromium
def test_the_status_page_in_a_browser(server: ServerProcess, reused: int, tmp_path: Path) -> None:
    """Its script shows what the server says, and the hottest passages: of all checks that the server has answered."""
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=5000",
        f"--user-data-dir={tmp_path}",
    ]
    command = ["chromium", *options, "--dump-dom", f"{server.url}/"]
    with urllib.request.urlopen(f"{server.url}/status", timeout=DEADLINE) as response:
        hottest = json.load(response)["passages"]
    page = unescape(subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True).stdout)
    fields = dict(re.findall(r'data-field="([\w.]+)"[^>]*>([^<]*)<', page))
    assert re.search(r'id="state"[^>]*>Running<', page)
    assert int(fields["requests.finished"].replace(",", "")) >= 2, fields
    assert int(fields["tokens.reused"].replace(",", "")) >= reused
    assert re.fullmatch(r"[\d.]+ m?s", fields["first_token_seconds.p50"])
    assert re.search(r"<td>memory</td><td>[1-9]", page)  # a tier, and its hits
    assert hottest
    for passage in hottest:
        assert passage["text"] in page


@pytest.mark.promtool
def test_the_metrics_by_prometheus_own_tool(server: ServerProcess, reused: int) -> None:
    """It has nothing against them but the colon, which vLLM's names have."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=DEADLINE) as response:
        text = response.read()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=DEADLINE)
    complaints = (done.stdout + done.stderr).decode().splitlines()
    assert complaints and [line for line in complaints if "should not contain ':'" not in line] == []
