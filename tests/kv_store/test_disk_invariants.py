"""Budget, eviction, pins and counts of the disk store, against plain Python, for any order of events."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.kv_store.stored_chunks import MODEL, PAGE, bytes_on_disk, hold, key, memory_folder, same, segments, sized
from vllm_blend.kv_store.disk import DiskChunkStore
from vllm_blend.kv_store.index_rows import Entry
from vllm_blend.kv_store.layout import ChunkLayout
from vllm_blend.kv_store.store_config import DiskStoreConfig

NUMBERS = st.integers(0, 5)
WHO = st.integers(0, 1)


@dataclass(eq=False)
class Version:
    """What was once put under a key, until its space is given back."""

    number: int
    pages: int
    bytes: int
    cost: float
    segment: str
    live: bool = True
    frequency: int = 1
    priority: float = 0.0


class SharedFolder(RuleBasedStateMachine):
    """Two stores on one folder, as two processes have them; what is done is done by either."""

    @initialize(budget=st.integers(1, 24), segment=st.integers(1, 30), how=st.sampled_from(["auto", "auto", "int8"]))
    def start(self, budget: int, segment: int, how: str) -> None:
        self.stack = ExitStack()
        self.folder = self.stack.enter_context(memory_folder())
        settings: dict[str, Any] = {
            "segment_bytes": segment * PAGE,
            "format": how,
            "num_threads": 1,
            "staging_bytes": 1 << 20,
        }
        self.config = DiskStoreConfig(self.folder, budget * PAGE, MODEL, **settings)
        self.stores = [DiskChunkStore(self.config) for _ in range(2)]
        self.versions: list[Version] = []  # in the order of their ids
        self.holds: list[list[tuple[Version, Entry]]] = [[], []]  # of each store
        self.clock = 0.0

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            for store in self.stores:
                store.close()
            self.stack.close()

    @rule(who=WHO, number=NUMBERS, pages=st.integers(1, 9), cost=st.integers(1, 50))
    def put(self, who: int, number: int, pages: int, cost: int) -> None:
        self.stores[who].put(key(number), sized(pages), cost)
        size = ChunkLayout.from_kv(sized(pages), self.config.format).payload_bytes
        old = self.live(number)
        if size > self.config.budget_bytes:
            return
        if old is not None and old.pages == pages:  # the same bytes: counted as a use
            self.use(old)
            self.flush(who)
            return
        self.flush(1 - who)  # nothing to do with the order of things: it has none
        missing = sum(version.bytes for version in self.versions) + size - self.config.budget_bytes
        dead = [version for version in self.versions if not version.live]
        leaving = []
        for version in [*dead, *sorted(filter(lambda v: v.live, self.versions), key=lambda v: v.priority)]:
            if missing > 0 and not self.held(version):
                leaving.append(version)
                missing -= version.bytes
        if missing > 0:
            return
        for version in leaving:
            self.clock = max(self.clock, version.priority if version.live else 0.0)
            self.space_back(version)
        entry = self.stores[who].space.index.find(key(number))
        assert entry is not None
        new = Version(number, pages, size, cost, entry.extent.segment)
        new.priority = self.clock + cost / size
        self.versions.append(new)
        if old is not None and old in self.versions:
            self.give_up(old)

    @rule(who=WHO, number=NUMBERS)
    def get(self, who: int, number: int) -> None:
        found, version = self.stores[who].get(key(number)), self.live(number)
        assert (found is None) == (version is None)
        if found is not None and version is not None:
            assert found.num_tokens == sized(version.pages).num_tokens
            assert same(found, sized(version.pages)) or self.config.format == "int8"
            self.use(version)
            self.flush(who)

    @rule(who=WHO, number=NUMBERS)
    def remove(self, who: int, number: int) -> None:
        self.stores[who].remove(key(number))
        if (version := self.live(number)) is not None:
            self.give_up(version)

    @rule(who=WHO, number=NUMBERS)
    def hold(self, who: int, number: int) -> None:
        version, entry = self.live(number), hold(self.stores[who], key(number))
        assert (entry is None) == (version is None)
        if entry is not None and version is not None:
            self.holds[who].append((version, entry))

    @precondition(lambda self: any(self.holds))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        who, index = data.draw(st.sampled_from([(who, i) for who in range(2) for i in range(len(self.holds[who]))]))
        self.stores[who].space.release(self.holds[who].pop(index)[1])

    @rule(who=WHO)
    def reopen(self, who: int) -> None:
        self.stores[who].close()
        self.holds[who].clear()
        self.stores[who] = DiskChunkStore(self.config)
        self.versions = [version for version in self.versions if version.live or self.held(version)]

    @invariant()
    def counted_exactly(self) -> None:
        for store in self.stores:
            assert {number for number in range(6) if key(number) in store} == {
                v.number for v in self.versions if v.live
            }
            assert len(store) == sum(version.live for version in self.versions)
            assert store.num_bytes == sum(version.bytes for version in self.versions)
            assert store.num_bytes == bytes_on_disk(self.folder) <= self.config.budget_bytes
            assert not store.stats.misses.keys() - {"absent"}
            assert not store.stats.refused.keys() - {"present", "too_large", "no_room"}
        assert len(segments(self.folder)) <= len(self.versions)

    def live(self, number: int) -> Version | None:
        return next((version for version in self.versions if version.live and version.number == number), None)

    def held(self, version: Version) -> bool:
        return any(version is one for holds in self.holds for one, _ in holds)

    def give_up(self, version: Version) -> None:
        version.live = False
        if not self.held(version):
            self.space_back(version)

    def space_back(self, version: Version) -> None:
        """A segment goes as a whole when all that is left in it was given up and is no longer held."""
        if version in self.versions:
            self.versions.remove(version)
        others = [other for other in self.versions if other.segment == version.segment]
        if not any(other.live or self.held(other) for other in others):
            self.versions = [other for other in self.versions if other not in others]

    def use(self, version: Version) -> None:
        version.frequency += 1
        version.priority = self.clock + version.frequency * version.cost / version.bytes

    def flush(self, who: int) -> None:
        """Have the index hear of uses now, not with the next chunk that is put."""
        self.stores[who]._flush_uses()


TestSharedFolder = SharedFolder.TestCase
TestSharedFolder.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
