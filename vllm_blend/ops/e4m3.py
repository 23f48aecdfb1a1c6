"""Numbers of eight bits, e4m3, as pages and chunks of an FP8 KV cache hold them."""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x in the dtype of a KV cache: in e4m3, what is larger than it can hold becomes the largest number."""
    return x.clamp(-LARGEST, LARGEST).to(E4M3) if dtype is E4M3 else x.to(dtype)


def widened(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what a KV cache holds in another dtype. Of e4m3, float16 and larger types hold every number."""
    return e4m3_to_float(x).to(dtype) if x.dtype is E4M3 else x.to(dtype)


def readable(x: torch.Tensor) -> torch.Tensor:
    """Return what a KV cache holds as numbers that torch computes with: e4m3 in float32, all else as it is."""
    return e4m3_to_float(x) if x.dtype is E4M3 else x


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return e4m3 as its bytes, all else as it is: some operators of torch that move numbers do not know the dtype."""
    return x.view(torch.uint8) if x.dtype is E4M3 else x


def gathered(cache: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return cache[index], for a cache of any dtype and on any device."""
    return as_bytes(cache)[index].view(cache.dtype)


def e4m3_to_float(x: torch.Tensor) -> torch.Tensor:
    """Return x.float() for float8_e4m3fn, on a CPU several times as fast as torch 2.13 does it: a number's bits in the
    place of float16's, whose exponent is larger by 8. All ones are NaN in both."""
    if not x.is_cpu:
        return x.float()
    bits = x.contiguous().view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    bits |= (bits.bitwise_and(0x3F80) == 0x3F80).to(torch.int16) << 14
    return bits.view(torch.float16).float().mul_(2.0**8)
