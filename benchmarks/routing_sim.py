"""Simulate many replicas behind a router: how often passages are in the chosen replica's memory, and first-token times.

    python -m benchmarks.routing_sim --output results/routing_sim

Requests arrive at random and name 1 to 2 * `--per-prompt` - 1 passages each. They are drawn by Zipf popularity, either
one by one (workload `independent`) or from one topic, which Zipf popularity chooses (`topics`: what a retriever finds
belongs together). A replica keeps the passages that it has used last in its memory, and prefills one request after
another: what is in its memory costs the share of recomputing, what the store that all replicas share has costs the
loading, too, and what no replica has encoded yet is computed. Answers, which take an exponential time, are generated
side by side, and slow nothing down. `--load` is the share of the time in which replicas would prefill if every passage
came from the store. The costs are assumptions, not measurements: they are flags, and those of a large model on a GPU
with a store on a fast network by default.

The policies: `affinity` is what the Ray router does (vllm_blend/ray/routing.py, the same code), with the requests that
wait for their first token as loads; `affinity, all` counts those that are being answered as well, and `rendezvous` goes
by scores alone, without a memory of what was sent where. `two choices` takes
the replica with fewer requests of two random ones, as Ray Serve does by itself, `least loaded` the one where the fewest
wait, `round robin` the next. All see the same requests, and the true loads. The same seed gives the same numbers.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.run import describe
from vllm_blend.ray.routing import DEFAULT_EPSILON, Homes, ScoreTable

WORKLOADS = ("independent", "topics")


@dataclass(frozen=True)
class Settings:
    """What is simulated. Times are seconds, memory is counted in passages."""

    corpus: int = 8_000
    topic_passages: int = 32
    zipf: float = 1.0
    per_prompt: int = 8  # on average
    passage_tokens: int = 512
    question_tokens: int = 64
    memory: int = 200
    load: float = 0.7
    compute: float = 50e-6  # of a token
    recomputed: float = 0.15  # the share of a reused passage that is computed
    loading: float = 25e-6  # of a token, from the store that all share
    answer: float = 2.0  # on average
    requests_per_replica: int = 20
    min_requests: int = 8_000
    seed: int = 0

    @property
    def rate(self) -> float:
        """Return the requests a second that arrive for each replica."""
        return self.load / self.prefill(0, self.per_prompt, 0)

    def prefill(self, in_memory: int, in_store: int, new: int) -> float:
        """Return the seconds that a prefill takes, by where its passages are."""
        reused = self.recomputed * self.compute
        tokens = in_memory * reused + in_store * (reused + self.loading) + new * self.compute
        return self.passage_tokens * tokens + self.question_tokens * self.compute


@dataclass(frozen=True)
class Loads:
    """For each replica the requests that wait for their first token, and all that have no end yet."""

    waiting: np.ndarray
    all: np.ndarray

    @classmethod
    def none(cls, num_replicas: int) -> Loads:
        return cls(np.zeros(num_replicas, dtype=np.int64), np.zeros(num_replicas, dtype=np.int64))


class Policy(Protocol):
    """Chooses the replica of a request from its passages and the replicas' loads."""

    def __call__(self, passages: Sequence[int], loads: Loads) -> int: ...


class Affinity:
    def __init__(
        self, num_replicas: int, tokens: int, epsilon: float = DEFAULT_EPSILON, counts_all: bool = False
    ) -> None:
        self._homes = Homes()
        self._names = self._homes.table(_names(num_replicas)).replicas
        self._tokens, self._epsilon, self._counts_all = tokens, epsilon, counts_all

    def __call__(self, passages: Sequence[int], loads: Loads) -> int:
        counted = loads.all if self._counts_all else loads.waiting
        chunks = {f"passage-{each}": self._tokens for each in passages}
        chosen = self._homes.first(chunks, counted, self._epsilon)
        self._homes.note(chunks, self._names[chosen])
        return chosen


def _names(num_replicas: int) -> list[str]:
    return [f"replica-{number:05d}" for number in range(num_replicas)]


class Rendezvous:
    """Choose as `Affinity` does, but by the scores alone, without a memory of what was sent where."""

    def __init__(self, num_replicas: int, tokens: int) -> None:
        self._table, self._tokens = ScoreTable(_names(num_replicas)), tokens

    def __call__(self, passages: Sequence[int], loads: Loads) -> int:
        return self._table.first({f"passage-{each}": self._tokens for each in passages}, loads.waiting)


class RoundRobin:
    def __init__(self) -> None:
        self._turns = count()

    def __call__(self, passages: Sequence[int], loads: Loads) -> int:
        return next(self._turns) % len(loads.all)


class LeastLoaded:
    """Equally loaded replicas are chosen at random."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng([seed, 1])

    def __call__(self, passages: Sequence[int], loads: Loads) -> int:
        return int(self._rng.choice(np.flatnonzero(loads.waiting == loads.waiting.min())))


class TwoChoices:
    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng([seed, 2])

    def __call__(self, passages: Sequence[int], loads: Loads) -> int:
        one, other = self._rng.integers(len(loads.all), size=2)
        return int(one if loads.all[one] <= loads.all[other] else other)


def policies(settings: Settings, num_replicas: int) -> dict[str, Policy]:
    """Return the policies by name, none of which has seen a request."""
    return {
        "affinity": Affinity(num_replicas, settings.passage_tokens),
        "affinity, all": Affinity(num_replicas, settings.passage_tokens, counts_all=True),
        "rendezvous": Rendezvous(num_replicas, settings.passage_tokens),
        "two choices": TwoChoices(settings.seed),
        "least loaded": LeastLoaded(settings.seed),
        "round robin": RoundRobin(),
    }


def requests(settings: Settings, workload: str, number: int) -> Iterator[list[int]]:
    """Yield the passages of so many requests: numbers below `corpus`, each at most once in a request."""
    rng = np.random.default_rng([settings.seed, WORKLOADS.index(workload)])
    size = settings.topic_passages if workload == "topics" else 1
    weights = np.arange(1, settings.corpus // size + 1, dtype=float) ** -settings.zipf
    edges = np.cumsum(weights / weights.sum())
    for _ in range(number):
        wanted = int(rng.integers(1, 2 * settings.per_prompt))
        if workload == "topics":
            topic = int(np.searchsorted(edges, rng.random()))
            yield [topic * size + int(each) for each in rng.choice(size, wanted, replace=False)]
        else:
            drawn: dict[int, None] = {}
            while len(drawn) < wanted:
                drawn |= dict.fromkeys(np.searchsorted(edges, rng.random(wanted)).tolist())
            yield list(drawn)[:wanted]


@dataclass
class Replica:
    """The passages in a replica's memory, and when it has prefilled all that it was sent."""

    memory: OrderedDict[int, None]
    free_at: float = 0.0

    def use(self, passages: Sequence[int], capacity: int) -> int:
        """Return how many of the passages are in memory; all of them are afterwards, and the oldest are not."""
        hits = sum(each in self.memory for each in passages)
        for each in passages:
            self.memory[each] = None
            self.memory.move_to_end(each)
        while len(self.memory) > capacity:
            self.memory.popitem(last=False)
        return hits


@dataclass(frozen=True)
class Row:
    """What one policy came to. Times to the first token are seconds; `busiest` is the largest share of all requests
    that one replica got, in units of an equal share."""

    workload: str
    replicas: int
    policy: str
    hit_rate: float
    store_rate: float
    p50: float
    p99: float
    utilization: float
    busiest: float


def simulate(settings: Settings, workload: str, num_replicas: int, name: str, policy: Policy) -> Row:
    """Run the requests of a workload past a policy. Those of the first half only fill the memories."""
    total = max(settings.min_requests, settings.requests_per_replica * num_replicas)
    rng = np.random.default_rng([settings.seed, 3])
    arrivals = rng.exponential(1 / (settings.rate * num_replicas), total).cumsum()
    answers = rng.exponential(settings.answer, total)
    replicas = [Replica(OrderedDict()) for _ in range(num_replicas)]
    loads, begins, ends = Loads.none(num_replicas), list[tuple[float, int]](), list[tuple[float, int]]()
    store: set[int] = set()
    counted = total // 2
    times = np.empty(total - counted)
    work, hits, found, named, sent = 0.0, 0, 0, 0, np.zeros(num_replicas, dtype=np.int64)
    for number, passages in enumerate(requests(settings, workload, total)):
        now = float(arrivals[number])
        for events, load in ((begins, loads.waiting), (ends, loads.all)):
            while events and events[0][0] <= now:
                load[heapq.heappop(events)[1]] -= 1
        chosen = policy(passages, loads)
        replica = replicas[chosen]
        in_memory = replica.use(passages, settings.memory)
        # What is in a memory is in the store, too: each passage was encoded once, and written through.
        in_store = sum(each in store for each in passages) - in_memory
        store.update(passages)
        seconds = settings.prefill(in_memory, in_store, len(passages) - in_memory - in_store)
        replica.free_at = max(now, replica.free_at) + seconds
        loads.waiting[chosen] += 1
        loads.all[chosen] += 1
        heapq.heappush(begins, (replica.free_at, chosen))
        heapq.heappush(ends, (replica.free_at + float(answers[number]), chosen))
        if number >= counted:
            times[number - counted] = replica.free_at - now
            work, hits, found = work + seconds, hits + in_memory, found + in_store
            named, sent[chosen] = named + len(passages), sent[chosen] + 1
    duration = float(arrivals[-1] - arrivals[counted]) * num_replicas
    return Row(
        workload,
        num_replicas,
        name,
        round(hits / named, 4),
        round(found / named, 4),
        round(float(np.percentile(times, 50)), 4),
        round(float(np.percentile(times, 99)), 4),
        round(work / duration, 4),
        round(float(sent.max() * num_replicas / sent.sum()), 2),
    )


HEAD = (
    "| workload | replicas | policy | in memory | in the store | first token p50, ms | p99, ms | prefilling | busiest "
    "|\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def line(row: Row) -> str:
    return (
        f"| {row.workload} | {row.replicas} | {row.policy} | {row.hit_rate:.1%} | {row.store_rate:.1%} | "
        f"{1e3 * row.p50:.0f} | {1e3 * row.p99:.0f} | {row.utilization:.0%} | {row.busiest:.2f} |"
    )


def render(report: dict[str, Any], command: str) -> str:
    """Return a report as Markdown."""
    settings = ", ".join(f"{name} {value:g}" for name, value in report["settings"].items())
    about = report["about"]
    return "\n".join(
        [
            "# Routing by passages, simulated",
            "",
            f"`{command}`, {about['date']}, commit {about['commit'][:12]}. A simulation: its costs are assumptions.",
            "",
            f"Settings: {settings}.",
            "",
            "In memory: share of the requests' passages that the chosen replica had in its memory; in the store: share",
            "that it loaded. Prefilling: share of the time. Busiest: requests of the busiest replica, in units of an",
            "equal share. Percentages and times are those of the second half of the requests.",
            "",
            HEAD,
            *(line(Row(**each)) for each in report["rows"]),
            "",
            f"## The load's bound, with {report['epsilon_replicas']} replicas",
            "",
            HEAD,
            *(line(Row(**each)) for each in report["epsilons"]),
            "",
        ]
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", nargs="+", type=int, default=[8, 64, 1000])
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--epsilon", nargs="*", type=float, default=[0.25, 1.0, 4.0], help="bounds to compare")
    parser.add_argument("--epsilon-replicas", type=int, default=32, help="with so many replicas (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("results/routing_sim"), help="files without their suffix")
    for name, value in asdict(Settings()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(value), default=value, help="(default: %(default)s)")
    return parser


def check(settings: Settings, replicas: Sequence[int]) -> None:
    """Raise ValueError for what cannot be simulated."""
    whole = ("corpus", "topic_passages", "per_prompt", "passage_tokens", "memory", "requests_per_replica")
    for name in whole:
        if getattr(settings, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(settings, name)} must be at least 1")
    if not 2 * settings.per_prompt - 1 <= settings.topic_passages <= settings.corpus:
        raise ValueError(
            f"--topic-passages {settings.topic_passages} must be at least twice --per-prompt {settings.per_prompt} "
            f"less one, and at most --corpus {settings.corpus}: a request names passages of one topic"
        )
    if not 0 < settings.load < 1:
        raise ValueError(f"--load {settings.load:g} must be between 0 and 1, or queues would grow without end")
    if wrong := [number for number in replicas if number < 1]:
        raise ValueError(f"--replicas {wrong[0]} must be at least 1")


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    settings = Settings(**{name: getattr(args, name) for name in asdict(Settings())})
    try:
        check(settings, [*args.replicas, args.epsilon_replicas])
    except ValueError as error:
        parser.error(str(error))
    print(HEAD)
    rows, epsilons = [], []
    for workload in args.workload:
        for number in args.replicas:
            for name, policy in policies(settings, number).items():
                rows.append(simulate(settings, workload, number, name, policy))
                print(line(rows[-1]), flush=True)
    for workload in args.workload:
        for epsilon in args.epsilon:
            policy = Affinity(args.epsilon_replicas, settings.passage_tokens, epsilon)
            name = f"affinity, epsilon {epsilon:g}"
            epsilons.append(simulate(settings, workload, args.epsilon_replicas, name, policy))
            print(line(epsilons[-1]), flush=True)
    report = {
        "about": describe("cpu"),
        "settings": asdict(settings),
        "rows": [asdict(row) for row in rows],
        "epsilon_replicas": args.epsilon_replicas,
        "epsilons": [asdict(row) for row in epsilons],
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    command = " ".join(["python -m benchmarks.routing_sim", *(argv or [])])
    args.output.with_suffix(".md").write_text(render(report, command), encoding="utf-8")
    return 0


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
