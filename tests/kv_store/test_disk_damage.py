"""Damaged, truncated, foreign and vanished files: misses, each with one warning, and never a wrong byte."""

from __future__ import annotations

import logging
import random
import shutil
import sqlite3
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.kv_store.stored_chunks import MODEL, OTHER_MODEL, PAGE, bytes_on_disk, chunk, key, same, segments, there
from vllm_blend.kv_store.disk import DiskChunkStore
from vllm_blend.kv_store.layout import ChunkLayout
from vllm_blend.kv_store.store_config import DiskStoreConfig

COUNT = 6
WARNING = "not used, it will be computed again"


def open_store(folder: Path, model: str = MODEL, **settings: Any) -> DiskChunkStore:
    return DiskChunkStore(DiskStoreConfig(folder, 64 << 20, model, **settings))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with open_store(tmp_path) as store:
        for number in range(COUNT):
            store.put(key(number), chunk(key(number)))
    return tmp_path


def flip(path: Path, at: int, bit: int = 4) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def places(folder: Path) -> dict[int, tuple[int, ChunkLayout]]:
    """Return where each chunk lies in the only segment."""
    with sqlite3.connect(folder / "v1" / "index.sqlite3") as index:
        rows = index.execute("SELECT key, offset FROM chunks").fetchall()
    index.close()
    return {int(name, 16): (offset, ChunkLayout.from_kv(chunk(name), "auto")) for name, offset in rows}


def check_one_lost(store: DiskChunkStore, lost: int, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Chunk `lost` is a miss that is warned of once and dropped; the others are what they were."""
    before = store.num_bytes
    assert store.get(key(lost)) is None
    assert key(lost) not in store and store.num_bytes < before
    assert store.get(key(lost)) is None
    assert store.stats.misses == {kind: 1, "absent": 1}
    assert caplog.text.count(WARNING) == 1 and key(lost) in caplog.text
    for number in set(range(COUNT)) - {lost}:
        assert same(store.get(key(number)), chunk(key(number)))
    store.put(key(lost), chunk(key(lost)))
    assert same(store.get(key(lost)), chunk(key(lost))) and store.num_bytes == before


@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("where", [0.0, 0.3, 0.5, 0.999])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_of_any_layer_is_a_miss(
    folder: Path, layer: int, where: float, bit: int, caplog: pytest.LogCaptureFixture
) -> None:
    offset, layout = places(folder)[2]
    start, stop = layout.layer_span(layer)
    flip(segments(folder)[0], offset + start + int(where * (stop - start)), bit)
    with open_store(folder) as store:
        check_one_lost(store, 2, "damaged", caplog)


def test_a_flipped_bit_is_found_in_layers_that_are_read_by_themselves(tmp_path: Path) -> None:
    kv = chunk(key(0), tokens=9000)
    with open_store(tmp_path) as store:
        store.put(key(0), kv)
        flip(segments(tmp_path)[0], ChunkLayout.from_kv(kv, "auto").layer_span(2)[0])
        pending = there(store.read(key(0)))
        assert pending.wait() is None and pending.layer(2) is None
        assert store.stats.misses == {"damaged": 1} and len(store) == 0


def test_a_hole_is_a_miss(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    offset, layout = places(folder)[1]
    with segments(folder)[0].open("r+b") as file:
        file.seek(offset)
        file.write(bytes(layout.payload_bytes))
    with open_store(folder) as store:
        check_one_lost(store, 1, "damaged", caplog)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("cut", [1, PAGE - 1, PAGE, 3 * PAGE])
def test_a_truncated_segment_loses_its_last_chunk(
    folder: Path, cut: int, direct: bool, caplog: pytest.LogCaptureFixture
) -> None:
    last = max(places(folder).items(), key=lambda item: item[1][0])[0]
    path = segments(folder)[0]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - cut)
    with open_store(folder, direct=direct) as store:
        check_one_lost(store, last, "truncated", caplog)


@pytest.mark.parametrize("size", [0, 1, PAGE + 5])
def test_what_is_left_of_a_segment_is_used(folder: Path, size: int) -> None:
    with segments(folder)[0].open("r+b") as file:
        file.truncate(size)
    with open_store(folder) as store:
        for number in range(COUNT):
            assert store.get(key(number)) is None
        assert store.stats.misses["truncated"] == COUNT and len(store) == store.num_bytes == 0


@pytest.mark.parametrize("opened", [True, False])
def test_a_vanished_segment_is_a_miss_for_each_of_its_chunks(
    folder: Path, opened: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(folder) as store:
        if opened:
            assert store.get(key(0)) is not None
        segments(folder)[0].unlink()
        for _ in range(2):
            assert all(store.get(key(number)) is None for number in range(COUNT))
        assert store.stats.misses == {"vanished": COUNT, "absent": COUNT}
        assert caplog.text.count(WARNING) == COUNT
        assert len(store) == store.num_bytes == 0
        store.put(key(0), chunk(key(0)))
        assert same(store.get(key(0)), chunk(key(0)))


def test_segments_that_changed_places_are_misses(tmp_path: Path) -> None:
    with open_store(tmp_path, segment_bytes=PAGE) as store:
        for number in range(2):
            store.put(key(number), chunk(key(number), tokens=16))
    one, other = segments(tmp_path)
    one.rename(tmp_path / "third")
    other.rename(one)
    (tmp_path / "third").rename(other)
    with open_store(tmp_path) as store:
        assert store.get(key(0)) is None and store.get(key(1)) is None
        assert store.stats.misses == {"damaged": 2}


def test_chunks_of_another_model_are_foreign(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_store(folder, OTHER_MODEL) as store:
        assert store.get(key(0)) is None
        assert store.stats.misses == {"foreign": 1} and "another model" in caplog.text


@pytest.mark.parametrize("part", ["magic", "key", "shape", "checksum of a layer", "its own checksum"])
def test_a_damaged_header_is_a_miss(folder: Path, part: str, caplog: pytest.LogCaptureFixture) -> None:
    at = {"magic": 2, "key": 20, "shape": 50, "checksum of a layer": 66, "its own checksum": -3}[part]
    with sqlite3.connect(folder / "v1" / "index.sqlite3") as index:
        [[header]] = index.execute("SELECT header FROM chunks WHERE key = ?", (key(4),)).fetchall()
        changed = bytearray(header)
        changed[at] ^= 1
        index.execute("UPDATE chunks SET header = ? WHERE key = ?", (bytes(changed), key(4)))
    index.close()
    with open_store(folder) as store:
        check_one_lost(store, 4, "foreign" if part == "magic" else "damaged", caplog)


def resigned(header: bytes, more: bytes) -> bytes:
    """Return a header that is longer than its layers need, with a checksum that fits."""
    body = header[:-8] + more
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


@pytest.mark.parametrize(
    ("column", "value", "kind"),
    [
        ("header", lambda header: resigned(header, b"abc"), "damaged"),
        ("header", lambda header: resigned(header, bytes(8)), "damaged"),
        ("header", "text", "truncated"),
        ("header", 3, "truncated"),
        ("offset", "x", "absent"),
        ("bytes", -4096, "absent"),
        ("segment", "../x", "absent"),
    ],
)
def test_a_forged_row_costs_no_other_chunk_and_is_dropped(
    folder: Path, column: str, value: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Chunks asked for together with it are found, its lock ends, and its key can be stored again."""
    with open_store(folder) as store:
        with sqlite3.connect(folder / "v1" / "index.sqlite3") as index:
            [[header]] = index.execute("SELECT header FROM chunks WHERE key = ?", (key(4),)).fetchall()
            value = value(header) if callable(value) else value
            index.execute(f"UPDATE chunks SET {column} = ? WHERE key = ?", (value, key(4)))
        index.close()
        for _ in range(2):
            pending = store.read_many([key(number) for number in range(COUNT)])
            for number, one in enumerate(pending):
                assert one is None if number == 4 else same(there(one).wait(), chunk(key(number)))
        assert store.stats.misses == Counter([kind, "absent"])
        assert caplog.text.count(WARNING) + caplog.text.count("is dropped from the index") == 1
        assert not store.space.locks._readers and len(store) == COUNT - 1
        assert store.num_bytes == sum(entry.extent.num_bytes for entry in store.space.index.live())
        store.put(key(4), chunk(key(4)))
        assert same(store.get(key(4)), chunk(key(4)))
    with open_store(folder) as store:
        assert len(store) == COUNT


def test_a_row_that_points_elsewhere_is_a_miss_and_harms_no_other_chunk(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with sqlite3.connect(folder / "v1" / "index.sqlite3") as index:
        index.execute("UPDATE chunks SET offset = offset + 4096 * 100000 WHERE key = ?", (key(3),))
    index.close()
    with open_store(folder) as store:
        check_one_lost(store, 3, "truncated", caplog)


def test_a_row_of_another_size_than_its_header_is_a_miss_and_harms_no_other_chunk(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with sqlite3.connect(folder / "v1" / "index.sqlite3") as index:
        index.execute("UPDATE chunks SET bytes = bytes - 4096 WHERE key = ?", (key(3),))
        index.execute("UPDATE totals SET bytes = bytes - 4096")
    index.close()
    with open_store(folder) as store:
        assert store.get(key(3)) is None
        assert store.stats.misses == {"damaged": 1} and caplog.text.count(WARNING) == 1
        for number in set(range(COUNT)) - {3}:
            assert same(store.get(key(number)), chunk(key(number)))
        store.put(key(3), chunk(key(3)))
        assert same(store.get(key(3)), chunk(key(3)))


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE chunks SET bytes = bytes + 1",
        "UPDATE chunks SET offset = -4096",
        "UPDATE chunks SET offset = 'x'",
        "UPDATE chunks SET segment = '../../../etc/passwd'",
        "UPDATE totals SET bytes = bytes + 4096",
        "DELETE FROM totals",
        "DROP TABLE segments",
        "DROP TRIGGER less",
    ],
)
def test_an_index_that_contradicts_itself_is_started_anew(
    folder: Path, statement: str, caplog: pytest.LogCaptureFixture
) -> None:
    with sqlite3.connect(folder / "v1" / "index.sqlite3") as index:
        index.execute(statement)
    index.close()
    with open_store(folder) as store:
        check_empty_and_usable(store, folder)
    assert caplog.text.count("is damaged") == 1


def check_empty_and_usable(store: DiskChunkStore, folder: Path) -> None:
    assert len(store) == store.num_bytes == bytes_on_disk(folder) == 0
    assert store.get(key(0)) is None
    store.put(key(0), chunk(key(0)))
    assert same(store.get(key(0)), chunk(key(0))) and store.num_bytes == bytes_on_disk(folder)


@pytest.mark.parametrize("content", [b"", b"x", b"no database" * 1000, b"\0" * 8192])
@pytest.mark.parametrize("suffix", ["", "-wal"])
def test_an_index_that_is_none_is_started_anew(folder: Path, content: bytes, suffix: str) -> None:
    path = folder / "v1" / f"index.sqlite3{suffix}"
    path.write_bytes(content)
    with open_store(folder) as store:
        if suffix:  # sqlite sees that the log is none of its own
            assert all(same(store.get(key(number)), chunk(key(number))) for number in range(COUNT))
        else:
            check_empty_and_usable(store, folder)


def test_without_its_index_a_folder_is_empty(folder: Path) -> None:
    (folder / "v1" / "index.sqlite3").unlink()
    with open_store(folder) as store:
        check_empty_and_usable(store, folder)


@pytest.mark.slow
def test_no_flipped_bit_of_the_index_changes_what_is_read(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """Most are found when the index is opened; the others in the chunk itself, or they hide a chunk."""
    caplog.set_level(logging.CRITICAL)
    choose, path = random.Random(5), folder / "v1" / "index.sqlite3"
    size, right, anew = path.stat().st_size, 0, 0
    header = [(at, choose.randrange(8)) for at in range(100)]
    for at, bit in [*header, *((choose.randrange(size), choose.randrange(8)) for _ in range(100))]:
        copy = tmp_path_factory.mktemp("flipped") / "store"
        shutil.copytree(folder, copy)
        flip(copy / "v1" / path.name, at, bit)
        with open_store(copy, num_threads=1) as store:
            for number in range(COUNT):
                found = store.get(key(number))
                assert found is None or same(found, chunk(key(number)))
                right += found is not None
            anew += len(store) == 0
            store.put(key(COUNT), chunk(key(COUNT)))
            found = store.get(key(COUNT))
            assert found is None or same(found, chunk(key(COUNT)))
        with open_store(copy, num_threads=1) as store:
            found = store.get(key(COUNT))
            assert found is None or same(found, chunk(key(COUNT)))
        shutil.rmtree(copy)
    assert right > 200 * COUNT * 0.3 and anew > 5  # both happen


def test_an_index_that_breaks_while_it_is_open_is_no_error(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_store(folder) as store:
        assert store.get(key(0)) is not None
        store._flush_uses()
        store.space.index._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        path = folder / "v1" / "index.sqlite3"
        path.write_bytes(b"\xff" * path.stat().st_size)
        store.space.index._db.execute("PRAGMA cache_size = 0")
        with sqlite3.connect(path) as other, pytest.raises(sqlite3.DatabaseError):
            other.execute("SELECT * FROM chunks")
        other.close()
        for number in range(COUNT):
            found = store.get(key(number))
            assert found is None or same(found, chunk(key(number)))
        store.put(key(COUNT), chunk(key(COUNT)))
        store.remove(key(0))
        assert isinstance(key(1) in store, bool) and isinstance(len(store), int) and store.num_bytes >= 0
        store.clear()
    with open_store(folder) as store:
        check_empty_and_usable(store, folder)


def test_a_file_that_cannot_be_read_now_is_a_miss_and_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with open_store(folder) as store:
        monkeypatch.setattr(store.space.files, "read", fail)
        assert store.get(key(0)) is None and store.get(key(1)) is None
        monkeypatch.undo()
        assert store.stats.misses == {"error": 2} and caplog.text.count("Too many open files") == 1
        assert same(store.get(key(0)), chunk(key(0)))


def test_damage_that_two_readers_find_at_once_is_warned_of_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    offset, _ = places(folder)[0]
    flip(segments(folder)[0], offset)
    with open_store(folder) as store:
        pending = [store.read(key(0)) for _ in range(5)]
        assert all(p.wait() is None for p in pending if p is not None)
        assert store.stats.num_misses == 5 and caplog.text.count(WARNING) == 1
        assert len(store) == COUNT - 1 and store.num_bytes == bytes_on_disk(folder)


def test_a_faulty_chunk_that_cannot_be_dropped_is_absent_and_is_stored_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its row stays, the chunk must not count as present: the one that is computed again could never replace
    it."""

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("database is locked")

    offset, _ = places(folder)[2]
    flip(segments(folder)[0], offset)
    with open_store(folder) as store:
        monkeypatch.setattr(store.space, "drop", fail)
        assert store.get(key(2)) is None
        monkeypatch.undo()
        assert len(store) == COUNT and store.space.index.find(key(2)) is not None  # the row has stayed
        assert key(2) not in store and key(1) in store
        assert store.get(key(2)) is None and store.stats.misses == {"damaged": 1, "absent": 1}
        store.put(key(2), chunk(key(2)))
        assert store.stats.refused == {} and store.stats.num_stored == 1
        assert key(2) in store and same(store.get(key(2)), chunk(key(2)))
