"""Measure how long a running stream waits for its next token while another client sends a bad or a large body.

Beside it stands how long it waits for a step that prefills another's prompts: what a well-behaved neighbour costs.

    vllm-blend serve inputs/demo-model-reuse --device cpu
    python -m benchmarks.bad_bodies --output gaps.json

For each body, in turn and `--repeats` times, a stream is asked for; when its first tokens have come, the body is sent,
and the longest time between two of the stream's tokens until the body was answered is kept (in milliseconds), with the
answer's status. "nothing" sends nothing for a second. The server's limits are those of docs/server.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import aiohttp

from benchmarks.serving_requests import events

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT_BYTES = 8_000_000  # a little below `--max-body-size`
VALUES = 1_000_000  # a little below what JSON may have besides its text
WARM_TOKENS = 16  # of the stream, before the body is sent
STEP = "a prefill of a whole step"


def bodies(
    context: int, step_tokens: int, vocabulary: int, rng: Random
) -> dict[str, Callable[[], list[tuple[str, bytes]]]]:
    """Return what is sent in each case: paths and bodies, sent at once. `context` and `step_tokens` are the server's
    max_model_len and max_num_batched_tokens."""

    def one(path: str, body: Any) -> Callable[[], list[tuple[str, bytes]]]:
        encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
        return lambda: [(path, encoded)]

    def whole_step() -> list[tuple[str, bytes]]:
        """Return prompts that no cache knows, as many as a step takes."""
        tokens = min(context - 1, step_tokens)
        asked = ([rng.randrange(10, vocabulary) for _ in range(tokens)] for _ in range(max(1, step_tokens // tokens)))
        return [(COMPLETIONS, json.dumps({"prompt": prompt, "max_tokens": 1}).encode()) for prompt in asked]

    user = {"role": "user", "content": "a"}
    integers = [7] * (VALUES - 10)
    pieces = {"prefix": "a", "chunks": ["a b"] * 10_000, "suffix": "?"}
    scored = {"prompt": [[7 + i] * 1000 for i in range(12)], "max_tokens": 1, "echo": True, "logprobs": 20}
    stops = [f"{i:>15}" for i in range(1000)]
    many = {"prompt": "a", "n": 256, "max_tokens": 64, "ignore_eos": True}
    return {
        "nothing": list,
        STEP: whole_step,
        "8 MB that are no JSON": one(CHAT, b'{"messages": "' + b"a" * TEXT_BYTES),
        "8 MB of invalid UTF-8": one(CHAT, b'{"messages": "' + b"\xff" * TEXT_BYTES + b'"}'),
        "10 MB, above the limit": one(CHAT, {"messages": "a" * 10_000_000}),
        "an 8 MB string as prompt": one(COMPLETIONS, {"prompt": "a " * (TEXT_BYTES // 2)}),
        "an 8 MB string as message": one(CHAT, {"messages": [{"role": "user", "content": "a " * (TEXT_BYTES // 2)}]}),
        "an unknown model": one(CHAT, {"model": "b", "messages": [user]}),
        "temperature NaN": one(CHAT, b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}'),
        "a million token ids": one(COMPLETIONS, {"prompt": integers}),
        "a million wrong messages": one(CHAT, {"messages": integers}),
        "a million unknown values": one(CHAT, {"messages": [user], "unknown": integers}),
        "130,000 empty objects": one(CHAT, {"messages": [user], "documents": [{}] * 130_000}),
        "10,000 chunks": one(COMPLETIONS, {"prompt": pieces, "max_tokens": 1}),
        "252,000 log-probabilities asked for": one(COMPLETIONS, scored),
        "1,000 stop strings for 256 completions": one(COMPLETIONS, many | {"stop": stops}),
        "1,000 bad words for 256 completions": one(COMPLETIONS, many | {"bad_words": stops}),
        "a document of 130,000 keys": one(
            CHAT, {"messages": [user], "documents": [{"text": "a", **{f"tit{i}": 1 for i in range(130_000)}}]}
        ),
        "lists 100,000 deep": one(CHAT, b"[" * 100_000 + b"]" * 100_000),
    }


async def stream(client: aiohttp.ClientSession, tokens: int, arrivals: list[float]) -> None:
    """Ask for a stream and note when each of its tokens came. Raises RuntimeError if it fails or comes short."""
    asked = {"prompt": "Question: who?\nAnswer:", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    async with client.post(COMPLETIONS, json=asked) as response:
        async for event in events(response):
            if "error" in event:
                raise RuntimeError(f"the stream failed: {event['error']}")
            arrivals.append(time.perf_counter())
    if len(arrivals) < tokens // 2:
        raise RuntimeError(f"the stream ended after {len(arrivals)} events instead of {tokens}")


async def longest_gap(
    client: aiohttp.ClientSession, tokens: int, sent: list[tuple[str, bytes]]
) -> tuple[float, list[int]]:
    """Return the longest time between tokens of a stream while `sent` was answered, in seconds, and the statuses.
    Raises RuntimeError if the stream ended before that."""
    arrivals: list[float] = []
    running = asyncio.create_task(stream(client, tokens, arrivals))
    while len(arrivals) < WARM_TOKENS and not running.done():
        await asyncio.sleep(0.001)
    begun = time.perf_counter()
    headers = {"Content-Type": "application/json"}

    async def send(path: str, body: bytes) -> int:
        async with client.post(path, data=body, headers=headers) as response:
            await response.read()
            return response.status

    statuses = list(await asyncio.gather(*(send(*each) for each in sent)))
    if not sent:
        await asyncio.sleep(1.0)
    count = len(arrivals)
    while len(arrivals) == count and not running.done():  # a gap may still be open
        await asyncio.sleep(0.001)
    if running.done():
        await running
        raise RuntimeError("the stream ended before the body was answered: raise --tokens")
    during = [each for each in arrivals if each >= begun]
    edges = [arrivals[-len(during) - 1], *during] if len(during) < len(arrivals) else during
    running.cancel()  # the server ends it, too
    await asyncio.gather(running, return_exceptions=True)
    return max(later - earlier for earlier, later in pairwise(edges)), statuses


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    cases = bodies(args.context, args.step_tokens, args.vocabulary, Random(args.seed))
    rows: dict[str, dict[str, Any]] = {name: {"body": name, "status": [], "gap_ms": []} for name in cases}
    async with aiohttp.ClientSession(args.url, timeout=aiohttp.ClientTimeout(total=120)) as client:
        for _ in range(args.repeats):
            for name, make in cases.items():
                gap, statuses = await longest_gap(client, args.tokens, make())
                rows[name]["gap_ms"].append(round(1000 * gap, 2))
                rows[name]["status"] = sorted({*rows[name]["status"], *statuses})
                await asyncio.sleep(0.2)
    return list(rows.values())


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| meanwhile | answered | longest gap, median, ms | longest of all, ms |", "|---|---|---|---|"]
    for row in rows:
        status, gaps = ", ".join(map(str, row["status"])) or "-", row["gap_ms"]
        lines.append(f"| {row['body']} | {status} | {median(gaps):.0f} | {max(gaps):.0f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--context", type=int, default=1024, help="the server's max_model_len")
    parser.add_argument("--step-tokens", type=int, default=2048, help="its max_num_batched_tokens")
    parser.add_argument(
        "--vocabulary", type=int, default=2000, help="token ids of the whole step's prompts are below it"
    )
    parser.add_argument("--tokens", type=int, default=900, help="of a stream, fewer than the context")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a JSON file for all gaps")
    args = parser.parse_args(argv)
    rows = asyncio.run(measure(args))
    print(table(rows))
    if args.output:
        args.output.write_text(
            json.dumps({"settings": vars(args) | {"output": str(args.output)}, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
