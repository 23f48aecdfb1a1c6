"""The examples of docs/passages.md, as the server reads them."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.chunks.test_chat import CHATML_LIKE
from tests.engine.engines import ROOT
from tests.entrypoints.openai.passages.prompts import chat, chunk_texts, completion
from vllm_blend.entrypoints.openai.passages import PassageFinder
from vllm_blend.inputs import ParsedPrompt

PASSAGES = ["First passage.", "Second passage."]


def test_the_four_ways() -> None:
    """Each has both passages as chunks; the plain string once they have been seen. Documents may continue a page."""
    blocks = re.findall(r"(?m)(?:^ {7}.*\n)+", (ROOT / "docs/passages.md").read_text(encoding="utf-8"))
    requests: list[dict[str, Any]] = [json.loads(block) for block in blocks]
    assert len(requests) == 5
    [page] = [request for request in requests if "continues" in str(request)]
    requests.remove(page)
    assert chat(PassageFinder(), page["messages"], CHATML_LIKE, page["documents"]).continues == (None, 0)
    finder = PassageFinder(min_characters=8)
    for request in requests:
        prompt: ParsedPrompt
        if "prompt" in request:
            prompt = completion(finder, request["prompt"])
        else:
            prompt = chat(finder, request["messages"], CHATML_LIKE, request.get("documents"))
        found = [text.strip().removeprefix("Lamps\n") for text in chunk_texts(prompt)]
        assert found == PASSAGES
