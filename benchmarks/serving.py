"""Load a running server with prompts over shared passages, and measure first-token times, throughput and reuse.

    vllm-blend serve inputs/demo-model-reuse --enable-blending --port 8000
    python -m benchmarks.serving --url http://127.0.0.1:8000 --clients 1 8 32 --minutes 1

Every request draws its passages by Zipf popularity from `--passages` synthetic ones, in random order, and asks one of
many questions, so that hardly two requests are alike. `--clients` is a closed loop: each client sends its next request
when the last one has ended. With `--rate` requests arrive at random (Poisson), however many are running. Every `--mode`
is measured in the same run: off (plain prefill), reuse, or a ratio such as 0.15.

`--first-token-limit 1` then searches, for each mode, the highest rate of random arrivals at which 99% of the first
tokens come within a second, up to the most requests/s that its clients reached in the closed loop.

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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

import aiohttp
import numpy as np

from benchmarks.server_watch import Watch
from benchmarks.serving_requests import Served, Workload, ask, make_workload

PERCENTILES = (50, 90, 99)
HEAD = (
    "| mode | load | requests | interrupted | failed | requests/s | in quarters of the time | tokens/s "
    "| first token p50, ms | p90 | p99 | reused, % |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)
SUSTAINED_HEAD = (
    "| mode | requests/s | p99 of the first token, ms | of the first mode's requests/s |\n|---|---|---|---|"
)
SEARCHED = 0.5  # of the closed loop's requests/s: the lowest rate that is searched
Part = Callable[[str, float, bool], Awaitable[list[Served]]]  # measures a mode at a load that is open or not


@dataclass(frozen=True)
class Load:
    """What is done to a server: the command's arguments, what is asked, of whom, and who watches."""

    client: aiohttp.ClientSession
    args: argparse.Namespace
    work: Workload
    model: str
    watch: Watch

    async def ask(self, rng: Random, mode: str, load: float) -> Served:
        """Send the next request, and read its answer."""
        return await ask(self.client, self.work.body(rng, self.model, mode), mode, load)


async def run(args: argparse.Namespace, work: Workload, watch: Watch) -> tuple[list[Served], list[str], list[str]]:
    """Run every mode at every load, one after another. Return all requests, the rows of the table, and those of the
    rates that hold the limit of the first token."""
    limits = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=args.timeout)
    served: list[Served] = []
    rows: list[str] = []
    sustained: list[str] = []
    async with aiohttp.ClientSession(args.url, connector=limits, timeout=timeout) as client:
        async with client.get("/v1/models", raise_for_status=True) as response:
            model = (await response.json())["data"][0]["id"]
        load = Load(client, args, work, model, watch)

        async def part(mode: str, number: float, is_open: bool) -> list[Served]:
            found = await (open_loop if is_open else closed_loop)(load, mode, number)
            found = [replace(each, interrupted=is_interrupted(each, watch)) for each in found]
            rows.append(row(mode, number, found, is_open, args.ramp))
            print(rows[-1], flush=True)
            served.extend(found)
            return found

        await warm_up(load)
        async with watch.running(client):
            capacity: dict[str, float] = {}
            for number in args.rate or args.clients:
                for mode in args.mode:
                    found = await part(mode, number, bool(args.rate))
                    capacity[mode] = max(capacity.get(mode, 0.0), rate_of(found, bool(args.rate), args.ramp))
            if args.first_token_limit is not None:
                held = {mode: await search_rate(part, mode, capacity[mode], args) for mode in args.mode}
                sustained = sustained_rows(held)
    return served, rows, sustained


async def search_rate(part: Part, mode: str, capacity: float, args: argparse.Namespace) -> tuple[float, float]:
    """Return the highest rate of arrivals at which 99% of the first tokens hold the limit, and these first tokens' ms:
    `capacity`, or what halving the rates below it finds; 0 and NaN if none holds it."""
    rate, p99 = 0.0, float("nan")
    high = capacity
    tried = capacity
    for _ in range(args.tries):
        found = await part(mode, round(tried, 2), True)
        last = first_token_ms(found, 0.0)[-1]
        if all(each.error is None for each in found) and last <= 1e3 * args.first_token_limit:
            rate, p99 = tried, last
            if tried == capacity:
                break
        else:
            high = tried
        tried = ((rate or SEARCHED * capacity) + high) / 2
    return rate, p99


def sustained_rows(held: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return a line for each mode's rate and p99, beside the rate of the first mode."""
    first, _ = next(iter(held.values()))
    return [
        f"| {mode} | {rate:.2f} | {p99:.0f} | {rate / (first or float('nan')):.2f} |"
        for mode, (rate, p99) in held.items()
    ]


async def warm_up(load: Load) -> None:
    """Let every mode answer requests that are not counted, so that passages are stored and graphs captured."""
    at_once = asyncio.Semaphore(max(load.args.clients))
    rng = Random(f"{load.args.seed}-warm-up")

    async def one(mode: str) -> Served:
        async with at_once:
            return await load.ask(rng, mode, 0)

    for mode in load.args.mode:
        for served in await asyncio.gather(*(one(mode) for _ in range(load.args.warm_up))):
            if served.error is not None:
                raise SystemExit(f"a request of the warm-up failed: {served.error}")


def is_interrupted(served: Served, watch: Watch) -> bool:
    """Return whether a request failed for nothing but the death of an engine that was killed."""
    return served.code == "engine_unavailable" and watch.was_down(served.sent, served.sent + served.total)


async def closed_loop(load: Load, mode: str, clients: float) -> list[Served]:
    """Keep `clients` requests running until the minutes or the requests are up."""
    begun = time.monotonic()
    end = begun + load.args.ramp + 60 * load.args.minutes
    left = load.args.requests

    async def one(number: int) -> list[Served]:
        nonlocal left
        rng, own = Random(f"{load.args.seed}-{number}"), []
        await asyncio.sleep(load.args.ramp * number / clients)
        while time.monotonic() < end and (left is None or left > 0):
            left = None if left is None else left - 1
            own.append(await load.ask(rng, mode, clients))
            if own[-1].error is not None:
                await load.watch.until_healthy(load.client)
        return own

    parts = await asyncio.gather(*(one(number) for number in range(int(clients))))
    return [served for part in parts for served in part]


async def open_loop(load: Load, mode: str, rate: float) -> list[Served]:
    """Send requests at random times, `rate` a second on average."""
    rng, begun = Random(load.args.seed), time.monotonic()
    tasks: list[asyncio.Task[Served]] = []
    due = 0.0  # seconds since the beginning; what sending takes does not lower the rate
    while due < 60 * load.args.minutes and (load.args.requests is None or len(tasks) < load.args.requests):
        await asyncio.sleep(begun + due - time.monotonic())
        await load.watch.until_healthy(load.client)
        tasks.append(asyncio.create_task(load.ask(rng, mode, rate)))
        due += rng.expovariate(rate)
    return list(await asyncio.gather(*tasks))


def rate_of(served: Sequence[Served], is_open: bool, ramp: float) -> float:
    """Return the requests a second: those that arrived, if arrivals are open; else those that ended after the ramp and
    before the last one was sent."""
    return float(np.mean(rates(served, is_open, ramp)))


def rates(served: Sequence[Served], is_open: bool, ramp: float, parts: int = 4) -> list[float]:
    """Return the requests a second in equal parts of the time. They are those of the whole run, its end included, if it
    was too short to have any in between."""
    done = [each for each in served if each.error is None]
    if not done:
        return [0.0] * parts
    begun, stop = min(each.sent for each in done), max(each.sent for each in done)
    times = [each.sent if is_open else each.sent + each.total for each in done]
    start = begun if is_open else begun + ramp
    if stop <= start or not any(start <= each <= stop for each in times):
        return [len(done) / (max(each.sent + each.total for each in done) - begun)] * parts
    counts, _ = np.histogram(times, parts, (start, stop))
    return [parts * count / (stop - start) for count in counts]


def first_token_ms(served: Sequence[Served], ramp: float) -> list[float]:
    """Return the percentiles of the time to the first token, of requests that were sent after the ramp."""
    begun = min((each.sent for each in served), default=0.0) + ramp
    times = [
        1e3 * each.first for each in served if each.error is None and each.first is not None and each.sent >= begun
    ]
    return [float(np.percentile(times, p)) if times else float("nan") for p in PERCENTILES]


def row(mode: str, load: float, served: Sequence[Served], is_open: bool, ramp: float) -> str:
    """Return one line of the table."""
    done = [each for each in served if each.error is None]
    times = " | ".join(f"{each:.0f}" for each in first_token_ms(served, 0.0 if is_open else ramp))
    tokens = Counter[str]()
    for each in done:
        tokens.update({name: count for name, count in each.prompt.items() if isinstance(count, int)})
    reused = tokens["reused_tokens"] / max(1, tokens["tokens"])
    rate = rate_of(served, is_open, ramp)
    answers = rate * sum(each.tokens for each in done) / max(1, len(done))
    interrupted = sum(each.interrupted for each in served)
    counts = f"{len(done)} | {interrupted} | {len(served) - len(done) - interrupted}"
    quarters = " ".join(f"{each:.2f}" for each in rates(served, is_open, ramp))
    return (
        f"| {mode} | {load:g}{'/s' if is_open else ''} | {counts} | {rate:.2f} | {quarters} | {answers:.1f} | {times} "
        f"| {100 * reused:.1f} |"
    )


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
    add("--ramp", type=float, default=0.0, help="seconds over which clients begin, which are not counted")
    add("--warm-up", type=int, default=0, help="requests of each mode before the first row, which are not counted")
    add("--selector", help="the rule of ratios (default: the server's)")
    add("--first-token-limit", type=float, metavar="SECONDS", help="search the rates that hold it for 99%% of requests")
    add("--tries", type=int, default=4, help="rates that are tried for each mode (default: %(default)s)")
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
    served, rows, sustained = asyncio.run(run(args, make_workload(args), watch))
    errors = Counter(each.error for each in served if each.error is not None and not each.interrupted)
    for error, count in errors.most_common(5):
        print(f"{count} x {error}", file=sys.stderr)
    problems = watch.problems(args.growth_mib)
    if sustained:
        print("", SUSTAINED_HEAD, *sustained, sep="\n")
    print(f"\n{watch.report()}")
    for problem in problems:
        print(problem, file=sys.stderr)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    if args.summary is not None:
        found = {
            "settings": settings,
            "head": HEAD,
            "rows": rows,
            "sustained": sustained,
            "problems": problems,
            "errors": errors,
        }
        args.summary.write_text(json.dumps(found | {"watched": watch.as_json()}, indent=1) + "\n")
    if args.output is not None:
        args.output.write_text(json.dumps({"settings": settings, "requests": [asdict(each) for each in served]}) + "\n")
    return 1 if errors or problems else 0


if __name__ == "__main__":
    sys.exit(main())
