"""FP8 kernels and products against their twins: bit by bit where only one rounding is defined."""

from __future__ import annotations

import pytest
import torch

from tests.ops_gpu.reference import FP8_PRODUCTS, TOLERANCE, assert_close
from vllm_blend import ops
from vllm_blend.ops.fp8 import (
    QuantizedRows,
    UnscaledProduct,
    fused_add_rms_norm_quant_reference,
    quantize_rows_reference,
    silu_and_mul_quant_reference,
)

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16]
ROWS = [0, 1, 33, 640]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape, device="cuda").to(dtype)


def whole(rows: QuantizedRows) -> torch.Tensor:
    return rows.values.double() * rows.scales.double()[:, None]


def assert_same(got: QuantizedRows, expected: QuantizedRows) -> None:
    assert torch.equal(got.scales, expected.scales)
    assert torch.equal(got.values.view(torch.uint8), expected.values.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("n", [16, 80, 384, 4096, 14336, 32768])
def test_quantize(rows: int, n: int, dtype: torch.dtype) -> None:
    x = randn(rows, n, dtype=dtype) * torch.logspace(-3, 2, rows, device="cuda").to(dtype)[:, None]
    x[::7] = 0
    assert_same(ops.quantize_rows(x), quantize_rows_reference(x))
    wide = randn(rows, 2 * n, dtype=dtype)
    assert_same(ops.quantize_rows(wide[:, n:]), quantize_rows_reference(wide[:, n:]))


def test_a_row_that_is_no_number_spoils_no_other() -> None:
    x = randn(5, 256)
    clean = ops.quantize_rows(x.clone())
    x[1, 17], x[3, 200] = float("nan"), float("-inf")
    got = ops.quantize_rows(x)
    others = [0, 2, 4]
    assert torch.equal(whole(got)[others], whole(clean)[others])
    assert whole(got)[1, 17].isnan()
    assert whole(got)[3, 200].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("n", [64, 1008, 4096, 16384])
def test_rms_norm_quant_is_the_norm_then_quantised(rows: int, n: int, dtype: torch.dtype) -> None:
    x, residual, weight = randn(rows, n, dtype=dtype), randn(rows, n, dtype=dtype) * 3, randn(n, dtype=dtype)
    assert_same(ops.rms_norm_quant(x, weight, 1e-5), quantize_rows_reference(ops.rms_norm(x, weight, 1e-5)))
    expected_total = residual.clone()
    expected = quantize_rows_reference(ops.fused_add_rms_norm(x, expected_total, weight, 1e-5)[0])
    got, total = ops.fused_add_rms_norm_quant(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    assert_same(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("n", [16, 768, 14336, 32768])
def test_silu_and_mul_quant_is_the_activation_then_quantised(rows: int, n: int, dtype: torch.dtype) -> None:
    x = randn(rows, 2 * n, dtype=dtype) * 4
    assert_same(ops.silu_and_mul_quant(x), quantize_rows_reference(ops.silu_and_mul(x)))


def unscaled(rows: int, columns: int) -> UnscaledProduct:
    scale = torch.rand(rows + columns, device="cuda") * 1e-2 + 1e-4
    return UnscaledProduct(randn(rows, columns) * 1e3, scale[:rows], scale[rows:] * 1e-1)


# An e4m3 value rounds by up to 1/16: where the last bit of bfloat16 differs, it may differ by a step.
E4M3_TOLERANCE = 0.02


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("n", [64, 1008, 4096])
def test_readers_of_an_unscaled_product(rows: int, n: int) -> None:
    product, residual, weight = unscaled(rows, n), randn(rows, n), randn(n)
    expected, expected_total = fused_add_rms_norm_quant_reference(product, residual, weight, 1e-5)
    got, total = ops.fused_add_rms_norm_quant(product, residual.clone(), weight, 1e-5)
    assert_close(total, expected_total, TOLERANCE[torch.bfloat16] / 8)
    assert_close(whole(got), whole(expected), E4M3_TOLERANCE)
    gate_up = unscaled(rows, 2 * n)
    assert_close(whole(ops.silu_and_mul_quant(gate_up)), whole(silu_and_mul_quant_reference(gate_up)), E4M3_TOLERANCE)


@FP8_PRODUCTS
@pytest.mark.parametrize("rows", [0, 1, 3, 17, 128, 647, 2048])
@pytest.mark.parametrize(("n", "out"), [(16, 16), (384, 768), (4096, 6144), (14336, 4096)])
def test_products(n: int, out: int, rows: int) -> None:
    x, weight = ops.quantize_rows(randn(rows, n)), ops.quantize_rows(randn(out, n))
    expected = whole(x) @ whole(weight).T
    linear = ops.quantized_linear(x, weight, None, torch.bfloat16)
    assert linear.dtype == torch.bfloat16
    assert_close(linear, expected, TOLERANCE[torch.bfloat16] / 2)
    product = ops.quantized_product(x, weight, None, torch.bfloat16)
    scaled = product.scaled() if isinstance(product, UnscaledProduct) else product
    assert isinstance(product, UnscaledProduct) is (-(-rows // 128) * -(-out // 128) < 1024)
    assert_close(scaled, expected, TOLERANCE[torch.bfloat16] / 2)
    bias = randn(out) * 100
    biased = ops.quantized_product(x, weight, bias, torch.bfloat16)
    assert isinstance(biased, torch.Tensor)
    assert_close(biased, expected + bias.double(), TOLERANCE[torch.bfloat16] / 2)


@FP8_PRODUCTS
def test_rows_of_a_product_do_not_depend_on_their_neighbours_scale() -> None:
    x, weight = randn(8, 512), ops.quantize_rows(randn(256, 512))
    alone = ops.quantized_linear(ops.quantize_rows(x), weight, None, torch.bfloat16)
    x[1::2] *= 1e4
    beside = ops.quantized_linear(ops.quantize_rows(x), weight, None, torch.bfloat16)
    assert torch.equal(alone[::2], beside[::2])


@FP8_PRODUCTS
def test_a_captured_mlp_replays() -> None:
    """Quantise, multiply, activate, multiply, normalise: in a CUDA graph, on new input, with the same result."""
    up, down = ops.quantize_rows(randn(2048, 512)), ops.quantize_rows(randn(512, 1024))
    weight = randn(512)

    def mlp(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate_up = ops.quantized_product(ops.quantize_rows(x), up, None, torch.bfloat16)
        hidden = ops.quantized_product(ops.silu_and_mul_quant(gate_up), down, None, torch.bfloat16)
        rows, total = ops.fused_add_rms_norm_quant(hidden, residual.clone(), weight, 1e-5)
        return whole(rows), total

    x, residual = randn(17, 512), randn(17, 512)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        mlp(x, residual)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mlp(x, residual)
    for seed in range(3):
        torch.manual_seed(seed)
        x.normal_()
        residual.normal_()
        graph.replay()
        for got, expected in zip(captured, mlp(x, residual), strict=True):
            assert torch.equal(got, expected)


def test_what_the_kernels_do_not_take() -> None:
    with pytest.raises(RuntimeError, match="a size is out of range"):
        ops.quantize_rows(randn(2, 12))
    with pytest.raises(RuntimeError, match="a size is out of range"):
        ops.quantize_rows(randn(2, 32776))
    with pytest.raises(ValueError, match=r"the scales are \(2,\) and \(16,\), not \(2,\) and \(32,\)"):
        ops.silu_and_mul_quant(UnscaledProduct(randn(2, 32), *(torch.ones(n, device="cuda") for n in (2, 16))))
