"""Chunks that are written with one wait for the disk, and neighbours that are read at once."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kv_store.disk_processes import open_store
from tests.kv_store.stored_chunks import PAGE, bytes_on_disk, chunk, hold, key, same, segments, sized, there
from vllm_blend.kv_store import pending
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.host_memory import aligned_empty
from vllm_blend.kv_store.layout import ChunkFault
from vllm_blend.kv_store.segment import Extent, SegmentFiles


class Calls:
    """How often the system was asked for something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts = {"preadv": 0, "pwritev": 0, "fdatasync": 0}
        for name in self.counts:
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self.counts[name] += 1
            return function(*arguments)

        return counted


def test_many_chunks_take_one_write_and_one_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path, 64) as store:
        calls = Calls(monkeypatch)
        store.put_many([(key(number), sized(1 + number)) for number in range(8)])
        assert calls.counts == {"preadv": 0, "pwritev": 1, "fdatasync": 1}
        assert len(store) == store.stats.num_stored == 8 and store.num_bytes == bytes_on_disk(tmp_path) == 36 * PAGE
        found = [there(each).wait() for each in store.read_many([key(number) for number in range(8)])]
        assert calls.counts["preadv"] == 1
        assert all(same(kv, sized(1 + number)) for number, kv in enumerate(found))
        assert store.stats.num_hits == 8 and store.stats.bytes_read == 36 * PAGE
    with open_store(tmp_path, 64) as store:
        assert all(same(store.get(key(number)), sized(1 + number)) for number in range(8))


def test_full_segments_split_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path, 64, segment_bytes=8 * PAGE) as store:
        calls = Calls(monkeypatch)
        store.put_many([(key(number), sized(3)) for number in range(7)])
        assert len(segments(tmp_path)) == 3
        assert calls.counts["pwritev"] == calls.counts["fdatasync"] == 3
        found = [there(each).wait() for each in store.read_many([key(number) for number in range(6, -1, -1)])]
        assert calls.counts["preadv"] == 3
        assert all(same(kv, sized(3)) for kv in found) and store.stats.num_misses == 0


def test_only_neighbours_are_read_at_once_and_not_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "READ_BYTES", 6 * PAGE)
    with open_store(tmp_path, 64) as store:
        store.put_many([(key(number), sized(2)) for number in range(8)])
        calls = Calls(monkeypatch)
        for chosen, reads in (([0, 1, 2], 1), ([0, 1, 2, 3], 2), ([5, 3, 1], 3), ([7, 6, 4, 5, 0], 3), ([3, 3], 1)):
            calls.counts["preadv"] = 0
            found = [there(each).wait() for each in store.read_many([key(number) for number in chosen])]
            assert all(same(kv, sized(2)) for kv in found) and calls.counts["preadv"] == reads, chosen


def test_a_damaged_chunk_does_not_harm_its_neighbours(tmp_path: Path) -> None:
    with open_store(tmp_path, 64) as store:
        store.put_many([(key(number), sized(2)) for number in range(5)])
        extent = there(store.space.index.find(key(2))).extent
        [path] = segments(tmp_path)
        with path.open("r+b") as file:
            file.seek(extent.offset + 5000)
            file.write(b"\xff\x00\xff")
        found = [None if each is None else each.wait() for each in store.read_many([key(n) for n in range(5)])]
        assert [kv is None for kv in found] == [False, False, True, False, False]
        assert store.stats.misses == {"damaged": 1} and store.stats.num_hits == 4 and len(store) == 4


def test_a_truncated_segment_costs_the_chunks_behind_its_end(tmp_path: Path) -> None:
    with open_store(tmp_path, 64) as store:
        store.put_many([(key(number), sized(2)) for number in range(5)])
        [path] = segments(tmp_path)
        os.truncate(path, 5 * PAGE)
        found = [None if each is None else each.wait() for each in store.read_many([key(n) for n in range(5)])]
        assert [kv is None for kv in found] == [False, False, True, True, True]
        assert store.stats.misses == {"truncated": 3}


def test_what_cannot_be_stored_is_refused_by_itself(tmp_path: Path) -> None:
    """Too large, not finite, there already; and where all do not fit together, those that do are stored."""
    infinite = ChunkKV(torch.full((1, 40, 2, 32), float("inf")), torch.zeros(1, 40, 2, 32))
    with open_store(tmp_path, 8, format="int8") as store:
        fine = chunk(key(1), 40)
        store.put(key(1), fine)
        store.put_many([(key(1), fine), (key(2), infinite), (key(3), chunk(key(3), 1000)), (key(4), chunk(key(4), 9))])
        assert store.stats.refused == {"present": 1, "not_quantizable": 1, "too_large": 1}
        assert key(1) in store and key(4) in store and len(store) == 2
    with open_store(tmp_path / "small", 8) as store:
        store.put_many([(key(number), sized(3)) for number in range(4)], 10)
        assert len(store) == 2 and store.num_bytes == bytes_on_disk(tmp_path / "small") == 6 * PAGE
        assert hold(store, key(3)) and hold(store, key(2))
        store.put_many([(key(number), sized(2)) for number in (5, 6)], 10)
        assert len(store) == 3 and key(6) in store, "the second took the place of the first"
        store.put_many([(key(number), sized(3)) for number in (7, 8)], 10)
        assert len(store) == 3 and store.stats.refused["no_room"] == 2
        with pytest.raises(ValueError, match="chunk key"):
            store.put_many([(key(7), sized(1)), ("x", sized(1))])
        assert key(7) not in store


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path, 64) as store:
        store.put(key(9), sized(2))

        def full(fd: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", full)
            store.put_many([(key(number), sized(2)) for number in range(4)])
        assert store.stats.refused == {"failed": 4} and len(store) == 1
        assert store.num_bytes == bytes_on_disk(tmp_path) == 2 * PAGE
        assert not store.space.index.unfinished() and same(store.get(key(9)), sized(2))


@pytest.mark.parametrize("seed", range(20))
def test_files_write_and_read_pieces_of_any_order(tmp_path: Path, seed: int) -> None:
    """Against memory: pieces here and there, written and read in one call each, with short reads and writes."""
    choose = random.Random(seed)
    files = SegmentFiles(tmp_path, direct=False)
    image = {name: bytearray(64 * PAGE) for name in ("a", "b")}
    free = [(name, page) for name in image for page in range(0, 64, 4)]
    pieces = []
    for name, page in choose.sample(free, 12):
        payload = aligned_empty(choose.randrange(1, 5) * PAGE)
        payload.random_(0, 256, generator=torch.manual_seed(page))
        image[name][page * PAGE : page * PAGE + len(payload)] = payload.numpy().tobytes()
        pieces.append((Extent(name, page * PAGE, len(payload)), payload))
    write, read = os.pwritev, os.preadv

    def short_write(fd: int, views: Sequence[memoryview], at: int) -> int:
        return write(fd, [views[0][: choose.choice([PAGE, 3 * PAGE])]], at)

    def short_read(fd: int, views: Sequence[memoryview], at: int) -> int:
        return read(fd, [views[0][:PAGE]], at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", short_write)
        patch.setattr(os, "preadv", short_read)
        files.write(pieces)
        for name, content in image.items():
            stored = (tmp_path / f"{name}.segment").read_bytes()
            assert stored == bytes(content[: len(stored)])
        name, whole = choose.choice(list(image.items()))
        size = (tmp_path / f"{name}.segment").stat().st_size // PAGE
        cut = choose.randrange(1, size) if size > 1 else 1
        parts = [aligned_empty(cut * PAGE), *([aligned_empty((size - cut) * PAGE)] if size > cut else [])]
        files.read_adjacent(name, 0, parts)
        assert b"".join(part.numpy().tobytes() for part in parts) == bytes(whole[: size * PAGE])
        with pytest.raises(ChunkFault, match="ends at byte"):
            files.read_adjacent(name, 0, [*parts, aligned_empty(PAGE)])
