"""4-bit weights: each number is that of the dequantized matrix, and products are those with it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.paged import DTYPES, ISAS, assert_near, kernels, threads
from vllm_blend import ops
from vllm_blend.ops import bindings, cpu, int4
from vllm_blend.ops.int4 import (
    KERNEL_ROWS,
    OTHER_ROWS,
    max_kernel_rows,
    unpack_int4_reference,
    why_not_int4,
)
from vllm_blend.ops.int4_matrix import Int4Matrix


def random_matrix(features: int, size: int, group: int, scale_dtype: torch.dtype) -> tuple[Int4Matrix, torch.Tensor]:
    """Return a matrix in 4 bits, and what it is in float32."""
    numbers = torch.randint(16, (features, size), dtype=torch.uint8)
    scales = torch.empty(features, size // group).uniform_(0.01, 0.03).to(scale_dtype)
    zeros = torch.randint(17, scales.shape, dtype=torch.uint8)
    by_group = numbers.view(features, -1, group).float() - zeros[..., None].float()
    matrix = Int4Matrix(ops.pack_int4(numbers), scales, zeros)
    return matrix, (by_group * scales[..., None].float()).view(features, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("size", "group"), [(32, 16), (32, 32), (96, 48), (384, 128), (160, 160), (192, 16)])
def test_unpacked_numbers_are_exact(isa: str, dtype: torch.dtype, size: int, group: int) -> None:
    for scale_dtype in DTYPES:
        matrix, expected = random_matrix(19, size, group, scale_dtype)
        assert matrix.shape == (19, size) and matrix.group_size == group
        assert torch.equal(unpack_int4_reference(matrix, dtype), expected.to(dtype))
        with kernels(isa):
            assert torch.equal(ops.unpack_int4(matrix, dtype), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 270),
    size=st.sampled_from([32, 96, 384]),
    features=st.sampled_from([1, 16, 17, 48, 640]),
    with_bias=st.booleans(),
    strided=st.booleans(),
)
def test_int4_linear(
    isa: str, dtype: torch.dtype, rows: int, size: int, features: int, with_bias: bool, strided: bool
) -> None:
    matrix, weight = random_matrix(features, size, 32, torch.float16)
    x = (torch.randn(rows, size + 7 * strided) / size**0.5).to(dtype)[:, :size]
    bias = torch.randn(features).to(dtype) if with_bias else None
    expected = F.linear(x.double(), weight.to(dtype).double(), None if bias is None else bias.double())
    with kernels(isa):
        actual = ops.int4_linear(x, matrix, bias)
    assert actual.dtype == dtype
    assert_near(actual, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_the_kernel_itself(isa: str, dtype: torch.dtype) -> None:
    """Every number of rows up to where several passes begin; threads and what else is in a batch change nothing."""
    matrix, weight = random_matrix(80, 384, 128, torch.bfloat16)
    bias, x = torch.randn(80).to(dtype), (torch.randn(129, 384) / 20).to(dtype)
    expected = F.linear(x.double(), weight.to(dtype).double(), bias.double())
    with kernels(isa):
        found = bindings.cpu_kernels()
        for rows in [*range(1, 70), 128, 129]:
            with threads(1):
                alone = cpu.int4_linear(found, x[:rows], matrix, bias)
            with threads(3):
                assert torch.equal(cpu.int4_linear(found, x[:rows], matrix, bias), alone)
            assert_near(alone, expected[:rows], dtype)


def test_large_matrices_are_unpacked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, weight = random_matrix(80, 64, 32, torch.float16)
    bias, x = torch.randn(80), torch.randn(300, 64)
    parts = []

    def unpack(part: Int4Matrix, dtype: torch.dtype) -> torch.Tensor:
        parts.append(len(part.values))
        return unpack_int4_reference(part, dtype)

    monkeypatch.setattr(int4, "unpack_int4", unpack)
    monkeypatch.setattr(int4, "UNPACKED_AT_ONCE", 64 * 30)
    torch.testing.assert_close(ops.int4_linear(x, matrix, bias), F.linear(x, weight, bias))
    assert parts == [30, 30, 20]


def test_kernel_rows_are_by_instruction_set() -> None:
    assert KERNEL_ROWS.keys() <= {"amx", "avx512bf16", "avx512", "avx2", "generic"}
    assert max_kernel_rows("generic", torch.float32) == OTHER_ROWS < max_kernel_rows("amx", torch.bfloat16)


def test_what_kernels_do_not_multiply_is_said() -> None:
    assert why_not_int4(48, 64, 16, torch.float16) is None
    assert "80 inputs and 48 outputs" in str(why_not_int4(48, 80, 16, torch.float16))
    assert "64 inputs and 40 outputs" in str(why_not_int4(40, 64, 16, torch.float16))
    assert "groups of 8 inputs" in str(why_not_int4(48, 64, 8, torch.float16))
    assert "scales are float64" in str(why_not_int4(48, 64, 16, torch.float64))


def test_kernels_refuse_what_they_do_not_know() -> None:
    matrix, _ = random_matrix(16, 64, 8, torch.float16)
    with pytest.raises(TypeError, match="int4_linear"):
        cpu.int4_linear(bindings.cpu_kernels(), torch.randn(2, 64), matrix, None)
    with pytest.raises(TypeError, match="int4_unpack"):
        cpu.int4_unpack(bindings.cpu_kernels(), matrix, torch.float32)
