from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.paged import DTYPES, ISAS, assert_near, kernels, threads
from vllm_blend import ops
from vllm_blend.ops import bindings
from vllm_blend.ops.linear import MAX_KERNEL_ROWS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, MAX_KERNEL_ROWS + 20),
    size=st.sampled_from([1, 32, 33, 64, 96, 384]),
    features=st.sampled_from([1, 16, 17, 48, 640]),
    with_bias=st.booleans(),
    strided=st.booleans(),
)
def test_linear(
    isa: str, dtype: torch.dtype, rows: int, size: int, features: int, with_bias: bool, strided: bool
) -> None:
    x = torch.randn(rows, size + 7 * strided).to(dtype)[:, :size]
    weight = (torch.randn(features, size) * size**-0.5).to(dtype)
    bias = torch.randn(features).to(dtype) if with_bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    with kernels(isa):
        actual = ops.linear(x, weight, bias)
    assert actual.dtype == dtype
    assert_near(actual, expected, dtype)


@pytest.mark.skipif("amx" not in ISAS, reason="the kernel exists for AMX only")
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 63, 64, 65, MAX_KERNEL_ROWS])
def test_the_kernel_on_several_threads(rows: int) -> None:
    x, weight = torch.randn(rows, 384).bfloat16(), (torch.randn(1536, 384) / 20).bfloat16()
    expected = torch.nn.functional.linear(x.double(), weight.double())
    with kernels("amx"):
        assert bindings.cpu_kernels().linear is not None
        with threads(1):
            alone = ops.linear(x, weight)
        with threads(3):
            assert torch.equal(ops.linear(x, weight), alone)
    assert_near(alone, expected, torch.bfloat16)


def test_shapes_that_do_not_fit_are_torchs_errors() -> None:
    with pytest.raises(RuntimeError):
        ops.linear(torch.randn(3, 32).bfloat16(), torch.randn(16, 64).bfloat16())
