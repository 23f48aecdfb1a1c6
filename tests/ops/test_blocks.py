"""Matrices in ggml's blocks: each number is that of the package gguf, and products are those with the numbers."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.ops.paged import DTYPES, ISAS, assert_near, kernels, threads
from vllm_blend import ops
from vllm_blend.ops import BlockMatrix, bindings
from vllm_blend.ops.blocks import BAND, BLOCK_TYPES, KERNEL_ROWS, UNPACKED_AT_ONCE, why_not_blocks

SIZE = 512  # two blocks of the types K


def random_blocks(kind: int, features: int, size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of random bytes as a file may have them, and the numbers that gguf makes of them."""
    inputs, row_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    blocks = np.random.default_rng(kind).integers(0, 256, (features, size // inputs, row_bytes), np.uint8)
    halves = {12: (0, 2), 13: (0, 2), 14: (208,)}.get(kind, (0, 2) if kind in (3, 7) else (0,))
    for number, place in enumerate(halves):  # scales and minima: the other bytes may be anything
        half = np.random.default_rng(number).uniform(0.01, 0.02, blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = half[..., None].view(np.uint8)
    stored = blocks.reshape(features, -1)
    numbers = gguf.dequantize(stored, gguf.GGMLQuantizationType(kind))
    return torch.from_numpy(stored), torch.from_numpy(numbers)


def test_names_and_sizes_are_those_of_ggml() -> None:
    for kind, (name, inputs, row_bytes) in BLOCK_TYPES.items():
        known = gguf.GGMLQuantizationType(kind)
        assert (known.name, gguf.GGML_QUANT_SIZES[known][0]) == (name, inputs)
        assert gguf.GGML_QUANT_SIZES[known][1] <= row_bytes <= 1.03 * gguf.GGML_QUANT_SIZES[known][1]
        assert why_not_blocks(kind, SIZE) is None and "not made of blocks" in str(why_not_blocks(kind, 48))
    assert "Q4_0, Q4_1, Q5_0" in str(why_not_blocks(gguf.GGMLQuantizationType.IQ4_NL, SIZE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_unpacked_numbers_are_those_of_gguf(kind: int, isa: str, dtype: torch.dtype) -> None:
    stored, numbers = random_blocks(kind, 37)
    order = torch.randperm(37)
    with kernels(isa):
        part = ops.pack_blocks(kind, [stored], [order], SIZE)
        unpacked = ops.unpack_blocks(part, dtype)
        assert unpacked.dtype == dtype
        if kind in (2, 6, 8, 14):  # numbers with an offset are rounded once instead of twice in float32
            assert torch.equal(unpacked, numbers[order].to(dtype))
        assert_near(unpacked, numbers[order].double(), dtype)
        assert torch.equal(ops.unpack_blocks(part, dtype, 16, 9), unpacked[16:25])
        ids = torch.tensor([36, 0, 17, 17])
        assert torch.equal(ops.blocks_rows(ids, BlockMatrix((part,)), dtype), unpacked[ids])
        with pytest.raises(IndexError, match="37 rows"):
            ops.blocks_rows(torch.tensor([37]), BlockMatrix((part,)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 9, KERNEL_ROWS, KERNEL_ROWS + 1])
def test_products_are_those_with_the_numbers(kind: int, isa: str, dtype: torch.dtype, rows: int) -> None:
    first, second = random_blocks(kind, 48), random_blocks(8, 5)
    numbers = torch.cat([first[1], second[1]])
    x = (torch.randn(rows, SIZE + 3) / SIZE).to(dtype)[:, :SIZE]
    bias = torch.randn(len(numbers)).to(dtype) if rows % 2 else None
    expected = F.linear(x.double(), numbers.double(), None if bias is None else bias.double())
    with kernels(isa), threads(1 + rows % 2):
        halves = ops.pack_blocks(kind, [first[0][:BAND], first[0][BAND:]], [None, None], SIZE)
        matrix = BlockMatrix((halves, ops.pack_blocks(8, [second[0]], [None], SIZE)))
        assert matrix.shape == (53, SIZE)
        in_pairs = dtype == torch.bfloat16 and isa in ("avx512bf16", "amx") and rows > 2
        slack = 2.0 if in_pairs or rows > KERNEL_ROWS else 1.0  # numbers are rounded to the dtype there
        assert_near(ops.blocks_linear(x, matrix, bias), expected, dtype, slack)


def test_a_large_matrix_is_unpacked_in_stretches() -> None:
    features = UNPACKED_AT_ONCE // SIZE + 20
    stored, numbers = random_blocks(2, features)
    matrix = BlockMatrix((ops.pack_blocks(2, [stored[:7], stored[7:]], [None, None], SIZE),))
    x = torch.randn(KERNEL_ROWS + 1, SIZE)
    torch.testing.assert_close(ops.blocks_linear(x, matrix), F.linear(x, numbers), rtol=1e-4, atol=1e-4)


def test_no_kernels_no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    stored, _ = random_blocks(2, 16)
    matrix = BlockMatrix((ops.pack_blocks(2, [stored], [None], SIZE),))
    with pytest.raises(TypeError, match="float64"):
        ops.blocks_linear(torch.ones(1, SIZE, dtype=torch.float64), matrix)
    monkeypatch.setattr(bindings, "_kernels_or_none", lambda: None)
    with pytest.raises(TypeError, match="compiled kernels"):
        ops.blocks_linear(torch.ones(1, SIZE), matrix)
