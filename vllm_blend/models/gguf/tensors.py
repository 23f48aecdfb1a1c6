"""The tensors of a GGUF file under the names and in the layout of a Hugging Face checkpoint, dequantized as read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from vllm_blend.checks import closest, is_whole
from vllm_blend.models.gguf.families import GGUF_FAMILIES, MIXTRAL, GGUFFamily
from vllm_blend.models.gguf.header import GGUFHeader, TensorPlace
from vllm_blend.models.gguf.names import conversion
from vllm_blend.ops.fp8 import QuantizedRows

IGNORED = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")  # the config has them
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

    @property
    def kind(self) -> int:
        """Return ggml's number of its type."""
        return self._place.kind

    def blocks(self) -> torch.Tensor:
        """Return the rows of a matrix as the file has them, uint8 [rows, bytes], in mapped memory."""
        place = self._place
        try:
            return torch.from_numpy(
                np.memmap(place.path, np.uint8, "c", place.start, (place.shape[0], place.num_bytes // place.shape[0]))
            )
        except OSError as error:
            raise ValueError(f"{self._header.path}: the tensor {place.name!r} cannot be read: {error!r}") from error

    def row_order(self) -> torch.Tensor | None:
        """Return which rows of the file the rows of a checkpoint's matrix are, None if the order is the same."""
        return None if self._change is None else self._change(torch.arange(self.shape[0])[:, None]).flatten()

    def entry(self, index: int) -> GGUFTensor:
        """Return one of the tensors that are stacked in this one."""
        return GGUFTensor(self._header, self._place.entry(index), f"{self.name}[{index}]", None)

    def source(self, device: torch.device) -> torch.Tensor:
        return self.read()

    def quantized_rows(self, device: torch.device) -> QuantizedRows | None:
        return None


class FusedExperts:
    """gpt-oss' matrices [experts, inputs, outputs], or biases [experts, outputs], of a file's one or two stacks; the
    outputs of two alternate. They are read expert by expert."""

    def __init__(self, name: str, stacks: list[GGUFTensor]) -> None:
        self.name, self._stacks = name, stacks
        experts, outputs, *inputs = stacks[0].shape
        self.shape = (experts, *inputs, outputs * len(stacks))
        if any(stack.shape != stacks[0].shape for stack in stacks):
            raise ValueError(f"{name} is made of tensors of the shapes {[stack.shape for stack in stacks]}")

    @property
    def num_parts(self) -> int:
        """Return how many matrices an expert has in it."""
        return len(self._stacks)

    @property
    def is_quantized(self) -> bool:
        return any(stack.kind not in FLOATS for stack in self._stacks)

    def read(self) -> torch.Tensor:
        return self[()]

    def __getitem__(self, index: Any) -> torch.Tensor:
        experts, *others = index or (slice(None),)
        chosen = [self._expert(number) for number in range(self.shape[0])[experts]]
        part: torch.Tensor = torch.stack(chosen)[(slice(None), *others)]
        return part

    def source(self, device: torch.device) -> FusedExperts:
        return self

    def quantized_rows(self, device: torch.device) -> QuantizedRows | None:
        return None

    def parts(self, number: int) -> list[GGUFTensor]:
        """Return an expert's matrices [outputs, inputs]: gate and up, or one alone."""
        return [stack.entry(number) for stack in self._stacks]

    def _expert(self, number: int) -> torch.Tensor:
        rows = torch.stack([part.read() for part in self.parts(number)], 1).flatten(0, 1)
        return rows.mT if rows.dim() == 2 else rows


def family_of(header: GGUFHeader) -> GGUFFamily:
    """Return the family of a file's model. Raises ValueError for one that is not read here."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in GGUF_FAMILIES:
        meant = closest(name, GGUF_FAMILIES.names())
        hint = f" (did you mean {meant!r}?)" if meant else ""
        raise ValueError(
            f"{header.path}: general.architecture is {name!r}{hint}; of GGUF files {', '.join(GGUF_FAMILIES.names())} "
            "are read. Give the directory of the same model in safetensors, or convert the file if transformers knows "
            f"it: {conversion(repr(str(header.path.parent)), repr(header.path.name))}"
        )
    is_mixture = name == MIXTRAL.name and header.metadata.get(f"{name}.expert_count") not in (None, 0)
    return MIXTRAL if is_mixture else GGUF_FAMILIES[name]


def gguf_tensors(header: GGUFHeader) -> dict[str, GGUFTensor | FusedExperts]:
    """Return the tensors by the names that they have in a Hugging Face checkpoint. A tensor without a place there
    keeps its own name. Raises ValueError if two have the same, or experts do not fit each other."""
    family, stacks = family_of(header), dict[str, GGUFTensor]()
    found: dict[str, GGUFTensor | FusedExperts] = {}
    for name, place in header.tensors.items():
        if name in IGNORED:
            continue
        for theirs, part in _parts(family, name, place):
            if theirs in found or theirs in stacks:
                raise ValueError(f"{header.path} has {theirs} twice, once as {name}: fetch it again")
            is_stack = family.fuses_experts and ".mlp.experts." in theirs
            (stacks if is_stack else found)[theirs] = GGUFTensor(
                header, part, theirs, _change_of(header, family, name, part)
            )
    return found | _fused(stacks)


def _parts(family: GGUFFamily, name: str, place: TensorPlace) -> Iterator[tuple[str, TensorPlace]]:
    """Return what a tensor is in a checkpoint: itself, or the matrix of each expert."""
    theirs = family.checkpoint_name(name)
    if "{}" not in theirs:
        yield theirs, place
    else:
        for expert in range(place.shape[0]):
            yield theirs.format(expert), place.entry(expert)


def _fused(stacks: dict[str, GGUFTensor]) -> dict[str, GGUFTensor | FusedExperts]:
    """Return gpt-oss' tensors of the stacks of gate, up and down; a stack without its twin keeps its name."""
    fused: dict[str, GGUFTensor | FusedExperts] = dict(stacks)
    for name, gate in stacks.items():
        stem, _, last = name.rpartition(".")
        suffix = "" if last == "weight" else f"_{last}"
        if stem.endswith(".gate") and (up := f"{stem.removesuffix('.gate')}.up.{last}") in stacks:
            theirs = f"{stem.removesuffix('.gate')}.gate_up_proj{suffix}"
            fused[theirs] = FusedExperts(theirs, [gate, stacks[up]])
            del fused[name], fused[up]
        elif stem.endswith(".down"):
            fused[f"{stem}_proj{suffix}"] = FusedExperts(f"{stem}_proj{suffix}", [gate])
            del fused[name]
    return fused


def quantized_types(header: GGUFHeader) -> list[str]:
    """Return the names of the quantized types that a file has, most frequent first."""
    from gguf import GGMLQuantizationType

    kinds = [place.kind for place in header.tensors.values() if place.kind not in FLOATS]
    return [GGMLQuantizationType(kind).name for kind in sorted(set(kinds), key=kinds.count, reverse=True)]


def read_tensor(header: GGUFHeader, place: TensorPlace) -> torch.Tensor:
    """Return the values of a tensor in float32, as the file has them. Raises ValueError if that cannot be done."""
    from gguf import GGMLQuantizationType, dequantize

    try:
        stored = np.memmap(place.path, np.uint8, "r", place.start, (place.num_bytes,))
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
