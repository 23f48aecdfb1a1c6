"""What the 4-bit matrices of a checkpoint become on each kind of device, and which of them its kernels multiply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from vllm_blend.models.weight_formats.int4 import StoredInt4
from vllm_blend.ops import Int4Matrix, Int4Tiles, Int4Weight, pack_int4, pack_tiles
from vllm_blend.ops.bindings import kernels_for
from vllm_blend.ops.int4 import why_not_int4
from vllm_blend.ops.int4_tiles import CAPABILITY, DTYPE, why_not_tiles


class Int4Layout(ABC):
    """How the kernels of a device have matrices of 4 bits."""

    @abstractmethod
    def why_none(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """Return why no matrix is multiplied by activations of `dtype` on `device`, None if matrices are."""

    @abstractmethod
    def why_not(self, features: int, part: StoredInt4, scale_dtype: torch.dtype) -> str | None:
        """Return why a matrix of `features` rows like those of `part` is not multiplied, None if it is."""

    @abstractmethod
    def pack(self, parts: Sequence[StoredInt4], scale_dtype: torch.dtype) -> Int4Weight:
        """Return one matrix of several, one above the other, on the device where they lie."""


class CPULayout(Int4Layout):
    """The numbers, scales and zero points as they are stored."""

    def why_none(self, dtype: torch.dtype, device: torch.device) -> str | None:
        return "the compiled CPU kernels are not there" if kernels_for(torch.empty(0, dtype=dtype)) is None else None

    def why_not(self, features: int, part: StoredInt4, scale_dtype: torch.dtype) -> str | None:
        return why_not_int4(features, part.numbers.shape[1], part.group_size, scale_dtype)

    def pack(self, parts: Sequence[StoredInt4], scale_dtype: torch.dtype) -> Int4Matrix:
        return Int4Matrix(
            torch.cat([pack_int4(part.numbers) for part in parts]),
            torch.cat([part.scales.to(scale_dtype) for part in parts]).contiguous(),
            torch.cat([part.zeros for part in parts]).contiguous(),
        )


class CUDALayout(Int4Layout):
    """PyTorch's tiles, with scales and zero points in bfloat16."""

    def why_none(self, dtype: torch.dtype, device: torch.device) -> str | None:
        if dtype != DTYPE:
            given, wanted = (str(one).removeprefix("torch.") for one in (dtype, DTYPE))
            return f"4-bit products on a GPU take {wanted}, not {given} (dtype={wanted!r} keeps the 4 bits)"
        capability = torch.cuda.get_device_capability(device)
        if capability < CAPABILITY:
            found, wanted = (".".join(map(str, one)) for one in (capability, CAPABILITY))
            return f"4-bit products need a GPU of compute capability {wanted} or later, and this one has {found}"
        return None

    def why_not(self, features: int, part: StoredInt4, scale_dtype: torch.dtype) -> str | None:
        return why_not_tiles(features, part.numbers.shape[1], part.group_size)

    def pack(self, parts: Sequence[StoredInt4], scale_dtype: torch.dtype) -> Int4Tiles:
        device = parts[0].numbers.device
        packed = pack_tiles(
            torch.cat([part.numbers for part in parts]),
            torch.cat([part.scales.to(scale_dtype) for part in parts]),
            torch.cat([part.zeros for part in parts]),
        )
        # It may lie in what a larger tensor has left, and torch could never return that memory to the GPU.
        tiles, scales_and_zeros = packed.tiles.cpu(), packed.scales_and_zeros.cpu()
        del packed
        torch.cuda.empty_cache()
        return Int4Tiles(tiles.to(device), scales_and_zeros.to(device))


INT4_LAYOUTS: dict[str, Int4Layout] = {"cpu": CPULayout(), "cuda": CUDALayout()}  # by type of device
