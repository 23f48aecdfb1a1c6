"""Plan which chunks move next: a function of a snapshot, and the thread that it runs in beside the engine's.

Tables and pools belong to the engine's thread (`kv_cache_scheduler.py`). It posts a snapshot of them after a step and
takes the plan before a later one. If a request has changed since its snapshot, its version differs and the plan is
dropped: a late plan does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_blend.features.offload.residency import Residency


@dataclass(frozen=True)
class MovePolicy:
    """How many chunks of a request stay on the device, and how much better a chunk must be to replace another.

    `resident_chunks` stay; None means the share `device_fraction` of them (rounded up). A chunk outside takes the place
    of one inside if its score is higher by `margin` (relative), and neither has moved for `dwell` steps.
    `bytes_per_step` bounds what all moves of a step copy, in both directions together.
    """

    resident_chunks: int | None
    device_fraction: float
    bytes_per_step: int
    margin: float = 0.1
    dwell: int = 2

    def __post_init__(self) -> None:
        if self.dwell < 1:
            raise ValueError(f"dwell={self.dwell} must be at least 1: chunks would move back and forth within a step")

    def target(self, count: int) -> int:
        """Return how many of a request's `count` movable chunks belong on the device."""
        wanted = self.resident_chunks
        if wanted is None:
            wanted = -(-round(self.device_fraction * count * 1000) // 1000)  # 0.2 * 5 is 1, whatever floats say
        return min(wanted, count)


@dataclass(frozen=True)
class ChunkView:
    """A chunk that can move, as it was at the time. `settled`: it has not moved for the policy's `dwell` steps."""

    index: int
    score: float
    resident: bool
    moving: bool
    settled: bool


@dataclass(frozen=True)
class Snapshot:
    """The movable chunks of one request, as they were at the time."""

    residency: Residency
    version: int
    chunks: tuple[ChunkView, ...]


@dataclass(frozen=True)
class Plan:
    """Moves of one request: chunks by their numbers, in order. It is void once the request has another `version`."""

    residency: Residency
    version: int
    evict: tuple[int, ...] = ()
    promote: tuple[int, ...] = ()


def plan_request(snapshot: Snapshot, policy: MovePolicy) -> Plan | None:
    """Return the moves to start now, None if there are none. A chunk on its way counts as arrived.

    If too many chunks are on the device, the worst leave; if there is room, the best one comes. Otherwise the worst
    leaves if one outside has a clear lead, which then has room.
    """
    inside = sorted((c for c in snapshot.chunks if c.resident and not c.moving), key=lambda c: (c.score, -c.index))
    outside = [c for c in snapshot.chunks if not c.resident and not c.moving]
    leaving = sum(c.resident and c.moving for c in snapshot.chunks)
    staying = len(snapshot.chunks) - len(outside) - leaving
    target = policy.target(len(snapshot.chunks))
    if staying > target:
        excess = tuple(chunk.index for chunk in inside[: staying - target])
        return Plan(snapshot.residency, snapshot.version, evict=excess) if excess else None
    best = max((c for c in outside if c.settled), key=lambda c: (c.score, -c.index), default=None)
    if best is None:
        return None
    if staying + leaving < target:
        return Plan(snapshot.residency, snapshot.version, promote=(best.index,))
    if staying == target and inside and inside[0].settled:
        worst = inside[0]
        if best.score > worst.score + policy.margin * abs(worst.score):
            return Plan(snapshot.residency, snapshot.version, evict=(worst.index,))
    return None


def plan_all(snapshots: Sequence[Snapshot], policy: MovePolicy) -> list[Plan]:
    """Return the plans of all requests that have any, in order."""
    plans = (plan_request(snapshot, policy) for snapshot in snapshots)
    return [plan for plan in plans if plan is not None]


class MovePlanner:
    """Plans the moves of the requests that were posted last: before `post` returns, or `in_thread`, while the engine
    goes on. Without a thread, placements depend on no timing but that of the copies: a CPU makes them at once, a GPU
    ends them when it can. The thread ends when the last reference to this object is gone."""

    def __init__(self, policy: MovePolicy, in_thread: bool = False) -> None:
        self.policy = policy
        self._thread = ThreadPoolExecutor(1, "offload-planner") if in_thread else None
        self._posted: dict[int, Snapshot] = {}  # by identity of the residency, which the snapshot keeps alive
        self._planning: list[Future[list[Plan]]] = []  # in the order in which they end

    @property
    def plans_at_once(self) -> bool:
        """Return whether plans are ready once their snapshots are posted."""
        return self._thread is None

    def post(self, snapshots: Sequence[Snapshot]) -> None:
        """Ask for a plan of these requests. The newest snapshot of each counts."""
        self._posted |= {id(snapshot.residency): snapshot for snapshot in snapshots}
        if self._thread is not None and self._posted and all(plans.done() for plans in self._planning):
            posted, self._posted = list(self._posted.values()), {}
            self._planning.append(self._thread.submit(plan_all, posted, self.policy))

    def take(self) -> list[Plan]:
        """Return the plans that are ready, once. Raises what planning raised."""
        if self._thread is None:
            posted, self._posted = list(self._posted.values()), {}
            return plan_all(posted, self.policy)
        ready = [plans for plans in self._planning if plans.done()]
        del self._planning[: len(ready)]
        self.post(())  # what came while the thread was busy
        return [plan for plans in ready for plan in plans.result()]
