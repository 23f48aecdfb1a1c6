"""4-bit weights in the layout for GPUs: its definition, what scales and zero points become, and who multiplies when.

The kernels themselves are tested on a GPU (tests/ops_gpu/test_int4.py)."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.checkout import ROOT
from tests.ops import int4_emulation
from tests.ops.int4_emulation import operators_on_cpu
from tests.stand_ins import COMPILER, needs_compiler
from vllm_blend import ops
from vllm_blend.ops import int4_tiles
from vllm_blend.ops.int4_tiles import (
    KERNEL_ROWS,
    join_scales,
    tiles_group,
    unpack_tiles_reference,
    why_not_tiles,
)

pytestmark = pytest.mark.cpu_only
SHAPES = [(8, 32, 32), (24, 64, 32), (16, 64, 64), (16, 96, 96), (8, 128, 128), (16, 256, 32), (8, 512, 512)]


def stored(features: int, size: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return numbers, scales and zero points as a checkpoint has them."""
    torch.manual_seed(features + size + group)
    numbers = torch.randint(16, (features, size), dtype=torch.uint8)
    scales = torch.empty(features, size // group).uniform_(0.01, 0.03).half()
    return numbers, scales, torch.randint(17, scales.shape, dtype=torch.uint8)


def packed(features: int, size: int, group: int) -> ops.Int4Tiles:
    with operators_on_cpu():
        return ops.pack_tiles(*stored(features, size, group))


def defined(features: int, size: int, group: int) -> torch.Tensor:
    """Return the matrix that the numbers stand for, float64."""
    numbers, scales, zeros = (part.double() for part in stored(features, size, group))
    by_group = numbers.view(features, -1, group) - zeros[..., None]
    return (by_group * scales[..., None]).flatten(1)


@pytest.mark.parametrize(("features", "size", "group"), SHAPES)
def test_tiles_hold_the_numbers_where_the_layout_has_them(features: int, size: int, group: int) -> None:
    weight = packed(features, size, group)
    assert weight.shape == (features, size) and weight.group_size == tiles_group(group)
    assert torch.equal(int4_emulation.unpack(weight.tiles), stored(features, size, group)[0])
    numbers = features * size
    assert weight.nbytes == numbers // 2 + 4 * numbers // tiles_group(group)


@pytest.mark.parametrize(("features", "size", "group"), SHAPES)
def test_shapes_are_those_that_torch_declares(features: int, size: int, group: int) -> None:
    """By its own rules for the operators, run on tensors without data."""
    with FakeTensorMode() as fake:
        weight = ops.pack_tiles(*(fake.from_tensor(part) for part in stored(features, size, group)))
        assert ops.int4_linear(torch.empty(5, size, dtype=torch.bfloat16), weight).shape == (5, features)
    assert weight.tiles.shape == packed(features, size, group).tiles.shape and weight.tiles.dtype == torch.int32


@pytest.mark.parametrize(("features", "size", "group"), SHAPES)
def test_unpacked_weights_are_those_that_torch_multiplies(features: int, size: int, group: int) -> None:
    """Torch's product on a CPU with the identity gives its weights, to the bit."""
    weight = packed(features, size, group)
    theirs = int4_emulation.weights(weight.tiles, weight.group_size, weight.scales_and_zeros)
    assert torch.equal(unpack_tiles_reference(weight), theirs)
    assert torch.equal(ops.unpack_tiles(weight), theirs)


@pytest.mark.parametrize(("features", "size", "group"), SHAPES)
def test_unpacked_weights_are_within_rounding_of_the_dequantized_matrix(features: int, size: int, group: int) -> None:
    """Rounded are the scale, what it makes of the zero point, and the sum: each by up to 1/256 of it."""
    _, scales, zeros = (part.double() for part in stored(features, size, group))
    expected = defined(features, size, group)
    zero = ((8 - zeros) * scales).abs().repeat_interleave(group, 1)
    error = (unpack_tiles_reference(packed(features, size, group)).double() - expected).abs()
    assert bool((error <= (2 * expected.abs() + 1.01 * zero) * 2**-8 * 1.01).all())


def test_numbers_around_the_middle_lose_nothing_but_the_scale_s_rounding() -> None:
    """Symmetric formats have the zero point 8: what stands for it is 0."""
    scales = torch.rand(8, 2).bfloat16()
    scale, zero = join_scales(scales, torch.full((8, 2), 8, dtype=torch.uint8), 64).unbind(2)
    assert torch.equal(scale, scales.T) and not zero.any()


def test_large_groups_are_repeated() -> None:
    assert [tiles_group(size) for size in (32, 64, 96, 128, 256, 384, 512, 4096)] == [
        32,
        64,
        32,
        128,
        256,
        128,
        256,
        256,
    ]
    scales, zeros = torch.rand(8, 2), torch.randint(16, (8, 2), dtype=torch.uint8)
    joined = join_scales(scales, zeros, 1024)
    assert joined.shape == (4, 8, 2)
    assert torch.equal(joined[0], joined[1]) and torch.equal(joined[2], joined[3])
    assert torch.equal(joined[::2, :, 0], scales.bfloat16().T)


HOST = """
#include "int4_tiles.cuh"

extern "C" void unpack(const uint32_t* tiles, uint8_t* out, int features, int size, int log_words) {
  const vb::Int4Tiles layout{size, log_words};
  for (int row = 0; row < features; ++row)
    for (int unit = 0; unit < size / 8; ++unit)
      for (int c = 0; c < 4; ++c) {
        const uint32_t word = tiles[layout.word(row, unit) + c * layout.stride()] >> layout.bit(unit);
        out[row * size + unit * 8 + 2 * c] = word & 15;
        out[row * size + unit * 8 + 2 * c + 1] = word >> 16 & 15;
      }
}
"""


@needs_compiler
def test_the_kernel_finds_the_numbers(tmp_path: Path) -> None:
    """The arithmetic of the CUDA kernel's addresses, compiled for the host."""
    source, library = tmp_path / "host.cpp", tmp_path / "libhost.so"
    source.write_text(HOST)
    include = f"-I{ROOT / 'csrc' / 'cuda'}"
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-Wall", "-Werror", include, source, "-o", library], check=True)
    unpack = ctypes.CDLL(str(library)).unpack
    for features, size, group in SHAPES:
        weight = packed(features, size, group)
        out = torch.empty(features, size, dtype=torch.uint8)
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (weight.tiles, out))
        unpack(*pointers, features, size, weight.tiles.shape[3].bit_length() - 1)
        assert torch.equal(out, stored(features, size, group)[0])


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, KERNEL_ROWS, KERNEL_ROWS + 1, 200])
def test_int4_linear(rows: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are multiplied by torch's kernel, and for more the matrix is unpacked; the product is the same."""
    features, size = 24, 256
    weight, matrix = packed(features, size, 64), defined(features, size, 64)
    unpacked = []

    def unpack(given: ops.Int4Tiles) -> torch.Tensor:
        unpacked.append(given)
        return unpack_tiles_reference(given)

    monkeypatch.setattr(int4_tiles, "unpack_tiles", unpack)
    x = torch.randn(rows, 2 * size).bfloat16()[:, :size]  # strided
    bias = torch.randn(features).bfloat16() if with_bias else None
    with operators_on_cpu():
        out = ops.int4_linear(x, weight, bias)
    assert out.dtype == torch.bfloat16
    expected = F.linear(x.double(), matrix, None if bias is None else bias.double())
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)
    assert bool(unpacked) is not (0 < rows <= KERNEL_ROWS)


def test_what_no_kernel_multiplies_is_said() -> None:
    assert why_not_tiles(8, 32, 32) is None and why_not_tiles(4096, 14336, 14336) is None
    assert why_not_tiles(8, 80, 16) == (
        "the layer has 80 inputs and 8 outputs, which must be multiples of 32 and 8 on a GPU"
    )
    assert "64 inputs and 12 outputs" in str(why_not_tiles(12, 64, 32))
    assert why_not_tiles(8, 64, 16) == "groups of 16 inputs are not multiples of 32, as a GPU needs them"
