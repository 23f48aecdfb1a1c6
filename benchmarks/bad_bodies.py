"""Measure how long clients wait while another one sends hostile bodies, or floods the server.

    vllm-blend serve inputs/demo-model-reuse --device cpu
    python -m benchmarks.bad_bodies --output gaps.json

One client reads streams, one asks for a single token again and again, and one asks for `/version`, which the event loop
answers alone; all three from another address than the hostile client's. For each case of `bad_bodies_cases.py`, in turn
and `--repeats` times, another process sends what the case says. From then until it is answered, and for `--after`
seconds more, the longest times of the three clients are kept, in milliseconds: between two tokens of a stream, for the
token, and for the version. Beside them stand those of the second before, when nothing was sent: other work on the
machine shows there. The server's limits are those of docs/server.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import aiohttp

from benchmarks.bad_bodies_cases import COMPLETIONS, Attack, cases, statuses_of
from benchmarks.serving_requests import events

WAITS = ("gap", "token", "loop")
READY_SECONDS = 0.2  # from when a case is ready until it is sent: making it takes the machine, too


class Observers:
    """Three clients, and for each the times (begun, ended) of what it waited for."""

    def __init__(self, client: aiohttp.ClientSession, stream_tokens: int, vocabulary: int) -> None:
        self._client, self._stream_tokens, self._vocabulary = client, stream_tokens, vocabulary
        self._rng = Random(0)
        self.waits: dict[str, list[tuple[float, float]]] = {name: [] for name in WAITS}
        self._open: dict[str, float] = {}  # what is waited for now, since when

    async def run(self) -> None:
        await asyncio.gather(self._streams(), self._tokens(), self._versions())

    def longest(self, name: str, begun: float, ended: float) -> float:
        """Return the longest wait of a client that overlaps a time, in milliseconds."""
        known = [*self.waits[name], (self._open.get(name, ended), ended)]
        found = [stop - start for start, stop in known if stop >= begun and start <= ended]
        return round(1000 * max(found, default=0.0), 2)

    def forget(self) -> None:
        for waits in self.waits.values():
            waits.clear()

    def _note(self, name: str, begun: float) -> None:
        self.waits[name].append((begun, time.monotonic()))
        self._open.pop(name, None)

    async def _streams(self) -> None:
        """Read one stream after the other. What comes before the second token of one is not counted."""
        asked = {"prompt": "Question: who?\nAnswer:", "max_tokens": self._stream_tokens, "ignore_eos": True}
        while True:
            arrivals: list[float] = []
            async with self._client.post(COMPLETIONS, json=asked | {"stream": True}) as response:
                async for event in events(response):
                    if "error" in event:
                        raise RuntimeError(f"the stream failed: {event['error']}")
                    arrivals.append(time.monotonic())
                    self._open["gap"] = arrivals[-1]
                    self.waits["gap"] += pairwise(arrivals[-2:])
            self._open.pop("gap", None)
            if len(arrivals) < self._stream_tokens // 2:
                raise RuntimeError(f"the stream ended after {len(arrivals)} events instead of {self._stream_tokens}")

    async def _tokens(self) -> None:
        while True:
            ids = [self._rng.randrange(10, self._vocabulary) for _ in range(8)]
            self._open["token"] = begun = time.monotonic()
            async with self._client.post(COMPLETIONS, json={"prompt": ids, "max_tokens": 1}) as response:
                await response.read()
            if response.status not in (200, 429):
                raise RuntimeError(f"a request for one token was answered with {response.status}")
            self._note("token", begun)
            await asyncio.sleep(0.02)

    async def _versions(self) -> None:
        while True:
            self._open["loop"] = begun = time.monotonic()
            async with self._client.get("/version") as response:
                await response.read()
            self._note("loop", begun)
            await asyncio.sleep(0.01)


def send(url: str, name: str, settings: tuple[int, int, int, int], ready: float) -> tuple[list[int], float, float]:
    """Make a case, send it, and return the statuses and the times between which it was sent and answered. For a process
    of its own."""
    context, step_tokens, vocabulary, seed = settings
    attack: Attack = cases(context, step_tokens, vocabulary, Random(seed))[name]()
    time.sleep(ready)

    async def timed() -> tuple[list[int], float, float]:
        begun = time.monotonic()
        found = await attack(url)
        return statuses_of(found), begun, time.monotonic()

    return asyncio.run(timed())


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    names = [
        name
        for name in cases(args.context, args.step_tokens, args.vocabulary, Random())
        if any(each in name for each in args.only.split("|"))
    ]
    columns = ["seconds", *WAITS, *(f"{each}_before" for each in WAITS)]
    rows: dict[str, dict[str, Any]] = {n: {"body": n, "status": [], **{c: [] for c in columns}} for n in names}
    timeout = aiohttp.ClientTimeout(total=300)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
        connector = aiohttp.TCPConnector(local_addr=(args.address, 0))
        async with aiohttp.ClientSession(args.url, timeout=timeout, connector=connector) as client:
            observers = Observers(client, args.tokens, args.vocabulary)
            observing = asyncio.create_task(observers.run())
            for repeat in range(args.repeats):
                for number, name in enumerate(names):
                    observers.forget()
                    settings = (args.context, args.step_tokens, args.vocabulary, args.seed + 1000 * repeat + number)
                    work = asyncio.get_running_loop().run_in_executor(
                        other, send, args.url, name, settings, args.before + READY_SECONDS
                    )
                    await asyncio.wait((work, observing), return_when=asyncio.FIRST_COMPLETED)
                    if observing.done():
                        observing.result()
                    statuses, begun, ended = await work
                    await asyncio.sleep(args.after)
                    row = rows[name]
                    row["status"] = sorted({*row["status"], *statuses})
                    row["seconds"].append(round(ended - begun, 3))
                    for each in WAITS:
                        row[each].append(observers.longest(each, begun, ended + args.after))
                        row[f"{each}_before"].append(observers.longest(each, begun - args.before, begun - 0.001))
                    if args.verbose:
                        print({key: value if key in ("body", "status") else value[-1] for key, value in row.items()})
            observing.cancel()
            await asyncio.gather(observing, return_exceptions=True)
    return list(rows.values())


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| meanwhile | answered | a stream's token | a request for one token | `/version` |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        status = ", ".join("closed" if each == 0 else str(each) for each in row["status"]) or "-"
        cells = [f"{median(row[w]):.0f}, {max(row[w]):.0f} ({median(row[f'{w}_before']):.0f})" for w in WAITS]
        lines.append(f"| {row['body']} | {status} | {' | '.join(cells)} |")
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
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--before", type=float, default=1.0, help="seconds without any case that are measured")
    parser.add_argument("--after", type=float, default=0.3, help="seconds that are measured when a case is over")
    parser.add_argument("--address", default="127.0.0.2", help="of this machine: the three clients'")
    parser.add_argument("--only", default="", help="cases whose name has this text, or one of several: a|b")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print every measurement")
    parser.add_argument("--output", type=Path, help="a JSON file for all times")
    args = parser.parse_args(argv)
    rows = asyncio.run(measure(args))
    print(table(rows))
    if args.output:
        given = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        args.output.write_text(json.dumps({"settings": given, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
