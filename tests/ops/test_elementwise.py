from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.paged import DTYPES, ISAS, assert_near, kernels
from vllm_blend import ops
from vllm_blend.ops.activation import silu_and_mul_reference
from vllm_blend.ops.layernorm import fused_add_rms_norm_reference, rms_norm_reference

ROWS = st.integers(0, 70)
WIDTHS = st.integers(1, 300)


def rows_of(rows: int, n: int, dtype: torch.dtype, strided: bool) -> torch.Tensor:
    """A random matrix; when strided, a slice of a wider one."""
    return torch.randn(rows, n + 5 * strided).to(dtype)[:, :n] if strided else torch.randn(rows, n).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=30, deadline=None)
@given(rows=ROWS, n=WIDTHS, strided=st.booleans(), eps=st.sampled_from([1e-6, 1e-5, 1e-1]))
def test_rms_norm(isa: str, dtype: torch.dtype, rows: int, n: int, strided: bool, eps: float) -> None:
    x, weight = rows_of(rows, n, dtype, strided), torch.randn(n).to(dtype)
    expected = torch.nn.functional.rms_norm(x.double(), (n,), weight.double(), eps)
    with kernels(isa):
        assert_near(ops.rms_norm(x, weight, eps), expected, dtype, slack=2.0)  # two roundings: the norm, the product


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=30, deadline=None)
@given(rows=ROWS, n=WIDTHS, strided=st.booleans())
def test_fused_add_rms_norm(isa: str, dtype: torch.dtype, rows: int, n: int, strided: bool) -> None:
    x, residual = rows_of(rows, n, dtype, strided), rows_of(rows, n, dtype, strided)
    weight = torch.randn(n).to(dtype)
    before = x.clone(), residual.clone()
    with kernels(isa):
        normed, total = ops.fused_add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_near(normed, torch.nn.functional.rms_norm(total.double(), (n,), weight.double(), 1e-5), dtype, slack=2.0)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("isa", ISAS)
def test_rms_norm_rounds_like_its_twin(isa: str) -> None:
    """Parity with Hugging Face in bf16 depends on where the cast stands: nearly every element is equal to the bit."""
    x, weight = torch.randn(64, 384).bfloat16(), torch.randn(384).bfloat16()
    with kernels(isa):
        same = ops.rms_norm(x, weight, 1e-5) == rms_norm_reference(x, weight, 1e-5)
        fused, _ = ops.fused_add_rms_norm(x, x.flip(0), weight, 1e-5)
    assert same.float().mean() > 0.999
    twin, _ = fused_add_rms_norm_reference(x, x.flip(0), weight, 1e-5)
    assert (fused == twin).float().mean() > 0.999


@pytest.mark.parametrize("isa", ISAS)
def test_rms_norm_of_heads(isa: str) -> None:
    """Qwen3 normalises each head: a 3-d view into a packed projection."""
    packed = torch.randn(7, 6 * 64 + 100)
    x, weight = packed[:, : 6 * 64].view(7, 6, 64), torch.randn(64)
    with kernels(isa):
        actual = ops.rms_norm(x, weight, 1e-6)
    assert_near(actual, torch.nn.functional.rms_norm(x.double(), (64,), weight.double(), 1e-6), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=30, deadline=None)
@given(rows=ROWS, n=WIDTHS, strided=st.booleans(), size=st.sampled_from([1.0, 30.0]))
def test_silu_and_mul(isa: str, dtype: torch.dtype, rows: int, n: int, strided: bool, size: float) -> None:
    gate_up = rows_of(rows, 2 * n, dtype, strided) * size
    expected = silu_and_mul_reference(gate_up.double())
    with kernels(isa):
        assert_near(ops.silu_and_mul(gate_up), expected, dtype)


@pytest.mark.parametrize("isa", ISAS)
def test_silu_at_the_ends_of_the_range(isa: str) -> None:
    gate = torch.tensor([-1e30, -200.0, -87.5, -0.0, 0.0, 87.5, 1e30, float("inf")])
    with kernels(isa):
        out = ops.silu_and_mul(torch.cat([gate, torch.ones(8)])[None])[0]
    torch.testing.assert_close(out, torch.nn.functional.silu(gate), rtol=1e-6, atol=1e-30)


def flushes(isa: str, dtype: torch.dtype) -> bool:
    """The instruction that rounds to bf16 takes float32 subnormals for 0."""
    return isa in ("amx", "avx512bf16") and dtype == torch.bfloat16


def flushed(values: torch.Tensor) -> torch.Tensor:
    return values.float().abs() < torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("isa", ISAS)
def test_every_16_bit_value_survives_a_round_trip(isa: str, dtype: torch.dtype) -> None:
    """Stored -> float32 -> stored, through the copy of a rotation by 0: subnormals, infinities and NaN included."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(1, 1, -1)
    still = torch.zeros(1, 0)
    with kernels(isa):
        out = ops.rotary_embedding(values, still, still)
    nan = values.isnan()
    assert torch.equal(out.isnan(), nan)
    exact = ~nan & ~(flushed(values) if flushes(isa, dtype) else torch.zeros_like(nan))
    assert torch.equal(out.view(torch.int16)[exact], values.view(torch.int16)[exact])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("isa", ISAS)
def test_rounding_to_16_bits_is_torchs(isa: str, dtype: torch.dtype) -> None:
    """It rounds to nearest even, and treats ties, overflow and subnormals as torch.Tensor.to does."""
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), dtype=torch.int64).to(torch.int32)
    exact = torch.randn(4096).to(dtype).float().view(torch.int32)
    ties = exact + (0x8000 if dtype == torch.bfloat16 else 0x1000)
    small = (torch.randn(4096) * 2.0**-20).view(torch.int32)
    edges = torch.tensor([65504.0, 65519.0, 65520.0, 65536.0, 3.4e38, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25])
    values = torch.cat([t.view(torch.float32) for t in (bits, ties, small)] + [edges, -edges])
    values = values[~values.isnan()].view(1, 1, 1, -1)
    cache = torch.zeros(1, 1, 1, 1, values.numel(), dtype=dtype)
    still, slot = torch.zeros(1, 0), torch.zeros(1, dtype=torch.int64)
    with kernels(isa):
        ops.place_chunks([(values, values)], still, still, cache, cache.clone(), slot)
    values = values.view(-1)
    exact = ~flushed(values) if flushes(isa, dtype) else torch.ones_like(values, dtype=torch.bool)
    assert torch.equal(cache.view(-1)[exact], values.to(dtype)[exact])
