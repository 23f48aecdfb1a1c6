"""The snippets of docs/rag_stacks.md against the server: how much of the prompts of ten questions each has reused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integrations.hugging_face import ROOT
from tests.integrations.servers import NAME, ServerProcess

PAGE = (ROOT / "docs/rag_stacks.md").read_text(encoding="utf-8")
SNIPPETS = dict(re.findall(r"^## (.+?)\n.*?^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
PASSAGES_OF_A_QUESTION = 5


@dataclass(frozen=True)
class Tokens:
    """Tokens of prompts: all, those that were found and used as they were, and those of them that are passages."""

    prompt: int = 0
    cached: int = 0
    reused: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.prompt + other.prompt, self.cached + other.cached, self.reused + other.reused)

    @property
    def share(self) -> float:
        return self.cached / self.prompt


def pages() -> tuple[list[str], list[str]]:
    """Return the titles of eight pages, and their texts, which begin with them."""
    texts: dict[str, list[str]] = {}
    for sample in json.loads((ROOT / "inputs/wikimqa_s.json").read_text(encoding="utf-8"))[:2]:
        for passage in sample["ctxs"]:
            texts.setdefault(passage["title"], []).append(passage["text"])
    chosen = [*texts][:8]
    return chosen, [f"{title}: {' '.join(texts[title])}" for title in chosen]


def ask_all(server: ServerProcess, stack: str, monkeypatch: pytest.MonkeyPatch) -> list[Tokens]:
    """Ask ten questions by a snippet, and return what the usage of each answer counts."""
    monkeypatch.setenv("OPENAI_API_KEY", f"sk-{[*SNIPPETS].index(stack)}")  # a tenant of its own
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    counts: list[Tokens] = []
    send = httpx.Client.send

    def note(client: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
        response = send(client, request, **options)
        usage = json.loads(response.read())["usage"]
        details = usage["prompt_tokens_details"]
        counts.append(Tokens(usage["prompt_tokens"], details["cached_tokens"], details["reused_tokens"]))
        return response

    monkeypatch.setattr(httpx.Client, "send", note)
    scope: dict[str, Any] = {"URL": server.base_url, "MODEL": NAME}
    exec(compile(SNIPPETS[stack], stack, "exec"), scope)
    titles, texts = pages()
    for number in range(10):
        step = (1, 3, 5, 7)[(number + number // 8) % 4]  # all places of eight
        found = [texts[(number + step * place) % len(texts)] for place in range(PASSAGES_OF_A_QUESTION)]
        asked = "What is said about {}?" if number < len(titles) else "Who knows {}?"
        scope["answer"](asked.format(titles[number % len(titles)]), found)
    monkeypatch.undo()
    assert len(counts) == 10
    return counts


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ServerProcess]]:
    """Two servers with a tenant for each stack: one finds passages, the other has the prefix cache alone."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("finds", "plain")}
    keys = folders["finds"] / "keys.txt"
    keys.write_text("".join(f"sk-{number}\n" for number in range(len(SNIPPETS))))

    def start(folder: Path, *flags: str) -> ServerProcess:
        return ServerProcess(folder, flags=["--api-keys", str(keys), *flags])

    servers = {"finds": start(folders["finds"]), "plain": start(folders["plain"], "--no-detect-chunks")}
    yield servers
    for server in servers.values():
        log = server.log()
        server.close()
        assert "Traceback" not in log, log


@pytest.mark.parametrize("stack", SNIPPETS)
def test_a_stack_as_the_page_shows_it(
    stack: str, keyed: dict[str, ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reuses much of its prompts once the passages have come twice, and the page says how much."""
    each = ask_all(keyed["finds"], stack, monkeypatch)
    alone = sum(ask_all(keyed["plain"], stack, monkeypatch), Tokens())
    total, later = sum(each, Tokens()), sum(each[5:], Tokens())
    shares = (total.share, total.reused / total.prompt, later.share, alone.share)
    row = f"| {stack} | " + " | ".join(f"{share:.0%}" for share in shares) + " |"
    print(row)
    assert later.share > 0.4 and later.share > alone.share + 0.2
    assert row in PAGE
