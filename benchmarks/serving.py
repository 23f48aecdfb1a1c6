"""Load a running server with prompts over shared passages, and measure first-token times, throughput and reuse.

    vllm-blend serve inputs/demo-model-reuse --enable-blending --port 8000
    python -m benchmarks.serving --url http://127.0.0.1:8000 --clients 1 8 32 --minutes 1

Every request draws its passages by Zipf popularity from `--passages` synthetic ones, in random order, and asks one of
many questions, so that hardly two requests are alike. `--clients` is a closed loop: each client sends its next request
when the last one has ended. With `--rate` requests arrive at random (Poisson), however many are running. Every `--mode`
is measured in the same run: off (plain prefill), reuse, or a ratio such as 0.15.

`--server` is the process id of the server: its memory and its engine's are watched, and when all requests have ended,
none may run and no page may be used. `--kill engine 200` kills the engine 200 seconds after the beginning, `--kill 4711
200` any other process, such as Redis. An engine's death may cost requests an error that says so, until it runs again:
these are counted as interrupted, and their clients go on when it does.

Prints a row for each mode and number of clients or rate; --summary keeps the rows and what was watched, --output every
request. The exit status is 1 if a request failed, pages stayed in use, or memory grew by more than --growth-mib.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
from transformers import AutoTokenizer

from benchmarks.ranking import make_passages
from benchmarks.server_watch import Watch
from vllm_blend.quality.splits import DEVELOPMENT

PREFIX = "You will be asked a question after reading several passages. Answer within five words.\nPassages:\n"
PERCENTILES = (50, 90, 99)
HEAD = (
    "| mode | load | requests | interrupted | failed | requests/s | tokens/s | first token p50, ms | p90 | p99 "
    "| reused, % |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


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
    code: str | None = None
    usage: dict[str, Any] = {}
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                error = f"{response.status_code}: {(await response.aread()).decode()[:200]}"
                code = error_code(await response.aread())
            async for event in events(response):
                if "error" in event:
                    error, code = json.dumps(event["error"])[:200], event["error"]["code"]
                usage = event.get("usage") or usage
                if first is None and event.get("choices"):
                    first = time.perf_counter() - start
    except httpx.HTTPError as problem:
        error = f"{type(problem).__name__}: {problem}"
    if error is None and (first is None or not usage):
        error = "the stream ended without a token or without its usage"
    details = usage.get("prompt_tokens_details") or {}
    prompt = {"tokens": usage.get("prompt_tokens", 0), **details}
    total = time.perf_counter() - start
    return Served(mode, load, sent, first, total, usage.get("completion_tokens", 0), prompt, error, code)


def error_code(body: bytes) -> str | None:
    """Return the code of an error in OpenAI's shape; None for what is something else."""
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
    return str(code)


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events."""
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


async def run(args: argparse.Namespace, work: Workload, watch: Watch) -> tuple[list[Served], list[str]]:
    """Run every mode at every load, one after another; return all requests, and the rows of the table."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    served: list[Served] = []
    rows: list[str] = []
    async with httpx.AsyncClient(base_url=args.url, timeout=args.timeout, limits=limits) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        async with watch.running(client):
            for load in args.rate or args.clients:
                for mode in args.mode:
                    part = open_loop if args.rate else closed_loop
                    begun = time.perf_counter()
                    found = await part(client, args, work, model, mode, load, watch)
                    found = [replace(each, interrupted=is_interrupted(each, watch)) for each in found]
                    rows.append(row(mode, load, found, time.perf_counter() - begun))
                    print(rows[-1], flush=True)
                    served += found
    return served, rows


def is_interrupted(served: Served, watch: Watch) -> bool:
    """Return whether a request failed for nothing but the death of an engine that was killed."""
    return served.code == "engine_unavailable" and watch.was_down(served.sent, served.sent + served.total)


async def closed_loop(
    client: httpx.AsyncClient,
    args: argparse.Namespace,
    work: Workload,
    model: str,
    mode: str,
    clients: float,
    watch: Watch,
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
            if own[-1].error is not None:
                await watch.until_healthy(client)
        return own

    parts = await asyncio.gather(*(one(number) for number in range(int(clients))))
    return [served for part in parts for served in part]


async def open_loop(
    client: httpx.AsyncClient,
    args: argparse.Namespace,
    work: Workload,
    model: str,
    mode: str,
    rate: float,
    watch: Watch,
) -> list[Served]:
    """Send requests at random times, `rate` a second on average."""
    rng, end = Random(args.seed), time.monotonic() + 60 * args.minutes
    tasks: list[asyncio.Task[Served]] = []
    while time.monotonic() < end and (args.requests is None or len(tasks) < args.requests):
        await watch.until_healthy(client)
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
    interrupted = sum(each.interrupted for each in served)
    failed = len(served) - len(done) - interrupted
    counts = f"{len(done)} | {interrupted} | {failed}"
    return f"| {mode} | {load:g} | {counts} | {rate:.2f} | {answers:.1f} | {times} | {100 * reused:.1f} |"


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
    add("--server", type=int, metavar="PID", help="the server's process, which is watched")
    add("--kill", nargs=2, action="append", default=[], metavar=("PID", "SECONDS"), help="a process, or `engine`")
    add("--growth-mib", type=float, default=64.0, help="by which memory may grow (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--summary", type=Path, help="JSON file for the rows, and for what was watched")
    add("--output", type=Path, help="JSON file for every request")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    if not 1 <= args.per_prompt <= args.passages:
        raise SystemExit(f"--per-prompt {args.per_prompt}: use 1 to {args.passages}, the number of --passages")
    if args.server is None and any(process == "engine" for process, _ in args.kill):
        raise SystemExit("--kill engine needs --server PID, the process that the engine belongs to")
    watch = Watch(args.server, [(process, float(seconds)) for process, seconds in args.kill])
    print(HEAD)
    served, rows = asyncio.run(run(args, make_workload(args), watch))
    errors = Counter(each.error for each in served if each.error is not None and not each.interrupted)
    for error, count in errors.most_common(5):
        print(f"{count} x {error}", file=sys.stderr)
    problems = watch.problems(args.growth_mib)
    print(f"\n{watch.report()}")
    for problem in problems:
        print(problem, file=sys.stderr)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    if args.summary is not None:
        found = {"settings": settings, "head": HEAD, "rows": rows, "problems": problems, "errors": errors}
        args.summary.write_text(json.dumps(found | {"watched": watch.as_json()}, indent=1) + "\n")
    if args.output is not None:
        args.output.write_text(json.dumps({"settings": settings, "requests": [asdict(each) for each in served]}) + "\n")
    return 1 if errors or problems else 0


if __name__ == "__main__":
    sys.exit(main())
