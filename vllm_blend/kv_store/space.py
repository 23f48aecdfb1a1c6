"""The space of a disk store: where chunks may be written, what has to leave for them, and what is kept from leaving.

Space is taken in the index before the first byte is written and given back after the bytes are gone, so that the sum
in the index is never below what the segments hold. Chunks that are neither whole nor wanted, and that are not
claimed, are those of processes that died; they are the first to leave.
"""

from __future__ import annotations

import fcntl
import heapq
import logging
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from errno import ENOSPC
from operator import itemgetter
from pathlib import Path

import torch

from vllm_blend.kv_store.index import Index
from vllm_blend.kv_store.index_rows import DEAD, LIVE, Entry
from vllm_blend.kv_store.keys import ChunkId, ModelFingerprint
from vllm_blend.kv_store.locks import NumberLocks
from vllm_blend.kv_store.owners import ANYONE, Owner, above_their_parts, parts
from vllm_blend.kv_store.regular_file import open_regular, require_regular
from vllm_blend.kv_store.segment import SegmentFiles

logger = logging.getLogger(__name__)

ACTIVE_SECONDS = 86_400.0  # for which an owner that uses nothing keeps its part
INDEX, OPEN_LOCK, LOCKS = "index.sqlite3", "open.lock", "locks"


@dataclass(frozen=True)
class NewRow:
    """A chunk that is to be written, as the index keeps it."""

    key: str
    num_bytes: int
    header: bytes
    cost: float
    name: tuple[ChunkId, ModelFingerprint] | None = None  # for exports


class DiskSpace:
    """Index, files and locks of one folder, together. Safe to use from several threads.

    Methods raise OSError and sqlite3.Error if the disk or the database fails.
    """

    def __init__(self, folder: Path, budget_bytes: int, segment_bytes: int, direct: bool, timeout: float) -> None:
        self.budget_bytes, self.segment_bytes, self.timeout = budget_bytes, segment_bytes, timeout
        self.num_evicted = 0
        self._owners: dict[str, Owner] = {}  # those that this process has stored chunks for, by id
        folder.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder / OPEN_LOCK, timeout):
            self.files = SegmentFiles(folder, direct)
            self.locks = NumberLocks(folder / LOCKS)
            self.index = _open_index(folder, self.files, timeout)
            with self.index.transaction():
                self.files.unlink_others(self.index.segments())
        try:
            self._clear_away()
        except (OSError, sqlite3.Error) as error:
            if not (error.errno == ENOSPC if isinstance(error, OSError) else "full" in str(error)):
                raise
            # What is stored can be read, and nothing is written before there is room again.
            logger.warning("%s: the disk is full (%s): what dead processes left stays there for now", folder, error)

    def close(self) -> None:
        self.index.close()
        self.locks.close()
        self.files.close()

    def hold(self, keys: Sequence[str]) -> dict[str, Entry]:
        """Return those of these chunks that are there, by key. They stay where they are, each until `release`."""
        found: dict[str, Entry] = {}
        for _ in range(10):
            entries = list(self.index.find_many([key for key in keys if key not in found]).values())
            if not entries:
                break
            held = {entry.id for entry in entries if self.locks.share(entry.id)}
            live = self.index.are_live(entries)
            for entry in entries:
                if entry.id in held and entry.id in live:
                    found[entry.key] = entry
                elif entry.id in held:
                    self.locks.unshare(entry.id)
            keys = [entry.key for entry in entries if entry.id not in live]  # replaced in between
        return found

    def held(self) -> dict[str, int]:
        """Return the bytes of those owners that this process has stored chunks for, by name."""
        held = self.index.held()
        return {owner.name: held[each] for each, owner in [*self._owners.items()] if each in held}

    def release(self, entry: Entry) -> None:
        self.locks.unshare(entry.id)

    def reserve(self, rows: Sequence[NewRow], uses: Mapping[int, int], owner: Owner = ANYONE) -> list[Entry] | None:
        """Return entries with space for chunks of an owner, which are this process's to write; `publish` or `discard`
        follows. None where too much is held, or is others' part. `uses` of other chunks (id -> how many) are counted
        first."""
        num_bytes = sum(row.num_bytes for row in rows)
        limit = self.budget_bytes if owner.max_bytes is None else min(owner.max_bytes, self.budget_bytes)
        if num_bytes > limit:
            return None  # a part of them may fit
        self._owners[owner.id] = owner
        deadline = time.monotonic() + self.timeout
        while True:
            with self._claiming() as claimed:
                self.index.touch(uses)
                above = self.index.held().get(owner.id, 0) + num_bytes - limit if self.files.can_punch else 0
                missing = self.index.num_bytes + num_bytes - self.budget_bytes
                if missing <= 0 and above <= 0:
                    for row in rows:
                        entry = self.index.insert(row.key, row.num_bytes, row.header, row.cost, self.segment_bytes)
                        if not self.locks.claim(entry.id):
                            raise OSError(f"chunk {entry.id} is new and already locked")
                        claimed.append(entry)
                        if owner.id:
                            self.index.owners.give(entry.id, owner.id)
                        if row.name is not None:
                            self.index.set_name(entry, *row.name)
                    return claimed
                candidates = self._own(owner) if above > 0 else self._candidates(owner, num_bytes)
                if not self._evict(above if above > 0 else missing, claimed, candidates):
                    return None
            self._give_back(claimed)  # and try again: another process may be faster
            uses = {}
            if time.monotonic() > deadline:
                raise TimeoutError(f"other processes took the space that was made, for {self.timeout:g} s")

    def publish(self, entries: Sequence[Entry], payloads: Sequence[torch.Tensor]) -> None:
        """Write reserved chunks; when all are on the disk, they take the place of what their keys stood for."""
        self.files.write([(entry.extent, payload) for entry, payload in zip(entries, payloads, strict=True)])
        with self.index.transaction():
            replaced = [self.index.publish(entry) for entry in entries]
            self._unclaim(entries)  # before others see them; a process that clears away waits for this transaction
        self._drop_if_possible([entry for entry in replaced if entry is not None])

    def discard(self, entries: Sequence[Entry]) -> None:
        """Give up chunks that were reserved."""
        for entry in entries:
            try:
                if self.files.can_punch:  # before anything else: on a full disk, the index has no room to grow either
                    self.files.punch(entry.extent)
            except OSError as error:
                logger.debug("what was written of chunk %s stays: %s", entry.key, error)
            self.locks.unclaim(entry.id)
        self._drop_if_possible(entries)

    def drop(self, entries: Iterable[Entry]) -> None:
        """Give up chunks. The space of those that are held comes back later."""
        entries = list(entries)
        with self._claiming() as claimed:
            self.index.give_up(entries)
            claimed += [entry for entry in entries if self.locks.claim(entry.id)]
        self._give_back(claimed)

    def _drop_if_possible(self, entries: Sequence[Entry]) -> None:
        try:
            if entries:
                self.drop(entries)
        except (OSError, sqlite3.Error) as error:  # what is not held is cleared away by the next process
            logger.debug("%d chunks were not cleared away: %s", len(entries), error)

    def _evict(self, missing: int, claimed: list[Entry], candidates: Generator[list[Entry], None, None]) -> bool:
        """Give up chunks of `missing` bytes or more, and claim them. Return False, with nothing changed, where there
        are not enough. Inside of a transaction."""
        with closing(candidates):  # a query that is left open would keep the index as it was, and from being changed
            for group in candidates:
                if self._claim(group):
                    claimed += group
                    missing -= sum(entry.extent.num_bytes for entry in group)
                if missing <= 0:
                    break
            else:
                self._unclaim(claimed)
                claimed.clear()
                return False
        live = [entry for entry in claimed if entry.state == LIVE]
        self.index.advance_clock(live)
        self.index.give_up(claimed)
        self.num_evicted += len(live)
        return True

    def _candidates(self, owner: Owner = ANYONE, num_bytes: int = 0) -> Generator[list[Entry], None, None]:
        """Yield what may leave for chunks of an owner, in that order; each group goes as a whole. Where a file is given
        back as a whole, it goes with the chunks of all owners in it."""
        if not self.files.can_punch:
            yield from self.index.by_priority_of_segments()
            return
        for entry in self.index.unfinished():
            yield [entry]
        held, active = Counter(self.index.held()), self.index.owners.active(time.time() - ACTIVE_SECONDS) | {owner.id}
        shares = parts(self.budget_bytes, {each: self._owners.get(each, ANYONE) for each in active})
        above = above_their_parts(held, shares, owner.id, num_bytes)
        if above in ([], [owner.id]) and held.total() - held[owner.id] + num_bytes > self.budget_bytes:
            return  # all that others have is theirs
        for _, each, entry in heapq.merge(*map(self._ranked, above), key=itemgetter(0)):
            if each == owner.id or held[each] > shares.get(each, 0):
                held[each] -= entry.extent.num_bytes
                yield [entry]
        if owner.id not in above:
            for _, entry in self.index.by_priority(owner.id):
                yield [entry]

    def _ranked(self, owner: str) -> Iterator[tuple[tuple[float, int], str, Entry]]:
        return (((priority, entry.id), owner, entry) for priority, entry in self.index.by_priority(owner))

    def _own(self, owner: Owner) -> Generator[list[Entry], None, None]:
        """Yield what leaves when an owner has reached its limit."""
        for entry in self.index.unfinished():
            yield [entry]
        for _, entry in self.index.by_priority(owner.id):
            yield [entry]

    def _clear_away(self) -> None:
        """Give up what dead processes left, and what is above the budget."""
        with self._claiming() as claimed:
            for entry in self.index.unfinished():
                if self._claim([entry]):
                    claimed.append(entry)
            self.index.give_up(claimed)
        self._give_back(claimed)
        with self._claiming() as claimed:
            above = self.index.num_bytes - self.budget_bytes
            if above > 0 and not self._evict(above, claimed, self._candidates()):
                logger.warning("%s holds %d bytes more than its budget, all in use", self.files.folder, above)
        self._give_back(claimed)

    def _give_back(self, claimed: list[Entry]) -> None:
        """Return the space of chunks that are given up. Ends the claims, whatever happens."""
        claimed = list(claimed)
        try:
            with self.index.transaction():
                if self.files.can_punch:
                    for entry in claimed:
                        self.files.punch(entry.extent)
                        self.index.delete(entry)
                for segment in {entry.extent.segment for entry in claimed}:
                    self._remove_unused(segment, claimed)
                self._unclaim(claimed)  # not later: the next transaction may be another process's, which needs room
                claimed.clear()
        finally:
            self._unclaim(claimed)

    def _remove_unused(self, segment: str, claimed: list[Entry]) -> None:
        """Remove a segment in which nothing is left but what is given up."""
        ours = {entry.id for entry in claimed}
        others = [entry for entry in self.index.in_segment(segment) if entry.id not in ours]
        if all(entry.state == DEAD for entry in others) and self._claim(others):
            claimed += others
            self.files.unlink(segment)
            self.index.delete_segment(segment)

    @contextmanager
    def _claiming(self) -> Iterator[list[Entry]]:
        """Open a transaction, with a list of claims that end if it fails."""
        claimed: list[Entry] = []
        try:
            with self.index.transaction():
                yield claimed
        except BaseException:
            self._unclaim(claimed)
            raise

    def _claim(self, group: list[Entry]) -> bool:
        """Claim all of a group, or none. Return whether it was all."""
        for count, entry in enumerate(group):
            if not self.locks.claim(entry.id):
                self._unclaim(group[:count])
                return False
        return True

    def _unclaim(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self.locks.unclaim(entry.id)


def _open_index(folder: Path, files: SegmentFiles, timeout: float) -> Index:
    """Return the index, or an empty one in place of a damaged one. Other processes that have the damaged one open go on
    with it, in files that have no name any more."""
    path = folder / INDEX
    for name in _index_files(path):
        require_regular(name, follow_link=False)
    try:
        return Index(path, timeout)
    except sqlite3.DatabaseError as error:
        # Damage, a full disk, missing permissions: sqlite has no clear line between them. A new index tells.
        if "locked" in str(error):
            raise
        trial = folder / f"{INDEX}.trial"
        _unlink_index(trial)
        try:
            Index(trial, timeout).close()
        except sqlite3.Error:
            raise error from None
        finally:
            _unlink_index(trial)
        logger.warning("%s: the index of the chunk store is damaged (%s): it starts empty", path, error)
        _unlink_index(path)
        files.unlink_others([])
        return Index(path, timeout)


def _index_files(path: Path) -> list[Path]:
    """Return the index and what sqlite keeps beside it."""
    return [Path(f"{path}{suffix}") for suffix in ("", "-wal", "-shm", "-journal")]


def _unlink_index(path: Path) -> None:
    for name in _index_files(path):
        name.unlink(missing_ok=True)


@contextmanager
def _exclusive(path: Path, timeout: float) -> Iterator[None]:
    """Keep all other threads and processes out."""
    deadline = time.monotonic() + timeout
    fd = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} is locked by another process for more than {timeout:g} s") from error
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)
