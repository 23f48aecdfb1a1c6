"""LangChain's stuff chain against a server, unmodified: passages that it has seen before are reused in any order.

    pip install langchain-openai langchain-classic
    vllm-blend serve inputs/demo-model-reuse
    python examples/langchain_stuff.py [http://127.0.0.1:8000/v1]

The chain joins documents by blank lines and puts them into the prompt as one string, where the server finds them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from openai import OpenAI

PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer the question based on the given passages.\n\n{context}"), ("human", "{question}")]
)
QUESTIONS = [
    "In which country is Wiossnea?",
    "Which company did Kaimsha Piaka found?",
    "Where is the head office of Senhaix Works?",
    "Which river flows through Niaceal?",
]


def main(url: str) -> None:
    key = os.environ.get("OPENAI_API_KEY", "none")
    model = OpenAI(base_url=url, api_key=key).models.list().data[0].id  # what the server calls it
    llm = ChatOpenAI(base_url=url, api_key=key, model=model, temperature=0)
    chain = create_stuff_documents_chain(llm, PROMPT)
    sample = json.loads((Path(__file__).parents[1] / "inputs/wikimqa_s.json").read_text(encoding="utf-8"))[0]
    documents = [Document(f"{each['title']}\n{each['text']}") for each in sample["ctxs"]]
    for number, question in enumerate(QUESTIONS):
        order = documents[number:] + documents[:number]  # as a retriever orders them by relevance
        with get_usage_metadata_callback() as callback:
            answer = chain.invoke({"context": order, "question": question})
        [usage] = callback.usage_metadata.values()
        found = usage["input_token_details"]["cache_read"]
        print(f"{question} {answer.strip()}\n  {usage['input_tokens']} prompt tokens, {found} of them cached")


if __name__ == "__main__":
    default = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    main(sys.argv[1] if len(sys.argv) > 1 else default)
