"""The request router of Ray Serve that sends a request to the replica where its passages are at home."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from vllm_blend.ray.forwarding import RoutingKey
from vllm_blend.ray.routing import DEFAULT_EPSILON, Homes

Policy = Literal["affinity", "least_loaded", "round_robin"]


class PassageRouter(RequestRouter):  # type: ignore[misc]  # Ray has no annotations for mypy
    """Chooses replicas by `Homes`. A replica's load is the number of requests that this router has sent there and
    that wait for the beginning of their answers: those that have begun hold up others by little.

    Each process that sends requests has a router of its own, so that the bound on loads holds for the requests of each.
    """

    def initialize_state(self, policy: Policy = "affinity", epsilon: float = DEFAULT_EPSILON) -> None:
        """Take the arguments that Ray Serve passes on from the deployment."""
        self._policy, self._epsilon = policy, epsilon
        self._homes = Homes()
        self._turns = itertools.count()
        self._sent: Counter[str] = Counter()  # to a replica that has not taken them yet
        self._taken: dict[str, tuple[str, RoutingKey]] = {}  # by the id of the request: the replica, and its key

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which they are asked to take a request."""
        if not candidate_replicas:
            return []
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # all replicas are in the list: wait before the next
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if self._policy == "round_robin":
            names, turn = sorted(by_name), next(self._turns)
            order = [names[(turn + number) % len(names)] for number in range(len(names))]
        else:
            order = self._homes.choose(self._passages(pending_request), self._loads(by_name), self._epsilon)
        return [[by_name[name]] for name in order]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a request that a replica has not taken yet."""
        super().on_send_request(replica_id)
        self._sent[replica_id.unique_id] += 1

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count a request that a replica has taken."""
        self._forget_sent(replica_id.unique_id)
        self._homes.note(self._passages(pending_request), replica_id.unique_id)
        self._taken[pending_request.metadata.internal_request_id] = (replica_id.unique_id, _key_of(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Stop counting a request that has ended, or that the replica has refused to take."""
        if self._taken.pop(internal_request_id, None) is None:
            self._forget_sent(replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget what a replica had that is gone."""
        super().on_replica_actor_died(replica_id)
        name = replica_id.unique_id
        self._sent.pop(name, None)
        self._taken = {each: taken for each, taken in self._taken.items() if taken[0] != name}

    def _forget_sent(self, name: str) -> None:
        self._sent[name] -= 1
        if self._sent[name] <= 0:
            del self._sent[name]

    def _passages(self, request: PendingRequest | None) -> dict[str, int]:
        return _key_of(request).passages if self._policy == "affinity" else {}

    def _loads(self, names: Iterable[str]) -> dict[str, int]:
        loads = self._sent + Counter(name for name, key in self._taken.values() if not key.has_begun)
        return {name: loads[name] for name in names}


def _key_of(request: PendingRequest | None) -> RoutingKey:
    """Return the key that the ingress has given a request; an empty one for what others call."""
    given: list[Any] = [] if request is None else [*request.args, *request.kwargs.values()]
    return next((each for each in given if isinstance(each, RoutingKey)), RoutingKey())
