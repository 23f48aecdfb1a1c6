"""4-bit weights on a GPU: PyTorch's layout and product are what is written of them, and the kernel unpacks the same
numbers, to the bit."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F

from tests.ops import int4_emulation
from tests.ops_gpu.reference import TOLERANCE, assert_close
from vllm_blend import ops
from vllm_blend.ops import cuda, int4_tiles
from vllm_blend.ops import pointers as to
from vllm_blend.ops.cuda_library import check, stream_of
from vllm_blend.ops.int4_tiles import KERNEL_ROWS, unpack_tiles_reference

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
SHAPES = [
    (8, 32, 32), (24, 96, 96), (640, 384, 128), (16, 64, 64), (4096, 1024, 32), (384, 768, 256), (1024, 4096, 4096),
    (28672, 4096, 128), (4096, 14336, 64),
]  # fmt: skip
SMALL = SHAPES[:4]


def stored(features: int, size: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return numbers, scales and zero points as a checkpoint has them."""
    torch.manual_seed(features + size + group)
    numbers = torch.randint(16, (features, size), dtype=torch.uint8, device="cuda")
    scales = torch.empty(features, size // group, device="cuda").uniform_(0.005, 0.02).half()
    return numbers, scales, torch.randint(17, scales.shape, dtype=torch.uint8, device="cuda")


def packed(features: int, size: int, group: int) -> ops.Int4Tiles:
    return ops.pack_tiles(*stored(features, size, group))


def defined(weight: ops.Int4Tiles, numbers: torch.Tensor) -> torch.Tensor:
    """Return (number - 8) * scale + zero [out, in], float64."""
    scale, zero = weight.scales_and_zeros.double().transpose(0, 1).repeat_interleave(weight.group_size, 1).unbind(2)
    return (numbers.double() - 8) * scale + zero


@pytest.mark.parametrize(("features", "size", "group"), SMALL)
def test_tiles_are_those_of_the_definition(features: int, size: int, group: int) -> None:
    numbers = stored(features, size, group)[0].cpu()
    weight = packed(features, size, group)
    pairs = (numbers[:, ::2] << 4 | numbers[:, 1::2]).contiguous()
    assert torch.equal(weight.tiles.cpu(), int4_emulation.pack(pairs, 2 * weight.tiles.shape[3]))


@pytest.mark.parametrize(("features", "size", "group"), SHAPES)
def test_unpacked_numbers(features: int, size: int, group: int) -> None:
    weight = packed(features, size, group)
    unpacked = ops.unpack_tiles(weight)
    assert torch.equal(unpacked, defined(weight, stored(features, size, group)[0]).to(BF16))
    assert torch.equal(unpacked, unpack_tiles_reference(weight))


@pytest.mark.parametrize(("features", "size", "group"), SHAPES)
def test_torch_multiplies_by_the_unpacked_numbers(features: int, size: int, group: int) -> None:
    """The identity times a matrix is the matrix, to the bit."""
    weight = packed(features, size, group)
    unpacked = ops.unpack_tiles(weight)
    for start in range(0, size, 2048):
        rows = torch.eye(size, device="cuda", dtype=BF16)[start : start + 2048]
        theirs = torch._weight_int4pack_mm(rows, weight.tiles, weight.group_size, weight.scales_and_zeros)
        assert torch.equal(theirs, unpacked[:, start : start + 2048].T)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 7, 16, 17, KERNEL_ROWS, KERNEL_ROWS + 1, 384])
@pytest.mark.parametrize(("features", "size", "group"), SHAPES)
def test_products(features: int, size: int, group: int, rows: int, with_bias: bool) -> None:
    weight = packed(features, size, group)
    x = torch.randn(rows, size, device="cuda").to(BF16)
    bias = torch.randn(features, device="cuda").to(BF16) if with_bias else None
    exact = defined(weight, stored(features, size, group)[0]).to(BF16).double()
    expected = F.linear(x.double(), exact, None if bias is None else bias.double())
    out = ops.int4_linear(x, weight, bias)
    assert out.dtype == BF16 and out.shape == (rows, features)
    assert_close(out, expected, TOLERANCE[BF16])
    wide = torch.cat([x, x], 1)[:, :size]
    assert_close(ops.int4_linear(wide, weight, bias), expected, TOLERANCE[BF16])


def test_both_ways_give_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = packed(4096, 1024, 32), torch.randn(KERNEL_ROWS, 1024, device="cuda").to(BF16)
    by_torch = ops.int4_linear(x, weight)
    monkeypatch.setattr(int4_tiles, "KERNEL_ROWS", 0)
    assert_close(ops.int4_linear(x, weight), by_torch, TOLERANCE[BF16])


def test_tiles_stay_while_other_memory_is_reused() -> None:
    """What packing used is free again afterwards, and other tensors take it."""
    weights = [packed(*shape) for shape in SHAPES]
    gc.collect()
    others = [
        torch.full((1 << bits,), 0xA5, dtype=torch.uint8, device="cuda") for bits in range(9, 27) for _ in range(3)
    ]
    for weight, shape in zip(weights, SHAPES, strict=True):
        assert torch.equal(ops.unpack_tiles(weight), defined(weight, stored(*shape)[0]).to(BF16))
    assert all(bool((other == 0xA5).all()) for other in others)


@pytest.mark.parametrize("rows", [5, KERNEL_ROWS, 384])
def test_a_captured_mlp_replays(rows: int) -> None:
    """Two products by either way, whose unpacked matrices lie in the graph's memory, on new input and beside new
    tensors."""
    up, down = packed(4096, 1024, 128), packed(1024, 2048, 64)

    def mlp(x: torch.Tensor) -> torch.Tensor:
        return ops.int4_linear(ops.silu_and_mul(ops.int4_linear(x, up)), down)

    x = torch.randn(rows, 1024, device="cuda").to(BF16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        mlp(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mlp(x)
    for seed in range(3):
        torch.manual_seed(seed)
        x.normal_()
        others = [torch.full((1 << bits,), float("nan"), device="cuda") for bits in range(10, 24)]
        graph.replay()
        assert_close(captured, mlp(x), TOLERANCE[BF16])
        del others


def test_what_the_kernel_does_not_take() -> None:
    tiles, scales = torch.zeros(1 << 12, dtype=torch.int32, device="cuda"), torch.zeros(1 << 12, device="cuda").to(BF16)
    out = torch.empty(1 << 12, device="cuda").to(BF16)

    def unpack(features: int, size: int, group: int, words: int) -> None:
        code = cuda.functions().int4_tiles_unpack(
            to.Tiles(tiles), to.Scales(scales), to.Out(out), features, size, group, words, stream_of(out)
        )
        check("int4_tiles_unpack", code)

    unpack(8, 64, 32, 2)
    for sizes in [(12, 64, 32, 1), (8, 48, 16, 1), (8, 64, 16, 1), (8, 96, 48, 1), (8, 64, 64, 4), (8, 96, 32, 3)]:
        with pytest.raises(RuntimeError, match="a size is out of range"):
            unpack(*sizes)
    weight = packed(8, 64, 32)
    with pytest.raises(TypeError, match=r"tiles is torch\.int64"):
        ops.unpack_tiles(ops.Int4Tiles(weight.tiles.long(), weight.scales_and_zeros))
