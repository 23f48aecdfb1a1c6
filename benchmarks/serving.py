"""Load a running server with prompts over shared passages, and measure first-token times, throughput and reuse.

    vllm-blend serve inputs/demo-model-reuse --enable-blending --port 8000
    python -m benchmarks.serving --url http://127.0.0.1:8000 --clients 1 8 32 --minutes 1

Every request draws its passages by Zipf popularity from `--passages` synthetic ones, in random order, and asks one of
many questions, so that hardly two requests are alike. `--clients` is a closed loop: each client sends its next request
when the last one has ended. With `--rate` requests arrive at random (Poisson), however many are running. Every `--mode`
is measured in the same run: off (plain prefill), reuse, or a ratio such as 0.15. `--pids` are processes whose resident
memory is compared before and after.

Prints a row for each mode and number of clients or rate; --output keeps every request. The exit status is 1 if any
request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
from transformers import AutoTokenizer

from benchmarks.ranking import make_passages
from vllm_blend.quality.splits import DEVELOPMENT

PREFIX = "You will be asked a question after reading several passages. Answer within five words.\nPassages:\n"
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Served:
    """One request: seconds from the sending to the first token and to the end, tokens of the answer and of its prompt
    by what became of them, and what went wrong, if anything did."""

    mode: str
    load: float
    sent: float
    first: float | None
    total: float
    tokens: int
    prompt: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True)
class Workload:
    """The passages and questions that requests draw from."""

    prefix: list[int]
    passages: list[list[int]]
    questions: list[list[int]]
    per_prompt: int
    zipf: float
    max_tokens: int

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
        return asked | {"blend": blend_of(mode)}


def blend_of(mode: str) -> dict[str, Any]:
    """Return the request field for a mode: off, reuse, or a ratio."""
    return {"mode": mode} if mode in ("off", "reuse") else {"mode": "blend", "ratio": float(mode)}


async def ask(client: httpx.AsyncClient, body: dict[str, Any], mode: str, load: float) -> Served:
    """Send one request and read its stream to the end."""
    start, sent = time.perf_counter(), time.time()
    first: float | None = None
    error: str | None = None
    usage: dict[str, Any] = {}
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                error = f"{response.status_code}: {(await response.aread()).decode()[:200]}"
            async for event in events(response):
                if "error" in event:
                    error = json.dumps(event["error"])[:200]
                usage = event.get("usage") or usage
                if first is None and event.get("choices"):
                    first = time.perf_counter() - start
    except httpx.HTTPError as problem:
        error = f"{type(problem).__name__}: {problem}"
    if error is None and (first is None or not usage):
        error = "the stream ended without a token or without its usage"
    details = usage.get("prompt_tokens_details") or {}
    prompt = {"tokens": usage.get("prompt_tokens", 0), **details}
    return Served(
        mode, load, sent, first, time.perf_counter() - start, usage.get("completion_tokens", 0), prompt, error
    )


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events."""
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


async def run(args: argparse.Namespace, work: Workload) -> list[Served]:
    """Run every mode at every load, one after another; return all requests."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    served: list[Served] = []
    async with httpx.AsyncClient(base_url=args.url, timeout=args.timeout, limits=limits) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        for load in args.rate or args.clients:
            for mode in args.mode:
                part = open_loop if args.rate else closed_loop
                begun = time.perf_counter()
                found = await part(client, args, work, model, mode, load)
                print(row(mode, load, found, time.perf_counter() - begun), flush=True)
                served += found
    return served


async def closed_loop(
    client: httpx.AsyncClient, args: argparse.Namespace, work: Workload, model: str, mode: str, clients: float
) -> list[Served]:
    """Keep `clients` requests running until the minutes or the requests are up."""
    end = time.monotonic() + 60 * args.minutes
    left = args.requests

    async def one(number: int) -> list[Served]:
        nonlocal left
        rng, own = Random(f"{args.seed}-{number}"), []
        while time.monotonic() < end and (left is None or left > 0):
            left = None if left is None else left - 1
            own.append(await ask(client, work.body(rng, model, mode), mode, clients))
        return own

    parts = await asyncio.gather(*(one(number) for number in range(int(clients))))
    return [served for part in parts for served in part]


async def open_loop(
    client: httpx.AsyncClient, args: argparse.Namespace, work: Workload, model: str, mode: str, rate: float
) -> list[Served]:
    """Send requests at random times, `rate` a second on average."""
    rng, end = Random(args.seed), time.monotonic() + 60 * args.minutes
    tasks: list[asyncio.Task[Served]] = []
    while time.monotonic() < end and (args.requests is None or len(tasks) < args.requests):
        tasks.append(asyncio.create_task(ask(client, work.body(rng, model, mode), mode, rate)))
        await asyncio.sleep(rng.expovariate(rate))
    return list(await asyncio.gather(*tasks))


def row(mode: str, load: float, served: Sequence[Served], seconds: float) -> str:
    """Return one line of the table."""
    done = [each for each in served if each.error is None]
    firsts = [1e3 * each.first for each in done if each.first is not None]
    times = " | ".join(f"{np.percentile(firsts, p):.0f}" for p in PERCENTILES) if firsts else "- | - | -"
    tokens = Counter[str]()
    for each in done:
        tokens.update({name: count for name, count in each.prompt.items() if isinstance(count, int)})
    reused = tokens["reused_tokens"] / max(1, tokens["tokens"])
    rate, answers = len(done) / seconds, sum(each.tokens for each in done) / seconds
    failed = len(served) - len(done)
    return f"| {mode} | {load:g} | {len(done)} | {failed} | {rate:.2f} | {answers:.1f} | {times} | {100 * reused:.1f} |"


def resident_bytes(pids: Sequence[int]) -> int:
    """Return the memory that processes hold, in bytes. Linux only."""
    total = 0
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text()
        total += 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))
    return total


def make_workload(args: argparse.Namespace) -> Workload:
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    passages, _ = make_passages(tokenizer, DEVELOPMENT.random(args.seed), args.passages, args.passage_tokens)
    questions = [
        tokenizer.encode(f"Question: what is known of number {number}?\nAnswer:", add_special_tokens=False)
        for number in range(1000)
    ]
    return Workload(tokenizer.encode(PREFIX), passages, questions, args.per_prompt, args.zipf, args.max_tokens)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000")
    add("--tokenizer", default="inputs/demo-model-reuse", help="that of the server's model")
    add("--mode", nargs="+", default=["off", "0.15", "0.08", "reuse"], help="off, reuse or a ratio")
    add("--clients", nargs="+", type=int, default=[8], help="requests running at a time")
    add("--rate", nargs="+", type=float, help="requests a second, in place of --clients")
    add("--minutes", type=float, default=1.0, help="of each row (default: %(default)s)")
    add("--requests", type=int, help="of each row at most")
    add("--passages", type=int, default=64)
    add("--passage-tokens", type=int, default=64)
    add("--per-prompt", type=int, default=8, help="passages in a prompt (default: %(default)s)")
    add("--zipf", type=float, default=1.0, help="popularity of the n-th passage is n ** -zipf (default: %(default)s)")
    add("--max-tokens", type=int, default=32, help="tokens of an answer (default: %(default)s)")
    add("--timeout", type=float, default=120.0, help="seconds to wait for a server's next bytes (default: %(default)s)")
    add("--pids", nargs="+", type=int, default=[], help="processes whose memory is watched")
    add("--seed", type=int, default=0)
    add("--output", type=Path, help="JSON file for every request")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    if not 1 <= args.per_prompt <= args.passages:
        raise SystemExit(f"--per-prompt {args.per_prompt}: use 1 to {args.passages}, the number of --passages")
    before = resident_bytes(args.pids)
    print("| mode | load | requests | failed | requests/s | tokens/s | first token p50, ms | p90 | p99 | reused, % |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    served = asyncio.run(run(args, make_workload(args)))
    if args.pids:
        print(f"\nresident memory: {before / 2**20:.0f} MiB before, {resident_bytes(args.pids) / 2**20:.0f} after")
    errors = Counter(each.error for each in served if each.error is not None)
    for error, count in errors.most_common(5):
        print(f"{count} x {error}", file=sys.stderr)
    if args.output is not None:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        args.output.write_text(json.dumps({"settings": settings, "requests": [asdict(each) for each in served]}) + "\n")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
