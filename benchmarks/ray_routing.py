"""Measure routing by passages on Ray Serve against round robin, and kill a replica in mid-run (needs vllm-blend[ray]).

    python -m benchmarks.ray_routing --output results/ray_routing

Each routing gets two replicas with a new, empty store on disk beneath both, and the same requests: `--per-prompt`
passages of one topic that Zipf popularity chooses (workload `topics`), or each by its own popularity (`independent`).
A replica's memory has room for a share of all passages. Where the passages' tokens were found is what the answers'
usage says. The first third of each workload's requests fills memories and store, and is not counted.

Then a replica of the affine application is killed (SIGKILL to its process) while streams run, after a third of the
requests; they go on until the replica that Ray Serve starts instead has answered some. What became of every request is
counted: answered, ended by an error that says so, or anything else, which makes the exit status 1. In the end an engine
of its own opens the store and looks for every passage that an answer had used before the kill.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import numpy as np

from benchmarks.ray_requests import (
    OPTIONS,
    READ_SECONDS,
    Answer,
    Workload,
    ask,
    check_drawn,
    check_ray,
    command_of,
    make_workload,
    opening,
    serving,
    settings_of,
    write_report,
)
from benchmarks.run import describe, installed
from vllm_blend import LLM, SamplingParams

PROCESS = "ray::ServeReplica:default:vllm-blend-engine"
KV_BYTES_PER_TOKEN = 12288  # of the demo model in float32
NEW_ANSWERS = 20  # by the new replica, when a run with a kill may end
KILL_TIMES = 6  # times --requests, when it ends in any case
CLEAN = ("engine_unavailable", "shutting_down")  # codes of errors that say what happened


async def run_requests(
    args: argparse.Namespace,
    workload: Workload,
    drawn: Sequence[tuple[int, ...]],
    seed: str,
    on_third: Callable[[], None] | None = None,
    is_enough: Callable[[list[Answer]], bool] = lambda _: False,
) -> list[Answer]:
    """Send requests, `--clients` at a time, until there are enough answers; return these in the order in which they
    ended. `on_third` is called when a third of `--requests` have been sent."""
    rng, answers, left = Random(seed), list[Answer](), iter(enumerate(drawn))
    timeout = aiohttp.ClientTimeout(total=None, sock_read=READ_SECONDS)

    async with aiohttp.ClientSession(f"http://127.0.0.1:{args.port}", timeout=timeout) as client:

        async def one() -> None:
            for number, passages in left:
                if is_enough(answers):
                    return
                if number == args.requests // 3 and on_third is not None:
                    on_third()
                answers.append(await ask(client, args, workload.prompt(passages, rng), passages))

        await asyncio.gather(*(one() for _ in range(args.clients)))
    return answers


def start(args: argparse.Namespace, routing: str, store: str, corpus_bytes: int) -> None:
    """Start an application, in the place of the one that ran before."""
    from ray import serve

    from vllm_blend.ray import build_app

    options = OPTIONS | {
        "model": args.model,
        "routing": routing,
        "blend_chunk_cache_gib": args.memory_share * corpus_bytes / 2**30,
        "chunk_store_path": store,
        "shutdown_timeout": 10.0,
    }
    serve.run(build_app(options, replicas=2))


def summary(workload: str, routing: str, answers: Sequence[Answer], args: argparse.Namespace) -> dict[str, Any]:
    """Return what the counted requests of a run came to."""
    counted = answers[len(answers) // 3 :]
    tiers: Counter[str] = Counter()
    for answer in counted:
        tiers.update(answer.tiers)
    named = sum(len(answer.passages) for answer in counted) * args.passage_tokens
    times = [1e3 * answer.first for answer in counted if answer.first is not None]
    shares = Counter(answer.replica for answer in counted)
    return {
        "workload": workload,
        "routing": routing,
        "requests": len(counted),
        "errors": [answer.error for answer in answers if answer.error is not None],
        "tiers": {name: round(count / named, 4) for name, count in sorted(tiers.items()) if count},
        "first_token_ms": {
            "p50": round(float(np.percentile(times, 50)), 1),
            "p99": round(float(np.percentile(times, 99)), 1),
        },
        "busiest": round(max(shares.values()) / len(counted), 3),
        "replicas": len(shares),
    }


def kill_replica() -> int:
    """Kill a process of a replica at once, and return its id."""
    found = [
        int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if _cmdline(path).startswith(PROCESS)
    ]
    if len(found) != 2:
        raise SystemExit(f"{len(found)} processes are called {PROCESS}, and there should be 2")
    os.kill(found[0], signal.SIGKILL)
    return found[0]


def _cmdline(path: Path) -> str:
    try:
        return path.read_text().replace("\0", " ")
    except OSError:
        return ""


def survive_kill(args: argparse.Namespace, workload: Workload) -> tuple[dict[str, Any], list[Answer]]:
    """Kill a replica while requests run; return what became of them, and the answers from before."""
    killed: list[float] = []

    def kill() -> None:
        kill_replica()
        killed.append(time.monotonic())

    def of_new_replica(answers: list[Answer]) -> list[Answer]:
        done = [answer for answer in answers if answer.error is None]
        old = {answer.replica for answer in done if not killed or answer.sent < killed[0]}
        return [answer for answer in done if answer.replica not in old]

    def is_enough(answers: list[Answer]) -> bool:
        return len(of_new_replica(answers)) >= NEW_ANSWERS

    drawn = workload.drawn("topics", KILL_TIMES * args.requests)
    answers = asyncio.run(run_requests(args, workload, drawn, "kill", kill, is_enough))
    before = [answer for answer in answers if answer.error is None and answer.sent < killed[0]]
    came = [answer.sent for answer in of_new_replica(answers)]
    outcome: Counter[str] = Counter()
    for answer in answers:
        kind = "answered" if answer.error is None else "clean error" if answer.code in CLEAN else "other error"
        outcome[kind] += 1
    return {
        "outcome": dict(outcome),
        "errors": sorted({answer.error for answer in answers if answer.error is not None}),
        "seconds_to_new_replica": round(min(came) - killed[0], 1) if came else None,
        "answered_by_new_replica": len(came),
        "seconds_after_kill": round(max(answer.sent for answer in answers) - killed[0], 1),
    }, before


def look_into_store(args: argparse.Namespace, workload: Workload, store: str, passages: set[int]) -> dict[str, int]:
    """Return how many of these passages an engine that has just started finds in the store."""
    llm = LLM(args.model, enable_blending=True, enable_prefix_caching=False, chunk_store_path=store, max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    found = 0
    for number in sorted(passages):
        prompt: Any = workload.prompt([number], Random(0))
        [output] = llm.generate([prompt], params, use_tqdm=False)
        encoded = 0 if output.blend is None else output.blend.num_encoded_tokens
        found += encoded == 0
    return {"passages": len(passages), "found": found}


HEAD = (
    "| workload | routing | passages' tokens in memory | on the shared disk | first token p50, ms | p99, ms | "
    "requests of the busier replica |\n|---|---|---|---|---|---|---|"
)


def line(row: dict[str, Any]) -> str:
    tiers, times = row["tiers"], row["first_token_ms"]
    in_memory = tiers.get("device", 0) + tiers.get("host", 0)
    return (
        f"| {row['workload']} | {row['routing']} | {in_memory:.1%} | {tiers.get('disk', 0):.1%} | "
        f"{times['p50']:.0f} | {times['p99']:.0f} | {row['busiest']:.0%} |"
    )


def render(report: dict[str, Any]) -> str:
    kill, store = report["kill"], report["store"]
    return "\n".join(
        [
            *opening("Two replicas on Ray Serve", report, str(report["about"]["load"])),
            HEAD,
            *(line(row) for row in report["rows"]),
            "",
            "## A replica is killed",
            "",
            f"Of {sum(kill['outcome'].values())} streams: "
            + ", ".join(f"{count} {kind}" for kind, count in sorted(kill["outcome"].items()))
            + f". The first request to a new replica was sent {kill['seconds_to_new_replica']} s after the kill; it "
            f"answered {kill['answered_by_new_replica']} of those in the {kill['seconds_after_kill']} s after it.",
            "",
            *(f"- `{error}`" for error in kill["errors"]),
            "",
            f"Of {store['passages']} passages that had been used in answers before the kill, a new engine found "
            f"{store['found']} in the store.",
            "",
        ]
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="inputs/demo-model-reuse")
    add("--port", type=int, default=8123, help="of Ray Serve (default: %(default)s)")
    add("--requests", type=int, default=300, help="of each workload (default: %(default)s)")
    add("--clients", type=int, default=4, help="requests running at a time (default: %(default)s)")
    add("--passages", type=int, default=256)
    add("--passage-tokens", type=int, default=64)
    add("--topic", type=int, default=16, help="passages of a topic (default: %(default)s)")
    add("--per-prompt", type=int, default=4, help="passages of a request (default: %(default)s)")
    add("--zipf", type=float, default=1.0)
    add("--memory-share", type=float, default=0.25, help="of all passages' KV, for each replica (default: %(default)s)")
    add("--max-tokens", type=int, default=16)
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("results/ray_routing"), help="files without their suffix")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    check_drawn(args)
    check_ray()
    workload = make_workload(args)
    corpus = args.passages * args.passage_tokens * KV_BYTES_PER_TOKEN
    about = describe("cpu") | {"ray": installed("ray")}
    rows: list[dict[str, Any]] = []
    with serving(args.port) as serve, tempfile.TemporaryDirectory() as folder:
        for routing in ("round_robin", "affinity"):
            start(args, routing, f"{folder}/{routing}", corpus)
            for kind in ("independent", "topics"):
                drawn = workload.drawn(kind, args.requests)
                answers = asyncio.run(run_requests(args, workload, drawn, kind))
                rows.append(summary(kind, routing, answers, args))
                print(rows[-1], flush=True)
        kill, before = survive_kill(args, workload)
        print(kill, flush=True)
        serve.shutdown()
        used = {number for answer in before for number in answer.passages}
        store = look_into_store(args, workload, f"{folder}/affinity", used)
        print(store, flush=True)
    report: dict[str, Any] = {
        "command": command_of("benchmarks.ray_routing", argv),
        "about": about,
        "settings": settings_of(args),
        "rows": sorted(rows, key=lambda row: row["workload"]),
        "kill": kill,
        "store": store,
        "answers_before_kill": [asdict(answer) for answer in before[-20:]],
    }
    write_report(args.output, report, render(report))
    print(HEAD, *(line(row) for row in report["rows"]), sep="\n")
    bad = kill["outcome"].get("other error", 0) + sum(len(row["errors"]) for row in rows)
    return int(bad > 0 or store["found"] < store["passages"] or kill["seconds_to_new_replica"] is None)


if __name__ == "__main__":
    sys.exit(main())
