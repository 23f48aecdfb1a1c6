"""KV that does not fit is refused before a byte is copied, on the way to a GPU too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_blend import ops
from vllm_blend.ops import cuda

LAYERS, TOKENS, HEADS, DIM = 3, 5, 2, 8


def kv(layers: int = LAYERS, tokens: int = TOKENS, heads: int = HEADS, dim: int = DIM) -> torch.Tensor:
    return torch.randn(layers, tokens, heads, dim)


WRONG: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "fewer layers": (kv(layers=2), kv(layers=2)),
    "more layers": (kv(layers=4), kv(layers=4)),
    "fewer tokens": (kv(tokens=4), kv(tokens=4)),
    "more tokens": (kv(tokens=6), kv(tokens=6)),
    "other heads": (kv(heads=1), kv(heads=1)),
    "another head size": (kv(dim=4), kv(dim=4)),
    "heads and head size that make the same bytes": (kv(heads=4, dim=4), kv(heads=4, dim=4)),
    "V of another shape": (kv(), kv(tokens=4)),
}


@pytest.mark.parametrize("which", WRONG)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_chunks_that_do_not_fit_are_not_placed(which: str, device: str) -> None:
    """`cuda.place_chunks` is called as on a GPU: it must refuse before it asks for one."""
    caches = torch.zeros(2, LAYERS, 4, 4, HEADS, DIM)
    cos, sin, slots = torch.ones(TOKENS, DIM // 2), torch.zeros(TOKENS, DIM // 2), torch.arange(TOKENS)
    with pytest.raises(ValueError, match=r"do not fit a cache of 3 layers|one for each of the chunks' [46] tokens"):
        if device == "cpu":
            ops.place_chunks([WRONG[which]], cos, sin, caches[0], caches[1], slots)
        else:
            pointers = torch.zeros(LAYERS, dtype=torch.int64)
            cuda.place_chunks([WRONG[which]], cos, sin, pointers, pointers, caches[0, 0], slots)
    assert not caches.any()


def test_chunks_that_fit_are_placed_and_caches_must_be_alike() -> None:
    caches = torch.zeros(2, LAYERS, 4, 4, HEADS, DIM)
    cos, sin, slots = torch.ones(TOKENS, DIM // 2), torch.zeros(TOKENS, DIM // 2), torch.arange(TOKENS)
    k, v = kv(), kv()
    ops.place_chunks([(k[:, :2], v[:, :2]), (k[:, 2:], v[:, 2:])], cos, sin, caches[0], caches[1], slots)
    assert torch.equal(caches.flatten(2, 3)[:, :, :TOKENS], torch.stack([k, v]))
    with pytest.raises(ValueError, match="must be alike"):
        ops.place_chunks([(k, v)], cos, sin, caches[0], caches[1, :, :2], slots)
    pointers = torch.zeros(LAYERS, dtype=torch.int64)
    with pytest.raises(ValueError, match="the addresses of key and value caches, must be as many"):
        cuda.place_chunks([(k, v)], cos, sin, pointers, pointers[1:], caches[0, 0], slots)


def pieces(*tensors: torch.Tensor) -> ops.HostPieces:
    hosts = [ops.HostKV.from_tensors(t, t.clone()) for t in tensors]
    return ops.HostPieces([(host, 0, host.k.shape[1]) for host in hosts if host is not None])


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(2 * TOKENS - 1, HEADS, DIM),
        torch.zeros(2 * TOKENS, HEADS, DIM // 2),
        torch.zeros(2 * TOKENS, 1, DIM),
        torch.zeros(2 * TOKENS, HEADS, DIM, dtype=torch.bfloat16),
        torch.zeros(2 * TOKENS, HEADS, 2 * DIM)[..., ::2],
        torch.zeros(2 * TOKENS, HEADS * DIM),
    ],
)
@pytest.mark.parametrize("which", [0, 1])
def test_a_copy_to_a_buffer_that_is_too_small_is_refused(buffer: torch.Tensor, which: int) -> None:
    right = torch.zeros(2 * TOKENS, HEADS, DIM)
    buffers = [right, buffer] if which else [buffer, right]
    with pytest.raises(ValueError, match=r"10 rows of .* do not fit a buffer"):
        ops.copy_pieces(pieces(kv(), kv()), 0, buffers[0], buffers[1], None)  # type: ignore[arg-type]
    assert not any(b.any() for b in buffers)


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_a_layer_that_is_not_there_is_not_copied(layer: int) -> None:
    buffer = torch.zeros(TOKENS, HEADS, DIM)
    with pytest.raises(ValueError, match=f"layer {layer} of KV of 3 layers"):
        ops.copy_pieces(pieces(kv()), layer, buffer, buffer.clone(), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [kv(layers=2), kv(heads=1), kv(dim=4), kv().bfloat16()])
def test_pieces_of_other_shapes_do_not_travel_together(other: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="cannot be copied along with"):
        pieces(kv(), other)


@pytest.mark.parametrize("span", [(-1, 3), (3, 3), (0, TOKENS + 1)])
def test_pieces_lie_within_their_chunk(span: Any) -> None:
    host = ops.HostKV.from_tensors(kv(), kv())
    assert host is not None
    with pytest.raises(ValueError, match="cannot be copied along with"):
        ops.HostPieces([(host, *span)])
