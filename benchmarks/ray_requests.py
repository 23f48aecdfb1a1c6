"""What the benchmarks of Ray Serve share: an application and its options, requests, their answers, and reports."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import numpy as np

from benchmarks.serving_requests import error_code, events, make_texts

REPLICA = "x-vllm-blend-replica"
READ_SECONDS = 600.0  # without a byte of an answer, until a request counts as failed
OPTIONS: dict[str, Any] = {  # of every application
    "num_cpus": 0.5,
    "ingress_cpus": 0.5,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 512,
    "enable_prefix_caching": False,
    "chunk_store_gib": 4.0,
    "disable_access_log": True,
    "uvicorn_log_level": "warning",
}


@dataclass(frozen=True)
class Answer:
    """What became of one request. `passages` are its passages' numbers, times are seconds."""

    passages: tuple[int, ...]
    sent: float
    first: float | None = None
    replica: str = ""
    tokens: int = 0
    tiers: dict[str, int] = field(default_factory=dict)
    stored: int = 0  # tokens of passages that were computed and stored
    error: str | None = None
    code: str | None = None


@dataclass(frozen=True)
class Workload:
    """The requests of a run: the same for every routing."""

    args: argparse.Namespace
    prefix: list[int]
    passages: list[list[int]]
    questions: list[list[int]]

    def drawn(self, kind: str, number: int) -> list[tuple[int, ...]]:
        """Return the passages of so many requests."""
        rng = np.random.default_rng([self.args.seed, number])
        size = self.args.topic if kind == "topics" else 1
        count = len(self.passages) // size
        weights = np.arange(1, count + 1, dtype=float) ** -self.args.zipf
        weights /= weights.sum()
        found = []
        for _ in range(number):
            if kind == "topics":
                topic = int(rng.choice(count, p=weights))
                chosen = topic * size + rng.choice(size, self.args.per_prompt, replace=False)
            else:
                chosen = rng.choice(count, self.args.per_prompt, replace=False, p=weights)
            found.append(tuple(map(int, chosen)))
        return found

    def prompt(self, passages: Sequence[int], rng: Random) -> dict[str, Any]:
        chunks = [self.passages[number] for number in passages]
        return {"prefix": self.prefix, "chunks": chunks, "suffix": rng.choice(self.questions)}


def make_workload(args: argparse.Namespace) -> Workload:
    return Workload(args, *make_texts(args.model, args))


async def ask(
    client: aiohttp.ClientSession, args: argparse.Namespace, prompt: Any, passages: tuple[int, ...]
) -> Answer:
    """Send one request and read its stream to the end."""
    body = {
        "model": args.model,
        "prompt": prompt,
        "max_tokens": args.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun, sent = time.perf_counter(), time.monotonic()
    first: float | None = None
    usage: dict[str, Any] = {}
    replica = ""
    error = code = None
    try:
        async with client.post("/v1/completions", json=body) as response:
            replica = response.headers.get(REPLICA, "")
            if response.status != 200:
                text = await response.text()
                error, code = f"{response.status}: {text[:200]}", error_code(text)
            async for event in events(response):
                if "error" in event:
                    error, code = json.dumps(event["error"])[:200], event["error"]["code"]
                if event.get("choices"):
                    first = time.perf_counter() - begun if first is None else first
                usage = event.get("usage") or usage
    except (aiohttp.ClientError, TimeoutError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    tokens = usage.get("completion_tokens", 0)
    if error is None and tokens != args.max_tokens:
        error = f"the stream ended after {tokens} of {args.max_tokens} tokens"
    details = usage.get("prompt_tokens_details") or {}
    stored = details.get("stored_tokens", 0)
    return Answer(passages, sent, first, replica, tokens, details.get("tiers", {}), stored, error, code)


def check_drawn(args: argparse.Namespace) -> None:
    """Raise SystemExit for numbers of passages by which no request can be drawn."""
    if not 1 <= args.per_prompt <= args.topic <= args.passages:
        raise SystemExit(
            f"--per-prompt {args.per_prompt}, --topic {args.topic} and --passages {args.passages} must not fall"
        )


def check_ray() -> None:
    """Raise SystemExit where Ray is not installed."""
    try:
        import ray.serve  # noqa: F401
    except ModuleNotFoundError as error:
        raise SystemExit("this needs Ray: pip install 'vllm-blend[ray]'") from error


@contextmanager
def serving(port: int) -> Iterator[Any]:
    """Have Ray Serve listen at a port while the body of the statement runs; yield `ray.serve`."""
    import ray
    from ray import serve

    ray.init(num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"port": port})
        yield serve
    finally:
        serve.shutdown()
        ray.shutdown()


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that a report names."""
    return {name: value for name, value in vars(args).items() if name not in ("output", "port")}


def command_of(module: str, argv: Sequence[str] | None) -> str:
    return shlex.join(["python", "-m", module, *(sys.argv[1:] if argv is None else argv)])


def opening(title: str, report: dict[str, Any], load: str) -> list[str]:
    """Return the first lines of a page: its title, where and how it was measured, and the settings."""
    about = report["about"]
    settings = ", ".join(f"{name} {value}" for name, value in report["settings"].items())
    return [
        f"# {title}",
        "",
        f"`{report['command']}`, {about['date']}, commit {about['commit'][:12]}, {about['processor']}, "
        f"{about['cores']} cores, ray {about['ray']}, load {load}.",
        "",
        f"Settings: {settings}.",
        "",
    ]


def write_report(output: Path, report: dict[str, Any], page: str) -> None:
    """Write a report as JSON and its page as Markdown, to files whose name without suffix is `output`."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    output.with_suffix(".md").write_text(page, encoding="utf-8")
