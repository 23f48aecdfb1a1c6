"""The kernels of KV-Compress's sums, called directly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.head_pages import DecodeProblem, WindowProblem, decode_problem, window_problem
from tests.ops_gpu import cases
from vllm_blend.attention.cuda import CUDABackend
from vllm_blend.attention.metadata import AttentionMetadata, LayerStep
from vllm_blend.features.kv_compress import cuda_ops as cuda_kv_compress
from vllm_blend.features.kv_compress import ops as kv_compress
from vllm_blend.features.kv_compress.sums import KeyRows, WindowKeys
from vllm_blend.ops.paged_kv import PagedKV

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16]
HEAD_DIMS = [64, 80, 96, 128, 256]
# Probabilities of exact products, by an approximate exponential: relative to the largest of a head.
TOLERANCE = 2e-4


def on_gpu(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    def moved(x: Any) -> Any:
        if isinstance(x, PagedKV):
            return PagedKV(x.key.cuda(), x.value.cuda())
        if isinstance(x, (KeyRows, WindowKeys)):
            return type(x)(*map(moved, x))
        return x.cuda() if isinstance(x, torch.Tensor) else x

    return tuple(moved(x) for x in arguments)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    largest = expected.abs().amax().item() if expected.numel() else 0.0
    torch.testing.assert_close(actual.double().cpu(), expected, rtol=TOLERANCE, atol=TOLERANCE * largest + 1e-9)


def check_window(problem: WindowProblem) -> None:
    arguments = on_gpu(problem.arguments(problem.q.dtype))
    actual = cuda_kv_compress.window_sums(*arguments)
    assert actual.dtype == torch.float32
    assert_near(actual, problem.expected())
    assert torch.equal(actual, cuda_kv_compress.window_sums(*arguments))


def received(problem: DecodeProblem) -> torch.Tensor:
    """Return what is added to the metric, which rounding to what was there before would hide."""
    return replace(problem, metric=torch.zeros_like(problem.metric)).expected()


def check_decode(problem: DecodeProblem) -> None:
    results = []
    for _ in range(2):
        added = torch.zeros_like(problem.metric, device="cuda")
        cuda_kv_compress.accumulate_sums(*on_gpu(problem.arguments(problem.q.dtype, added)))
        results.append(added)
    assert torch.equal(*results)
    assert_near(results[0], received(problem))
    metric = problem.metric.cuda()
    cuda_kv_compress.accumulate_sums(*on_gpu(problem.arguments(problem.q.dtype, metric)))
    assert torch.equal(metric, problem.metric.cuda() + results[0])
    by_lse = torch.zeros_like(problem.metric, device="cuda")
    cuda_kv_compress.accumulate_sums(*on_gpu((*problem.arguments(problem.q.dtype, by_lse), problem.lse())))
    assert_near(by_lse, received(problem))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("power", [1, 2])
def test_head_dims(power: int, head_dim: int, dtype: torch.dtype) -> None:
    check_window(window_problem(333, 32, 8, 2, head_dim, dtype, power=power))
    check_decode(decode_problem([1, 15, 16, 17, 333, 0, 1000], 4, head_dim, dtype, power=power, spare_width=3))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 12, 16, 17, 40])
def test_groups(group: int) -> None:
    check_window(window_problem(200, 20, 2 * group, 2, 64, torch.bfloat16))
    check_decode(decode_problem([200, 90], group, 128, torch.bfloat16))


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 64, 65, 150])
def test_windows(rows: int) -> None:
    check_window(window_problem(400, rows, 4, 2, 128, torch.bfloat16))
    check_window(window_problem(400, rows, 4, 2, 128, torch.bfloat16, scattered=True, strided=True))


@pytest.mark.parametrize("buffer", [0, 1, 16, 100, 5000])
def test_buffers(buffer: int) -> None:
    check_window(window_problem(300, 32, 4, 2, 64, torch.bfloat16, buffer=buffer))
    check_decode(decode_problem([300, 64], 4, 64, torch.bfloat16, buffer=buffer))


@settings(max_examples=cases.examples(60), deadline=None)
@given(data=st.data())
def test_random_shapes(data: st.DataObject) -> None:
    dtype, head_dim = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(HEAD_DIMS))
    group, seed = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 2**16))
    common: dict[str, Any] = {
        "block_size": data.draw(st.sampled_from([16, 32, 128])),
        "power": data.draw(st.sampled_from([1, 2])),
        "buffer": data.draw(st.one_of(st.just(0), st.integers(0, 300))),
        "seed": seed,
    }
    n, kv_heads = data.draw(st.integers(1, 700)), data.draw(st.integers(1, 4))
    w = data.draw(st.integers(1, min(n, 70)))
    check_window(window_problem(n, w, kv_heads * group, kv_heads, head_dim, dtype, **common))
    lengths = data.draw(st.lists(st.integers(0, 700), min_size=1, max_size=9))
    check_decode(decode_problem(lengths, group, head_dim, dtype, **common))


def test_many_rows_and_few_long_ones() -> None:
    check_decode(decode_problem([20] * 700, 4, 64, torch.bfloat16))
    check_decode(decode_problem([6000], 4, 64, torch.bfloat16))


def test_a_graph_follows_lengths_and_tables() -> None:
    """Captured once, replayed with other requests in the same tensors."""
    first = decode_problem([300, 40, 0], 4, 128, torch.bfloat16, seed=1)
    metric, q, kv, key_rows, rule = on_gpu(first.arguments(torch.bfloat16, first.metric))
    cuda_kv_compress.accumulate_sums(metric, q, kv, key_rows, rule)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda_kv_compress.accumulate_sums(metric, q, kv, key_rows, rule)
    for now in ([0, 300, 40], [40, 0, 300]):  # as many pages, in other rows
        problem = decode_problem(now, 4, 128, torch.bfloat16, seed=2)
        _, new_q, new_kv, new_rows, _ = problem.arguments(torch.bfloat16, problem.metric)
        for to, source in zip((q, kv.key, *key_rows), (new_q, new_kv.key, *new_rows), strict=True):
            to.copy_(source)
        metric.zero_()
        graph.replay()
        assert_near(metric, received(problem))


@pytest.mark.parametrize("lengths", [[300, 40, 1], [20] * 300, [6000], [17] * 2048])
def test_attention_finds_the_log_sum_exp(lengths: list[int]) -> None:
    """The sums by what decoding attention leaves behind; its output is kept for the layer, which asks for it next."""
    problem = decode_problem(lengths, 4, 128, torch.bfloat16)
    arguments = on_gpu(problem.arguments(torch.bfloat16, torch.zeros_like(problem.metric)))
    metric, q, kv, key_rows, rule = arguments
    held, at = key_rows.lengths, key_rows.query_positions
    kv = PagedKV(kv.key, torch.randn(kv.key.shape, device="cuda").to(kv.key.dtype))
    rows = len(lengths)
    metadata = AttentionMetadata(
        held - 1,
        torch.zeros_like(held),
        key_rows.tables,
        list(range(rows + 1)),
        lengths,
        rope_positions=at,
        per_head=True,
    )
    backend, step = CUDABackend(), LayerStep(q, kv, metadata, problem.scale)
    expected = backend.attend(step)
    lse = backend.attend_early(step)
    assert torch.equal(backend.attend(step), expected)
    torch.testing.assert_close(lse.cpu(), problem.lse(), rtol=1e-4, atol=1e-3)
    cuda_kv_compress.accumulate_sums(metric, q, kv, key_rows, rule, lse)
    assert_near(metric, received(problem))


def test_the_twins_run_on_a_gpu() -> None:
    window = window_problem(333, 32, 8, 2, 64, torch.bfloat16)
    assert_near(kv_compress.window_sums_reference(*on_gpu(window.arguments(torch.float32))), window.expected())
    decode = decode_problem([333, 0, 20], 4, 64, torch.bfloat16)
    metric = torch.zeros_like(decode.metric, device="cuda")
    kv_compress.accumulate_sums_reference(*on_gpu(decode.arguments(torch.float32, metric)))
    assert_near(metric, received(decode))


def test_what_the_kernels_cannot_take_is_an_error() -> None:
    problem = decode_problem([40], 70, 64, torch.bfloat16)
    with pytest.raises(RuntimeError, match="number of query heads"):
        cuda_kv_compress.accumulate_sums(*on_gpu(problem.arguments(torch.bfloat16, problem.metric)))
    window = window_problem(40, 8, 4, 2, 64, torch.bfloat16, block_size=8)
    with pytest.raises(RuntimeError, match="block_size"):
        cuda_kv_compress.window_sums(*on_gpu(window.arguments(torch.bfloat16)))
