from __future__ import annotations

import pytest
import torch

from tests.ops_gpu.reference import TOLERANCE, assert_close
from vllm_blend import ops

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16]


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the norm in float64, rounded to x's dtype before the weight as in Hugging Face's Llama."""
    x64 = x.double()
    return (x64 / (x64.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).to(x.dtype).double() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("hidden", [64, 1000, 1024, 4096, 5120, 8192, 16384])
def test_rms_norm(hidden: int, tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(hidden + tokens)
    x, residual = (torch.randn(tokens, hidden, device="cuda").to(dtype) for _ in range(2))
    weight = torch.rand(hidden, device="cuda").to(dtype) + 0.5
    assert_close(ops.rms_norm(x, weight, 1e-5), rms_norm(x, weight), TOLERANCE[dtype] / 2)
    total = x + residual
    out = ops.fused_add_rms_norm(x, residual, weight, 1e-5)[0]
    assert torch.equal(residual, total)
    assert_close(out, rms_norm(total, weight), TOLERANCE[dtype] / 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 16), (37, 28672), (5, 6144)])
def test_silu_and_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(shape[1])
    x = torch.randn(shape, device="cuda").to(dtype) * 4
    gate, up = x.double().chunk(2, -1)
    out = ops.silu_and_mul(x)
    assert_close(out, gate * torch.sigmoid(gate) * up, TOLERANCE[dtype])
    silu = torch.nn.functional.silu(gate.to(dtype)).double()  # rounded once more, as plain torch does
    assert_close(out, silu * up, TOLERANCE[dtype] / 2)
