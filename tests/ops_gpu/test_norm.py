from __future__ import annotations

import pytest
import torch

from tests.ops_gpu.reference import TOLERANCE, assert_close
from vllm_blend.ops import cuda
from vllm_blend.ops.activation import silu_and_mul
from vllm_blend.ops.layernorm import fused_add_rms_norm, rms_norm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda.is_available(), reason="no CUDA device or kernels")]

DTYPES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("hidden", [64, 1000, 1024, 4096, 5120, 8192, 16384])
def test_rms_norm(hidden: int, tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(hidden + tokens)
    x, residual = (torch.randn(tokens, hidden, device="cuda").to(dtype) for _ in range(2))
    weight = torch.rand(hidden, device="cuda").to(dtype) + 0.5
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_close(cuda.rms_norm(x, weight, 1e-5), exact, TOLERANCE[dtype])
    assert_close(cuda.rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5), TOLERANCE[dtype] / 4)
    expected, total = fused_add_rms_norm(x, residual, weight, 1e-5)
    out = cuda.rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(residual, total)
    assert_close(out, expected, TOLERANCE[dtype] / 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 16), (37, 28672), (5, 6144)])
def test_silu_and_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(shape[1])
    x = torch.randn(shape, device="cuda").to(dtype) * 4
    gate, up = x.double().chunk(2, -1)
    out = cuda.silu_and_mul(x)
    assert_close(out, gate * torch.sigmoid(gate) * up, TOLERANCE[dtype])
    assert_close(out, silu_and_mul(x), TOLERANCE[dtype] / 4)
