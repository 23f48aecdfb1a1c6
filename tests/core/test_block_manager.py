from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_blend.core.block_manager import BlockManager, OutOfBlocks, Retained, chain_digest
from vllm_blend.kv_store.keys import salt_digest

SIZE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=0, max_size=10)  # two tokens only: prefixes meet all the time


def digests_of(tokens: list[int]) -> list[bytes]:
    """Chained digests of the full blocks of `tokens`."""
    chain = [b""]
    for start in range(0, len(tokens) - SIZE + 1, SIZE):
        chain.append(chain_digest(chain[-1], tokens[start : start + SIZE]))
    return chain[1:]


class Sharing(RuleBasedStateMachine):
    """Sequences that take what they find of their prefix, allocate the rest, publish it, and leave again."""

    @initialize(num_blocks=st.integers(2, 9), caching=st.booleans())
    def start(self, num_blocks: int, caching: bool) -> None:
        self.manager = BlockManager(num_blocks, SIZE, caching)
        self.caching = caching
        self.tables: list[list[int]] = []
        self.holds: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end, as long as it may be shared

    @rule(tokens=TOKENS)
    def begin(self, tokens: list[int]) -> None:
        digests = digests_of(tokens)
        found = self.manager.match_prefix(digests, tokens)
        for index, block in enumerate(found):
            assert self.holds[block] == tuple(tokens[: (index + 1) * SIZE])
        self.manager.take(found)
        needed = self.manager.blocks_for(len(tokens)) - len(found)
        free = self.manager.num_free_blocks
        if needed > free:
            with pytest.raises(OutOfBlocks, match=f"{free} of {self.manager.num_usable_blocks}"):
                self.manager.allocate(needed)
            assert self.manager.num_free_blocks == free
            self.manager.release(found)
            return
        fresh = self.manager.allocate(needed)
        assert len(set(fresh)) == needed
        assert not set(fresh) & {block for table in self.tables for block in [*table, *found]}
        for block in fresh:
            self.holds.pop(block, None)
        table = found + fresh
        for index, digest in enumerate(digests):
            own = tuple(tokens[index * SIZE : (index + 1) * SIZE])
            known = self.manager.match_prefix(digests[: index + 1], tokens)
            self.manager.publish(table[index], digest, own)
            if self.caching and len(known) <= index:
                self.holds[table[index]] = tuple(tokens[: (index + 1) * SIZE])
                assert self.manager.match_prefix(digests[: index + 1], tokens)[-1] == table[index]
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.manager.release(table)

    @rule()
    def forget(self) -> None:
        self.manager.reset_prefix_cache()
        self.holds.clear()

    @invariant()
    def counted(self) -> None:
        held = {block for table in self.tables for block in table}
        assert 0 not in held
        assert held <= set(range(1, self.manager.num_blocks))
        assert self.manager.num_free_blocks == self.manager.num_usable_blocks - len(held)
        for block in held:
            owners = [(table.index(block), table) for table in self.tables if block in table]
            assert all(table.count(block) == 1 for _, table in owners)
            if len(owners) > 1:  # shared: at the same place of every owner, and only after it was published
                assert self.caching
                assert len({index for index, _ in owners}) == 1


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def published(manager: BlockManager, tokens: list[int]) -> list[int]:
    """Blocks of a sequence that has come and gone."""
    table = manager.allocate(manager.blocks_for(len(tokens)))
    for index, digest in enumerate(digests_of(tokens)):
        manager.publish(table[index], digest, tokens[index * SIZE : (index + 1) * SIZE])
    return table


def test_least_recently_used_content_leaves_first() -> None:
    manager = BlockManager(7, SIZE)
    old, young = published(manager, [1, 2, 3, 4]), published(manager, [5, 6, 7, 8])
    private = manager.allocate(2)
    for table in (old, young, private):
        manager.release(table)
    assert set(manager.allocate(2)) == set(private)  # nothing is lost with these
    assert manager.allocate(2) == [old[1], old[0]]  # the end of a prefix before its beginning
    assert manager.match_prefix(digests_of([5, 6, 7, 8]), [5, 6, 7, 8]) == young
    assert manager.match_prefix(digests_of([1, 2, 3, 4]), [1, 2, 3, 4]) == []


def test_a_hit_makes_content_young_again() -> None:
    manager = BlockManager(5, SIZE)
    first, second = published(manager, [1, 2, 3, 4]), published(manager, [5, 6, 7, 8])
    manager.release(first)
    manager.release(second)
    manager.take(first)
    manager.release(first)
    assert manager.allocate(2) == [second[1], second[0]]


def test_a_hit_is_verified_against_the_tokens() -> None:
    """Even if two contents had the same digest."""
    manager = BlockManager(4, SIZE)
    [block] = manager.allocate(1)
    manager.publish(block, b"digest", [1, 2])
    assert manager.match_prefix([b"digest"], [1, 2]) == [block]
    assert manager.match_prefix([b"digest"], [1, 3]) == []


def test_digests_depend_on_everything_before() -> None:
    assert chain_digest(b"", [1, 2]) != chain_digest(chain_digest(b"", [0, 0]), [1, 2])
    assert chain_digest(b"", [1, 2]) != chain_digest(b"", [2, 1])
    assert chain_digest(b"", [1, 2]) == chain_digest(b"", (1, 2))


def test_a_run_of_hits_ends_at_the_first_miss() -> None:
    manager = BlockManager(6, SIZE)
    table = published(manager, [1, 2, 3, 4, 5, 6])
    digests = digests_of([1, 2, 9, 9, 5, 6])
    assert manager.match_prefix(digests, [1, 2, 9, 9, 5, 6]) == table[:1]


def test_releasing_too_often_is_an_error() -> None:
    manager = BlockManager(4, SIZE)
    table = manager.allocate(2)
    manager.release(table)
    with pytest.raises(RuntimeError, match="released more often"):
        manager.release(table)


def test_a_pool_needs_a_block_besides_the_padding() -> None:
    with pytest.raises(ValueError, match="num_blocks=1"):
        BlockManager(1, SIZE)


def test_what_is_shared_is_not_free_without_one_of_its_owners() -> None:
    manager = BlockManager(6, SIZE)
    table = manager.allocate(3)
    manager.take(table[:2])
    assert manager.num_free_without(table) == 3, "two that were free, and the one that is not shared"
    manager.release(table[:2])
    assert manager.num_free_without(table) == manager.num_usable_blocks


def test_retained_contexts_do_not_overlap() -> None:
    """A block belongs to one retained context: what came first stays, whole."""
    manager = BlockManager(8, SIZE)
    table = manager.allocate(4)
    first = Retained(tuple(table[:2]), 4)
    manager.retain(b"first", first)
    manager.retain(b"overlapping", Retained(tuple(table[1:3]), 4))
    manager.retain(b"first", Retained(tuple(table[2:]), 4))
    assert manager.retained == {b"first": first}
    manager.release(table)
    assert manager.forget_retained(b"first") == 2
    assert not manager.retained and manager.num_free_blocks == manager.num_usable_blocks


def test_a_salt_begins_another_chain() -> None:
    salts = [b"", salt_digest("a"), salt_digest("b")]
    roots = [chain_digest(salt, [1, 2]) for salt in salts]
    following = [chain_digest(root, [1, 2]) for root in roots]
    assert len({*roots, *following}) == 2 * len(salts)
