"""An agent whose context grows: each turn adds a search result before the earlier ones, which are reused behind it.

    vllm-blend serve inputs/demo-model-reuse
    python examples/server_agent.py [http://127.0.0.1:8000/v1]

The newest result comes first, so no prompt begins as the one before it and a prefix cache has nothing to give. As
`documents` the results are passages: the server computes each of them once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from openai import OpenAI

START = "Kaimsha Piaka"
STEPS = ["Which company did {} found?", "Where is the head office of {}?", "Which river flows through {}?"]


def search(name: str) -> list[dict[str, str]]:
    """Return the passages of the page that has this title."""
    sample = json.loads((Path(__file__).parents[1] / "inputs/wikimqa_s.json").read_text(encoding="utf-8"))[0]
    return [{"title": each["title"], "text": each["text"]} for each in sample["ctxs"] if each["title"] == name]


def main(url: str) -> None:
    client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    documents: list[dict[str, str]] = []
    name = START
    for step in STEPS:
        documents = search(name) + documents
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": step.format(name)}],
            temperature=0,
            extra_body={"documents": documents},
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        found = answer.usage.prompt_tokens_details.model_dump()  # OpenAI's type, with the server's own counts
        text = (answer.choices[0].message.content or "").strip()
        print(
            f"{step.format(name)} {text}\n  {len(documents)} documents, {answer.usage.prompt_tokens} prompt tokens: "
            f"{found['reused_tokens']} reused, {found['stored_tokens']} computed for the store, "
            f"{found['recomputed_tokens']} computed in place"
        )
        name = text


if __name__ == "__main__":
    default = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    main(sys.argv[1] if len(sys.argv) > 1 else default)
