"""The choice of a replica: by its chunks alone unless it is busy, and moved by nothing that need not move it."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.ray.routing import Homes, ScoreTable, choose_replica, load_bound

NAMES = st.text("abcdef0123", min_size=1, max_size=6)
CHUNKS = st.dictionaries(NAMES, st.integers(1, 2000), min_size=1, max_size=6)
REPLICAS = st.lists(NAMES, min_size=2, max_size=9, unique=True)
UNBOUNDED = 1e9


@given(CHUNKS, REPLICAS)
def test_neither_the_order_of_chunks_nor_of_replicas_matters(chunks: dict[str, int], replicas: list[str]) -> None:
    other = dict(reversed(chunks.items()))
    assert choose_replica(chunks, dict.fromkeys(replicas, 0)) == choose_replica(
        other, dict.fromkeys(reversed(replicas), 0)
    )


@given(CHUNKS, REPLICAS)
def test_a_replica_that_goes_moves_only_its_own_requests(chunks: dict[str, int], replicas: list[str]) -> None:
    """Read backwards, this is what a replica that comes moves."""
    *rest, gone = replicas
    before = choose_replica(chunks, dict.fromkeys(replicas, 0), UNBOUNDED)
    after = choose_replica(chunks, dict.fromkeys(rest, 0), UNBOUNDED)
    assert before in (gone, after)


@given(CHUNKS, REPLICAS, st.lists(st.integers(0, 50), min_size=9, max_size=9), st.floats(0, 4))
def test_no_choice_goes_above_the_bound(
    chunks: dict[str, int], replicas: list[str], numbers: list[int], epsilon: float
) -> None:
    loads = dict(zip(replicas, numbers, strict=False))
    chosen = choose_replica(chunks, loads, epsilon)
    assert loads[chosen] + 1 <= math.ceil((1 + epsilon) * (sum(loads.values()) + 1) / len(loads))


@given(REPLICAS, st.lists(st.integers(0, 50), min_size=9, max_size=9))
def test_a_request_without_chunks_goes_to_the_least_loaded(replicas: list[str], numbers: list[int]) -> None:
    loads = dict(zip(replicas, numbers, strict=False))
    assert loads[choose_replica({}, loads)] == min(loads.values())


def test_chunks_win_in_proportion_to_their_tokens() -> None:
    """Of two chunks with 300 and 100 tokens, the first decides in three of four cases, to within three standard errors
    of 400 cases. Pairs whose chunks are at home in the same replica decide nothing."""
    loads = dict.fromkeys(map(str, range(50)), 0)
    wins: Counter[str] = Counter()
    for number in range(400):
        large, small = f"large {number}", f"small {number}"
        homes = {choose_replica({each: 1}, loads, UNBOUNDED): each for each in (large, small)}
        chosen = choose_replica({large: 300, small: 100}, loads, UNBOUNDED)
        assert chosen in homes
        if len(homes) == 2:
            wins[homes[chosen].split()[0]] += 1
    assert 0.68 < wins["large"] / wins.total() < 0.82


def test_what_is_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="no replica"):
        choose_replica({"a": 1}, {})
    with pytest.raises(ValueError, match="epsilon=-1"):
        choose_replica({"a": 1}, {"r": 0}, -1)
    with pytest.raises(ValueError, match="has 0 tokens"):
        choose_replica({"a": 0}, {"r": 0})


@given(CHUNKS, REPLICAS, st.lists(st.integers(0, 50), min_size=9, max_size=9), st.floats(0, 4))
def test_the_table_chooses_the_same(
    chunks: dict[str, int], replicas: list[str], numbers: list[int], epsilon: float
) -> None:
    """It also orders all others: those below the bound first, whatever is remembered from before."""
    loads = dict(zip(replicas, numbers, strict=False))
    table = ScoreTable(replicas)
    array = np.array([loads[name] for name in table.replicas])
    for asked in (chunks, dict(list(chunks.items())[:1]), chunks):
        chosen = choose_replica(asked, loads, epsilon)
        order = [table.replicas[number] for number in table.choose(asked, array, epsilon)]
        assert order[0] == table.replicas[table.first(asked, array, epsilon)] == chosen
        assert sorted(order) == sorted(replicas)
        bound = load_bound(loads, epsilon)
        are_free = [loads[name] < bound for name in order]
        assert are_free == sorted(are_free, reverse=True)


def test_the_table_sends_a_request_without_chunks_to_the_least_loaded() -> None:
    table = ScoreTable(["b", "a", "c"])
    loads = np.array([2, 1, 1])
    assert table.first({}, loads) == 1
    assert table.choose({}, loads) == (1, 2, 0)


def test_the_table_forgets_what_it_has_no_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_blend.ray.routing.TABLE_BYTES", 0)
    table = ScoreTable(["a", "b", "c"])
    chosen = [table.first({str(number): 1}, np.zeros(3, int)) for number in range(200)]
    assert len(table._logs) == 64
    assert chosen == [table.first({str(number): 1}, np.zeros(3, int)) for number in range(200)]


def test_the_table_refuses_what_is_out_of_range() -> None:
    with pytest.raises(ValueError, match="no replica"):
        ScoreTable([])
    with pytest.raises(ValueError, match="epsilon=-1"):
        ScoreTable(["a"]).choose({"c": 1}, np.zeros(1, int), -1)
    with pytest.raises(ValueError, match="has 0 tokens"):
        ScoreTable(["a"]).first({"c": 0}, np.zeros(1, int))


@given(CHUNKS, REPLICAS, st.lists(st.integers(0, 50), min_size=9, max_size=9), st.floats(0, 4), st.data())
def test_requests_go_below_the_bound_where_most_of_their_tokens_went(
    chunks: dict[str, int], replicas: list[str], numbers: list[int], epsilon: float, data: st.DataObject
) -> None:
    loads = dict(zip(replicas, numbers, strict=False))
    homes, held = Homes(), dict.fromkeys(replicas, 0)
    homes.table(replicas)
    for chunk, tokens in chunks.items():
        if data.draw(st.booleans()):
            home = data.draw(st.sampled_from(replicas))
            homes.note({chunk: tokens}, home)
            held[home] += tokens
    order = homes.choose(chunks, loads, epsilon)
    bound = load_bound(loads, epsilon)
    free = [name for name in replicas if loads[name] < bound]
    assert sorted(order) == sorted(replicas) and set(order[: len(free)]) == set(free)
    assert held[order[0]] == max(held[name] for name in free)
    table = homes.table(replicas)
    assert order[0] == table.replicas[homes.first(chunks, np.array([loads[name] for name in table.replicas]), epsilon)]


@given(CHUNKS, REPLICAS, st.lists(st.integers(0, 50), min_size=9, max_size=9))
def test_what_is_not_remembered_goes_by_its_scores(
    chunks: dict[str, int], replicas: list[str], numbers: list[int]
) -> None:
    loads = dict(zip(replicas, numbers, strict=False))
    homes = Homes()
    homes.note({"another chunk": 7}, replicas[0])
    assert homes.choose(chunks, loads)[0] == choose_replica(chunks, loads)


def test_what_went_to_a_replica_that_is_gone_is_sent_elsewhere() -> None:
    homes, loads = Homes(), dict.fromkeys("abc", 0)
    homes.table(loads)
    homes.note({"chunk": 5}, "b")
    assert homes.choose({"chunk": 5}, loads)[0] == "b"
    del loads["b"]
    assert homes.choose({"chunk": 5}, loads)[0] == choose_replica({"chunk": 5}, loads)


def test_a_replica_that_comes_gets_its_share_of_what_is_remembered() -> None:
    """Once it has been sent there, it stays; what belongs to others has not moved."""
    homes, loads = Homes(), dict.fromkeys("abc", 0)
    names = [f"chunk {number}" for number in range(60)]
    homes.table(loads)
    for name in names:
        homes.note({name: 1}, "a")
    loads["d"] = 0
    own = {name for name in names if choose_replica({name: 1}, loads) == "d"}
    went = {name: homes.choose({name: 1}, loads)[0] for name in names}
    assert own and went == {name: "d" if name in own else "a" for name in names}
    for name in names:
        homes.note({name: 1}, "b")
    assert {homes.choose({name: 1}, loads)[0] for name in names} == {"b"}


def test_homes_forget_what_was_named_longest_ago() -> None:
    homes, loads = Homes(max_chunks=2), dict.fromkeys("abc", 0)
    homes.table(loads)
    names = [f"chunk {number}" for number in range(50)]
    kept = next(each for each in names if choose_replica({each: 1}, loads) != "a")
    homes.note({kept: 1}, "a")
    homes.note({"x": 1}, "a")
    assert homes.choose({kept: 1}, loads)[0] == "a"
    homes.note({"y": 1, "z": 1}, "a")
    assert homes.choose({kept: 1}, loads)[0] != "a"
