from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.paged import DTYPES, ISAS, Problem, assert_near, build, kernels, problems, threads
from vllm_blend.ops.attention import (
    attention_mass,
    attention_mass_reference,
    paged_attention,
    paged_attention_reference,
)

# bf16 weights meet bf16 values on AMX: one more rounding than elsewhere, of every term of the sum.
SLACK = {"amx": 3.0}


def check(problem: Problem, isa: str) -> None:
    dtype = problem.q.dtype
    expected = paged_attention_reference(*problem.arguments(torch.float64))
    with kernels(isa):
        actual = paged_attention(*problem.arguments(dtype))
    assert actual.dtype == dtype
    assert_near(actual, expected, dtype, SLACK.get(isa, 1.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_paged_attention_matches_float64(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    check(data.draw(problems(dtype)), isa)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("isa", ISAS)
def test_paged_attention_every_group_and_head_size(isa: str, group: int, head_dim: int) -> None:
    for dtype in DTYPES:
        check(build([150, 140, 33], [40, 1, 2], 2 * group, 2, head_dim, dtype, seed=group), isa)


@pytest.mark.parametrize("isa", ISAS)
def test_long_requests(isa: str) -> None:
    """Many chunks to merge, many tiles to sum, and the whole causal triangle."""
    for dtype in DTYPES:
        check(build([1000, 700, 333], [1, 1, 333], 6, 2, 64, dtype, seed=3), isa)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), high=st.sampled_from([-60.0, -2.0, 3.0, 60.0]))
def test_sinks_match_float64(isa: str, data: st.DataObject, high: float) -> None:
    for dtype in DTYPES:
        problem = data.draw(problems(dtype))
        sinks = torch.randn(problem.q.shape[1], generator=torch.Generator().manual_seed(0)) + high
        check(replace(problem, sinks=sinks), isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [None, 50])
def test_sinks_in_long_requests(isa: str, window: int | None) -> None:
    for dtype in DTYPES:
        problem = build([1000, 700, 333], [1, 1, 333], 6, 2, 64, dtype, window=window, seed=3)
        check(replace(problem, sinks=torch.linspace(-3, 6, 6)), isa)


def test_sinks_of_another_shape() -> None:
    problem = replace(build([20], [3], 4, 2, 64, torch.float32), sinks=torch.zeros(3))
    with pytest.raises(ValueError, match=r"a score for each of the 4 heads, not shape \(3,\)"):
        paged_attention(*problem.arguments(torch.float32))


@pytest.mark.parametrize("isa", ISAS)
def test_large_scores_do_not_overflow(isa: str) -> None:
    problem = build([200, 90], [60, 1], 4, 2, 64, torch.float32)
    problem.q.mul_(1000)
    check(problem, isa)


@pytest.mark.parametrize("isa", ISAS)
def test_unsorted_and_repeated_positions(isa: str) -> None:
    problem = build([300], [50], 6, 2, 64, torch.float32)
    problem.positions.copy_(torch.randint(0, 300, (50,)))
    check(problem, isa)


@pytest.mark.parametrize("isa", ISAS)
def test_a_request_alone_equals_itself_in_a_batch(isa: str) -> None:
    """Bit for bit: what a request attends to must not depend on its batch mates or on the number of threads."""
    for dtype in DTYPES:
        batch = build([400, 257, 130, 64], [1, 1, 70, 0], 6, 2, 64, dtype)
        with kernels(isa), threads(3):
            together = paged_attention(*batch.arguments(dtype))
        for request, rows in enumerate(batch.rows()):
            alone = Problem(
                batch.q[rows],
                batch.key_cache,
                batch.value_cache,
                batch.positions[rows].contiguous(),
                batch.block_tables[request : request + 1].contiguous(),
                torch.tensor([0, rows.stop - rows.start]),
                batch.seq_lens[request : request + 1],
                batch.scale,
                batch.window,
            )
            with kernels(isa), threads(1):
                assert torch.equal(paged_attention(*alone.arguments(dtype)), together[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_attention_mass_matches_float64(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    problem = data.draw(problems(dtype))
    rows = [slice(data.draw(st.integers(r.start, r.stop)), r.stop) for r in problem.rows()]
    expected = attention_mass_reference(*problem.mass_arguments(torch.float64, rows))
    with kernels(isa):
        actual = attention_mass(*problem.mass_arguments(dtype, rows))
    assert [len(mass) for mass in actual] == problem.seq_lens.tolist()
    for mass, wanted in zip(actual, expected, strict=True):
        assert mass.dtype == torch.float32
        # Probabilities come from exact products of the stored values: float32 error whatever the storage.
        assert_near(mass, wanted, torch.float32, slack=2.0)


@pytest.mark.parametrize("isa", ISAS)
def test_attention_mass_of_a_long_request_sums_to_its_queries(isa: str) -> None:
    problem = build([1500], [40], 6, 2, 64, torch.bfloat16)
    with kernels(isa):
        (mass,) = attention_mass(*problem.mass_arguments(torch.bfloat16, problem.rows()))
    assert mass.sum().item() == pytest.approx(40, rel=1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_no_tokens_and_no_requests(isa: str) -> None:
    with kernels(isa):
        idle = build([20, 5], [0, 0], 4, 2, 64, torch.float32)
        assert paged_attention(*idle.arguments(torch.float32)).shape == (0, 4, 64)
        masses = attention_mass(*idle.mass_arguments(torch.float32, idle.rows()))
        assert [mass.tolist() for mass in masses] == [[0.0] * 20, [0.0] * 5]
        no_request = build([], [], 4, 2, 64, torch.float32)
        assert paged_attention(*no_request.arguments(torch.float32)).shape == (0, 4, 64)
        assert attention_mass(*no_request.mass_arguments(torch.float32, [])) == []


@pytest.mark.parametrize("isa", ISAS)
def test_out_of_range_tables_and_positions_are_errors(isa: str) -> None:
    def run(**changes: torch.Tensor) -> None:
        problem = build([40, 30], [5, 1], 4, 2, 64, torch.float32)
        for name, value in changes.items():
            object.__setattr__(problem, name, value)
        paged_attention(*problem.arguments(torch.float32))

    with kernels(isa):
        run()
        with pytest.raises(IndexError, match="block_tables"):
            run(block_tables=torch.full((2, 3), 10_000, dtype=torch.int32))
        with pytest.raises(IndexError, match="block_tables"):
            run(block_tables=torch.full((2, 3), -1, dtype=torch.int32))
        with pytest.raises(IndexError, match="block_tables"):
            run(seq_lens=torch.tensor([4000, 30]))
        with pytest.raises(IndexError, match="positions"):
            run(positions=torch.tensor([0, 1, 2, 3, 40, 29]))
        with pytest.raises(IndexError, match="positions"):
            run(positions=torch.tensor([-1, 1, 2, 3, 4, 29]))
        for starts in ([0, 5, 5], [0, 5, 7], [1, 5, 6], [0, 7, 6], [0, -1, 6]):
            with pytest.raises(ValueError, match="query_start_loc"):
                run(query_start_loc=torch.tensor(starts))


def test_tensors_that_do_not_fit_are_errors() -> None:
    def run(**changes: object) -> None:
        problem = build([40, 30], [5, 1], 4, 2, 64, torch.float32)
        for name, value in changes.items():
            object.__setattr__(problem, name, value)
        paged_attention(*problem.arguments(torch.float32))

    with pytest.raises(ValueError, match="positions"):
        run(positions=torch.zeros(6, dtype=torch.int32))
    with pytest.raises(ValueError, match="block_tables"):
        run(block_tables=torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="query_start_loc"):
        run(query_start_loc=torch.tensor([0, 5, 6, 6]))
    with pytest.raises(ValueError, match="seq_lens"):
        run(seq_lens=torch.tensor([40]))
    with pytest.raises(ValueError, match="sliding_window"):
        run(window=0)
    with pytest.raises(ValueError, match="KV heads"):
        run(q=torch.zeros(6, 3, 64))
    problem = build([40, 30], [5, 1], 4, 2, 64, torch.float32)
    with pytest.raises(ValueError, match=r"query_rows\[1\]"):
        attention_mass(*problem.mass_arguments(torch.float32, [slice(0, 5), slice(5, 9)]))
    with pytest.raises(ValueError, match="query_rows"):
        attention_mass(*problem.mass_arguments(torch.float32, [slice(0, 5)]))


def test_unsupported_head_size_and_float64_run_the_twin() -> None:
    odd = build([40, 30], [5, 1], 4, 2, 24, torch.float32)
    expected = paged_attention_reference(*odd.arguments(torch.float64))
    with kernels(ISAS[0]):
        assert_near(paged_attention(*odd.arguments(torch.float32)), expected, torch.float32)
        assert torch.equal(paged_attention(*odd.arguments(torch.float64)), expected)
