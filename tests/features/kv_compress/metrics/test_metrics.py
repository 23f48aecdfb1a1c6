from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.features.kv_compress.metrics.oracles import ORACLES, Prompt, prompt
from vllm_blend.features.kv_compress.metrics import (
    METRICS,
    HeadView,
    LayerView,
    make_metric,
    register_metric,
    setting_names,
)
from vllm_blend.features.kv_compress.metrics.base import EvictionMetric

NAMES = sorted(METRICS)
QUERY_FREE = [name for name in NAMES if not METRICS[name].watches]


def scores(p: Prompt, metric: EvictionMetric) -> torch.Tensor:
    result = metric.score(p.view())
    assert result.shape == (p.kv_heads, len(p.keys))
    assert result.dtype == torch.float32
    return result


def check(p: Prompt, metric: EvictionMetric) -> None:
    expected = torch.from_numpy(ORACLES[metric.name](p, metric))
    torch.testing.assert_close(scores(p, metric).double(), expected, rtol=1e-4, atol=1e-6)


def test_every_metric_has_an_oracle() -> None:
    assert ORACLES.keys() == METRICS.keys()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_metric_matches_its_oracle(name: str, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 70))
    p = prompt(
        n,
        w=data.draw(st.integers(1, min(n, 9))),
        group=data.draw(st.integers(1, 8)),
        kv_heads=data.draw(st.integers(1, 3)),
        head_dim=data.draw(st.sampled_from([16, 24])),
        block_size=data.draw(st.sampled_from([1, 8, 16])),
        seed=data.draw(st.integers(0, 999)),
    )
    check(p, make_metric(name))


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *[("kv_compress", {"aggregation": a}) for a in ("L1-sum", "L1-avg", "L2-sum", "L2-avg")],
    ("kv_compress", {"buffer": 3}),
    ("kv_compress", {"buffer": 100}),
    ("kv_compress", {"pool_size": 1}),
    ("kv_compress", {"pool_size": 11, "aggregation": "L1-sum", "buffer": 1}),
    ("snapkv", {"pool_size": 1}),
    ("snapkv", {"pool_size": 7, "buffer": 2}),
    ("expected_attention", {"value_norm": False}),
    ("expected_attention", {"future_positions": 1}),
    ("random", {"seed": -5}),
]


@pytest.mark.parametrize(("name", "given_settings"), SETTINGS)
def test_settings_match_the_oracle(name: str, given_settings: dict[str, Any]) -> None:
    check(prompt(seed=3), make_metric(name, **given_settings))


def test_window_of_scattered_queries() -> None:
    """A blended prompt computes the tokens that were chosen: the last of them need not stand together."""
    p = dataclasses.replace(prompt(), query_positions=torch.tensor([3, 17, 20, 21, 38, 39]))
    check(p, make_metric("kv_compress", buffer=2))
    check(p, make_metric("expected_attention"))


@pytest.mark.parametrize("name", ["kv_compress", "snapkv", "expected_attention"])
def test_window_of_no_query_scores_zero(name: str) -> None:
    p = prompt()
    unasked = dataclasses.replace(p, queries=p.queries[:0], query_positions=p.query_positions[:0])
    assert not scores(unasked, make_metric(name)).any()


def test_expected_attention_undoes_any_rope() -> None:
    """Some channels without rotation, cosines that are scaled (YaRN), and no positions left in the tables."""
    metric = make_metric("expected_attention")
    check(prompt(rotary_dim=8), metric)
    check(prompt(attention_factor=1.3), metric)
    check(prompt(max_position=45), metric)
    check(prompt(max_position=40), metric)
    p = prompt()
    with pytest.raises(ValueError, match="rotary"):
        metric.score(dataclasses.replace(p.view(), last_queries=dataclasses.replace(p.view().window, rotary=None)))


@pytest.mark.parametrize("name", NAMES)
def test_blocks_may_lie_anywhere(name: str) -> None:
    p = prompt(n=61)
    metric = make_metric(name)
    assert torch.equal(metric.score(p.view(layout_seed=1)), metric.score(p.view(layout_seed=2)))


@pytest.mark.parametrize("name", QUERY_FREE)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999))
def test_head_pages_score_what_they_hold(name: str, seed: int) -> None:
    """Each head has KVs of its own, in any order; beyond them there is anything."""
    metric = make_metric(name)
    p = prompt(n=50, seed=seed)
    random = torch.Generator().manual_seed(seed)
    survivors = [torch.randperm(50, generator=random)[: 50 - 20 * head] for head in range(p.kv_heads)]
    keys, values = (torch.full((p.kv_heads, 50, 16), float("nan")) for _ in range(2))
    positions, valid = torch.zeros(p.kv_heads, 50, dtype=torch.int64), torch.zeros(p.kv_heads, 50, dtype=torch.bool)
    for head, kept in enumerate(survivors):
        at = (head, slice(0, len(kept)))
        keys[at], values[at], positions[at], valid[at] = p.keys[kept, head], p.values[kept, head], kept, True
    actual = metric.score(HeadView(0, 2, p.scale, keys, values, positions, valid))
    assert actual.isfinite().all()
    for head, kept in enumerate(survivors):
        # What a metric that compares KVs with one another sees is this head's survivors, and nothing else.
        alone = dataclasses.replace(p, keys=p.keys[kept.sort().values], values=p.values[kept.sort().values])
        expected = metric.score(alone.view())[head]
        if name in ("random", "streaming_llm"):  # theirs depend on positions, which `alone` has others of
            expected = metric.score(p.view())[head][kept.sort().values]
        order = kept.argsort()
        torch.testing.assert_close(actual[head, : len(kept)][order], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in NAMES if METRICS[name].watches])
def test_metrics_of_queries_refuse_head_pages(name: str) -> None:
    view = prompt().view()
    heads = HeadView(0, 2, view.scale, view.keys, view.values, view.positions, view.valid)
    with pytest.raises(ValueError, match=r"quer"):
        make_metric(name).score(heads)


def test_a_view_without_window_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="keydiff or knorm"):
        make_metric("kv_compress").score(dataclasses.replace(prompt().view(), last_queries=None))


@pytest.mark.parametrize("aggregation", ["L1-sum", "L1-avg", "L2-sum", "L2-avg"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_rank_divides_by_the_queries_that_counted(aggregation: str, data: st.DataObject) -> None:
    buffer = data.draw(st.integers(0, 5))
    queries = sorted(data.draw(st.sets(st.integers(0, 30), max_size=12)))
    positions = torch.tensor(data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=9))).expand(2, 3, -1)
    stored = torch.rand(positions.shape)
    metric = make_metric("kv_compress", aggregation=aggregation, buffer=buffer)
    actual = metric.rank(stored, positions, torch.tensor(queries, dtype=torch.int64))
    counts = torch.tensor([max(1, sum(t >= p + buffer for t in queries)) for p in positions[0, 0].tolist()])
    assert torch.equal(actual, stored / counts if aggregation.endswith("avg") else stored)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "kv_compress"])
def test_other_metrics_rank_by_what_is_stored(name: str) -> None:
    stored = torch.rand(2, 5)
    assert make_metric(name).rank(stored, torch.arange(5).expand(2, -1), torch.tensor([4])) is stored


@pytest.mark.parametrize("name", NAMES)
def test_what_an_engine_asks_every_metric(name: str) -> None:
    metric = make_metric(name)
    assert metric.power in (1, 2) and metric.buffer >= 0
    assert metric.watches or not metric.accumulates


def test_what_an_engine_asks_the_metrics_of_papers() -> None:
    made = {name: make_metric(name) for name in ("kv_compress", "snapkv", "expected_attention", "keydiff", "knorm")}
    assert [name for name, metric in made.items() if metric.power == 2] == ["kv_compress"]
    asks = ["kv_compress", "snapkv", "expected_attention"]
    assert [name for name, metric in made.items() if metric.watches] == asks
    assert [name for name, metric in made.items() if metric.accumulates] == asks
    assert not any(metric.buffer for metric in made.values())


def test_random_is_uniform_and_its_own_in_each_layer_and_head() -> None:
    p = prompt(n=4000, w=1, kv_heads=2, group=1)
    metric = make_metric("random")
    numbers = torch.cat([metric.score(p.view()), metric.score(p.view(layer_idx=1))])
    assert numbers.min() >= 0 and numbers.max() < 1
    assert torch.histc(numbers, 16, 0, 1).sub(1000).abs().max() < 150  # 5 standard deviations of a count
    assert torch.corrcoef(numbers).fill_diagonal_(0).abs().max() < 0.08  # likewise, of a correlation
    assert not torch.equal(numbers[:2], make_metric("random", seed=1).score(p.view()))


def test_registry_errors_say_the_fix() -> None:
    with pytest.raises(ValueError, match=r"'lru'.*keydiff.*random"):
        make_metric("lru")
    with pytest.raises(ValueError, match=r"'keydiff'.*'buffer'.*none"):
        make_metric("keydiff", buffer=1)
    with pytest.raises(ValueError, match=r"'snapkv'.*'aggregation'.*buffer.*pool_size"):
        make_metric("snapkv", aggregation="L2-sum")
    with pytest.raises(ValueError, match=r"metric_aggregation='L3'.*L1-sum"):
        make_metric("kv_compress", aggregation="L3")
    for name in ("kv_compress", "snapkv", "expected_attention"):
        with pytest.raises(ValueError, match="metric_collection_buffer_size=-1"):
            make_metric(name, buffer=-1)
    for name, size in (("kv_compress", 4), ("snapkv", 0)):
        with pytest.raises(ValueError, match=f"pool_size={size}"):
            make_metric(name, pool_size=size)
    with pytest.raises(ValueError, match="future_positions=0"):
        make_metric("expected_attention", future_positions=0)
    assert setting_names("kv_compress") == {"aggregation", "buffer", "pool_size"}


def test_users_may_register_a_metric() -> None:
    @dataclasses.dataclass(frozen=True)
    class First(EvictionMetric):
        name: ClassVar[str] = "first"

        def score(self, view: LayerView) -> torch.Tensor:
            return -view.positions.float()

    try:
        register_metric(First)
        assert make_metric("first").score(prompt().view())[0, 3] == -3
    finally:
        METRICS.pop("first", None)


@pytest.mark.parametrize("name", ["kv_compress", "snapkv", "streaming_llm", "random"])
def test_metrics_that_need_no_keys_gather_none(name: str) -> None:
    view = prompt().view()
    make_metric(name).score(view)
    assert "keys" not in vars(view) and "values" not in vars(view)
