"""Engines that publish: a router's index, made of the events alone, knows exactly what the prefix cache holds."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.async_engines import async_llm, final
from tests.engine.engines import (
    DEMO,
    TINY_VOCABULARY,
    demo_prompt,
    feature,
    greedy,
    ids_of,
    new_llm,
    run,
    tiny_model,
)
from tests.features.kv_events.subscriber import AllBlocksCleared, Index, Subscriber, decode, subscribed
from tests.waiting import wait_until
from vllm_blend import LLM
from vllm_blend.core.block_manager import BlockManager, chain_digest
from vllm_blend.features.kv_events.events import EventBatch, wire_form
from vllm_blend.features.kv_events.extension import KVEvents, block_hash
from vllm_blend.kv_store.keys import salt_digest

ANY_PORT = "tcp://127.0.0.1:*"
ON = {"enable_kv_cache_events": True, "endpoint": ANY_PORT, "replay_endpoint": ANY_PORT}
SIZE = 8  # of blocks
SMALL = 2  # of blocks of a manager without an engine
PROMPTS = st.lists(st.integers(0, 1), min_size=0, max_size=10)


@contextmanager
def publishing(model: str | None = None, **arguments: Any) -> Iterator[tuple[LLM, Subscriber]]:
    """An engine with few blocks, and a subscriber that can ask for the events so far."""
    fixed = {"kv_events_config": ON, "block_size": SIZE, "num_gpu_blocks_override": 24}
    with new_llm(model or tiny_model("llama"), **(fixed | arguments)) as llm:
        publisher = feature(llm.llm_engine, KVEvents).publisher
        with subscribed(publisher.endpoint, publisher.replay_endpoint) as subscriber:
            yield llm, subscriber


def batches_of(llm: LLM, subscriber: Subscriber) -> list[Any]:
    publisher = feature(llm.llm_engine, KVEvents).publisher
    wait_until(lambda: len(subscriber.replay(0)) == publisher.num_published)
    return [batch for _, batch in subscriber.replay(0)]


def index_of(llm: LLM, subscriber: Subscriber) -> Index:
    """What a router knows when it has read all events."""
    index = Index()
    for batch in batches_of(llm, subscriber):
        index.apply(batch)
    return index


def held(llm: LLM) -> set[int]:
    return {block_hash(digest) for digest in llm.llm_engine.blocks.published}


def prompt(start: int, count: int) -> list[int]:
    return [(start + 7 * i) % TINY_VOCABULARY for i in range(count)]


class Kept:
    """A publisher that keeps what it is given, as it would be sent."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def publish(self, batch: EventBatch) -> None:
        self.payloads.append(msgspec.msgpack.encode(wire_form(batch, "array")))

    def close(self) -> None:
        pass


def digests_of(tokens: list[int], salt: bytes) -> list[bytes]:
    chain = [salt]
    for start in range(0, len(tokens) - SMALL + 1, SMALL):
        chain.append(chain_digest(chain[-1], tokens[start : start + SMALL]))
    return chain[1:]


@given(
    st.lists(
        st.one_of(st.tuples(PROMPTS, st.booleans()), st.sampled_from(["end", "clear", "step"])),
        min_size=1,
        max_size=40,
    )
)
@settings(deadline=None)
def test_replayed_events_give_what_the_cache_holds(actions: list[Any]) -> None:
    """Sequences come, share, publish and leave; some have a salt, and of their blocks nothing is told."""
    manager, kept = BlockManager(9, SMALL), Kept()
    manager.listener = events = KVEvents(kept, SMALL)  # type: ignore[arg-type]
    tables: list[list[int]] = []
    salted: set[bytes] = set()
    for action in actions:
        if action == "end":
            if tables:
                manager.release(tables.pop(0))
        elif action == "clear":
            manager.reset_prefix_cache()
        elif action == "step":
            events.idle()
        else:
            tokens, is_salted = action
            digests = digests_of(tokens, salt_digest("tenant") if is_salted else b"")
            salted |= set(digests) if is_salted else set()
            found = manager.match_prefix(digests, tokens)
            manager.take(found)
            needed = manager.blocks_for(len(tokens)) - len(found)
            if needed > manager.num_free_blocks:
                manager.release(found)
                continue
            table = found + manager.allocate(needed)
            for index, digest in enumerate(digests):
                parent = digests[index - 1] if index else None
                own = tokens[index * SMALL : (index + 1) * SMALL]
                manager.publish(table[index], digest, own, parent, is_salted)
            tables.append(table)
    events.idle()
    router = Index()
    for payload in kept.payloads:
        router.apply(decode(payload))
    assert set(router.parents) == {block_hash(digest) for digest in manager.published.keys() - salted}
    chained = {block_hash(digest): digest for digest in manager.published}
    for name, parent_name in router.parents.items():  # a block is what its tokens make of the block before it
        before = chained.get(parent_name, b"") if isinstance(parent_name, int) else b""
        if before or parent_name is None:
            assert isinstance(name, int) and chained[name] == chain_digest(before, router.tokens[name])


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_router_knows_what_an_engine_finds(async_scheduling: bool) -> None:
    """Prompts that share beginnings go through a cache that is too small for them, several at a time."""
    chance = random.Random(5)
    with publishing(async_scheduling=async_scheduling, max_num_batched_tokens=48, max_num_seqs=4) as (llm, subscriber):
        evicted = False
        for _ in range(12):
            asked = [prompt(chance.randrange(3), chance.randrange(1, 80)) for _ in range(chance.randrange(1, 5))]
            run(llm, [{"prompt_token_ids": each} for each in asked], greedy(chance.randrange(1, 12)))
            index = index_of(llm, subscriber)
            assert set(index.parents) == held(llm)
            again = asked[0]
            expected = index.num_cached(again[: (len(again) - 1) // SIZE * SIZE], SIZE)
            [output] = run(llm, [{"prompt_token_ids": again}], greedy(1))
            assert output.num_cached_tokens == expected
            evicted |= any(type(event).__name__ == "BlockRemoved" for event in batches_of(llm, subscriber)[-1].events)
        assert evicted
        llm.reset_prefix_cache()  # which no step follows
        assert not index_of(llm, subscriber).parents
        assert batches_of(llm, subscriber)[-1].events == [AllBlocksCleared()]
        metrics = {metric.name: metric.value for metric in llm.get_metrics()}
        assert metrics["vllm_blend:kv_event_batches"] == len(batches_of(llm, subscriber)) > 12
        assert metrics["vllm_blend:kv_event_batches_dropped"] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"enable_kvc": True, "target_compression_rate": 0.5, "protected_window_size": 8, "kvc_interval": 4},
        {"enable_blending": True, "offload_mode": "exact"},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_other_features_change_the_cache_and_events_follow(arguments: dict[str, Any]) -> None:
    chance = random.Random(7)
    with publishing(**arguments) as (llm, subscriber):
        for _ in range(6):
            asked = [prompt(chance.randrange(2), chance.randrange(20, 80)) for _ in range(2)]
            run(llm, [{"prompt_token_ids": each} for each in asked], greedy(12))
            assert set(index_of(llm, subscriber).parents) == held(llm)
        assert held(llm) or "enable_kvc" in arguments


def test_consecutive_blocks_are_one_event() -> None:
    with publishing() as (llm, subscriber):
        tokens = prompt(1, 30)
        run(llm, [{"prompt_token_ids": tokens}], greedy(1))
        [batch] = batches_of(llm, subscriber)
        [stored] = batch.events
        assert (stored.token_ids, stored.block_size, stored.parent_block_hash) == (tokens[:24], SIZE, None)
        assert len(stored.block_hashes) == 3 and (stored.lora_id, stored.medium) == (None, "GPU")


def test_of_prompts_with_a_salt_nothing_is_told() -> None:
    with publishing() as (llm, subscriber):
        secret = prompt(1, 30)
        run(llm, [{"prompt_token_ids": secret, "cache_salt": "tenant"}], greedy(4))
        run(llm, [{"prompt_token_ids": prompt(2, 20)}], greedy(1))
        run(llm, [{"prompt_token_ids": prompt(start, 80)} for start in range(5, 9)], greedy(1))  # the salted ones leave
        index = index_of(llm, subscriber)
        assert set(index.parents) == held(llm)
        told = [event for batch in batches_of(llm, subscriber) for event in batch.events]
        assert not any(secret[0:SIZE] == event.token_ids[0:SIZE] for event in told if hasattr(event, "token_ids"))


@pytest.mark.parametrize("selector", ["question_attention", "value_deviation"])
def test_blended_blocks_are_not_announced(selector: str) -> None:
    """A blended prompt's own blocks are no prefix: only those that plain prefill has filled are told of."""
    arguments = {"enable_blending": True, "blend_selector": selector, "num_gpu_blocks_override": 600, "block_size": 16}
    with publishing(DEMO, **arguments) as (llm, subscriber):
        for _ in range(2):  # encoded, and then found
            run(llm, [demo_prompt(0)], greedy(4))
        index, ids = index_of(llm, subscriber), ids_of(llm, demo_prompt(0))
        assert set(index.parents) == held(llm)
        prefix = len(llm.get_tokenizer().encode(demo_prompt(0)["prefix"]))
        assert index.num_cached(ids, 16) <= prefix + len(llm.get_tokenizer().encode(str(demo_prompt(0)["chunks"][0])))
        # The same tokens without chunks are an exact prefix.
        run(llm, [{"prompt_token_ids": ids}], greedy(1))
        assert index_of(llm, subscriber).num_cached(ids, 16) == len(ids) // 16 * 16


def test_an_engine_that_is_dropped_or_shut_down_gives_its_port_back() -> None:
    def listening() -> int:
        return sum(thread.name == "kv-events" for thread in threading.enumerate())

    before = listening()
    llm = new_llm(tiny_model("llama"), kv_events_config=ON, num_gpu_blocks_override=8)
    assert listening() == before + 1
    llm.shutdown()
    assert listening() == before
    llm = new_llm(tiny_model("llama"), kv_events_config=ON, num_gpu_blocks_override=8)
    assert listening() == before + 1
    del llm
    gc.collect()
    wait_until(lambda: listening() == before)


def test_without_the_option_no_one_listens_to_the_cache() -> None:
    with new_llm(tiny_model("llama"), num_gpu_blocks_override=8) as llm:
        assert llm.llm_engine.blocks.listener is None
        assert not any("kv_event" in metric.name for metric in llm.get_metrics())


@pytest.mark.slow
@pytest.mark.cpu_only
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_process_publishes_once_whatever_its_ranks(
    ranks: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("e")  # a socket's path is short
    events, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
    config = ON | {"endpoint": events, "replay_endpoint": replay, "topic": "kv-events"}
    arguments = {"kv_events_config": config, "block_size": SIZE, "tensor_parallel_size": ranks}
    with async_llm(model=tiny_model("llama"), num_gpu_blocks_override=24, **arguments) as llm:
        tokens = prompt(3, 50)
        asyncio.run(final(llm, {"prompt_token_ids": tokens}, greedy(1)))
        with subscribed(events, replay, "kv-events") as subscriber:
            index = Index()
            for _, batch in subscriber.replay(0):
                index.apply(batch)
            assert index.num_cached(tokens[:48], SIZE) == 48 and len(index.parents) == 6
