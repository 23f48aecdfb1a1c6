"""Products of a few rows with a weight matrix, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops_gpu.reference import DEVICE, TOLERANCE, assert_close
from vllm_blend import ops
from vllm_blend.ops.linear import FEW_ROWS, FEW_ROWS_OUTS, _are_few

pytestmark = pytest.mark.gpu


def operands(rows: int, outs: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows + outs + size)
    x, weight, bias = (torch.randn(shape, device=DEVICE).to(dtype) for shape in ((rows, size), (outs, size), (outs,)))
    return x, weight, bias


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("outs", "size"), [(4, 8), (64, 2048), (6144, 4096), (100, 4104), (4096, 14336), (32000, 1024)]
)
@pytest.mark.parametrize("rows", range(1, FEW_ROWS + 1))
def test_products(rows: int, outs: int, size: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, weight, bias = operands(rows, outs, size, dtype)
    given = bias if has_bias else None
    assert _are_few(x, weight, given)
    out = ops.linear(x, weight, given)
    expected = F.linear(x.double(), weight.double(), None if given is None else given.double())
    assert_close(out, expected, TOLERANCE[dtype] / 2)
    assert torch.equal(out, ops.linear(x, weight, given))


@pytest.mark.parametrize(
    ("rows", "outs", "size"), [(0, 64, 64), (FEW_ROWS + 1, 64, 64), (1, 64 + FEW_ROWS_OUTS // 2, 64), (2, 64, 60)]
)
def test_what_does_not_fit_is_torchs(rows: int, outs: int, size: int) -> None:
    x, weight, bias = operands(rows, outs, size, torch.bfloat16)
    assert not _are_few(x, weight, bias)
    assert torch.equal(ops.linear(x, weight, bias), F.linear(x, weight, bias))


def test_weights_that_learn_are_torchs() -> None:
    x, weight, bias = operands(1, 64, 64, torch.bfloat16)
    weight.requires_grad_()
    assert not _are_few(x, weight, bias)
    ops.linear(x, weight, bias).sum().backward()
    assert weight.grad is not None


def test_a_graph_reads_what_the_kernel_before_it_wrote() -> None:
    """Weights are asked for early, but inputs are not: in every replay they are those of this replay."""
    x, weight, _ = operands(2, 4096, 4096, torch.bfloat16)
    weight = weight / 64
    norm, static = torch.ones(4096, device=DEVICE, dtype=torch.bfloat16), torch.zeros_like(x)

    def chain(rows: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            rows = ops.linear(ops.rms_norm(rows, norm, 1e-5), weight)
        return rows

    chain(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(static)
    for shift in range(20):
        given = x.roll(shift, 1)
        static.copy_(given)
        graph.replay()
        assert torch.equal(out, chain(given))
