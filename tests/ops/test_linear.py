from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.paged import DTYPES, ISAS, assert_near, kernels, threads
from vllm_blend import ops
from vllm_blend.ops import Int4Matrix, bindings, cpu, cuda
from vllm_blend.ops.linear import KERNEL_ROWS, _are_few


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 150),
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


@pytest.mark.parametrize("dtype", list(KERNEL_ROWS))
@pytest.mark.parametrize("isa", ISAS)
def test_the_kernel_itself(isa: str, dtype: torch.dtype) -> None:
    """Every number of rows up to where several passes over the weights begin, whether or not the op would take it."""
    weight, bias = (torch.randn(80, 384) / 20).to(dtype), torch.randn(80).to(dtype)
    with kernels(isa):
        found = bindings.cpu_kernels()
        if dtype not in found.linear_dtypes:
            with pytest.raises(TypeError, match="dtype"):
                cpu.linear(found, torch.randn(3, 384).to(dtype), weight, bias)
            return
        for rows in [*range(1, 70), 128, 129]:
            x = torch.randn(rows, 384).to(dtype)
            expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
            with threads(1):
                alone = cpu.linear(found, x, weight, bias)
            with threads(3):
                assert torch.equal(cpu.linear(found, x, weight, bias), alone)
            assert_near(alone, expected, dtype)


@pytest.mark.parametrize("dtype", list(KERNEL_ROWS))
def test_no_rows_in_a_new_thread(dtype: torch.dtype) -> None:
    """It has no scratch memory yet, and the kernel asks for none."""
    weight = torch.randn(32, 64).to(dtype)
    matrix = Int4Matrix(
        torch.zeros(32, 32, dtype=torch.uint8), torch.ones(32, 2), torch.zeros(32, 2, dtype=torch.uint8)
    )
    for product in (lambda x: ops.linear(x, weight), lambda x: ops.int4_linear(x, matrix)):
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(product, torch.empty(0, 64, dtype=dtype)).result().shape == (0, 32)


def test_shapes_that_do_not_fit_are_torchs_errors() -> None:
    with pytest.raises(RuntimeError):
        ops.linear(torch.randn(3, 32).bfloat16(), torch.randn(16, 64).bfloat16())


def test_a_gpus_product_of_few_rows_is_asked_for_what_fits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel reads as many numbers as the weight has, whatever lies behind a shorter input or bias."""
    monkeypatch.setattr(cuda, "accepts", lambda tensor: True)
    x, weight, bias = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((2, 64), (16, 64), (16,)))
    assert _are_few(x, weight, None) and _are_few(x, weight, bias)
    assert not _are_few(x[:, :32], weight, bias)
    assert not _are_few(x, weight, bias[:1])
    assert not _are_few(x, weight[:, ::2], bias) and not _are_few(x[:, ::2], weight[:, ::2], bias)
    assert not _are_few(x, weight, bias.float()) and not _are_few(x, weight.float(), bias)
