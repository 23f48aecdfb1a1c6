"""The remote store over fsspec, and what it does with a server that is slow, broken, full or forbidden."""

from __future__ import annotations

import logging
import threading
import uuid
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from tests.clock import Clock
from tests.kv_store.disk_processes import Child
from tests.kv_store.stored_chunks import MODEL, OTHER_MODEL, chunk, key, same, sized
from tests.waiting import DEADLINE, wait_until
from vllm_blend.kv_store import circuit_breaker
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.objects import FsspecObjects, Rejected, open_objects
from vllm_blend.kv_store.remote import RemoteChunkStore
from vllm_blend.kv_store.store_config import RemoteStoreConfig


def open_store(url: str, model: str = MODEL, **settings: Any) -> RemoteChunkStore:
    """Open a store whose deadline no machine is too slow for, unless `settings` have another one."""
    return RemoteChunkStore(RemoteStoreConfig(url, model, **({"timeout": DEADLINE} | settings)))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that decides how long failing servers are left alone."""
    return Clock(monkeypatch, circuit_breaker)


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{uuid.uuid4().hex}/chunks" if request.param == "memory" else f"file://{tmp_path}/chunks"


def object_path(tmp_path: Path, name: str) -> Path:
    return tmp_path / "chunks" / "vllm-blend" / MODEL / name


class Objects:
    """A server of values that can be told what to do."""

    max_bytes: int | None = None

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.error: Exception | None = None
        self.wait: threading.Event | None = None
        self.num_calls = self.num_answers = 0
        self._lock = threading.Lock()

    def _serve(self) -> None:
        with self._lock:
            self.num_calls += 1
        if self.wait is not None:
            assert self.wait.wait(10 * DEADLINE)
        with self._lock:
            self.num_answers += 1
        if self.error is not None:
            raise self.error

    def get(self, name: str, max_bytes: int | None) -> bytes | None:
        self._serve()
        return self.values.get(name)

    def put(self, name: str, data: bytes) -> None:
        self._serve()
        self.values[name] = data

    def delete(self, name: str) -> None:
        self._serve()
        self.values.pop(name, None)

    def exists(self, name: str) -> bool:
        self._serve()
        return name in self.values


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Objects:
    objects = Objects()
    monkeypatch.setattr("vllm_blend.kv_store.remote.open_objects", lambda *_: objects)
    return objects


# What is kept.


@pytest.mark.parametrize("how", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_put_comes_back_also_in_another_store(url: str, dtype: torch.dtype, how: str) -> None:
    kv = chunk(key(1), dtype=dtype)
    store = open_store(url, format=how)
    assert store.put(key(1), kv) is kv
    other = open_store(url)
    found = other.get(key(1))
    assert key(1) in other and key(2) not in other and other.get(key(2)) is None
    if how == "auto":
        assert same(found, kv)
    else:
        assert found is not None and found.k.dtype == dtype and (found.k - kv.k).norm() < 0.03 * kv.k.norm()
    assert (other.stats.num_hits, other.stats.num_misses, other.stats.misses) == (1, 1, {"absent": 1})
    assert store.stats.num_stored == 1 and store.stats.bytes_written == other.stats.bytes_read > 0


def test_putting_again_replaces_and_removing_removes(url: str) -> None:
    store = open_store(url)
    store.put(key(1), sized(2))
    store.put(key(1), sized(3))
    assert same(store.get(key(1)), sized(3))
    store.remove(key(1))
    store.remove(key(1))
    assert key(1) not in store and store.get(key(1)) is None


def test_models_do_not_see_each_others_chunks(url: str) -> None:
    one, other = open_store(url), open_store(url, OTHER_MODEL)
    one.put(key(1), sized(1))
    assert key(1) not in other and other.get(key(1)) is None
    other.put(key(1), sized(2))
    assert same(one.get(key(1)), sized(1)) and same(other.get(key(1)), sized(2))


def test_names_that_are_no_keys_reach_nothing(url: str, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    store = open_store(url)
    for name in ("../../../precious", "", "x", "A" * 32):
        assert name not in store and store.get(name) is None
        store.remove(name)
        with pytest.raises(ValueError, match="32 hex digits"):
            store.put(name, sized(1))
    assert (tmp_path / "precious").read_text() == "x"


def put_again_and_again(connection: Connection, url: str, tokens: int) -> None:
    """Put chunks until the connection says that it is enough."""
    store = open_store(url)
    while not connection.poll():
        for number in range(60):
            store.put(key(1), chunk(key(1), tokens + number % 2))
    connection.send(store.stats.refused)


def test_a_reader_sees_whole_files_only(tmp_path: Path) -> None:
    url, name = f"file://{tmp_path}/chunks", key(1)
    versions = [chunk(name, tokens) for tokens in (300, 301, 800, 801)]
    store = open_store(url)
    store.put(name, versions[0])
    seen: set[int] = set()

    def look() -> int:
        found = store.get(name)
        matches = {at for at, version in enumerate(versions) if same(found, version)}
        assert len(matches) == 1, store.stats.misses
        seen.update(matches)
        return len(seen)

    with Child(put_again_and_again, url, 300) as one, Child(put_again_and_again, url, 800) as other:
        wait_until(lambda: look() > 2, every=0)
        for child in (one, other):
            child.connection.send("enough")
        while one.process.is_alive() or other.process.is_alive():
            look()
        assert not one.receive() and not other.receive()
    assert [path.name for path in object_path(tmp_path, "").iterdir()] == [name]


# Damage.


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign", "other key", "longer"])
def test_a_damaged_value_is_a_miss_that_is_warned_of_once_and_dropped(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(f"file://{tmp_path}/chunks")
    store.put(key(1), chunk(key(1)))
    store.put(key(2), chunk(key(2)))
    path = object_path(tmp_path, key(1))
    data = bytearray(path.read_bytes())
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    other = object_path(tmp_path, key(2)).read_bytes()
    changed: dict[str, bytes | bytearray] = {
        "flip": flipped,
        "cut": data[:-100],
        "empty": b"",
        "foreign": b"x" * 9000,
        "other key": other,
    }
    path.write_bytes(changed.get(damage, data + b"x"))
    assert store.get(key(1)) is None and not path.exists() and store.get(key(1)) is None
    kind = {"flip": "damaged", "foreign": "foreign", "other key": "foreign"}.get(damage, "truncated")
    assert store.stats.misses == {kind: 1, "absent": 1}
    assert caplog.text.count("computed again") == 1 and key(1) in caplog.text
    assert same(store.get(key(2)), chunk(key(2)))


def test_a_value_that_cannot_be_dropped_is_warned_of_once(
    objects: Objects, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store("made://up")
    store.put(key(1), sized(1))
    name = next(iter(objects.values))
    objects.values[name] = objects.values[name][:-1]

    def delete(name: str) -> None:
        raise Rejected("read-only")

    monkeypatch.setattr(objects, "delete", delete)
    for _ in range(5):
        assert store.get(key(1)) is None
    assert store.stats.misses == {"truncated": 5} and caplog.text.count("computed again") == 1


# A server in trouble.


def test_after_some_failures_the_server_is_left_alone_for_a_while(
    objects: Objects, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm_blend")
    store = open_store("made://up", max_failures=3, retry_seconds=0.3)
    store.put(key(1), sized(1))
    objects.error = ConnectionError("no route")
    objects.num_calls = 0
    for _ in range(20):
        assert store.get(key(1)) is None
        store.put(key(2), sized(1))
        assert key(1) not in store
        store.remove(key(1))
    assert objects.num_calls == 3
    assert store.stats.misses == {"unavailable": 20} and store.stats.refused == {"unavailable": 20}
    assert caplog.text.count("no route") == 1 and "tried again every 0.3 s" in caplog.text
    clock.advance(0.29)
    assert store.get(key(1)) is None and objects.num_calls == 3
    clock.advance(0.02)
    assert store.get(key(1)) is None and store.get(key(1)) is None  # one more try
    assert objects.num_calls == 4 and caplog.text.count("no route") == 1
    objects.error = None
    clock.advance(0.31)
    assert same(store.get(key(1)), sized(1)) and same(store.get(key(1)), sized(1))
    assert "works again" in caplog.text


def test_failures_now_and_then_do_not_matter(objects: Objects) -> None:
    store = open_store("made://up", max_failures=2)
    store.put(key(1), sized(1))
    for _ in range(5):
        objects.error = ConnectionError()
        assert store.get(key(1)) is None
        objects.error = None
        assert same(store.get(key(1)), sized(1))
    assert store.stats.num_hits == 5 and store.stats.num_misses == 5


def test_no_call_takes_longer_than_its_deadline(
    objects: Objects, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store("made://up", timeout=0.1, max_failures=3, retry_seconds=60)
    objects.wait = threading.Event()
    for _ in range(30):
        assert store.get(key(1)) is None and key(1) not in store
        store.put(key(1), sized(1))
    wait_until(lambda: objects.num_calls == 3)  # the thread of the last one may be about to begin
    assert objects.num_answers == 0, "no call was answered, and at most three waited for a deadline"
    assert "no answer in 0.1 s" in caplog.text and caplog.text.count("no answer") == 1
    objects.wait.set()


def test_calls_that_have_timed_out_but_still_run_are_limited(objects: Objects) -> None:
    store = open_store("made://up", timeout=0.02, max_failures=1000)
    objects.wait = threading.Event()
    before = set(threading.enumerate())  # of earlier tests, which may still be about to end
    for _ in range(40):
        assert store.get(key(1)) is None
    started = set(threading.enumerate()) - before
    wait_until(lambda: objects.num_calls >= len(started))  # the last one's may be about to begin
    assert objects.num_calls == len(started) == 16
    objects.wait.set()
    wait_until(lambda: not any(thread.is_alive() for thread in started))
    objects.wait = None
    store.config = replace(store.config, timeout=DEADLINE)
    store.put(key(1), sized(1))
    assert same(store.get(key(1)), sized(1))


def test_a_server_that_refuses_is_not_one_that_fails(
    objects: Objects, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store("made://up", max_failures=1)
    store.put(key(1), sized(1))

    def put(name: str, data: bytes) -> None:
        raise Rejected("out of memory")

    monkeypatch.setattr(objects, "put", put)
    for _ in range(5):
        store.put(key(2), sized(1))
        assert same(store.get(key(1)), sized(1))
    assert store.stats.refused == {"rejected": 5} and caplog.text.count("out of memory") == 1


def test_values_above_the_servers_limit_are_not_sent(objects: Objects, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store("made://up")
    objects.max_bytes = 3 * 4096
    store.put(key(1), sized(3))
    store.put(key(2), sized(3))
    store.put(key(3), sized(2))
    assert store.stats.refused == {"too_large": 2} and len(objects.values) == 1
    assert caplog.text.count("12288 bytes and more are not stored") == 1


def test_a_full_or_forbidden_file_system_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"file://{tmp_path}/chunks", max_failures=1)
    store.put(key(1), sized(1))
    for error in (OSError(28, "No space left on device"), PermissionError(13, "Permission denied")):
        with monkeypatch.context() as patch:
            patch.setattr(
                fsspec.implementations.local.LocalFileSystem,
                "pipe_file",
                lambda *_, error=error, **__: (_ for _ in ()).throw(error),
            )
            store.put(key(2), sized(1))
        assert same(store.get(key(1)), sized(1))
    assert store.stats.refused == {"rejected": 2}
    assert [path.name for path in object_path(tmp_path, "").iterdir()] == [key(1)]


def test_what_cannot_be_quantized_is_not_stored(objects: Objects, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store("made://up", format="int8")
    kv = ChunkKV(torch.full((1, 2, 1, 2), float("inf")), torch.zeros(1, 2, 1, 2))
    store.put(key(1), kv)
    store.put(key(2), kv)
    assert store.stats.refused == {"not_quantizable": 2} and not objects.values
    assert caplog.text.count("not finite") == 1


def test_many_threads_at_once(objects: Objects) -> None:
    store, wrong = open_store("made://up"), []

    def work(seed: int) -> None:
        for number in range(40):
            name = key((seed * 7 + number) % 11)
            found = store.get(name)
            if found is None:
                store.put(name, chunk(name))
            elif not same(found, chunk(name)):
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert not wrong and store.stats.num_hits + store.stats.num_misses == 240 and store.stats.num_hits > 100


# Bad input.


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"timeout": 0}, "timeout=0 must be positive"),
        ({"max_failures": 0}, "max_failures=0"),
        ({"retry_seconds": -1}, "retry_seconds=-1"),
        ({"format": "zip"}, "format='zip' must be one of auto, fp8, int8"),
        ({"model": "x"}, "model='x' must be a ModelFingerprint.digest"),
    ],
)
def test_settings_that_cannot_be_say_so(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RemoteStoreConfig(**({"url": "memory://", "model": MODEL} | settings))


def test_a_url_that_is_none_says_so() -> None:
    with pytest.raises(ValueError, match="url='localhost:6379' must be a URL such as redis://"):
        open_store("localhost:6379")
    with pytest.raises(ValueError, match="gopher"):
        open_store("gopher://somewhere")


@pytest.mark.parametrize(("url", "package"), [("redis://localhost", "redis"), ("s3://bucket", "fsspec")])
def test_a_missing_package_says_what_to_install(url: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ImportError, match=rf"{package} package: pip install 'vllm-blend\[store\]'"):
        open_objects(url, 1.0)


def test_no_password_is_logged(objects: Objects, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store("redis://user:secret@host:6379/0", max_failures=1)
    objects.error = ConnectionError("down")
    store.get(key(1))
    assert "redis://***@host:6379/0" in caplog.text and "secret" not in caplog.text


def test_object_stores_replace_objects_as_a_whole() -> None:
    assert FsspecObjects("memory://x")._whole and not FsspecObjects("file:///x")._whole
