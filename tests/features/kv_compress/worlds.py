"""Random requests to evict from, and the rule of eviction written down a second time, in plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from vllm_blend.features.kv_compress.config import Allocation

ALLOCATIONS: list[Allocation] = ["global", "layer", "head"]
# Few values, so that ties are everywhere, and the awkward ones among them.
METRICS = st.sampled_from([0.0, -0.0, 0.25, 0.5, 1.0, -1.0, 1e-40, 3e38, math.inf, -math.inf, math.nan])


@dataclass(frozen=True)
class World:
    """One request as `schedule_evictions` is asked about it."""

    metric: torch.Tensor  # [L, H, n]
    positions: torch.Tensor  # [L, H, n]; beyond a head's length, anything
    lengths: torch.Tensor  # [L, H]
    num_blocks: int
    num_sinks: int
    protected_from: int
    block_size: int
    allocation: Allocation

    def evictable(self, layer: int, head: int) -> list[int]:
        """Return the KVs of a head that may go, from the one that is worth least."""
        metric, positions = self.metric[layer, head].tolist(), self.positions[layer, head].tolist()
        those = [
            k for k in range(int(self.lengths[layer, head])) if self.num_sinks <= positions[k] < self.protected_from
        ]
        return sorted(those, key=lambda k: (worth(metric[k]), positions[k]))

    def groups(self, layer: int, head: int) -> list[list[int]]:
        """Return what goes together, in the order in which it goes."""
        left, length = self.evictable(layer, head), int(self.lengths[layer, head])
        groups: list[list[int]] = []
        size = length - (math.ceil(length / self.block_size) - 1) * self.block_size
        while length and len(left) >= size:
            groups.append(left[:size])
            left, size = left[size:], self.block_size
        return groups


def worth(metric: float) -> tuple[int, float]:
    """A NaN is worth least of all."""
    return (0, 0.0) if math.isnan(metric) else (1, metric)


def expected(world: World) -> dict[tuple[int, int], list[int]]:
    """The KVs that go, by (layer, head), in no particular order."""
    num_layers, num_heads = world.lengths.shape
    heads = [(layer, head) for layer in range(num_layers) for head in range(num_heads)]
    groups = {at: world.groups(*at) for at in heads}
    counts = dict.fromkeys(heads, 0)

    def take(among: list[tuple[int, int]], quota: int) -> None:
        offered = [
            (max(worth(float(world.metric[(*at, k)])) for k in group), at, number)
            for at in among
            for number, group in enumerate(groups[at])
        ]
        for _, at, _ in sorted(offered)[:quota]:
            counts[at] += 1

    if world.allocation == "global":
        take(heads, world.num_blocks)
    elif world.allocation == "layer":
        layers = [[at for at in heads if at[0] == layer] for layer in range(num_layers)]
        most = min(sum(len(groups[at]) for at in layer) for layer in layers)
        for layer in layers:
            take(layer, min(world.num_blocks // num_layers, most))
    else:
        most = min(len(groups[at]) for at in heads)
        counts = dict.fromkeys(heads, min(world.num_blocks // len(heads), most))
    return {at: [k for group in groups[at][: counts[at]] for k in group] for at in heads}


@st.composite
def worlds(draw: st.DrawFn, longest: int = 24, metrics: st.SearchStrategy[float] = METRICS) -> World:
    """Heads of any lengths, with KVs at any positions in any order."""
    num_layers, num_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    seq_len = draw(st.integers(1, longest))
    even = draw(st.booleans())  # as after prefill: every head has every token, in order
    shape = (num_layers, num_heads)
    if even:
        lengths = torch.full(shape, seq_len)
        n = seq_len
        positions = torch.arange(n).expand(*shape, n)
    else:
        flat = draw(st.lists(st.integers(0, seq_len), min_size=math.prod(shape), max_size=math.prod(shape)))
        lengths = torch.tensor(flat).view(shape)
        n = int(lengths.max()) + draw(st.integers(0, 2))
        orders = [draw(st.permutations(range(seq_len))) for _ in flat]
        positions = torch.tensor([[*order, *range(n)][:n] for order in orders], dtype=torch.int64).view(*shape, n)
    count = math.prod(shape) * n
    metric = torch.tensor(draw(st.lists(metrics, min_size=count, max_size=count)), dtype=torch.float32).view(*shape, n)
    return World(
        metric,
        positions,
        lengths,
        num_blocks=draw(st.integers(0, math.prod(shape) * seq_len)),
        num_sinks=draw(st.integers(0, 5)),
        protected_from=draw(st.integers(0, seq_len)),
        block_size=draw(st.integers(1, 6)),
        allocation=draw(st.sampled_from(ALLOCATIONS)),
    )
