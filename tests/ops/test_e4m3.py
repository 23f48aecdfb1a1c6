"""Caches of e4m3: what is written is rounded as torch rounds, and attention is that of the rounded numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.head_pages import decode_problems, window_problems
from tests.ops.paged import DTYPES, ISAS, Problem, assert_near, build, kernels, problems
from vllm_blend import ops
from vllm_blend.features.kv_compress.ops import accumulate_sums, window_sums
from vllm_blend.ops.attention import attention_mass_reference, paged_attention_reference
from vllm_blend.ops.e4m3 import E4M3, as_bytes, gathered, narrowed, widened
from vllm_blend.ops.paged_kv import PagedKV
from vllm_blend.ops.states import attention_states_reference

SLACK = {"amx": 3.0}  # as in test_attention.py
EVERY = torch.arange(256, dtype=torch.uint8).view(E4M3)
NAN = 0x7F


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round by torch alone; what is unused stays NaN."""
    return x.float().clamp(-448, 448).to(E4M3)


def rounded(problem: Problem) -> tuple[Problem, PagedKV]:
    """Return a problem whose keys and values are numbers of e4m3, and its cache."""
    kv = PagedKV(e4m3(problem.key_cache), e4m3(problem.value_cache))
    return replace(problem, key_cache=kv.key.float(), value_cache=kv.value.float()), kv


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_number_is_widened_as_torch_does(dtype: torch.dtype) -> None:
    torch.testing.assert_close(widened(EVERY, dtype), EVERY.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert same(narrowed(EVERY.to(dtype), E4M3)[EVERY.float().isfinite()], EVERY[EVERY.float().isfinite()])


def test_rows_are_gathered_bit_by_bit() -> None:
    pages = EVERY.view(8, 4, 2, 4)
    index = torch.tensor([[5, 0], [3, 3]])
    assert gathered(pages, index).dtype is E4M3
    assert torch.equal(as_bytes(gathered(pages, index)), torch.arange(256, dtype=torch.uint8).view(8, 4, 2, 4)[index])
    strided = pages[:, :, 1]
    assert torch.equal(as_bytes(gathered(strided, index)), as_bytes(pages)[index][..., 1, :])
    floats = pages.float()
    assert as_bytes(floats) is floats and torch.equal(gathered(floats, index).nan_to_num(), floats[index].nan_to_num())


def test_what_is_too_large_becomes_the_largest_number() -> None:
    x = torch.tensor([448.0, 460.0, 1e9, torch.inf, -torch.inf, torch.nan])
    expected = torch.tensor([448.0, 448.0, 448.0, 448.0, -448.0, torch.nan])
    torch.testing.assert_close(narrowed(x, E4M3).float(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_kernels_round_to_nearest_even(isa: str, dtype: torch.dtype) -> None:
    """All midpoints between two numbers, and numbers of every size beside them."""
    numbers = EVERY.float()[EVERY.float().isfinite()].sort().values
    middles = (numbers[1:] + numbers[:-1]) / 2
    sizes = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 4096)
    x = torch.cat([numbers, middles, middles * 1.01, sizes, torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])])
    x = torch.cat([x, x.new_zeros(-len(x) % 32)]).to(dtype).view(-1, 2, 16)
    kv = PagedKV(*(torch.full((len(x) // 8 + 1, 8, 2, 16), 1.0).to(E4M3) for _ in range(2)))
    slots = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    with kernels(isa):
        ops.reshape_and_cache(x, -x, kv, slots)
    for cache, written in ((kv.key, x), (kv.value, -x)):
        got, expected = cache.flatten(0, 1)[slots], e4m3(written)
        is_nan = written.isnan()
        assert same(got[~is_nan], expected[~is_nan]) and bool(got.float()[is_nan].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_rotated_keys_are_rounded_once(isa: str, dtype: torch.dtype, head_dim: int) -> None:
    """K goes from float32 to e4m3 in one step, by every way into the cache; a chunk may be of e4m3 too."""
    random = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(40, heads, head_dim, generator=random).to(dtype) for heads in (6, 2, 2))
    angles = torch.rand(40, head_dim // 2, generator=random) * 7
    cos, sin, slots = angles.cos(), angles.sin(), torch.randperm(48, generator=random)[:40]
    expected = PagedKV(*(torch.zeros(6, 8, 2, head_dim).to(E4M3) for _ in range(2)))
    exact = rotate64(k, cos, sin)
    expected.key.flatten(0, 1)[slots] = e4m3(exact)
    expected.value.flatten(0, 1)[slots] = e4m3(v)
    written = PagedKV(torch.zeros_like(expected.key), torch.zeros_like(expected.key))
    placed = PagedKV(torch.zeros_like(expected.key), torch.zeros_like(expected.key))
    with kernels(isa):
        ops.rotary_and_cache(q, k, v, cos, sin, written, slots)
        ops.place_chunks([(k[None], v[None])], cos, sin, placed.key[None], placed.value[None], slots)
    for kv in (written, placed):
        assert same(kv.value, expected.value)
        differs = kv.key.float() != expected.key.float()  # float32 and float64 may fall on two sides of a midpoint
        assert differs.float().mean() < 1e-3
        torch.testing.assert_close(kv.key.float(), expected.key.float(), rtol=2.0**-3, atol=2.0**-9)
    from_e4m3 = PagedKV(torch.zeros_like(expected.key), torch.zeros_like(expected.key))
    chunk = (e4m3(k)[None], e4m3(v)[None])
    with kernels(isa):
        ops.place_chunks([chunk], cos, sin, from_e4m3.key[None], from_e4m3.value[None], slots)
    assert same(from_e4m3.value, expected.value)
    again = e4m3(rotate64(chunk[0][0], cos, sin))
    assert (from_e4m3.key.flatten(0, 1)[slots].float() != again.float()).float().mean() < 1e-3


def rotate64(k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = k.float().double().chunk(2, -1)
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_attention_is_that_of_the_rounded_numbers(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    check(data.draw(problems(dtype)), isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", [1, 3, 8])
def test_long_requests(isa: str, group: int) -> None:
    for dtype in DTYPES:
        check(build([700, 600, 300], [1, 40, 300], 2 * group, 2, 128, dtype, window=None, seed=3), isa)


def check(problem: Problem, isa: str) -> None:
    dtype = problem.q.dtype
    exact, kv = rounded(problem)
    expected = paged_attention_reference(*exact.arguments(torch.float64))
    with kernels(isa):
        actual = ops.paged_attention(problem.q, kv, *problem.arguments(dtype)[2:])
        masses = ops.attention_mass(problem.q, kv, *problem.mass_arguments(dtype, problem.rows())[2:])
    assert actual.dtype == dtype
    assert_near(actual, expected, dtype, SLACK.get(isa, 1.0))
    for mass, wanted in zip(
        masses, attention_mass_reference(*exact.mass_arguments(torch.float64, problem.rows())), strict=True
    ):
        assert_near(mass, wanted, torch.float32, 2.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_states(isa: str, dtype: torch.dtype) -> None:
    problem = build([300, 90, 17], [1, 1, 1], 6, 2, 64, dtype)
    exact, kv = rounded(problem)
    where = (problem.positions, problem.block_tables, [0, 1, 2, 3], problem.seq_lens.tolist(), problem.scale)
    expected, lse = attention_states_reference(exact.q.double(), exact.kv(torch.float64), *where)
    with kernels(isa):
        actual, actual_lse = ops.attention_states(problem.q, kv, *where)
    assert_near(actual, expected, dtype, SLACK.get(isa, 1.0))
    assert_near(actual_lse, lse, torch.float32, SLACK.get(isa, 2.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_sums_of_kv_compress(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    window = data.draw(window_problems(dtype))
    keys = e4m3(window.key_cache)
    with kernels(isa):
        sums = window_sums(window.q, PagedKV(keys, keys), *window.arguments(dtype)[2:])
    assert_near(sums, replace(window, key_cache=keys.float()).expected(), torch.float32, 2.0)
    decode = data.draw(decode_problems(dtype))
    metric, keys = decode.metric.clone(), e4m3(decode.head_keys)
    _, q, _, *rest = decode.arguments(dtype, metric)
    with kernels(isa):
        accumulate_sums(metric, q, PagedKV(keys, keys), *rest)
    assert_near(metric, replace(decode, head_keys=keys.float()).expected(), torch.float32, 2.0)
