"""Move chunks between device and host as their scores ask, under budgets, step by step.

All tables and pools change here, in the engine's thread, between two steps. Plans (`planner.py`) and copies
(`copies.py`) are made beside it: a chunk that leaves stays visible until its copy on the host is complete, and one that
comes is invisible until then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_blend.core.block_manager import BlockManager
from vllm_blend.core.pages import MISSING
from vllm_blend.features.offload.block_pool import HostBlockPool
from vllm_blend.features.offload.copies import BlockCopies, Ticket
from vllm_blend.features.offload.planner import ChunkView, MovePlanner, Plan, Snapshot
from vllm_blend.features.offload.residency import ChunkState, Residency


@dataclass(frozen=True)
class StepMoves:
    """The chunks of a request that arrived at the device, and left it, before a step."""

    promotions: list[int] = field(default_factory=list)
    evictions: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Move:
    """A chunk on its way. Until it arrives, the move owns the blocks that it goes to: device blocks if it is promoted,
    host blocks otherwise."""

    residency: Residency
    chunk: ChunkState
    promotes: bool
    device: list[int]
    host: list[int]
    generation: int
    tickets: list[Ticket] = field(default_factory=list)
    num_submitted: int = 0

    @property
    def is_stale(self) -> bool:
        """Return whether the request has returned its pages since the move began."""
        return self.generation != self.residency.generation

    def is_over(self) -> bool:
        """Return whether no copy is under way and, unless the move is stale, none remains to be submitted."""
        self.tickets = [ticket for ticket in self.tickets if not ticket.done()]
        return not self.tickets and (self.is_stale or self.num_submitted == len(self.device))


class KVCacheScheduler:
    """Owns the moves of all tracked requests, which follow the policy of the planner.

    Raises ValueError if a step's budget is below one block: nothing could ever move.
    """

    def __init__(self, device: BlockManager, host: HostBlockPool, copies: BlockCopies, planner: MovePlanner) -> None:
        policy = planner.policy
        if policy.bytes_per_step < host.block_bytes:
            raise ValueError(
                f"offload_bytes_per_step={policy.bytes_per_step} is below the {host.block_bytes} bytes of one block "
                "of KV: raise it, or lower block_size"
            )
        self.device, self.host, self.copies, self.policy, self.planner = device, host, copies, policy, planner
        self.step_index = 0
        self.num_promotions = self.num_evictions = self.num_bytes = self.num_dropped = self.num_stale_plans = 0
        self.bytes_moved = 0  # in the current step
        self.moved: dict[Residency, StepMoves] = {}  # in the current step
        self._tracked: dict[Residency, None] = {}
        self._posted: dict[Residency, tuple[Sequence[float] | None, int]] = {}  # scores and version
        self.moves: list[_Move] = []  # under way

    def track(self, residency: Residency) -> None:
        """Let the chunks of a request, all resident, move from now on."""
        for chunk in residency.chunks:
            chunk.moved_at = self.step_index
        self._tracked[residency] = None

    def forget(self, residency: Residency) -> None:
        """Return the host blocks of a request that returns its pages. Its moves are dropped when their copies end."""
        residency.generation += 1
        self._tracked.pop(residency, None)
        self._posted.pop(residency, None)
        travelling = {move.chunk for move in self.moves if move.residency is residency}
        for chunk in residency.chunks:
            if chunk not in travelling:
                self.host.release(chunk.host)
            chunk.host = []

    def step(self, scores: Mapping[Residency, Sequence[float]], reserve: int = 0) -> None:
        """Finish moves that have arrived and start those that the scores ask for, before the next step of the model.

        `scores` has a number per chunk, larger for one that is needed more; a request without scores goes by its ranks.
        `reserve` blocks of the device are left to growing requests.
        """
        self.step_index += 1
        self.moved, self.bytes_moved = {}, 0
        self._settle()
        self._begin(self.planner.take(), reserve)  # what was planned while the last step ran
        while True:
            self._submit()
            self._settle()
            if not self._tracked:
                return
            if not self.planner.plans_at_once:
                self.planner.post(self._changed_snapshots(scores))
                return
            self.planner.post([self._snapshot(residency, scores.get(residency)) for residency in self._tracked])
            # No chunk starts to move twice in a step, so asking again comes to an end.
            if not self._begin(self.planner.take(), reserve):
                return

    def end_moves(self) -> None:
        """Wait for the copies of all moves, whose requests are gone, and return the blocks that these own."""
        for move in self.moves:
            for ticket in move.tickets:
                ticket.wait()
        self._settle()

    def _changed_snapshots(self, scores: Mapping[Residency, Sequence[float]]) -> list[Snapshot]:
        """Return snapshots of the requests whose scores or tables have changed since they were posted last. Scores are
        compared by identity: each scoring makes a new list."""
        changed = []
        for residency in self._tracked:
            own = scores.get(residency)
            seen = self._posted.get(residency)
            if seen is None or seen[0] is not own or seen[1] != residency.version:
                changed.append(self._snapshot(residency, own))
                if all(chunk.settled for chunk in changed[-1].chunks):  # otherwise time alone may change the plan
                    self._posted[residency] = own, residency.version
        return changed

    def _snapshot(self, residency: Residency, scores: Sequence[float] | None) -> Snapshot:
        own = scores or [-float(rank) for rank in residency.ranks]
        chunks = [
            ChunkView(
                chunk.index,
                own[chunk.index],
                chunk.resident,
                chunk.moving,
                self.step_index - chunk.moved_at >= self.policy.dwell,
            )
            for chunk in residency.movable
        ]
        return Snapshot(residency, residency.version, tuple(chunks))

    def _begin(self, plans: Sequence[Plan], reserve: int) -> bool:
        """Start the moves of plans that still hold, and return whether there were any."""
        started = False
        for plan in plans:
            residency = plan.residency
            if residency not in self._tracked or residency.version != plan.version:
                self.num_stale_plans += 1
                continue
            begun = [self._evict(residency, residency.chunks[index]) for index in plan.evict]
            begun += [self._promote(residency, residency.chunks[index], reserve) for index in plan.promote]
            started |= any(begun)
            if not all(begun):  # no room now: plan again at the next step
                self._posted.pop(residency, None)
        if started and self._tracked:  # under a budget, another request comes first at the next step
            first = next(iter(self._tracked))
            self._tracked[first] = self._tracked.pop(first)
        return started

    def _evict(self, residency: Residency, chunk: ChunkState) -> bool:
        if chunk.host:  # the copy of its last stay is still good
            self._leave(residency, chunk)
            return True
        host = self._host_blocks(len(chunk.blocks))
        if host is None:
            return False
        self._start(_Move(residency, chunk, False, residency.device_blocks(chunk), host, residency.generation))
        return True

    def _promote(self, residency: Residency, chunk: ChunkState, reserve: int) -> bool:
        if self.device.num_free_blocks < len(chunk.blocks) + reserve:
            return False
        device = self.device.allocate(len(chunk.blocks))
        self._start(_Move(residency, chunk, True, device, chunk.host, residency.generation))
        return True

    def _start(self, move: _Move) -> None:
        move.chunk.moving = True
        move.residency.version += 1
        self.moves.append(move)

    def _host_blocks(self, count: int) -> list[int] | None:
        """Take host blocks, if need be those of copies of chunks that are on the device."""
        if self.host.num_free_blocks < count:
            for residency in self._tracked:
                for chunk in residency.chunks:
                    if chunk.resident and not chunk.moving:
                        self.host.release(chunk.host)
                        chunk.host = []
        return self.host.allocate(count)

    def _submit(self) -> None:
        """Copy as many blocks as the step's budget allows, oldest moves first."""
        for move in self.moves:
            left = (self.policy.bytes_per_step - self.bytes_moved) // self.host.block_bytes
            blocks = slice(move.num_submitted, min(move.num_submitted + left, len(move.device)))
            if move.is_stale or blocks.stop <= blocks.start:
                continue
            move.tickets.append(self.copies.submit(move.device[blocks], move.host[blocks], not move.promotes))
            move.num_submitted = blocks.stop
            size = (blocks.stop - blocks.start) * self.host.block_bytes
            self.bytes_moved += size
            self.num_bytes += size

    def _settle(self) -> None:
        """Record the moves that are over in the tables, and return the blocks of stale ones."""
        under_way = []
        for move in self.moves:
            if not move.is_over():
                under_way.append(move)
            elif move.is_stale:
                self.num_dropped += 1
                self.host.release(move.host)
                if move.promotes:
                    self.device.release(move.device)
            else:
                move.chunk.moving = False
                move.chunk.host = move.host
                if move.promotes:
                    self._arrive(move)
                else:
                    self._leave(move.residency, move.chunk)
        self.moves = under_way

    def _arrive(self, move: _Move) -> None:
        residency, chunk = move.residency, move.chunk
        for index, block in zip(chunk.blocks, move.device, strict=True):
            residency.table[index] = block
        chunk.resident, chunk.moved_at = True, self.step_index
        residency.version += 1
        self.num_promotions += 1
        self.moved.setdefault(residency, StepMoves()).promotions.append(chunk.index)

    def _leave(self, residency: Residency, chunk: ChunkState) -> None:
        blocks = residency.device_blocks(chunk)
        for index in chunk.blocks:
            residency.table[index] = MISSING
        self.device.release(blocks)
        chunk.resident, chunk.moved_at = False, self.step_index
        residency.version += 1
        self.num_evictions += 1
        self.moved.setdefault(residency, StepMoves()).evictions.append(chunk.index)
