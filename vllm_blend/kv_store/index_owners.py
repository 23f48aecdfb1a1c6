"""Whose chunks the index of a disk store has: what each owner holds, and which of its chunks leaves first.

Triggers keep these tables, so that versions of this program that know nothing of owners keep them, too: what those
store belongs to no one, as does what lay there before.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any

logger = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE owners (
  id INTEGER PRIMARY KEY, owner TEXT NOT NULL, bytes INTEGER NOT NULL, priority REAL NOT NULL
);
CREATE INDEX by_owner ON owners (owner, priority, id);
CREATE TABLE owned (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL, used INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER ownerless AFTER INSERT ON chunks BEGIN INSERT INTO owners VALUES (NEW.id, '', NEW.bytes, NEW.priority); END;
CREATE TRIGGER disowned AFTER DELETE ON chunks BEGIN DELETE FROM owners WHERE id = OLD.id; END;
CREATE TRIGGER ranked AFTER UPDATE OF priority ON chunks BEGIN UPDATE owners SET priority = NEW.priority WHERE id = NEW.id; END;
CREATE TRIGGER owns_more AFTER INSERT ON owners BEGIN INSERT INTO owned VALUES (NEW.owner, NEW.bytes, strftime('%s', 'now')) ON CONFLICT (owner) DO UPDATE SET bytes = bytes + NEW.bytes, used = excluded.used; END;
CREATE TRIGGER owns_less AFTER DELETE ON owners BEGIN UPDATE owned SET bytes = bytes - OLD.bytes WHERE owner = OLD.owner; DELETE FROM owned WHERE owner = OLD.owner AND bytes <= 0; END;
"""  # noqa: E501 -- sqlite keeps the text as it is, and it is compared
_FILL = "INSERT INTO owners SELECT id, '', bytes, priority FROM chunks"
_COUNT = "SELECT owner, sum(bytes) FROM owners GROUP BY owner"


class OwnerTables:
    """The tables of one connection. Everything is called inside of a transaction, or with the connection's lock."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def create_or_repair(self, found: set[str]) -> None:
        """Make what is not there yet. Where the tables do not fit the chunks, these belong to no one from now on."""
        statements = _SCHEMA.strip().split(";\n")
        missing = [sql for sql in statements if sql.rstrip(";") not in found]
        if missing and len(missing) < len(statements):
            logger.warning("the index of the chunk store lacks %s: it forgets whose chunks they are", missing)
            for kind, name in self._db.execute(
                "SELECT type, name FROM sqlite_master WHERE name IN ('owners', 'by_owner', 'owned', 'ownerless', "
                "'disowned', 'ranked', 'owns_more', 'owns_less') AND type IN ('trigger', 'table') ORDER BY type DESC"
            ).fetchall():
                self._db.execute(f"DROP {kind} {name}")
            missing = statements
        for sql in missing:
            self._db.execute(sql)
        if missing:
            self._db.execute(_FILL)
        elif not self._fits():
            logger.warning("the index of the chunk store does not know whose chunks it has: they belong to no one now")
            self._db.execute("DELETE FROM owners")
            self._db.execute("DELETE FROM owned")
            self._db.execute(_FILL)

    def give(self, number: int, owner: str) -> None:
        """Give a chunk to an owner."""
        row = self._db.execute("SELECT bytes, priority FROM owners WHERE id = ?", (number,)).fetchone()
        self._db.execute("DELETE FROM owners WHERE id = ?", (number,))
        self._db.execute("INSERT INTO owners VALUES (?, ?, ?, ?)", (number, owner, *row))

    def held(self) -> dict[str, int]:
        """Return the bytes of each owner's chunks, in any state."""
        return dict(self._db.execute("SELECT owner, bytes FROM owned"))

    def active(self, since: float) -> set[str]:
        """Return the owners that have stored or read something since a time, in seconds since the epoch."""
        return {owner for (owner,) in self._db.execute("SELECT owner FROM owned WHERE used >= ?", (since,))}

    def touch(self, numbers: Iterable[int], now: float) -> None:
        """Note that the owners of chunks have read something."""
        query = "UPDATE owned SET used = ? WHERE owner = (SELECT owner FROM owners WHERE id = ?)"
        self._db.executemany(query, [(int(now), number) for number in numbers])

    def by_priority(self, columns: Iterable[str], owner: str) -> Iterator[tuple[Any, ...]]:
        """Yield the priority and these columns of an owner's live chunks, the least priority first."""
        names = ", ".join(f"chunks.{column.strip()}" for column in columns)
        return self._db.execute(
            f"SELECT owners.priority, {names} FROM owners JOIN chunks ON owners.id = chunks.id "
            "WHERE owners.owner = ? AND chunks.state = 1 ORDER BY owners.priority, owners.id",
            (owner,),
        )

    def _fits(self) -> bool:
        """Return whether every chunk has an owner, and the sums are right."""
        chunks = "SELECT id, bytes, priority FROM chunks"
        owners = "SELECT id, bytes, priority FROM owners"
        differences = (f"{chunks} EXCEPT {owners} LIMIT 1", f"{owners} EXCEPT {chunks} LIMIT 1")
        differs = any(self._db.execute(query).fetchone() for query in differences)
        return not differs and dict(self._db.execute(_COUNT)) == self.held()
