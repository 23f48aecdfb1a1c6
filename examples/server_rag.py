"""Ask a server about passages that stand in plain text, in another order each time.

    vllm-blend serve inputs/demo-model-reuse
    python examples/server_rag.py [http://127.0.0.1:8000/v1]

This is what most RAG applications send: one string in which blank lines separate the passages. A passage is computed in
place the first time and stored the second time; from the third time on it is reused wherever it stands.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from openai import OpenAI

INSTRUCTION = "You will be asked a question after reading several passages. Answer within five words."
QUESTIONS = [
    "What does Jeasswior Company make?",
    "Who is the mayor of Yiamdond?",
    "Which festival is held in Viaxvias?",
    "Who founded Jearhiond Union?",
]


def main(url: str) -> None:
    client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    client.completions.create(model=model, prompt="Warm up.", max_tokens=1)
    sample = json.loads((Path(__file__).parents[1] / "inputs/musique_s.json").read_text(encoding="utf-8"))[0]
    passages = [passage["text"] for passage in sample["ctxs"]]
    for number, question in enumerate(QUESTIONS):
        order = passages[number:] + passages[:number]
        start, first, text = time.perf_counter(), None, ""
        for chunk in client.chat.completions.create(
            model=model,
            messages=[
                {"role": "system", "content": "\n\n".join([INSTRUCTION, *order])},
                {"role": "user", "content": question},
            ],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            if chunk.choices and chunk.choices[0].delta.content:
                first = first or time.perf_counter()
                text += chunk.choices[0].delta.content
            elif chunk.usage and (details := chunk.usage.prompt_tokens_details):
                found = details.model_dump()  # OpenAI's type, with the server's own counts
                print(
                    f"{question}{text}\n  first token after {1000 * ((first or start) - start):.0f} ms; "
                    f"{chunk.usage.prompt_tokens} prompt tokens: {found['cached_tokens']} cached "
                    f"({found['reused_tokens']} of them in passages), {found['stored_tokens']} computed for the store, "
                    f"{found['recomputed_tokens']} computed in place"
                )


if __name__ == "__main__":
    default = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    main(sys.argv[1] if len(sys.argv) > 1 else default)
