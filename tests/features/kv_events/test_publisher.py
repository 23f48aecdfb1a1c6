"""The publisher against an independent subscriber: what is on the wire, what is kept, and what a full queue does."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from tests.features.kv_events import subscriber as wire
from tests.features.kv_events.subscriber import Subscriber, subscribed
from tests.waiting import DEADLINE, wait_until
from vllm_blend.features.kv_events import publisher as publisher_module
from vllm_blend.features.kv_events.config import KVEventsConfig
from vllm_blend.features.kv_events.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    wire_form,
)
from vllm_blend.features.kv_events.publisher import ZmqPublisher

ANY_PORT = "tcp://127.0.0.1:*"
STORED = BlockStored([2**64 - 1, 3], 7, [1, 2, 3, 4], 2)


def removed(name: int) -> EventBatch:
    return EventBatch(float(name), [BlockRemoved([name])])


@contextmanager
def publishing(**options: Any) -> Iterator[ZmqPublisher]:
    given = {"endpoint": ANY_PORT, "replay_endpoint": ANY_PORT} | options
    publisher = ZmqPublisher(KVEventsConfig(True, **given))
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def joined(publisher: ZmqPublisher, **options: Any) -> Iterator[tuple[Subscriber, int]]:
    """A subscriber that batches reach, and how many there were until then: a PUB socket says nothing of who listens."""
    with subscribed(publisher.endpoint, publisher.replay_endpoint, **options) as subscriber:

        def reached() -> bool:
            publisher.publish(EventBatch(0.0, [AllBlocksCleared()]))
            return subscriber.has_more()

        wait_until(reached)
        last = publisher.num_published - 1
        while subscriber.receive()[1] != last:
            pass
        yield subscriber, last + 1


@contextmanager
def held_up(publisher: ZmqPublisher, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The publisher's thread as if it were slow: it sends nothing until it is let go on."""
    go_on = threading.Event()
    send = publisher._send_queued

    def wait_and_send() -> None:
        go_on.wait()
        send()

    monkeypatch.setattr(publisher, "_send_queued", wait_and_send)
    try:
        yield go_on
    finally:
        go_on.set()


def test_events_are_on_the_wire_as_vllm_writes_them() -> None:
    batch = EventBatch(1.5, [STORED, BlockRemoved([3]), AllBlocksCleared()])
    assert wire_form(batch, "array") == [
        1.5,
        [
            ["BlockStored", [2**64 - 1, 3], 7, [1, 2, 3, 4], 2, None, "GPU", None],
            ["BlockRemoved", [3], "GPU"],
            ["AllBlocksCleared"],
        ],
        0,
    ]
    assert wire_form(batch, "map")[1][1:] == [
        {"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"},
        {"type": "AllBlocksCleared"},
    ]


def test_a_subscriber_reads_topic_number_and_events() -> None:
    with publishing(topic="kv@pod@model") as publisher, joined(publisher, topic="kv@") as (subscriber, count):
        publisher.publish(EventBatch(1.5, [STORED, BlockRemoved([3]), AllBlocksCleared()]))
        topic, number, batch = subscriber.receive()
        assert (topic, number, batch.ts, batch.data_parallel_rank) == ("kv@pod@model", count, 1.5, 0)
        assert batch.events == [
            wire.BlockStored([2**64 - 1, 3], 7, [1, 2, 3, 4], 2, None, "GPU", None),
            wire.BlockRemoved([3], "GPU"),
            wire.AllBlocksCleared(),
        ]


def test_newer_subscribers_read_maps() -> None:
    with publishing(encoding="map") as publisher, joined_to_maps(publisher) as subscriber:
        publisher.publish(EventBatch(1.5, [STORED, BlockRemoved([3]), AllBlocksCleared()]))
        stored, gone, cleared = subscriber.replay(0)[-1][1].events
        assert (stored.block_hashes, stored.parent_block_hash, stored.medium) == ([2**64 - 1, 3], 7, "GPU")
        assert (stored.token_ids, stored.block_size, gone.block_hashes) == ([1, 2, 3, 4], 2, [3])
        assert type(cleared).__name__ == "_ClearedMap"


@contextmanager
def joined_to_maps(publisher: ZmqPublisher) -> Iterator[Subscriber]:
    with subscribed(publisher.endpoint, publisher.replay_endpoint) as subscriber:
        subscriber.decoder = msgspec.msgpack.Decoder(wire.MapEventBatch)
        yield subscriber


def test_what_was_sent_can_be_asked_for_again_from_any_number_on() -> None:
    with publishing(buffer_steps=3) as publisher, joined(publisher) as (subscriber, count):
        for name in range(5):
            publisher.publish(removed(name))
        received = [subscriber.receive()[1:] for _ in range(5)]
        assert [number for number, _ in received] == list(range(count, count + 5))
        assert subscriber.replay(count + 3) == received[3:]
        assert subscriber.replay(0) == received[2:]  # no more are kept
        assert subscriber.replay(count + 5) == []


def test_nothing_is_kept_if_nothing_is_to_be() -> None:
    with publishing(buffer_steps=0) as publisher, joined(publisher) as (subscriber, _):
        assert subscriber.replay(0) == []


def test_requests_that_are_none_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    with publishing() as publisher, joined(publisher) as (subscriber, count), caplog.at_level(logging.WARNING):
        subscriber.ask(b"")
        subscriber.ask(b"", b"short")
        subscriber.ask(b"x", b"12345678")
        subscriber.ask(b"", b"12345678", b"")
        publisher.publish(removed(1))
        [(number, batch)] = subscriber.replay(count)
        assert (number, batch.ts) == (count, 1.0)
    ignored = [record.args for record in caplog.records if "requests for KV events were ignored" in record.message]
    assert [args[0] for args in ignored if isinstance(args, tuple)] == [1, 2, 4]  # a flood of them is not one of lines


def test_a_full_queue_drops_the_oldest_which_can_still_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        publishing(max_queue_size=2) as publisher,
        joined(publisher) as (subscriber, count),
        caplog.at_level(logging.WARNING),
    ):
        with held_up(publisher, monkeypatch):
            for name in range(5):  # no call waits: nothing is sent meanwhile
                publisher.publish(removed(name))
            assert publisher.num_dropped == 3
        received = [subscriber.receive()[1:] for _ in range(2)]
        assert [(number, batch.ts) for number, batch in received] == [(count + 3, 3.0), (count + 4, 4.0)]
        missed = subscriber.replay(count)
        assert [batch.ts for _, batch in missed] == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert missed[3:] == received
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [1, 2]
    assert "max_queue_size=2" in caplog.text


def test_a_subscriber_that_reads_nothing_holds_nothing_up() -> None:
    batch = EventBatch(0.0, [BlockStored([1] * 1000, None, [1] * 16000, 16)])
    with publishing(hwm=1) as publisher, joined(publisher, hwm=1) as (slow, count):
        for _ in range(200):  # far more than sockets hold
            publisher.publish(batch)
        with subscribed(publisher.endpoint, publisher.replay_endpoint) as quick:
            wait_until(lambda: len(quick.replay(count)) == 200)
        assert len(slow.replay(count)) == 200  # what it has missed by now can be asked for
        assert publisher.num_dropped == 0


def counted_answers(publisher: ZmqPublisher, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that grows by one with each request that has been answered."""
    answered: list[None] = []
    answer = publisher._answer

    def answer_and_count(replay: zmq.Socket[bytes]) -> None:
        answer(replay)
        answered.append(None)

    monkeypatch.setattr(publisher, "_answer", answer_and_count)
    return answered


@contextmanager
def asking(publisher: ZmqPublisher) -> Iterator[zmq.Socket[bytes]]:
    """A client at an inproc:// address: nothing but the sockets' queues lies between it and the publisher."""
    client: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    client.setsockopt(zmq.RCVHWM, 1)
    client.connect(str(publisher.replay_endpoint))
    try:
        yield client
    finally:
        client.close(linger=0)


def test_a_client_that_asks_and_does_not_read_is_sent_little(monkeypatch: pytest.MonkeyPatch) -> None:
    with publishing(buffer_steps=3, replay_endpoint="inproc://greedy") as publisher, asking(publisher) as client:
        for name in range(3):
            publisher.publish(removed(name))
        wait_until(lambda: len(publisher._history) == 3)
        answered = counted_answers(publisher, monkeypatch)
        for _ in range(50):
            client.send_multipart([b"", bytes(8)])
        wait_until(lambda: len(answered) == 50)
        numbers = []
        while client.poll(0):
            numbers.append(int.from_bytes(client.recv_multipart()[1], "big", signed=True))
        assert numbers[:4] == [0, 1, 2, wire.END]
        assert len(numbers) <= 8  # of 200: two answers


def test_the_next_request_waits_until_the_last_answer_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "REPLAYED_PER_SECOND", 1 / 3600)  # an hour for each message
    with publishing(replay_endpoint="inproc://rested") as publisher, joined(publisher) as (subscriber, count):
        answered = counted_answers(publisher, monkeypatch)
        with asking(publisher) as client, asking(publisher) as other:
            client.send_multipart([b"", bytes(8)])
            wait_until(lambda: len(answered) == 1)
            for each in (client, other):
                each.send_multipart([b"", bytes(8)])
            for number in range(count, count + 3):  # batches go on: the thread has looked at its sockets
                publisher.publish(removed(number))
                assert subscriber.receive()[1] == number
            assert len(answered) == 1 and not other.poll(0)
            for expected in (2, 3):
                publisher._replay_at = 0.0  # the hours are over
                publisher.publish(removed(expected))
                wait_until(lambda expected=expected: len(answered) == expected)  # type: ignore[misc]


def test_a_client_that_sends_a_large_request_is_disconnected() -> None:
    with publishing() as publisher, joined(publisher) as (subscriber, count):
        publisher.publish(removed(1))
        subscriber.ask(b"", b"x" * 1_000_000)
        with subscribed(publisher.endpoint, publisher.replay_endpoint) as other:
            assert other.replay(count)[0][0] == count
        assert publisher._num_ignored == 0  # it was never taken into memory


def test_every_answer_is_whole_if_each_is_read_before_the_next_request() -> None:
    with publishing(buffer_steps=4, replay_endpoint="inproc://polite") as publisher, asking(publisher) as client:
        # An answer has 5 messages, of which ZeroMQ learns of 3 being read: a limit of 5 would cut the next one short.
        for name in range(4):
            publisher.publish(removed(name))
        wait_until(lambda: len(publisher._history) == 4)
        for _ in range(50):
            client.send_multipart([b"", bytes(8)])
            for number in (0, 1, 2, 3, wire.END):
                assert client.poll(int(DEADLINE * 1000)), "the answer is not whole"
                assert int.from_bytes(client.recv_multipart()[1], "big", signed=True) == number


@pytest.mark.parametrize("num_blocks", [1, 20_000])
def test_what_waits_for_a_client_is_what_is_kept(num_blocks: int) -> None:
    """An answer shares its payloads with the history, below and above the size from which pyzmq shares by itself."""
    # ZeroMQ gives an inproc:// address back some time after its socket was closed: every case has its own.
    replay_endpoint = f"inproc://shared-{num_blocks}"
    with publishing(replay_endpoint=replay_endpoint) as publisher, asking(publisher) as client:
        blocks = [2**63 + i for i in range(num_blocks)]
        publisher.publish(EventBatch(0.0, [BlockRemoved(blocks)]))
        wait_until(lambda: len(publisher._history) == 1)
        client.send_multipart([b"", bytes(8)])
        assert client.poll(int(DEADLINE * 1000))
        payload = client.recv_multipart(copy=False)[2]
        kept = publisher._history[0].payload
        assert kept is not None and address_of(payload) == address_of(kept)
        assert wire.decode(payload.bytes).events == [wire.BlockRemoved([*blocks], "GPU")]


def address_of(message: zmq.Frame) -> int:
    return np.frombuffer(message.buffer, np.uint8).ctypes.data


def test_batches_are_dropped_and_counted_once_the_thread_has_ended() -> None:
    with publishing() as publisher:
        publisher.publish(removed(0))
        publisher.close()
        assert not publisher._thread.is_alive()
        for name in range(1, 6):
            publisher.publish(removed(name))
        assert (publisher.num_published, publisher.num_dropped, len(publisher._queue)) == (6, 5, 0)


def test_batches_in_the_queue_of_a_thread_that_an_error_ends_are_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def terminated() -> None:
        raise zmq.ContextTerminated

    with publishing() as publisher, caplog.at_level(logging.WARNING):
        monkeypatch.setattr(publisher, "_send_queued", terminated)
        for name in range(5):
            publisher.publish(removed(name))
        publisher._thread.join(DEADLINE)
        publisher.publish(removed(5))
        assert (publisher.num_published, publisher.num_dropped, len(publisher._queue)) == (6, 6, 0)
    assert "KV events end here" in caplog.text


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("endpoint", ["tcp://[::]:*", "tcp://[::1]:*"])
def test_ipv6_addresses_are_bound(endpoint: str) -> None:
    with publishing(endpoint=endpoint, replay_endpoint=endpoint) as publisher:
        for bound in (publisher.endpoint, publisher.replay_endpoint):
            socket.create_connection(("::1", int(str(bound).rpartition(":")[2]))).close()


def test_what_is_queued_is_sent_before_the_publisher_closes() -> None:
    with publishing() as publisher, joined(publisher) as (subscriber, count):
        for name in range(100):
            publisher.publish(removed(name))
        publisher.close()
        assert [subscriber.receive()[1] for _ in range(100)] == list(range(count, count + 100))
        publisher.close()  # again, for nothing
        publisher.publish(removed(0))  # of an engine that goes on: it is not an error


def test_an_address_that_is_not_bound_is_connected_to() -> None:
    context: zmq.Context[Any] = zmq.Context()
    router: zmq.Socket[bytes] = context.socket(zmq.SUB)
    router.setsockopt(zmq.SUBSCRIBE, b"")
    router.bind("tcp://127.0.0.1:*")
    try:
        with publishing(endpoint=router.getsockopt_string(zmq.LAST_ENDPOINT), replay_endpoint=None) as publisher:

            def reached() -> bool:
                publisher.publish(removed(1))
                return bool(router.poll(0))

            wait_until(reached)
            assert publisher.replay_endpoint is None
    finally:
        router.close(linger=0)
        context.term()
