"""The router over stand-ins for Ray's replicas: its order, and what it counts as a replica's load."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.request_router import RequestRouter

from vllm_blend.ray.forwarding import RoutingKey
from vllm_blend.ray.router import PassageRouter, Policy
from vllm_blend.ray.routing import choose_replica

NAMES = ("a", "b", "c")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what the base class tells the cluster."""
    for name in ("on_send_request", "on_replica_actor_died"):
        monkeypatch.setattr(RequestRouter, name, lambda self, replica_id: None)


def make_router(policy: Policy = "affinity") -> PassageRouter:
    router: PassageRouter = PassageRouter.__new__(PassageRouter)  # the base class wants a cluster
    router.initialize_state(policy=policy)
    return router


def replica_id(name: str) -> Any:
    return SimpleNamespace(unique_id=name)


def request(number: str, **passages: int) -> Any:
    metadata = SimpleNamespace(internal_request_id=number)
    return SimpleNamespace(
        args=["forwarded", RoutingKey(passages)],
        kwargs={},
        metadata=metadata,
        routing_context=SimpleNamespace(should_backoff=False),
    )


def order(router: PassageRouter, asked: Any, names: tuple[str, ...] = NAMES) -> list[str]:
    replicas = [SimpleNamespace(replica_id=replica_id(name)) for name in names]
    ranks = asyncio.run(router.choose_replicas(replicas, asked))
    assert all(len(rank) == 1 for rank in ranks)
    return [rank[0].replica_id.unique_id for rank in ranks]


def take(router: PassageRouter, asked: Any, name: str) -> None:
    router.on_send_request(replica_id(name))
    router.on_request_routed(asked, replica_id(name), None)


def test_the_first_is_that_of_the_routing() -> None:
    asked = request("1", passage=100)
    first, *others = order(make_router(), asked)
    assert first == choose_replica({"passage": 100}, dict.fromkeys(NAMES, 0))
    assert sorted([first, *others]) == list(NAMES)
    assert asked.routing_context.should_backoff  # or Ray would ask again and again while all are full


def test_waiting_requests_move_the_next_ones_on() -> None:
    router = make_router()
    home = order(router, request("0", passage=100))[0]
    requests = [request(str(number), passage=100) for number in range(3)]
    for asked in requests[:2]:
        take(router, asked, home)
    assert order(router, request("9", passage=100))[0] != home
    assert order(router, request("9", passage=100))[-1] == home
    for asked in requests[:2]:
        asked.args[1].has_begun = True  # as the ingress notes
    assert order(router, request("9", passage=100))[0] == home


def test_a_request_counts_from_its_sending_on_and_until_its_end() -> None:
    router = make_router("least_loaded")
    router.on_send_request(replica_id("a"))
    assert order(router, request("9"))[-1] == "a"
    asked = request("1")
    router.on_request_routed(asked, replica_id("a"), None)
    assert order(router, request("9"))[-1] == "a"
    router.on_request_completed(replica_id("a"), "1")
    assert order(router, request("9")) == ["a", "b", "c"]
    router.on_send_request(replica_id("b"))
    router.on_request_completed(replica_id("b"), "2")  # refused by the replica
    assert order(router, request("9")) == ["a", "b", "c"]


def test_an_end_after_the_beginning_takes_nothing_from_others() -> None:
    router = make_router("least_loaded")
    first, second = request("1"), request("2")
    take(router, first, "a")
    router.on_send_request(replica_id("a"))
    first.args[1].has_begun = True
    router.on_request_completed(replica_id("a"), "1")
    assert order(router, second)[-1] == "a"


def test_what_a_dead_replica_had_is_forgotten() -> None:
    router = make_router("least_loaded")
    take(router, request("1"), "a")
    router.on_send_request(replica_id("a"))
    router.on_replica_actor_died(replica_id("a"))
    assert order(router, request("9")) == ["a", "b", "c"]


def test_replicas_may_come_and_go() -> None:
    router = make_router()
    asked = request("1", passage=100)
    first, second, _ = order(router, asked)
    rest = tuple(name for name in NAMES if name != first)
    assert order(router, asked, rest)[0] == second
    assert order(router, asked, (*rest, first, "d"))[0] in (first, "d")


def test_round_robin_takes_turns() -> None:
    router = make_router("round_robin")
    assert [order(router, request("1", passage=9))[0] for _ in range(4)] == ["a", "b", "c", "a"]


def test_calls_without_a_key_go_to_the_least_loaded() -> None:
    router = make_router()
    take(router, request("1"), "a")
    asked = request("2")
    asked.args = []
    assert order(router, asked)[0] == "b"
    assert asyncio.run(router.choose_replicas([], asked)) == []
