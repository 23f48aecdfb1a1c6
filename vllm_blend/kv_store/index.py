"""The index of a disk store: an sqlite database, shared by several processes, of what is stored where.

A chunk is a row, in one of three states. It is `WRITING` from before its first byte is written, so that its space is
counted; `LIVE` from when its last byte is on the disk; `DEAD` from when it is given up until its space is given back.
Every change is one transaction: a process that is killed leaves rows that are WRITING or DEAD and not claimed, and the
next process clears them away. (The log is flushed to the operating system with every transaction and to the disk now
and then: a power cut can take the last transactions back, which the checksums turn into misses.)

The chunk of the least priority leaves first: frequency x recompute cost / bytes, plus a clock. As in
GreedyDual-Size-Frequency (Cherkasova, HP Labs 1998), the clock is the priority of the last chunk that left, when this
chunk arrived or was used: without it, what was once popular would never leave.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vllm_blend.kv_store.host_memory import PAGE
from vllm_blend.kv_store.index_owners import OwnerTables
from vllm_blend.kv_store.index_rows import WRITING, DamagedIndex, Entry, entry_of
from vllm_blend.kv_store.keys import ChunkId, ModelFingerprint, chunk_key
from vllm_blend.kv_store.segment import Extent
from vllm_blend.kv_store.serialization import is_key

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 100_000  # keys that were put once, with admission on second use
LOG_PAGES = 256  # of 4 KiB: at this length sqlite's log is folded into the database, and begins again
MAX_PARAMETERS = 500  # in one query: SQLite takes 999 or more

T = TypeVar("T")

_SCHEMA = """
CREATE TABLE segments (name TEXT PRIMARY KEY, filled INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE chunks (
  id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL, state INTEGER NOT NULL,
  segment TEXT NOT NULL, offset INTEGER NOT NULL, bytes INTEGER NOT NULL, header BLOB NOT NULL,
  cost REAL NOT NULL, frequency INTEGER NOT NULL, priority REAL NOT NULL
);
CREATE UNIQUE INDEX live ON chunks (key) WHERE state = 1;
CREATE INDEX by_priority ON chunks (priority, id) WHERE state = 1;
CREATE INDEX unfinished ON chunks (id) WHERE state != 1;
CREATE INDEX by_segment ON chunks (segment);
CREATE TABLE totals (bytes INTEGER NOT NULL, clock REAL NOT NULL);
CREATE TRIGGER more AFTER INSERT ON chunks BEGIN UPDATE totals SET bytes = bytes + NEW.bytes; END;
CREATE TRIGGER less AFTER DELETE ON chunks BEGIN UPDATE totals SET bytes = bytes - OLD.bytes; END;
CREATE TABLE remembered (seen INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE);
INSERT INTO totals VALUES (0, 0.0);
"""
# What exports need, and indices of earlier versions lack: chunks that are stored from now on can be exported.
_NAMES_SCHEMA = """
CREATE TABLE models (digest TEXT PRIMARY KEY, fingerprint TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE names (
  id INTEGER PRIMARY KEY, model TEXT NOT NULL, context TEXT NOT NULL, tokens BLOB NOT NULL
);
CREATE TRIGGER nameless AFTER DELETE ON chunks BEGIN DELETE FROM names WHERE id = OLD.id; END;
"""
_COLUMNS = "id, key, state, segment, offset, bytes, header"


class Index:
    """Safe to use from several threads. Everything raises sqlite3.Error if the database cannot be used, among others
    when another process keeps it locked for `timeout` seconds."""

    def __init__(self, path: Path, timeout: float) -> None:
        self._lock = threading.RLock()
        self._db = sqlite3.connect(path, timeout=timeout, isolation_level=None, check_same_thread=False)
        self.owners = OwnerTables(self._db)
        self._db.text_factory = lambda text: text.decode(errors="replace")  # damaged text is found as what it is
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
            with self.transaction():
                self._create_or_check()
        except UnicodeDecodeError as error:  # sqlite's message quotes what is damaged
            self._db.close()
            raise DamagedIndex(f"its schema is no text: {error}") from error
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all changes inside or none, while other processes wait. Not to be nested."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    # Queries.

    @property
    def num_bytes(self) -> int:
        """Return the bytes of segments that are taken, by chunks in any state."""
        return int(self._value("SELECT bytes FROM totals"))

    def __len__(self) -> int:
        return int(self._value("SELECT count(*) FROM chunks WHERE state = 1"))

    def find(self, key: str) -> Entry | None:
        """Return the chunk that `key` stands for now."""
        return next(iter(self._entries("WHERE key = ? AND state = 1", key)), None)

    def find_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        """Return the chunks that these keys stand for now, by key, with their token ids."""
        found: dict[str, Entry] = {}
        for some in _batched(keys):
            marks = ", ".join("?" * len(some))
            columns = f"{_COLUMNS}, tokens FROM chunks LEFT JOIN names USING (id)"
            for *row, tokens in self._query(f"SELECT {columns} WHERE state = 1 AND key IN ({marks})", *some):
                for entry in self._validate([tuple(row)]):
                    found[entry.key] = replace(entry, tokens=tokens)
        return found

    def are_live(self, entries: Sequence[Entry]) -> set[int]:
        """Return the ids of those that are live."""
        live: set[int] = set()
        for some in _batched(entries):
            marks = ", ".join("?" * len(some))
            query = f"SELECT id FROM chunks WHERE state = 1 AND id IN ({marks})"
            live |= {number for (number,) in self._query(query, *(entry.id for entry in some))}
        return live

    def live(self) -> list[Entry]:
        return self._entries("WHERE state = 1")

    def segments(self) -> list[str]:
        return [name for (name,) in self._query("SELECT name FROM segments")]

    def unfinished(self) -> list[Entry]:
        """Return chunks that are not live: being written or given up, or left by a process that died."""
        return self._entries("WHERE state != 1 ORDER BY id")

    def by_priority(self, owner: str) -> Iterator[tuple[float, Entry]]:
        """Yield the live chunks of an owner with their priorities, the least first; for use inside of a transaction."""
        for priority, *row in self.owners.by_priority(_COLUMNS.split(","), owner):
            for entry in self._validate([tuple(row)]):
                yield priority, entry

    def held(self) -> dict[str, int]:
        """Return the bytes of each owner's chunks, in any state."""
        with self._lock:
            return self.owners.held()

    def by_priority_of_segments(self) -> list[list[Entry]]:
        """Return the chunks of each segment, in any state, the segment of the least priority by byte first."""
        priority = "sum(CASE state WHEN 1 THEN priority * bytes ELSE 0 END) / sum(bytes)"
        order = f"SELECT segment FROM chunks GROUP BY segment ORDER BY {priority}"
        return [self.in_segment(name) for (name,) in self._query(order)]

    def name(self, entry: Entry) -> tuple[ChunkId, ModelFingerprint] | None:
        """Return which chunk it is, and of which model, where that is known and fits the key."""
        row = self._query_one(
            "SELECT context, tokens, fingerprint FROM names JOIN models ON model = digest WHERE id = ?", entry.id
        )
        if row is None:
            return None
        try:
            context, tokens, fingerprint = row
            model = ModelFingerprint(**json.loads(fingerprint))
            ids = tuple(np.frombuffer(tokens, "<i8").tolist())
        except (TypeError, ValueError, RecursionError):  # damaged, or of a version with other properties
            return None
        fits = chunk_key(model, context, ids) == entry.key
        return (ChunkId(entry.key, context, ids), model) if fits else None

    def in_segment(self, segment: str) -> list[Entry]:
        """Return the chunks of a segment, in any state."""
        return self._entries("WHERE segment = ?", segment)

    # Changes, inside of a transaction.

    def insert(self, key: str, num_bytes: int, header: bytes, cost: float, segment_bytes: int) -> Entry:
        """Take `num_bytes` behind what the segments hold, for a chunk that is being written. Segments of
        `segment_bytes` are full."""
        row = self._query_one("SELECT name, filled FROM segments WHERE filled < ?", segment_bytes)
        segment, offset = row or (uuid.uuid4().hex, 0)
        if not (isinstance(segment, str) and is_key(segment) and isinstance(offset, int) and offset % PAGE == 0):
            raise DamagedIndex(
                f"{segment!r}, filled up to byte {offset!r}, is not a segment"
            )  # its name becomes a path
        self._db.execute("REPLACE INTO segments VALUES (?, ?)", (segment, offset + num_bytes))
        values = (key, WRITING, segment, offset, num_bytes, header, cost, self._clock + cost / num_bytes)
        columns = "key, state, segment, offset, bytes, header, cost, frequency, priority"
        cursor = self._db.execute(f"INSERT INTO chunks ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, 1, ?)", values)
        assert cursor.lastrowid is not None
        return Entry(cursor.lastrowid, key, WRITING, Extent(segment, offset, num_bytes), header)

    def set_name(self, entry: Entry, chunk: ChunkId, model: ModelFingerprint) -> None:
        """Store which chunk an entry is."""
        self._db.execute("INSERT OR IGNORE INTO models VALUES (?, ?)", (model.digest, json.dumps(asdict(model))))
        tokens = np.asarray(chunk.token_ids, "<i8").tobytes()
        self._db.execute("REPLACE INTO names VALUES (?, ?, ?, ?)", (entry.id, model.digest, chunk.context, tokens))

    def publish(self, entry: Entry) -> Entry | None:
        """Make a written chunk live, and return the one it replaces. Raises DamagedIndex if its row is gone."""
        replaced = self.find(entry.key)
        if replaced is not None:
            self.give_up([replaced])
        changed = self._db.execute("UPDATE chunks SET state = 1 WHERE id = ? AND state = 0", (entry.id,))
        if changed.rowcount != 1:
            raise DamagedIndex("the row of a chunk disappeared while it was written")
        return replaced

    def give_up(self, entries: Iterable[Entry]) -> None:
        self._db.executemany("UPDATE chunks SET state = 2 WHERE id = ?", [(entry.id,) for entry in entries])

    def advance_clock(self, entries: Iterable[Entry]) -> None:
        """Raise the clock to the priority of chunks that are evicted."""
        ids = [(entry.id,) for entry in entries]
        query = "UPDATE totals SET clock = max(clock, (SELECT priority FROM chunks WHERE id = ?))"
        self._db.executemany(query, ids)

    def touch(self, uses: Mapping[int, int]) -> None:
        """Count uses (id -> how many) of chunks."""
        query = (
            "UPDATE chunks SET frequency = frequency + ?, priority = ? + (frequency + ?) * cost / bytes WHERE id = ?"
        )
        clock = self._clock
        self._db.executemany(query, [(count, clock, count, number) for number, count in uses.items()])
        self.owners.touch(uses, time.time())

    def delete(self, entry: Entry) -> None:
        """Delete the row of a chunk whose space is given back."""
        self._db.execute("DELETE FROM chunks WHERE id = ?", (entry.id,))

    def delete_segment(self, segment: str) -> None:
        """Delete the rows of a segment whose file is gone."""
        self._db.execute("DELETE FROM chunks WHERE segment = ?", (segment,))
        self._db.execute("DELETE FROM segments WHERE name = ?", (segment,))

    def remember(self, key: str) -> bool:
        """Remember `key`. Return whether it was remembered before."""
        if self._query_one("SELECT 1 FROM remembered WHERE key = ?", key) is not None:
            return True
        cursor = self._db.execute("INSERT INTO remembered (key) VALUES (?)", (key,))
        self._db.execute("DELETE FROM remembered WHERE seen <= ?", ((cursor.lastrowid or 0) - MAX_REMEMBERED,))
        return False

    # Helpers.

    def _entries(self, condition: str, *values: object) -> list[Entry]:
        return list(self._validate(self._query(f"SELECT {_COLUMNS} FROM chunks {condition}", *values)))

    def _validate(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[Entry]:
        """Yield the chunks of rows, and delete the rows that are not chunks: they must not cost the others. Where their
        bytes lie is not known; the space comes back with the segment."""
        for row in rows:
            try:
                entry = entry_of(row)
            except DamagedIndex as error:
                logger.warning("a chunk is dropped from the index of the chunk store: %s", error)
                with self._lock, nullcontext() if self._db.in_transaction else self.transaction():
                    self._db.execute("DELETE FROM chunks WHERE id = ?", (row[0],))
                    # The row may not have fitted the sum.
                    self._db.execute("UPDATE totals SET bytes = (SELECT coalesce(sum(bytes), 0) FROM chunks)")
            else:
                yield entry

    @property
    def _clock(self) -> float:
        return float(self._value("SELECT clock FROM totals"))

    def _query_one(self, query: str, *values: object) -> tuple[Any, ...] | None:
        with self._lock:
            row: tuple[Any, ...] | None = self._db.execute(query, values).fetchone()
            return row

    def _query(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def _value(self, query: str) -> int | float:
        row = self._query_one(query)
        if row is None or not isinstance(row[0], int | float):
            raise DamagedIndex(f"{query!r} has no answer")
        return row[0]

    def _create_or_check(self) -> None:
        statements, names = (schema.strip().split(";\n") for schema in (_SCHEMA, _NAMES_SCHEMA))
        found = {sql for (sql,) in self._query("SELECT sql FROM sqlite_master")}
        if not found:
            for statement in [*statements, *names]:
                self._db.execute(statement)
            self.owners.create_or_repair(found)
            # Ids that no earlier index of this folder has used: its processes may still be there, with their locks.
            self._db.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('chunks', ?)", (time.time_ns(),))
            return
        if missing := [sql for sql in statements if sql.startswith("CREATE") and sql.rstrip(";") not in found]:
            raise DamagedIndex(f"it lacks {missing}")
        for sql in names:
            if sql.rstrip(";") not in found:
                self._db.execute(sql)
        if (answer := self._query_one("PRAGMA integrity_check")) != ("ok",):
            raise DamagedIndex(f"sqlite says {answer}")
        rows = self._query(f"SELECT {_COLUMNS} FROM chunks")
        if sum(entry_of(row).extent.num_bytes for row in rows) != self.num_bytes:
            raise DamagedIndex("its sums are wrong")
        self.owners.create_or_repair(found)


def _batched(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield as many items at a time as a query takes parameters."""
    for start in range(0, len(items), MAX_PARAMETERS):
        yield items[start : start + MAX_PARAMETERS]
