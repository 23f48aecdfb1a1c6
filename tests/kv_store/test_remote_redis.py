"""The remote store over a real Redis server, which is stopped, killed, filled and started again in mid-run."""

from __future__ import annotations

import logging
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kv_store.stored_chunks import MODEL, OTHER_MODEL, chunk, key, same, sized
from vllm_blend.kv_store.remote import RemoteChunkStore, RemoteStoreConfig

pytestmark = pytest.mark.redis


class Server:
    """A redis-server of our own on a free port, that keeps nothing on a disk."""

    def __init__(self, folder: Path) -> None:
        self.program = shutil.which("redis-server") or shutil.which("valkey-server")
        if self.program is None:
            pytest.fail("there is no redis-server: apt install redis-server, or leave these out with -m 'not redis'")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder = folder
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, *options: str) -> None:
        fixed = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command = [self.program, *fixed, "--dir", str(self.folder), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline and self.process.poll() is None, "redis-server does not start"
                time.sleep(0.02)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(30)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.stop()


def open_store(server: Server, model: str = MODEL, **settings: object) -> RemoteChunkStore:
    return RemoteChunkStore(RemoteStoreConfig(server.url, model, **settings))


@pytest.mark.parametrize("how", ["auto", "int8"])
def test_what_is_put_comes_back_also_on_another_machine(server, how):
    store, other = open_store(server, format=how), open_store(server)
    for number in range(20):
        store.put(key(number), chunk(key(number)))
    for number in range(20):
        found = other.get(key(number))
        assert same(found, chunk(key(number))) if how == "auto" else found.num_tokens == chunk(key(number)).num_tokens
    assert key(3) in other and key(20) not in other and other.get(key(20)) is None
    other.remove(key(3))
    assert key(3) not in store and store.get(key(3)) is None
    assert open_store(server, OTHER_MODEL).get(key(1)) is None
    assert (other.num_hits, other.tally.misses, store.tally.refused) == (20, {"absent": 1}, {})


def test_a_server_that_is_killed_and_started_again(server, caplog):
    caplog.set_level(logging.INFO, "vllm_blend")
    store = open_store(server, timeout=2.0, max_failures=3, retry_seconds=0.5)
    store.put(key(1), sized(2))
    assert same(store.get(key(1)), sized(2))
    server.stop()
    start = time.monotonic()
    for _ in range(100):
        assert store.get(key(1)) is None
        store.put(key(2), sized(1))
    assert time.monotonic() - start < 20
    assert store.tally.misses == {"unavailable": 100} and store.tally.refused == {"unavailable": 100}
    assert caplog.text.count("tried again every 0.5 s") == 1
    server.start()
    time.sleep(0.6)
    store.put(key(1), sized(3))  # the server has forgotten everything
    assert same(store.get(key(1)), sized(3)) and caplog.text.count("works again") == 1


def test_a_server_that_hangs_costs_a_few_deadlines_and_no_more(server, caplog):
    store = open_store(server, timeout=0.2, max_failures=3, retry_seconds=30.0)
    store.put(key(1), sized(2))
    server.process.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    for _ in range(100):
        assert store.get(key(1)) is None and key(1) not in store
        store.put(key(2), sized(1))
        store.remove(key(1))
    assert 0.5 < time.monotonic() - start < 5
    assert caplog.text.count("tried again every 30 s") == 1


def test_a_server_that_wakes_up_is_used_again(server):
    store = open_store(server, timeout=0.2, max_failures=2, retry_seconds=0.3)
    store.put(key(1), sized(2))
    for _ in range(3):
        server.process.send_signal(signal.SIGSTOP)
        assert all(store.get(key(1)) is None for _ in range(5))
        server.process.send_signal(signal.SIGCONT)
        time.sleep(0.4)
        assert same(store.get(key(1)), sized(2))


def test_a_server_that_is_stopped_while_many_threads_use_it(server):
    store, wrong = open_store(server, timeout=0.5, max_failures=3, retry_seconds=0.2), []
    until = time.monotonic() + 3

    def work(seed: int) -> None:
        number = seed
        while time.monotonic() < until:
            number += 1
            name = key(number % 13)
            found = store.get(name)
            if found is None:
                store.put(name, chunk(name))
            elif not same(found, chunk(name)):
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(0.7)
    server.process.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    server.stop()
    time.sleep(0.3)
    server.start()
    for thread in threads:
        thread.join(30)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert store.num_hits > 20 and store.tally.misses["unavailable"] > 0
    assert not store.tally.misses.keys() - {"absent", "unavailable"}


@pytest.mark.parametrize(("policy", "refuses"), [("noeviction", True), ("allkeys-lfu", False)])
def test_a_full_server_refuses_or_evicts_as_it_is_configured(server, policy, refuses, caplog):
    server.stop()
    server.start("--maxmemory", "8mb", "--maxmemory-policy", policy)
    store = open_store(server, max_failures=1)
    for number in range(300):
        store.put(key(number), sized(16))
    last = next(number for number in reversed(range(300)) if key(number) in store)
    assert same(store.get(key(last)), sized(16))
    assert (store.tally.refused["rejected"] > 100) == refuses and store.tally.refused["unavailable"] == 0
    assert (last == 299) != refuses and caplog.text.count("refuses") == refuses


def test_damage_on_the_server_is_a_miss(server, caplog):
    store = open_store(server)
    name = f"vllm-blend/{MODEL}/{key(1)}"
    store.put(key(1), chunk(key(1)))
    data = bytearray(store._objects.get(name))
    data[-5000] ^= 1
    store._objects.put(name, bytes(data))
    assert store.get(key(1)) is None and store.get(key(1)) is None
    assert store.tally.misses == {"damaged": 1, "absent": 1} and caplog.text.count("computed again") == 1
    store._objects._redis.rpush(name, "a list")
    assert store.get(key(1)) is None and store.tally.misses["rejected"] == 1


def test_a_wrong_password_is_a_miss_and_no_secret_is_logged(server, caplog):
    server.stop()
    server.start("--requirepass", "right")
    url = f"redis://:wrong-secret@127.0.0.1:{server.port}/0"
    store = RemoteChunkStore(RemoteStoreConfig(url, MODEL, max_failures=1))
    assert store.get(key(1)) is None and store.get(key(1)) is None
    assert store.tally.misses == {"unavailable": 2} and "wrong-secret" not in caplog.text
    right = RemoteChunkStore(RemoteStoreConfig(url.replace("wrong-secret", "right"), MODEL))
    right.put(key(1), sized(1))
    assert same(right.get(key(1)), sized(1))


@pytest.mark.parametrize("scheme", ["valkey", "redis"])
def test_valkey_has_a_url_too(server, scheme):
    store = RemoteChunkStore(RemoteStoreConfig(server.url.replace("redis", scheme), MODEL))
    store.put(key(1), sized(1))
    assert same(store.get(key(1)), sized(1))
