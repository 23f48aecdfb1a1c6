"""Which chunks are to move next: a function of a snapshot, and the thread that it runs in beside the engine's.

Tables and pools belong to the engine's thread (`kv_cache_scheduler.py`). It posts a snapshot of them after a step and
takes the plan before a later one. What has changed since a request's snapshot has another version, and its plan is
dropped then: a plan that comes late does no harm.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_blend.offload.residency import Residency

PLAN_DEADLINE = 10.0  # seconds that `flush` waits for the thread


@dataclass(frozen=True)
class MovePolicy:
    """How many chunks of a request stay on the device, and what a swap has to bring.

    `resident_chunks`: that many, None for the share `device_fraction` of them (rounded up). A chunk outside takes the
    place of one inside when its score is higher by `margin` (relative), and neither has moved for `dwell` steps.
    `bytes_per_step` bounds what all moves of a step copy, in both directions together.
    """

    resident_chunks: int | None
    device_fraction: float
    bytes_per_step: int
    margin: float = 0.1
    dwell: int = 2

    def __post_init__(self) -> None:
        if self.dwell < 1:
            raise ValueError(f"dwell={self.dwell}: a chunk that moves twice in a step would never come to rest")

    def target(self, count: int) -> int:
        """How many of a request's `count` movable chunks are to be on the device."""
        wanted = self.resident_chunks
        if wanted is None:
            wanted = -(-round(self.device_fraction * count * 1000) // 1000)  # 0.2 * 5 is 1, whatever floats say
        return min(wanted, count)


@dataclass(frozen=True)
class ChunkView:
    """A chunk that can move, as it was. `settled`: it has not moved for the policy's `dwell` steps."""

    index: int
    score: float
    resident: bool
    moving: bool
    settled: bool


@dataclass(frozen=True)
class Snapshot:
    """The movable chunks of one request, as they were."""

    residency: Residency
    version: int
    chunks: tuple[ChunkView, ...]


@dataclass(frozen=True)
class Plan:
    """Moves of one request: chunks by their numbers, in order. Of no use once the request has another `version`."""

    residency: Residency
    version: int
    evict: tuple[int, ...] = ()
    promote: tuple[int, ...] = ()


def plan_request(snapshot: Snapshot, policy: MovePolicy) -> Plan | None:
    """What is to be started now, None where nothing is. What is on its way counts as arrived.

    Too many on the device: the worst leave. Room: the best one comes. Neither: the worst leaves where one outside has a
    clear lead, and leaves room.
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
    """For every request, in order."""
    plans = (plan_request(snapshot, policy) for snapshot in snapshots)
    return [plan for plan in plans if plan is not None]


class MovePlanner(ABC):
    """Plans what was posted last."""

    def __init__(self, policy: MovePolicy) -> None:
        self.policy = policy

    @property
    @abstractmethod
    def plans_at_once(self) -> bool:
        """Whether a plan is there as soon as its snapshots are posted: placements then never depend on timing."""

    @abstractmethod
    def post(self, snapshots: Sequence[Snapshot]) -> None:
        """Ask for a plan of these requests. Of a request the newest snapshot counts."""

    @abstractmethod
    def take(self) -> list[Plan]:
        """The plans that are ready, once. Raises what planning raised."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until what was posted is planned. Raises TimeoutError after 10 seconds."""


class PlainPlanner(MovePlanner):
    """Plans before `post` returns: the same request has the same placement at every step of every run."""

    def __init__(self, policy: MovePolicy) -> None:
        super().__init__(policy)
        self._ready: list[Plan] = []

    @property
    def plans_at_once(self) -> bool:
        return True

    def post(self, snapshots: Sequence[Snapshot]) -> None:
        self._ready = plan_all(snapshots, self.policy)

    def take(self) -> list[Plan]:
        ready, self._ready = self._ready, []
        return ready

    def flush(self) -> None:
        pass


class ThreadPlanner(MovePlanner):
    """Plans in a thread of its own while the engine goes on. The thread ends when nobody holds this object any more."""

    def __init__(self, policy: MovePolicy) -> None:
        super().__init__(policy)
        self._box = _Box()
        threading.Thread(target=_serve, args=(self._box, policy), name="offload-planner", daemon=True).start()
        weakref.finalize(self, self._box.close).atexit = False

    @property
    def plans_at_once(self) -> bool:
        return False

    def post(self, snapshots: Sequence[Snapshot]) -> None:
        if not snapshots:
            return
        box = self._box
        with box.changed:
            box.posted |= {id(snapshot.residency): snapshot for snapshot in snapshots}
            box.busy = True
            box.changed.notify_all()

    def take(self) -> list[Plan]:
        box = self._box
        with box.changed:
            error, ready = box.error, box.ready
            box.error, box.ready = None, []
        if error is not None:
            raise error
        return ready

    def flush(self) -> None:
        box = self._box
        with box.changed:
            if not box.changed.wait_for(lambda: not box.busy, PLAN_DEADLINE):
                raise TimeoutError(f"the thread offload-planner has not answered for {PLAN_DEADLINE} seconds")


class _Box:
    """What the two threads share, under `changed`."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.posted: dict[int, Snapshot] = {}  # by identity of the request's tables; the snapshot keeps these alive
        self.ready: list[Plan] = []
        self.error: Exception | None = None
        self.busy = self.closed = False

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


def _serve(box: _Box, policy: MovePolicy) -> None:
    while True:
        with box.changed:
            box.changed.wait_for(lambda: box.closed or bool(box.posted))
            if box.closed:
                return
            posted, box.posted = list(box.posted.values()), {}
        ready: list[Plan] = []
        error: Exception | None = None
        try:
            ready = plan_all(posted, policy)
        except Exception as raised:  # raised where the plan is taken
            error = raised
        with box.changed:
            box.ready, box.error, box.busy = box.ready + ready, box.error or error, bool(box.posted)
            box.changed.notify_all()
        del posted, ready, error  # what they hold keeps the engine alive
