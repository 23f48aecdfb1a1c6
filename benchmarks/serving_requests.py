"""The requests that `benchmarks.serving` sends, and what it keeps of each."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp
from transformers import AutoTokenizer

from benchmarks.passages import make_passages
from vllm_blend.quality.splits import DEVELOPMENT

PREFIX = "You will be asked a question after reading several passages. Answer within five words.\nPassages:\n"


@dataclass(frozen=True)
class Served:
    """One request: seconds from the sending to the first token and to the end, tokens of the answer and of its prompt
    by what became of them, and what went wrong, if anything did. It was interrupted if the engine was killed."""

    mode: str
    load: float
    sent: float
    first: float | None
    total: float
    tokens: int
    prompt: dict[str, Any]
    error: str | None = None
    code: str | None = None
    interrupted: bool = False


@dataclass(frozen=True)
class Workload:
    """The passages and questions that requests draw from."""

    prefix: list[int]
    passages: list[list[int]]
    questions: list[list[int]]
    per_prompt: int
    zipf: float
    max_tokens: int
    selector: str | None

    def body(self, rng: Random, model: str, mode: str) -> dict[str, Any]:
        """Return the next request's JSON."""
        weights = [(rank + 1) ** -self.zipf for rank in range(len(self.passages))]
        drawn: dict[int, None] = {}
        while len(drawn) < self.per_prompt:
            drawn[rng.choices(range(len(weights)), weights)[0]] = None
        order = list(drawn)
        rng.shuffle(order)
        chunks = [self.passages[number] for number in order]
        asked: dict[str, Any] = {
            "model": model,
            "prompt": {"prefix": self.prefix, "chunks": chunks, "suffix": rng.choice(self.questions)},
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return asked | {"blend": blend_of(mode, self.selector)}


def blend_of(mode: str, selector: str | None) -> dict[str, Any]:
    """Return the request field for a mode: off, reuse, or a ratio, with the rule that chooses its tokens."""
    if mode in ("off", "reuse"):
        return {"mode": mode}
    return {"mode": "blend", "ratio": float(mode)} | ({} if selector is None else {"selector": selector})


async def ask(client: aiohttp.ClientSession, body: dict[str, Any], mode: str, load: float) -> Served:
    """Send one request and read its stream to the end."""
    start, sent = time.perf_counter(), time.time()
    first: float | None = None
    error: str | None = None
    code: str | None = None
    usage: dict[str, Any] = {}
    try:
        async with client.post("/v1/completions", json=body) as response:
            if response.status != 200:
                text = await response.text()
                error, code = f"{response.status}: {text[:200]}", error_code(text)
            async for event in events(response):
                if "error" in event:
                    error, code = json.dumps(event["error"])[:200], event["error"]["code"]
                usage = event.get("usage") or usage
                if first is None and event.get("choices"):
                    first = time.perf_counter() - start
    except (aiohttp.ClientError, TimeoutError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    if error is None and (first is None or not usage):
        error = "the stream ended without a token or without its usage"
    details = usage.get("prompt_tokens_details") or {}
    prompt = {"tokens": usage.get("prompt_tokens", 0), **details}
    total = time.perf_counter() - start
    return Served(mode, load, sent, first, total, usage.get("completion_tokens", 0), prompt, error, code)


def error_code(body: str) -> str | None:
    """Return the code of an error in OpenAI's shape; None for what is something else."""
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
    return str(code)


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events."""
    async for line in response.content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line.removeprefix(b"data: "))


def make_texts(tokenizer_name: str, args: argparse.Namespace) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """Return the prefix, the passages and the questions that requests draw from, as token ids."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_name)
    passages, _ = make_passages(tokenizer, DEVELOPMENT.random(args.seed), args.passages, args.passage_tokens)
    questions = [
        tokenizer.encode(f"Question: what is known of number {number}?\nAnswer:", add_special_tokens=False)
        for number in range(1000)
    ]
    return tokenizer.encode(PREFIX), passages, questions


def make_workload(args: argparse.Namespace) -> Workload:
    texts = make_texts(args.tokenizer, args)
    return Workload(*texts, args.per_prompt, args.zipf, args.max_tokens, args.selector)
