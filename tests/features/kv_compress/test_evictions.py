"""The KVs that go are those that the rule, written a second time, names; and what must hold whatever the rule is."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.features.kv_compress.worlds import ALLOCATIONS, World, expected, worlds, worth
from vllm_blend.features.kv_compress.evictions import Evictions, schedule_evictions


def schedule(world: World) -> Evictions:
    return schedule_evictions(*astuple(world))


def pages(lengths: torch.Tensor, block_size: int) -> torch.Tensor:
    return (lengths + block_size - 1) // block_size


@settings(max_examples=300, deadline=None)
@given(worlds())
def test_the_rule(world: World) -> None:
    evictions = schedule(world)
    for (layer, head), gone in expected(world).items():
        assert evictions.evicted[layer, head].nonzero().flatten().tolist() == sorted(gone)


@settings(max_examples=200, deadline=None)
@given(worlds())
def test_what_holds_for_any_rule(world: World) -> None:
    evictions = schedule(world)
    evicted, lengths = evictions.evicted, world.lengths
    assert evicted.shape == world.metric.shape and evictions.num_blocks.shape == lengths.shape
    # Pages: exactly what is said, no more than was asked.
    after = evictions.new_lengths(lengths)
    assert torch.equal(pages(lengths, world.block_size) - pages(after, world.block_size), evictions.num_blocks)
    assert evictions.num_blocks.sum() <= world.num_blocks
    # Nothing that is protected, and nothing that is not there.
    at = world.positions[evicted]
    assert ((at >= world.num_sinks) & (at < world.protected_from)).all()
    assert not evicted[torch.arange(evicted.shape[2]) >= lengths[..., None]].any()
    for layer, head in torch.cartesian_prod(*map(torch.arange, lengths.shape)).view(-1, 2).tolist():
        order = world.evictable(layer, head)
        gone = [k for k in order if evicted[layer, head, k]]
        assert gone == order[: len(gone)]  # every evicted metric <= every evictable one that stays
        # A page is full of KVs when it is free: what stays fills all others but for what could not be evicted.
        assert len(gone) == 0 or after[layer, head] % world.block_size == 0


@settings(max_examples=100, deadline=None)
@given(worlds(), st.integers(0, 30))
def test_more_pages_take_more_of_the_same(world: World, more: int) -> None:
    """Groups leave in one order: who frees more has freed what frees less."""
    few, many = schedule(world), schedule(replace(world, num_blocks=world.num_blocks + more))
    assert not (few.evicted & ~many.evicted).any()


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_a_global_order_of_groups(world: World) -> None:
    """No group that goes is worth more than the next group of any head."""
    world = replace(world, allocation="global")
    freed = schedule(world).num_blocks
    going, next_ones = [-math.inf], []
    values = world.metric.nan_to_num(-math.inf, math.inf, -math.inf)
    for layer, head in torch.cartesian_prod(*map(torch.arange, freed.shape)).view(-1, 2).tolist():
        groups = [max(float(values[layer, head, k]) for k in group) for group in world.groups(layer, head)]
        count = int(freed[layer, head])
        going += groups[:count]
        next_ones += groups[count : count + 1]
    assert max(going) <= min(next_ones, default=math.inf)
    total = sum(len(world.groups(*at)) for at in expected(world))
    assert freed.sum() == min(world.num_blocks, total)


@settings(max_examples=100, deadline=None)
@given(st.lists(worlds(), min_size=1, max_size=4))
def test_requests_together_are_as_each_alone(drawn: list[World]) -> None:
    """The requests have equally many layers and heads; beyond the lengths of the shorter ones anything may lie."""
    layers, heads = (min(world.lengths.shape[dim] for world in drawn) for dim in (0, 1))
    n = max(world.metric.shape[2] for world in drawn)
    each = []
    for world in drawn:
        metric, positions = world.metric[:layers, :heads], world.positions[:layers, :heads]
        gap = n - metric.shape[2]
        metric, positions = (torch.nn.functional.pad(x, (0, gap), value=3) for x in (metric, positions))
        lengths, size, how = world.lengths[:layers, :heads], drawn[0].block_size, drawn[0].allocation
        each.append(
            replace(world, metric=metric, positions=positions, lengths=lengths, block_size=size, allocation=how)
        )
    lengths = torch.stack([world.lengths for world in each])
    together = schedule_evictions(
        torch.stack([world.metric for world in each]),
        torch.stack([world.positions for world in each]),
        lengths,
        torch.tensor([world.num_blocks for world in each]),
        torch.tensor([world.num_sinks for world in each]),
        torch.tensor([world.protected_from for world in each]),
        each[0].block_size,
        each[0].allocation,
    )
    for request, world in enumerate(each):
        alone = schedule(world)
        assert torch.equal(together.evicted[request], alone.evicted)
        assert torch.equal(together.num_blocks[request], alone.num_blocks)
        assert torch.equal(together.new_lengths(lengths)[request], alone.new_lengths(world.lengths))


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_whose_metric_is_low_gives_most(allocation: str) -> None:
    """Two layers of two heads of 12 KVs, in pages of 4; the first head of a layer is worth less, and layer 0 less than
    layer 1."""
    metric = torch.tensor([[0.0, 1.0], [2.0, 3.0]])[..., None] + torch.arange(12) / 100
    positions, lengths = torch.arange(12).expand(2, 2, 12), torch.full((2, 2), 12)
    world = World(metric, positions, lengths, 5, 0, 12, 4, allocation)  # type: ignore[arg-type]
    freed = {"global": [[3, 2], [0, 0]], "layer": [[2, 0], [2, 0]], "head": [[1, 1], [1, 1]]}[allocation]
    assert schedule(world).num_blocks.tolist() == freed


def test_ties_go_by_position_then_layer_head_and_group() -> None:
    metric, lengths = torch.zeros(2, 2, 5), torch.full((2, 2), 5)
    positions = torch.tensor([4, 3, 2, 1, 0]).expand(2, 2, 5)
    world = World(metric, positions, lengths, 4, 0, 5, 2, "global")
    evictions = schedule(world)  # groups of 1, 2 and 2 KVs in each head
    assert evictions.num_blocks.tolist() == [[3, 1], [0, 0]]
    assert evictions.evicted[0, 1].tolist() == [False, False, False, False, True]


def test_a_nan_goes_first() -> None:
    metric = torch.tensor([[[1.0, -math.inf, math.nan, -5.0]]])
    world = World(metric, torch.arange(4).expand(1, 1, 4), torch.tensor([[4]]), 1, 0, 4, 1, "global")
    assert schedule(world).evicted.tolist() == [[[False, False, True, False]]]
    assert worth(math.nan) < worth(-math.inf)


def test_a_negative_zero_is_a_zero() -> None:
    metric = torch.tensor([[[0.0, -0.0, 0.0]]])
    world = World(metric, torch.tensor([[[2, 1, 0]]]), torch.tensor([[3]]), 2, 0, 3, 1, "global")
    assert schedule(world).evicted.tolist() == [[[False, True, True]]]


def test_positions_beyond_int32_halves() -> None:
    """Sort keys pack a metric and a position: neither may spill into the other."""
    positions = torch.tensor([[[2**31 - 1, 2**31 - 2, 7]]])
    metric = torch.tensor([[[-1.0, -1.0, 1e-45]]])
    world = World(metric, positions, torch.tensor([[3]]), 1, 0, 2**31, 1, "global")
    assert schedule(world).evicted.tolist() == [[[False, True, False]]]


def test_nothing_to_evict() -> None:
    none = World(torch.zeros(1, 2, 0), torch.zeros(1, 2, 0).long(), torch.zeros(1, 2).long(), 3, 0, 9, 4, "global")
    for allocation in ALLOCATIONS:
        evictions = schedule(replace(none, allocation=allocation))
        assert evictions.evicted.shape == (1, 2, 0) and evictions.num_blocks.tolist() == [[0, 0]]


def test_bad_arguments() -> None:
    good = World(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3).long(), torch.ones(1, 2).long(), 3, 0, 9, 4, "global")
    with pytest.raises(ValueError, match="allocation='even' is unknown"):
        schedule(replace(good, allocation="even"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"num_blocks=-1"):
        schedule(replace(good, num_blocks=-1))
    cases: tuple[dict[str, Any], ...] = (
        {"metric": good.metric.double()},
        {"positions": good.positions[..., 1:]},
        {"lengths": good.lengths.T},
    )
    for wrong in cases:
        with pytest.raises(ValueError, match=r"must be \[L, H, n\] float32"):
            schedule(replace(good, **wrong))
