"""Small unsigned integers packed into int32 words, the lowest bits first."""

from __future__ import annotations

import torch

WORD = 32
PACKED_BITS = (2, 4, 8)  # that divide a word


def unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Return the integers of int32 `words` [n, m] as uint8, 32 / bits of them for each along `dim` (0 or 1)."""
    if words.dtype != torch.int32 or words.ndim != 2:
        raise ValueError(f"packed integers must be a matrix of int32, not {words.dtype} {tuple(words.shape)}")
    if dim == 0:
        return unpack(words.T, bits, 1).T
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device)
    numbers = torch.bitwise_and(words[..., None] >> shifts, 2**bits - 1)
    return numbers.to(torch.uint8).flatten(1)
