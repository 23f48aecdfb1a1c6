"""The remote store over a real Redis server, which is stopped, killed, filled and started again in mid-run."""

from __future__ import annotations

import logging
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.clock import Clock
from tests.kv_store.stored_chunks import MODEL, OTHER_MODEL, chunk, key, same, sized, there
from tests.waiting import DEADLINE, wait_until
from vllm_blend.kv_store import circuit_breaker
from vllm_blend.kv_store.remote import RemoteChunkStore
from vllm_blend.kv_store.store_config import RemoteStoreConfig

pytestmark = pytest.mark.redis

PORTS = range(20_000, 30_000)  # below those that the system takes for connections: one might connect to itself


class Server:
    """A redis-server of our own on a free port, that keeps nothing on a disk."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            pytest.fail("there is no redis-server: apt install redis-server, or leave these out with -m 'not redis'")
        self.program, self.folder, self.port = program, folder, _free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, *options: str) -> None:
        fixed = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command = [self.program, *fixed, "--dir", str(self.folder), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + DEADLINE
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 5).close()
                return
            except OSError:
                assert time.monotonic() < deadline and self.process.poll() is None, "redis-server does not start"
                time.sleep(0.02)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(DEADLINE)


def _free_port() -> int:
    choose = random.SystemRandom()  # whatever seeds a test has set
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port := choose.choice(PORTS)))
            except OSError:
                continue
            return port


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.stop()


def open_store(server: Server, model: str = MODEL, **settings: Any) -> RemoteChunkStore:
    """Open a store whose deadline no machine is too slow for, unless `settings` have another one."""
    return RemoteChunkStore(RemoteStoreConfig(server.url, model, **({"timeout": DEADLINE} | settings)))


def set_timeout(store: RemoteChunkStore, seconds: float) -> None:
    """Change the timeout of the calls that begin from now on."""
    store.config = replace(store.config, timeout=seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that decides how long failing servers are left alone."""
    return Clock(monkeypatch, circuit_breaker)


@pytest.mark.parametrize("how", ["auto", "int8"])
def test_what_is_put_comes_back_also_on_another_machine(server: Server, how: str) -> None:
    store, other = open_store(server, format=how), open_store(server)
    for number in range(20):
        store.put(key(number), chunk(key(number)))
    for number in range(20):
        found = there(other.get(key(number)))
        assert same(found, chunk(key(number))) if how == "auto" else found.num_tokens == chunk(key(number)).num_tokens
    assert key(3) in other and key(20) not in other and other.get(key(20)) is None
    other.remove(key(3))
    assert key(3) not in store and store.get(key(3)) is None
    assert open_store(server, OTHER_MODEL).get(key(1)) is None
    assert (other.stats.num_hits, other.stats.misses, store.stats.refused) == (20, {"absent": 1}, {})


def test_a_server_that_is_killed_and_started_again(
    server: Server, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm_blend")
    store = open_store(server, max_failures=3, retry_seconds=0.5)
    store.put(key(1), sized(2))
    assert same(store.get(key(1)), sized(2))
    server.stop()
    for _ in range(100):
        assert store.get(key(1)) is None
        store.put(key(2), sized(1))
    assert (store._breaker.num_failures, store._breaker.num_refused) == (3, 197)
    assert store.stats.misses == {"unavailable": 100} and store.stats.refused == {"unavailable": 100}
    assert caplog.text.count("tried again every 0.5 s") == 1
    server.start()
    clock.advance(0.6)
    store.put(key(1), sized(3))  # the server has forgotten everything
    assert same(store.get(key(1)), sized(3)) and caplog.text.count("works again") == 1


def test_a_server_that_hangs_costs_a_few_deadlines_and_no_more(
    server: Server, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(server, max_failures=3, retry_seconds=30.0)
    store.put(key(1), sized(2))
    assert same(store.get(key(1)), sized(2))
    server.process.send_signal(signal.SIGSTOP)
    set_timeout(store, 0.2)
    start = time.monotonic()
    for _ in range(100):
        assert store.get(key(1)) is None and key(1) not in store
        store.put(key(2), sized(1))
        store.remove(key(1))
    assert time.monotonic() - start > 0.5
    assert (store._breaker.num_failures, store._breaker.num_refused) == (3, 397)
    assert caplog.text.count("tried again every 30 s") == 1


def test_a_server_that_wakes_up_is_used_again(server: Server, clock: Clock) -> None:
    store = open_store(server, max_failures=2, retry_seconds=0.3)
    store.put(key(1), sized(2))
    for _ in range(3):
        server.process.send_signal(signal.SIGSTOP)
        set_timeout(store, 0.2)
        assert all(store.get(key(1)) is None for _ in range(5))
        server.process.send_signal(signal.SIGCONT)
        set_timeout(store, DEADLINE)
        clock.advance(0.4)
        assert same(store.get(key(1)), sized(2))


def test_a_server_that_is_stopped_while_many_threads_use_it(server: Server) -> None:
    store, wrong, over = open_store(server, timeout=2.0, max_failures=3, retry_seconds=0.2), [], threading.Event()

    def work(seed: int) -> None:
        number = seed
        while not over.is_set():
            number += 1
            name = key(number % 13)
            found = store.get(name)
            if found is None:
                store.put(name, chunk(name))
            elif not same(found, chunk(name)):
                wrong.append(name)

    def wait_for_more(count: Callable[[], int]) -> None:
        before = count()
        wait_until(lambda: count() > before + 20)

    def unavailable() -> int:
        return store.stats.misses["unavailable"]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    try:
        wait_for_more(lambda: store.stats.num_hits)
        server.process.send_signal(signal.SIGSTOP)
        wait_for_more(unavailable)
        server.process.send_signal(signal.SIGCONT)
        wait_for_more(lambda: store.stats.num_hits)
        server.stop()
        wait_for_more(unavailable)
        server.start()
        wait_for_more(lambda: store.stats.num_hits)
    finally:
        over.set()
    for thread in threads:
        thread.join(DEADLINE)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert not store.stats.misses.keys() - {"absent", "unavailable"}


@pytest.mark.parametrize(("policy", "refuses"), [("noeviction", True), ("allkeys-lfu", False)])
def test_a_full_server_refuses_or_evicts_as_it_is_configured(
    server: Server, policy: str, refuses: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server.stop()
    server.start("--maxmemory", "8mb", "--maxmemory-policy", policy)
    store = open_store(server, max_failures=1)
    for number in range(300):
        store.put(key(number), sized(16))
    last = next(number for number in reversed(range(300)) if key(number) in store)
    assert same(store.get(key(last)), sized(16))
    assert (store.stats.refused["rejected"] > 100) == refuses and store.stats.refused["unavailable"] == 0
    assert (last == 299) != refuses and caplog.text.count("refuses") == refuses


def test_damage_on_the_server_is_a_miss(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(server)
    name = f"vllm-blend/{MODEL}/{key(1)}"
    store.put(key(1), chunk(key(1)))
    data = bytearray(there(store._objects.get(name, None)))
    data[-5000] ^= 1
    store._objects.put(name, bytes(data))
    assert store.get(key(1)) is None and store.get(key(1)) is None
    assert store.stats.misses == {"damaged": 1, "absent": 1} and caplog.text.count("computed again") == 1
    objects: Any = store._objects
    objects._redis.rpush(name, "a list")
    assert store.get(key(1)) is None and store.stats.misses["rejected"] == 1


def test_a_wrong_password_is_a_miss_and_no_secret_is_logged(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.stop()
    server.start("--requirepass", "right")
    url = f"redis://:wrong-secret@127.0.0.1:{server.port}/0"
    store = RemoteChunkStore(RemoteStoreConfig(url, MODEL, timeout=DEADLINE, max_failures=1))
    assert store.get(key(1)) is None and store.get(key(1)) is None
    assert store.stats.misses == {"unavailable": 2} and "wrong-secret" not in caplog.text
    right = RemoteChunkStore(RemoteStoreConfig(url.replace("wrong-secret", "right"), MODEL, timeout=DEADLINE))
    right.put(key(1), sized(1))
    assert same(right.get(key(1)), sized(1))


@pytest.mark.parametrize("scheme", ["valkey", "redis"])
def test_valkey_has_a_url_too(server: Server, scheme: str) -> None:
    store = RemoteChunkStore(RemoteStoreConfig(server.url.replace("redis", scheme), MODEL, timeout=DEADLINE))
    store.put(key(1), sized(1))
    assert same(store.get(key(1)), sized(1))
