"""The simulation of routing: the same seed gives the same numbers, and each policy does what it says."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.routing_sim import (
    Affinity,
    LeastLoaded,
    Loads,
    Rendezvous,
    Replica,
    RoundRobin,
    Row,
    Settings,
    TwoChoices,
    main,
    policies,
    requests,
    simulate,
)

SMALL = Settings(corpus=640, memory=40, min_requests=2000, requests_per_replica=1)


def rows_of(settings: Settings, workload: str) -> dict[str, Row]:
    made = policies(settings, 8)
    return {name: simulate(settings, workload, 8, name, policy) for name, policy in made.items()}


def test_the_seed_decides_everything() -> None:
    first, again = rows_of(SMALL, "topics"), rows_of(SMALL, "topics")
    assert first == again
    assert rows_of(replace(SMALL, seed=1), "topics") != first


def test_affinity_finds_more_passages_where_they_belong_together() -> None:
    rows = rows_of(SMALL, "topics")
    assert rows["affinity"].hit_rate > 1.2 * max(
        row.hit_rate for name, row in rows.items() if not name.startswith("affinity")
    )
    assert rows["affinity"].utilization < rows["round robin"].utilization


def test_memory_for_everything_makes_all_policies_alike() -> None:
    """Then only what a replica sees for the first time is missing."""
    rows = rows_of(replace(SMALL, corpus=64, memory=64), "independent")
    assert min(row.hit_rate for row in rows.values()) > 0.97


def test_without_memory_nothing_is_found_in_it() -> None:
    row = simulate(replace(SMALL, memory=1), "topics", 8, "round robin", RoundRobin())
    assert row.hit_rate < 0.05 and row.store_rate > 0.9


@pytest.mark.parametrize("workload", ["independent", "topics"])
def test_requests_name_each_passage_once(workload: str) -> None:
    drawn = list(requests(SMALL, workload, 500))
    assert len(drawn) == 500
    assert all(len(set(each)) == len(each) and 1 <= len(each) <= 15 for each in drawn)
    assert all(0 <= passage < SMALL.corpus for each in drawn for passage in each)
    assert abs(np.mean([len(each) for each in drawn]) - SMALL.per_prompt) < 1
    if workload == "topics":
        assert all(len({passage // SMALL.topic_passages for passage in each}) == 1 for each in drawn)


def test_a_memory_drops_what_was_used_longest_ago() -> None:
    replica = Replica(OrderedDict())
    assert [replica.use(each, 3) for each in ([1, 2], [2, 3], [1], [4], [2], [3])] == [0, 1, 1, 0, 0, 0]


def loads_of(*waiting: int) -> Loads:
    """Return loads of replicas, the first of which answers 9 requests besides."""
    return Loads(np.array(waiting), np.array(waiting) + np.eye(len(waiting), dtype=int)[0] * 9)


def test_policies_choose_by_load() -> None:
    loads = loads_of(0, 3, 5, 0)
    assert {LeastLoaded(seed)([7], loads) for seed in range(20)} == {0, 3}
    turns = RoundRobin()
    assert [turns([7], loads) for _ in range(5)] == [0, 1, 2, 3, 0]
    home = Affinity(4, 10)([7], Loads.none(4))
    others = Loads(np.where(np.arange(4) == home, 0, 1), np.where(np.arange(4) == home, 9, 1))
    assert Affinity(4, 10)([7], others) == home  # where the fewest wait
    assert Affinity(4, 10, counts_all=True)([7], others) != home


def test_affinity_remembers_where_passages_went() -> None:
    """The second of two passages follows the first one, though its own home is another."""
    affinity, rendezvous = Affinity(4, 10), Rendezvous(4, 10)
    homes = {number: rendezvous([number], Loads.none(4)) for number in range(20)}
    first, second = next((a, b) for a in homes for b in homes if homes[a] != homes[b])
    together = affinity([first, second], Loads.none(4))
    assert together == rendezvous([first, second], Loads.none(4))
    assert affinity([first], Loads.none(4)) == affinity([second], Loads.none(4)) == together


def test_two_choices_takes_the_less_loaded_of_two() -> None:
    """The most loaded of three is chosen only if both draws are it: in one of nine cases."""
    two, loads = TwoChoices(0), loads_of(0, 1, 2)
    share = np.mean([two([7], loads) == 0 for _ in range(3000)])
    assert 0.09 < share < 0.135


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--load", "1"], "--load 1 must be between 0 and 1"),
        (["--per-prompt", "40"], "--topic-passages 32 must be at least twice"),
        (["--replicas", "0"], "--replicas 0 must be at least 1"),
        (["--memory", "0"], "--memory 0 must be at least 1"),
    ],
)
def test_bad_flags_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(flags)
    assert message in capsys.readouterr().err


def test_the_report_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "made" / "sim"
    small = ["--min-requests", "200", "--requests-per-replica", "1", "--workload", "topics", "--epsilon", "0.5"]
    assert main(["--replicas", "2", "--epsilon-replicas", "2", *small, "--output", str(output)]) == 0
    report = json.loads(output.with_suffix(".json").read_text())
    assert [row["policy"] for row in report["rows"]] == [
        "affinity",
        "affinity, all",
        "rendezvous",
        "two choices",
        "least loaded",
        "round robin",
    ]
    assert report["epsilons"][0]["policy"] == "affinity, epsilon 0.5"
    text = output.with_suffix(".md").read_text()
    assert text.count("| topics | 2 |") == 7 and capsys.readouterr().out.count("| topics | 2 |") == 7
