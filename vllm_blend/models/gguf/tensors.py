"""The tensors of a GGUF file under the names and in the layout of a Hugging Face checkpoint, dequantized as read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_blend.checks import closest, is_whole
from vllm_blend.models.gguf.families import GGUF_FAMILIES, GGUFFamily
from vllm_blend.models.gguf.header import GGUFHeader, TensorPlace
from vllm_blend.ops.fp8 import QuantizedRows

IGNORED = ("rope_freqs.weight",)  # the config has them
FLOATS = {0: "F32", 1: "F16", 28: "F64", 30: "BF16"}  # types of ggml that are not quantized


class GGUFTensor:
    """A tensor, which is read when it is wanted (`models.stored.StoredTensor`)."""

    def __init__(
        self, header: GGUFHeader, place: TensorPlace, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None
    ) -> None:
        self.name, self.shape = name, place.shape
        self._header, self._place, self._change = header, place, change

    def read(self) -> torch.Tensor:
        values = read_tensor(self._header, self._place)
        return values if self._change is None else self._change(values)

    def source(self, device: torch.device) -> torch.Tensor:
        return self.read()

    def quantized_rows(self, device: torch.device) -> QuantizedRows | None:
        return None


def family_of(header: GGUFHeader) -> GGUFFamily:
    """Return the family of a file's model. Raises ValueError for one that is not read here."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in GGUF_FAMILIES:
        meant = closest(name, GGUF_FAMILIES.names())
        hint = f" (did you mean {meant!r}?)" if meant else ""
        raise ValueError(
            f"{header.path}: general.architecture is {name!r}{hint}; of GGUF files {', '.join(GGUF_FAMILIES.names())} "
            "are read. Give the directory of the same model in safetensors, or convert the file if transformers knows "
            f"it: AutoModelForCausalLM.from_pretrained({str(header.path.parent)!r}, gguf_file={header.path.name!r})"
            ".save_pretrained(new_path)"
        )
    return GGUF_FAMILIES[name]


def gguf_tensors(header: GGUFHeader) -> dict[str, GGUFTensor]:
    """Return the tensors by the names that they have in a Hugging Face checkpoint. A tensor without a place there
    keeps its own name. Raises ValueError if two have the same."""
    family, found = family_of(header), {}
    for name, place in header.tensors.items():
        if name not in IGNORED:
            theirs = family.checkpoint_name(name)
            if theirs in found:
                raise ValueError(f"{header.path} has {theirs} twice, once as {name}: fetch it again")
            found[theirs] = GGUFTensor(header, place, theirs, _change_of(header, family, name, place))
    return found


def quantized_types(header: GGUFHeader) -> list[str]:
    """Return the names of the quantized types that a file has, most frequent first."""
    from gguf import GGMLQuantizationType

    kinds = [place.kind for place in header.tensors.values() if place.kind not in FLOATS]
    return [GGMLQuantizationType(kind).name for kind in sorted(set(kinds), key=kinds.count, reverse=True)]


def read_tensor(header: GGUFHeader, place: TensorPlace) -> torch.Tensor:
    """Return the values of a tensor in float32, as the file has them. Raises ValueError if that cannot be done."""
    from gguf import GGMLQuantizationType, dequantize

    try:
        stored = np.memmap(header.path, np.uint8, "r", place.start, (place.num_bytes,))
        rows = stored.reshape(*place.shape[:-1], -1)
        values = dequantize(rows, GGMLQuantizationType(place.kind))
        read: torch.Tensor = torch.from_numpy(np.array(values, np.float32)).reshape(place.shape)
    except (NotImplementedError, ValueError, OSError) as error:
        raise ValueError(f"{header.path}: the tensor {place.name!r} cannot be read: {error!r}") from error
    return read


def _change_of(
    header: GGUFHeader, family: GGUFFamily, name: str, place: TensorPlace
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return what makes a Hugging Face checkpoint's tensor of the file's, None if they are equal."""
    if family.adds_one and name.endswith("norm.weight"):
        return lambda values: values - 1
    if family.interleaves_heads and name.rpartition(".")[0].endswith((".attn_q", ".attn_k")):
        key = "attention.head_count" if ".attn_q." in name else "attention.head_count_kv"
        heads: Any = header.metadata.get(f"{family.name}.{key}")
        heads = header.metadata.get(f"{family.name}.attention.head_count") if heads is None else heads
        if is_whole(heads) and heads > 0 and place.shape[0] % (2 * heads) == 0:  # else its shape will be refused
            return lambda values: _halves(values, int(heads))
    return None


def _halves(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows whose neighbours are rotated together with these half a head apart."""
    pairs: torch.Tensor = values.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).reshape(values.shape)
