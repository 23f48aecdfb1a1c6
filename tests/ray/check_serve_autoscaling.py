"""A second engine comes with the load on Ray Serve, and goes again without it; no stream notices.

`benchmarks.ray_autoscaling` has the load come again, too.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve
from ray.serve.config import AutoscalingConfig

from tests.checkout import ROOT
from tests.waiting import wait_until
from vllm_blend.ray import build_app, deployments

OPTIONS: dict[str, Any] = {
    "dtype": "float32",  # in its own processes, "auto" may be bfloat16
    "model": str(ROOT / "inputs" / "demo-model-reuse"),
    "served_model_name": ["demo"],
    "num_cpus": 0.25,
    "ingress_cpus": 0.25,
    "max_num_seqs": 2,  # the rest waits, and leaves the cores to the engine that starts
    "num_gpu_blocks_override": 512,
    "max_replicas": 2,
    "target_requests": 5.0,
    "upscale_delay": 0.5,
    "downscale_delay": 1.0,
    "shutdown_timeout": 120.0,  # no machine needs as long for a stream
}
PASSAGES = [
    f"Town number {number} lies at the river and has {number + 3} bridges and a market. " for number in range(12)
]
SEVERAL, FEW = 12, 4  # clients: above the target of one engine, and below it
STARTS = 300.0  # seconds for an engine to start while another one computes


@dataclass(frozen=True)
class Answer:
    """One stream: the number of its passage, its engine, how it ended, and when it ran."""

    passage: int
    engine: str
    reason: str | None
    stored_tokens: int
    disk_tokens: int
    began: float
    ended: float


@dataclass
class Clients:
    """Clients that ask for one stream after another."""

    url: str
    answers: list[Answer] = field(default_factory=list)

    def ask(self, passage: int, max_tokens: int, on_first: Callable[[], None] = lambda: None) -> None:
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": "How many bridges?"}],
            "documents": [PASSAGES[passage]],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.monotonic()
        events: list[dict[str, Any]] = []
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=300) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line.removeprefix("data: ")))
                    on_first()
        reasons = [each["choices"][0]["finish_reason"] for each in events if each.get("choices")]
        details = events[-1]["usage"]["prompt_tokens_details"]
        engine = response.headers["x-vllm-blend-replica"]
        tokens = (details["stored_tokens"], details["tiers"]["disk"])
        self.answers.append(Answer(passage, engine, reasons[-1], *tokens, began, time.monotonic()))

    def at_home(self, engine: str) -> list[int]:
        """Return the passages whose last stream an engine has written: the next one will go there, too."""
        last = {each.passage: each.engine for each in self.answers}
        return [passage for passage, home in last.items() if home == engine]

    @contextmanager
    def asking(self, passages: Sequence[int], max_tokens: int) -> Iterator[None]:
        """Keep a stream running for each of these passages; at the end wait for those that run. Raises what went wrong
        with one of them."""
        is_over = threading.Event()
        problems: list[BaseException] = []

        def ask_on(passage: int, has_begun: threading.Event) -> None:
            try:
                while not is_over.is_set():
                    self.ask(passage, max_tokens, has_begun.set)
            except BaseException as problem:
                problems.append(problem)
                has_begun.set()

        threads = []
        for passage in passages:
            has_begun = threading.Event()
            threads.append(threading.Thread(target=ask_on, args=(passage, has_begun)))
            threads[-1].start()
            assert has_begun.wait(120)  # else several would be counted at an engine before they are answered
        try:
            yield
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        for problem in problems:
            raise problem


@pytest.fixture
def clients(serve_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Clients]:
    """An application with one engine, and two at most, whose number Ray Serve thinks over every second."""
    often = functools.partial(AutoscalingConfig, metrics_interval_s=0.5, look_back_period_s=1.0)
    monkeypatch.setattr(deployments, "AutoscalingConfig", often)
    serve.run(build_app(OPTIONS | {"chunk_store_path": str(tmp_path)}, replicas=1))
    yield Clients(serve_url)
    serve.delete("default")


@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field")
def test_engines_come_and_go_with_the_load(clients: Clients) -> None:
    for passage in range(len(PASSAGES)):
        clients.ask(passage, 1)
    [first] = {each.engine for each in clients.answers}

    second = load_until_another_answers(clients, first)
    few = [passage for name in (first, second) for passage in clients.at_home(name)[: FEW // 2]]
    with clients.asking(few, max_tokens=200):
        wait_until(lambda: states() == {"RUNNING": 1, "STOPPING": 1}, every=0.1)
        ending = time.monotonic()
        wait_until(lambda: states() == {"RUNNING": 1}, every=0.1)
    running = {each.engine for each in clients.answers if each.began < ending < each.ended}
    assert running == {first, second}  # so also the one that Ray Serve was ending had a stream to finish

    assert {each.reason for each in clients.answers} == {"length"}


def load_until_another_answers(clients: Clients, old: str) -> str:
    """Keep several streams running until an engine that is new is the home of some passages, as others are of others;
    return its name. It has computed no passage, as the store has all."""

    def new() -> list[Answer]:
        return [each for each in clients.answers if each.engine != old]

    def has_its_share() -> bool:
        share = len(clients.at_home(new()[0].engine)) if new() else 0
        return FEW // 2 < share < SEVERAL - FEW // 2

    with clients.asking(range(SEVERAL), max_tokens=32):
        wait_until(has_its_share, every=0.1, seconds=STARTS)
    assert all(each.stored_tokens == 0 for each in new())
    assert any(each.disk_tokens > 0 for each in new())
    [name] = {each.engine for each in new()}
    return name


def states() -> dict[str, int]:
    """Return how many engines are in each state."""
    found = serve.status().applications["default"].deployments[deployments.ENGINE].replica_states
    return {str(state): number for state, number in found.items() if number}
