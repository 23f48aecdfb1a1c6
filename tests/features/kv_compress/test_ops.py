from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.head_pages import DecodeProblem, decode_problem, decode_problems, window_problem, window_problems
from tests.ops.paged import DTYPES, ISAS, assert_near, kernels, threads
from vllm_blend.features.kv_compress import ops as kv_compress
from vllm_blend.features.kv_compress.ops import (
    accumulate_sums,
    accumulate_sums_reference,
    window_sums,
    window_sums_reference,
)

# Probabilities come from exact products of the stored values: float32 error whatever the storage.
SLACK = 2.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_window_sums_match_float64(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    problem = data.draw(window_problems(dtype))
    with kernels(isa):
        actual = window_sums(*problem.arguments(dtype))
    assert actual.dtype == torch.float32
    assert_near(actual, problem.expected(), torch.float32, SLACK)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_the_twin_of_window_sums_keeps_float64(data: st.DataObject) -> None:
    problem = data.draw(window_problems(torch.float32))
    actual = window_sums_reference(*problem.arguments(torch.float64))
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, problem.expected(), rtol=1e-12, atol=1e-14)


def test_the_twins_take_some_heads_or_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = window_problem(90, 8, 10, 5, 32, torch.float32)
    whole = window_sums_reference(*problem.arguments(torch.float32))
    monkeypatch.setattr(kv_compress, "TILE_ELEMENTS", 2 * 2 * 8 * 90)  # of two KV heads
    torch.testing.assert_close(window_sums_reference(*problem.arguments(torch.float32)), whole)
    decode = decode_problem([40, 0, 30, 48, 3], 4, 32, torch.float32)
    monkeypatch.setattr(kv_compress, "TILE_ELEMENTS", 2 * 48 * 32)  # of two rows
    metric = decode.metric.double()
    accumulate_sums_reference(*decode.arguments(torch.float64, metric))
    torch.testing.assert_close(metric, decode.expected(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("isa", ISAS)
def test_window_sums_of_many_chunks_do_not_depend_on_threads(isa: str) -> None:
    for group in (1, 4, 7):
        problem = window_problem(1500, 32, 2 * group, 2, 64, torch.bfloat16, power=1)
        with kernels(isa), threads(1):
            alone = window_sums(*problem.arguments(torch.bfloat16))
        with kernels(isa), threads(3):
            assert torch.equal(window_sums(*problem.arguments(torch.bfloat16)), alone)
        torch.testing.assert_close(alone.sum(1), torch.full((2 * group,), 32.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("isa", ISAS)
def test_large_scores_do_not_overflow(isa: str) -> None:
    window = window_problem(200, 20, 4, 2, 64, torch.float32)
    window.q.mul_(1000)
    decode = decode_problem([200, 90], 3, 64, torch.float32)
    decode.q.mul_(1000)
    with kernels(isa):
        # Scores of thousands: float32 has them to 2^-12 or so, and the softmax makes that the relative error.
        torch.testing.assert_close(
            window_sums(*window.arguments(torch.float32)).double(), window.expected(), rtol=5e-3, atol=1e-3
        )
        metric = decode.metric.clone()
        accumulate_sums(*decode.arguments(torch.float32, metric))
        torch.testing.assert_close(metric.double(), decode.expected(), rtol=5e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_accumulate_sums_matches_float64(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    """Sums change in place for the rows' own keys, and no other slot changes."""
    problem = data.draw(decode_problems(dtype))
    metric = problem.metric.clone()
    with kernels(isa):
        accumulate_sums(*problem.arguments(dtype, metric))
    assert_near(metric, problem.expected(), torch.float32, SLACK)
    touched = torch.zeros(len(metric), dtype=torch.bool).index_fill_(0, problem.tables.flatten().long(), True)
    touched[0] = False
    assert torch.equal(metric[~touched], problem.metric[~touched])


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_the_twin_of_accumulate_sums_keeps_float64(data: st.DataObject) -> None:
    problem = data.draw(decode_problems(torch.float32))
    metric = problem.metric.double()
    accumulate_sums_reference(*problem.arguments(torch.float64, metric))
    torch.testing.assert_close(metric, problem.expected(), rtol=1e-12, atol=1e-14)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_log_sum_exp_that_is_known_changes_nothing(data: st.DataObject) -> None:
    problem = data.draw(decode_problems(torch.float32))
    metric = problem.metric.clone()
    accumulate_sums(*(*problem.arguments(torch.float32, metric), problem.lse()))
    assert_near(metric, problem.expected(), torch.float32, SLACK)


@pytest.mark.parametrize("isa", ISAS)
def test_rows_of_a_batch_are_each_row_alone(isa: str) -> None:
    """Bit for bit: what a request's KVs are worth must not depend on its batch mates or on the number of threads."""
    for dtype in DTYPES:
        batch = decode_problem([400, 0, 257, 130, 64, 1], 3, 64, dtype)
        together = batch.metric.clone()
        with kernels(isa), threads(3):
            accumulate_sums(*batch.arguments(dtype, together))
        alone = batch.metric.clone()
        for row in range(6):
            with kernels(isa), threads(1):
                accumulate_sums(*batch.rows(slice(row, row + 1)).arguments(dtype, alone))
        assert torch.equal(alone, together)


@pytest.mark.parametrize("isa", ISAS)
def test_steps_add_up(isa: str) -> None:
    problem = decode_problem([70, 33], 4, 64, torch.float32, power=1)
    metric = torch.zeros_like(problem.metric)
    with kernels(isa):
        for _ in range(3):
            accumulate_sums(*problem.arguments(torch.float32, metric))
    assert metric.sum().item() == pytest.approx(3 * 2 * 4, rel=1e-5)  # each query head spends 1 a step
    assert not metric[0].any()


@pytest.mark.parametrize("isa", ISAS)
def test_tables_may_be_a_slice_of_wider_ones(isa: str) -> None:
    problem = decode_problem([70, 33], 4, 64, torch.float32)
    wide = torch.full((2, 9), 10_000, dtype=torch.int32)
    wide[:, :5] = problem.tables
    sliced = DecodeProblem(**{**vars(problem), "tables": wide[:, :5]})
    metric = problem.metric.clone()
    with kernels(isa):
        accumulate_sums(*sliced.arguments(torch.float32, metric))
    assert_near(metric, problem.expected(), torch.float32, SLACK)


@pytest.mark.parametrize("isa", ISAS)
def test_no_queries_and_no_rows(isa: str) -> None:
    with kernels(isa):
        idle = window_problem(20, 0, 4, 2, 64, torch.float32)
        assert torch.equal(window_sums(*idle.arguments(torch.float32)), torch.zeros(4, 20))
        no_request = decode_problem([], 4, 64, torch.float32)
        empty = decode_problem([0, 0], 4, 64, torch.float32)
        for problem in (no_request, empty):
            metric = problem.metric.clone()
            accumulate_sums(*problem.arguments(torch.float32, metric))
            assert torch.equal(metric, problem.metric)


@pytest.mark.parametrize("isa", ISAS)
def test_out_of_range_tables_and_positions_are_errors(isa: str) -> None:
    def window(**changes: object) -> None:
        problem = window_problem(40, 5, 4, 2, 64, torch.float32)
        window_sums(*type(problem)(**{**vars(problem), **changes}).arguments(torch.float32))

    def decode(**changes: object) -> None:
        problem = decode_problem([40, 30], 4, 64, torch.float32)
        changed = type(problem)(**{**vars(problem), **changes})
        accumulate_sums(*changed.arguments(torch.float32, problem.metric))

    with kernels(isa):
        window()
        decode()
        for block in (10_000, -1):
            with pytest.raises(IndexError, match="block_tables"):
                window(block_table=torch.full((3,), block, dtype=torch.int32))
            with pytest.raises(IndexError, match="block_tables"):
                decode(tables=torch.full((2, 3), block, dtype=torch.int32))
        with pytest.raises(IndexError, match="n=49"):
            window(n=49)
        for position in (40, -1):
            with pytest.raises(IndexError, match="positions"):
                window(positions=torch.tensor([1, 2, 3, 4, position]))
        for length in (4000, -1):
            with pytest.raises(IndexError, match="block_tables"):
                decode(lengths=torch.tensor([40, length]))


def test_the_twin_refuses_positions_out_of_range() -> None:
    problem = window_problem(40, 5, 4, 2, 64, torch.float32)
    for position in (40, -1):
        problem.positions[2] = position
        with pytest.raises(IndexError, match="query_positions"):
            window_sums_reference(*problem.arguments(torch.float32))


def test_tensors_that_do_not_fit_are_errors() -> None:
    def window(**changes: object) -> None:
        problem = window_problem(40, 5, 4, 2, 64, torch.float32)
        window_sums(*type(problem)(**{**vars(problem), **changes}).arguments(torch.float32))

    def decode(metric: torch.Tensor | None = None, **changes: object) -> None:
        problem = decode_problem([40, 30], 4, 64, torch.float32)
        changed = type(problem)(**{**vars(problem), **changes})
        accumulate_sums(*changed.arguments(torch.float32, problem.metric if metric is None else metric))

    for run in (window, decode):
        with pytest.raises(ValueError, match="power must be 1 or 2, got 3"):
            run(power=3)
        with pytest.raises(ValueError, match="buffer must be at least 0, got -1"):
            run(buffer=-1)
    with pytest.raises(ValueError, match="KV heads"):
        window(q=torch.zeros(5, 3, 64))
    with pytest.raises(ValueError, match="query_positions"):
        window(positions=torch.zeros(5, dtype=torch.int32))
    with pytest.raises(ValueError, match="block_table"):
        window(block_table=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="do not fit together"):
        decode(q=torch.zeros(2, 4, 32))
    with pytest.raises(ValueError, match="do not fit together"):
        decode(metric=torch.zeros(4, 16))
    with pytest.raises(ValueError, match="metric must be contiguous"):
        decode(metric=torch.zeros(16, 8).T)
    with pytest.raises(ValueError, match="key_positions"):
        decode(key_positions=torch.zeros(8, 16, dtype=torch.int64))
    with pytest.raises(ValueError, match="lengths"):
        decode(lengths=torch.tensor([40]))
    with pytest.raises(ValueError, match="query_positions"):
        decode(query_positions=torch.tensor([40]))
    problem = decode_problem([40, 30], 4, 64, torch.float32)
    with pytest.raises(ValueError, match="lse"):
        accumulate_sums(*(*problem.arguments(torch.float32, problem.metric), problem.lse()[:, :2]))
    with pytest.raises(ValueError, match="tables"):
        decode(tables=torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="tables"):
        decode(tables=torch.zeros(3, 2, dtype=torch.int32).T)


def test_unsupported_head_size_and_float64_run_the_twins() -> None:
    window = window_problem(40, 5, 4, 2, 24, torch.float32)
    decode = decode_problem([40, 30], 4, 24, torch.float32)
    with kernels(ISAS[0]):
        assert_near(window_sums(*window.arguments(torch.float32)), window.expected(), torch.float32, SLACK)
        assert window_sums(*window.arguments(torch.float64)).dtype == torch.float64
        metric = decode.metric.clone()
        accumulate_sums(*decode.arguments(torch.float32, metric))
        assert_near(metric, decode.expected(), torch.float32, SLACK)
