"""The loading controller against the paper's rule: T_recompute(r) = r x prefill, T_load = bytes / throughput."""

from __future__ import annotations

import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.blend.controller import MIN_PREFILL_TOKENS, RATIO_STEP, TRY_AGAIN, Average, LoadingController
from vllm_blend.kv_store.tiers import DISK, MEMORY, ChunkLoad

BYTES = 1000  # of a token
FLOOR = 0.15
SPEEDS = st.floats(1e-7, 1e-2)


def controller(load: float | None = None, prefill: float | None = None, tier: str = MEMORY) -> LoadingController:
    """A controller that has seen loads and prefills of so many seconds a token."""
    made = LoadingController(BYTES)
    if load is not None:
        made.loaded(ChunkLoad(tier, 100 * BYTES, 100), 100 * load)
    if prefill is not None:
        made.prefilled(1000, 1000 * prefill)
    return made


def gauges(made: LoadingController) -> dict[str, float]:
    return dict(made.gauges())


@given(load=SPEEDS, prefill=SPEEDS, reused=st.integers(1, 4000), more=st.integers(0, 500), floor=st.floats(0, 1))
def test_recompute_hides_behind_loading_and_keeps_the_floor(
    load: float, prefill: float, reused: int, more: int, floor: float
) -> None:
    ratio = controller(load, prefill).choose_ratio(floor, {MEMORY: reused * BYTES}, reused + more).ratio
    assert floor <= ratio <= 1
    t_load, t_prefill = load * reused, prefill * (reused + more)
    if ratio > floor:
        assert ratio * t_prefill <= t_load * (1 + 1e-6)
    larger = ratio + RATIO_STEP
    assert larger > 1 or larger * t_prefill >= t_load * (1 - 1e-6), "more would have been free"


@pytest.mark.parametrize(("load", "ratio"), [(0.01, 0.15), (0.3, 0.30), (0.5, 0.50), (2.0, 1.0)])
def test_ratios_for_links_of_several_speeds(load: float, ratio: float) -> None:
    """`load` in prefills: a link that takes half as long as computing everything lets half be computed."""
    made = controller(load * 1e-4, 1e-4)
    assert made.choose_ratio(FLOOR, {MEMORY: 1000 * BYTES}, 1000).ratio == pytest.approx(ratio)
    assert gauges(made)["controller_ratio"] == pytest.approx(ratio)
    assert gauges(made)["controller_prompts_raised"] == (ratio > FLOOR)


@pytest.mark.parametrize(("load", "prefill"), [(None, 1e-4), (1e-4, None), (None, None)])
def test_the_floor_holds_while_something_is_unknown(load: float | None, prefill: float | None) -> None:
    choice = controller(load, prefill).choose_ratio(FLOOR, {MEMORY: 100 * BYTES}, 100)
    assert choice.ratio == FLOOR and "floor is kept" in choice.reason


def test_what_arrives_before_a_request_runs_hides_nothing() -> None:
    """Only what is left on the disk overlaps with the request's own prefill, however slow the disk is."""
    made = controller(1e-4, 1e-4, tier="disk")
    assert made.choose_ratio(FLOOR, {MEMORY: 100 * BYTES, DISK: 0}, 100).ratio == FLOOR
    assert made.choose_ratio(FLOOR, {MEMORY: 0, DISK: 0}, 100).ratio == FLOOR
    assert made.choose_ratio(FLOOR, {MEMORY: 50 * BYTES, DISK: 50 * BYTES}, 100).ratio == pytest.approx(0.5)


def test_what_arrives_from_several_tiers_adds_up() -> None:
    made = controller(1e-5, 1e-4)
    made.loaded(ChunkLoad(DISK, 100 * BYTES, 100), 100 * 6e-5)
    assert made.choose_ratio(FLOOR, {MEMORY: 100 * BYTES, DISK: 50 * BYTES}, 100).ratio == pytest.approx(0.4)


@given(load=SPEEDS, prefill=SPEEDS, tokens=st.integers(1, 4000))
def test_a_chunk_is_computed_where_loading_it_takes_longer(load: float, prefill: float, tokens: int) -> None:
    if math.isclose(load, prefill, rel_tol=1e-6):
        return
    made = controller(load, prefill, tier="disk")
    assert made.recompute(ChunkLoad("disk", tokens * BYTES, tokens)) == (load > prefill)
    assert made.num_recomputed == (load > prefill)
    assert not made.recompute(ChunkLoad("remote", tokens * BYTES, tokens)), "nothing is known of that tier"


@pytest.mark.parametrize(("load", "prefill"), [(None, 1e-4), (1.0, None)])
def test_what_is_unknown_is_loaded(load: float | None, prefill: float | None) -> None:
    assert not controller(load, prefill, tier="disk").recompute(ChunkLoad("disk", BYTES, 1))


def test_a_tier_that_was_slow_is_tried_again() -> None:
    made = controller(1.0, 1e-4, tier="disk")
    chunk = ChunkLoad("disk", 100 * BYTES, 100)
    answers = [made.recompute(chunk) for _ in range(3 * (TRY_AGAIN + 1))]
    assert answers == ([True] * TRY_AGAIN + [False]) * 3
    for _ in range(60):
        made.loaded(chunk, 1e-6)
    assert not made.recompute(chunk), "it has become fast"


def test_a_tier_is_tried_again_after_choices_in_a_row() -> None:
    """A chunk that loads faster than it is computed measures the tier, so counting begins anew."""
    made = controller(1.0, 1e-4, tier="disk")
    slow, fast = ChunkLoad("disk", 100 * BYTES, 100), ChunkLoad("disk", 0, 100)
    for _ in range(3):
        assert all(made.recompute(slow) for _ in range(TRY_AGAIN))
        assert not made.recompute(fast)


def test_speeds_are_moving_averages_of_all_but_tiny_steps() -> None:
    average = Average()
    average.add(10.0, 10)
    assert average.value == 1.0
    average.add(20.0, 10)
    assert average.value == pytest.approx(1.2), "the newest measurement counts for a fifth"
    for _ in range(100):
        average.add(6.0, 2)
    assert average.value == pytest.approx(3.0)
    made = controller(prefill=1e-4)
    made.prefilled(MIN_PREFILL_TOKENS - 1, 1000.0)
    assert gauges(made)["controller_prefill_tokens_per_second"] == pytest.approx(1e4)
    assert "controller_ratio" not in gauges(made) and "controller_disk_bytes_per_second" not in gauges(made)
    made.loaded(ChunkLoad("disk", 500, 1), 0.001)
    assert gauges(made)["controller_disk_bytes_per_second"] == pytest.approx(5e5)


def test_every_choice_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    made = controller(5e-5, 1e-4)
    made.loaded(ChunkLoad("disk", BYTES, 1), 1.0)
    with caplog.at_level(logging.DEBUG, "vllm_blend.blend.controller"):
        made.choose_ratio(FLOOR, {MEMORY: 1000 * BYTES}, 1000)
        made.recompute(ChunkLoad("disk", 100 * BYTES, 100))
    ratio, chunk = (record.getMessage() for record in caplog.records)
    assert ratio == (
        "recompute ratio 0.50 for 1000 tokens, 1.0 MiB from the memory: loading takes about 50.00 ms, a full prefill "
        "100.00 ms; a share of 0.50 hides behind loading"
    )
    assert chunk == (
        "a chunk of 100 tokens is computed: loading it from the disk takes about 100000.00 ms, computing it 10.00 ms"
    )
