"""Owners share the memory and the disk: none is pushed below its part, and none goes beyond its limit."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.kv_store.stored_chunks import MODEL, PAGE, key, memory_folder, sized
from vllm_blend.kv_store.disk import DiskChunkStore
from vllm_blend.kv_store.memory import ACTIVE_SECONDS, MemoryChunkStore
from vllm_blend.kv_store.owners import ANYONE, Owner, parts
from vllm_blend.kv_store.space import ACTIVE_SECONDS as DISK_SECONDS
from vllm_blend.kv_store.store_config import DiskStoreConfig

LARGEST = 4  # pages of a chunk
OWNERS = (Owner("a"), Owner("b", 2.0), Owner("c", 1.0, 6 * PAGE), Owner("d"))
BY_NAME = {owner.name: owner for owner in OWNERS}


def number_of(owner: Owner, number: int) -> str:
    return key(100 * OWNERS.index(owner) + number)


def part(held: Counter[str], owner: Owner, asking: Owner, budget: int) -> float:
    """Return what an owner can count on while another one asks for space."""
    there = [each for each in OWNERS if held[each.name] or each is asking]
    fair = budget * owner.weight / sum(each.weight for each in there)
    return fair if owner.max_bytes is None else min(fair, owner.max_bytes)


class Shared(RuleBasedStateMachine):
    """The memory, for any order of events. Chunks that are retained are no exception."""

    replaces_first: ClassVar[bool] = True  # whether what was under a key makes room before what comes in its place

    @initialize(pages=st.integers(6, 40))
    def start(self, pages: int) -> None:
        self.budget, self.now = pages * PAGE, 0.0
        self.open()
        self.sizes: dict[str, tuple[Owner, int]] = {}  # of what was put last under each key

    def open(self) -> None:
        self.store: Any = MemoryChunkStore(self.budget, now=lambda: self.now)

    def held(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for name, (owner, num_bytes) in self.sizes.items():
            if name in self.store:
                found[owner.name] += num_bytes
        return found

    def own(self, owner: Owner) -> set[str]:
        return {name for name, (other, _) in self.sizes.items() if other is owner and name in self.store}

    @rule(owner=st.sampled_from(OWNERS), number=st.integers(0, 12), pages=st.integers(1, LARGEST))
    def put(self, owner: Owner, number: int, pages: int) -> None:
        name, num_bytes = number_of(owner, number), pages * PAGE
        before, own = self.held(), self.own(owner) - {name}
        replaced = self.sizes[name][1] if name in self.store and self.replaces_first else 0
        self.store.put(name, sized(pages).owned_by(owner))
        self.sizes[name] = owner, num_bytes
        after = self.held()
        for other in OWNERS:
            if other is owner:
                continue
            own_part = part(before, other, owner, self.budget)
            if before[other.name] <= own_part:
                assert after[other.name] == before[other.name], f"{owner} has taken from {other} what is its part"
            else:
                assert after[other.name] > own_part - LARGEST * PAGE, f"{owner} has taken more of {other} than it must"
        if before[owner.name] - replaced + num_bytes <= part(before, owner, owner, self.budget):
            assert own | {name} == self.own(owner), "what fits into an owner's part is kept"

    @rule(owner=st.sampled_from(OWNERS), number=st.integers(0, 12))
    def use(self, owner: Owner, number: int) -> None:
        self.store.get(number_of(owner, number))

    @rule(owner=st.sampled_from(OWNERS), number=st.integers(0, 12), level=st.integers(0, 2), seconds=st.integers(1, 9))
    def retain(self, owner: Owner, number: int, level: int, seconds: int) -> None:
        self.store.retain(number_of(owner, number), level, seconds, owner.name)

    @rule()
    def wait(self) -> None:
        self.now += 1

    @rule(owner=st.sampled_from(OWNERS), number=st.integers(0, 12))
    def remove(self, owner: Owner, number: int) -> None:
        self.store.remove(number_of(owner, number))

    @invariant()
    def counts(self) -> None:
        held = self.held()
        assert +Counter(dict(self.told())) == +held
        assert self.store.num_bytes == held.total() <= self.budget
        for owner in OWNERS:
            assert owner.max_bytes is None or held[owner.name] <= owner.max_bytes

    def told(self) -> dict[str, int]:
        return dict(self.store.held)


class SharedDisk(Shared):
    """The disk. Nothing is retained there."""

    replaces_first = False

    def open(self) -> None:
        self.stack = ExitStack()
        self.folder = self.stack.enter_context(memory_folder())
        config = DiskStoreConfig(self.folder, self.budget, MODEL, num_threads=1, staging_bytes=1 << 20)
        self.store = DiskChunkStore(config)
        self.store.retain = lambda *_: None

    def told(self) -> dict[str, int]:
        found: dict[str, int] = self.store.held()
        return found

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.store.close()
            self.stack.close()


TestShared = Shared.TestCase
TestShared.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSharedDisk = SharedDisk.TestCase
TestSharedDisk.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(1, 9), st.none() | st.integers(1, 99)), min_size=1)
)
def test_parts_make_up_the_budget_at_most(given: dict[str, tuple[int, int | None]]) -> None:
    owners = {name: Owner(name, weight, limit) for name, (weight, limit) in given.items()}
    found = parts(100, owners)
    assert found.keys() == owners.keys() and 0 < sum(found.values()) <= 100 + 1e-6
    unlimited = {part / owners[name].weight for name, part in found.items() if owners[name].max_bytes is None}
    assert len({round(each, 6) for each in unlimited}) <= 1


@pytest.mark.parametrize("retained", [0, 50])
def test_a_flood_leaves_others_what_they_reuse(retained: int) -> None:
    """Whatever one owner stores, uses often or retains, another one keeps its half."""
    store = MemoryChunkStore(16 * PAGE)
    alice, bob = Owner("alice"), Owner("bob")
    for number in range(8):
        store.put(f"bob{number}", sized(1).owned_by(bob))
    for number in range(100):
        store.retain(f"alice{number}", retained, 1e6, "alice")
        store.put(f"alice{number}", sized(1).owned_by(alice))
        for _ in range(5):
            store.get(f"alice{number}")
    assert all(f"bob{number}" in store for number in range(8))
    assert store.held == {"alice": 8 * PAGE, "bob": 8 * PAGE}
    for number in range(8):
        store.remove(f"bob{number}")
    for number in range(100, 200):  # what others leave free may be used, and is given back
        store.put(f"alice{number}", sized(1).owned_by(alice))
    assert store.held == {"alice": 16 * PAGE}
    for number in range(8):
        store.put(f"bob{number}", sized(1).owned_by(bob))
    assert all(f"bob{number}" in store for number in range(8))


def test_owners_that_use_nothing_lose_their_part() -> None:
    """Unless they have retained what they have."""
    now = 0.0
    store = MemoryChunkStore(16 * PAGE, now=lambda: now)
    idle, patient, busy = Owner("idle"), Owner("patient"), Owner("busy")
    for owner in (idle, patient):
        for number in range(4):
            store.put(f"{owner.name}{number}", sized(1).owned_by(owner))
            if owner is patient:
                store.retain(f"{owner.name}{number}", 1, 2 * ACTIVE_SECONDS, owner.name)
    for number in range(40):
        store.put(f"busy{number}", sized(1).owned_by(busy))
    assert store.held == {"idle": 4 * PAGE, "patient": 4 * PAGE, "busy": 8 * PAGE}
    now = ACTIVE_SECONDS
    for number in range(40, 80):
        store.put(f"busy{number}", sized(1).owned_by(busy))
    assert store.held == {"patient": 4 * PAGE, "busy": 12 * PAGE}
    now = 2 * ACTIVE_SECONDS
    for number in range(80, 120):
        store.put(f"busy{number}", sized(1).owned_by(busy))
    assert store.held == {"busy": 16 * PAGE}


def test_on_the_disk_reading_is_using(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    idle, reads, busy = Owner("idle"), Owner("reads"), Owner("busy")
    with memory_folder() as folder, DiskChunkStore(DiskStoreConfig(folder, 12 * PAGE, MODEL)) as store:
        for number in range(4):
            for owner in (idle, reads):
                store.put(key(10 * number + (owner is idle)), sized(1).owned_by(owner))
        assert store.get(key(0)) is not None
        monkeypatch.setattr(time, "time", lambda: now + 2 * DISK_SECONDS)
        for number in range(40):
            store.put(key(1000 + number), sized(1).owned_by(busy))
        assert store.held() == {"reads": 4 * PAGE, "busy": 8 * PAGE}


def test_a_chunk_beyond_a_limit_is_not_kept_and_evicts_nothing() -> None:
    store, small = MemoryChunkStore(16 * PAGE), Owner("small", 1.0, 2 * PAGE)
    store.put("first", sized(2).owned_by(small))
    given = sized(3).owned_by(small)
    assert store.put("second", given) is given
    assert "first" in store and "second" not in store and store.num_refused == 1


def test_an_index_of_before_there_were_owners_can_be_used() -> None:
    """What lay there belongs to no one. Tables that do not fit the chunks are made again, and the chunks stay."""
    with memory_folder() as folder:
        config = DiskStoreConfig(folder, 64 * PAGE, MODEL)
        with DiskChunkStore(config) as store:
            store.put(key(1), sized(2).owned_by(Owner("a")))
            assert store.held() == {"a": 2 * PAGE} and store.space.index.held() == {Owner("a").id: 2 * PAGE}
            db = store.space.index._db
            for statement in (
                *("DROP TRIGGER ownerless", "DROP TRIGGER disowned", "DROP TRIGGER ranked"),
                *("DROP TABLE owners", "DROP TABLE owned"),
            ):
                db.execute(statement)
        for damage in (None, "DROP TRIGGER owns_less", "UPDATE owned SET bytes = 7", "DELETE FROM owners"):
            with DiskChunkStore(config) as store:
                assert store.space.index.held() == {ANYONE.id: 2 * PAGE}, damage
                assert store.get(key(1)) is not None
                store.put(key(2), sized(3).owned_by(Owner("b")))
                assert store.space.index.held() == {ANYONE.id: 2 * PAGE, Owner("b").id: 3 * PAGE}
                store.remove(key(2))
                if damage:
                    store.space.index._db.execute(damage)
            if damage:
                with DiskChunkStore(config) as store:
                    assert store.space.index.held() == {ANYONE.id: 2 * PAGE}, damage


def test_names_of_owners_are_not_on_the_disk() -> None:
    with memory_folder() as folder:
        with DiskChunkStore(DiskStoreConfig(folder, 64 * PAGE, MODEL)) as store:
            store.put(key(1), sized(2).owned_by(Owner("the-name-of-a-tenant")))
        written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"the-name-of-a-tenant" not in written and Owner("the-name-of-a-tenant").id.encode() in written
