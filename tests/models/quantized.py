"""Tiny checkpoints in each quantized format, written from the formats' definitions, number by number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.models.tiny import edit_config, save, tiny_hf_model

Tensors = dict[str, torch.Tensor]
Maker = Callable[[int, int, np.random.Generator], tuple[Tensors, np.ndarray]]
GROUP = 16
LINEAR = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj"
)  # fmt: skip


def words_of(numbers: np.ndarray, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Pack rows of unsigned integers into int32, the first into the lowest bits, or each into the place in `order`."""
    per_word = 32 // bits
    rows, count = numbers.shape
    words = np.zeros((rows, -(-count // per_word)), np.uint32)
    for row in range(rows):
        for column in range(count):
            place = column % per_word if order is None else order[column % per_word]
            words[row, column // per_word] |= np.uint32(int(numbers[row, column]) << (bits * place))
    return torch.from_numpy(words.view(np.int32).copy())


def half(values: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
    """Values in float16, and what they are then."""
    tensor = torch.from_numpy(values).half()
    return tensor, tensor.double().numpy()


def scales_of(shape: tuple[int, ...], random: np.random.Generator) -> tuple[torch.Tensor, np.ndarray]:
    return half(random.uniform(0.02, 0.06, shape))


def e4m3(rows: int, columns: int, random: np.random.Generator) -> tuple[torch.Tensor, np.ndarray]:
    weight = torch.from_numpy(random.normal(0, 1, (rows, columns))).float().to(torch.float8_e4m3fn)
    return weight, weight.double().numpy()


def fp8(block: tuple[int, int] | None, scale: str, per_row: bool = False) -> Maker:
    def make(rows: int, columns: int, random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        weight, values = e4m3(rows, columns, random)
        size = block or (1 if per_row else rows, columns)
        numbers = random.uniform(0.1, 0.3, (-(-rows // size[0]), -(-columns // size[1]))).astype(np.float32)
        matrix = np.array([
            [values[i, j] * float(numbers[i // size[0], j // size[1]]) for j in range(columns)] for i in range(rows)
        ])  # fmt: skip
        scales = torch.from_numpy(numbers)
        if numbers.size == 1:
            scales = scales.reshape(())
        return {"weight": weight, scale: scales, "input_scale": torch.ones(1)}, matrix

    return make


def packed(bits: int, asymmetric: bool = False, reordered: bool = False, size: int = GROUP) -> Maker:
    """compressed-tensors' pack-quantized: signed integers, stored with an offset."""

    def make(rows: int, columns: int, random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        offset, groups = 2 ** (bits - 1), columns // size
        numbers = random.integers(-offset, offset, (rows, columns))
        zeros = random.integers(-3, 4, (rows, groups)) if asymmetric else np.zeros((rows, groups), int)
        scales, factors = scales_of((rows, groups), random)
        group = random.permutation(columns) // size if reordered else np.arange(columns) // size
        tensors = {"weight_packed": words_of(numbers + offset, bits), "weight_scale": scales}
        tensors["weight_shape"] = torch.tensor([rows, columns])
        if asymmetric:  # packed along the rows
            tensors["weight_zero_point"] = words_of((zeros + offset).T, bits).T.contiguous()
        if reordered:
            tensors["weight_g_idx"] = torch.from_numpy(group).int()
        return tensors, (numbers - zeros[:, group]) * factors[:, group] * 2 ** (4 - bits)

    def scaled(rows: int, columns: int, random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        tensors, matrix = make(rows, columns, random)
        tensors["weight_scale"] = tensors["weight_scale"] * 2.0 ** (4 - bits)  # of 8 bits, numbers are larger
        return tensors, matrix

    return scaled


def int8(rows: int, columns: int, random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    numbers = random.integers(-128, 128, (rows, columns))
    scales, factors = half(random.uniform(0.002, 0.004, (rows, 1)))
    return {"weight": torch.from_numpy(numbers).to(torch.int8), "weight_scale": scales}, numbers * factors


def awq(size: int = GROUP) -> Maker:
    """Words hold outputs; the nibbles from the lowest on are outputs 0, 2, 4, 6, 1, 3, 5, 7."""
    place = [[0, 2, 4, 6, 1, 3, 5, 7].index(output) for output in range(8)]

    def make(rows: int, columns: int, random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        groups = columns // size
        numbers, zeros = random.integers(0, 16, (columns, rows)), random.integers(6, 10, (groups, rows))
        scales, factors = scales_of((groups, rows), random)
        group = np.arange(columns) // size
        matrix = ((numbers - zeros[group]) * factors[group]).T
        return {"qweight": words_of(numbers, 4, place), "qzeros": words_of(zeros, 4, place), "scales": scales}, matrix

    return make


def gptq(
    bits: int = 4, reordered: bool = False, less: int = 1, without: Sequence[str] = (), size: int = GROUP
) -> Maker:
    """Words hold inputs; zero points are stored less one in the first version of the format."""

    def make(rows: int, columns: int, random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        groups, middle = columns // size, 2 ** (bits - 1)
        numbers = random.integers(0, 2**bits, (columns, rows))
        zeros = random.integers(middle - 1, middle + 2, (groups, rows))
        if "qzeros" in without:
            zeros = np.full_like(zeros, middle)
        scales, factors = half(random.uniform(0.02, 0.06, (groups, rows)) * 2.0 ** (4 - bits))
        group = random.permutation(columns) // size if reordered else np.arange(columns) // size
        tensors = {
            "qweight": words_of(numbers.T, bits).T.contiguous(),
            "qzeros": words_of(zeros - less, bits),
            "scales": scales,
            "g_idx": torch.from_numpy(group).int(),
        }
        matrix = ((numbers - zeros[group]) * factors[group]).T
        return {name: tensor for name, tensor in tensors.items() if name not in without}, matrix

    return make


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": scheme}}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
PACKED = {"type": "int", "strategy": "group", "group_size": GROUP}
FLOAT = {"type": "float", "num_bits": 8}
QUANTIZED: dict[str, tuple[dict[str, Any], Maker]] = {
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [32, 48]}, fp8((32, 48), "weight_scale_inv")),
    "fp8 matrices": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8(None, "weight_scale")),
    "float-quantized rows": (
        compressed("float-quantized", strategy="channel", **FLOAT), fp8(None, "weight_scale", per_row=True)
    ),
    "float-quantized blocks": (
        compressed("float-quantized", strategy="block", block_structure=[32, 48], **FLOAT),
        fp8((32, 48), "weight_scale"),
    ),
    "int-quantized": (compressed("int-quantized", type="int", num_bits=8, strategy="channel"), int8),
    "pack-quantized": (compressed("pack-quantized", num_bits=4, **PACKED), packed(4)),
    "pack-quantized, zero points": (
        compressed("pack-quantized", num_bits=4, **PACKED), packed(4, asymmetric=True)
    ),
    "pack-quantized, reordered": (compressed("pack-quantized", num_bits=4, **PACKED), packed(4, reordered=True)),
    "pack-quantized, 8 bits": (compressed("pack-quantized", num_bits=8, **PACKED), packed(8)),
    "awq": (AWQ, awq()),
    "gptq": (GPTQ, gptq()),
    "gptq, 8 bits": (GPTQ | {"bits": 8}, gptq(8)),
    "gptq, 2 bits": (GPTQ | {"bits": 2}, gptq(2)),
    "gptq, reordered": (GPTQ | {"desc_act": True}, gptq(reordered=True)),
    "gptq, second version": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(less=0)),
    "gptq, no index": (GPTQ, gptq(without=["g_idx"])),
    "gptq, no zero points": (GPTQ | {"sym": True}, gptq(without=["qzeros"])),
}  # fmt: skip

WIDE = 32  # inputs of a group that kernels on GPUs can have
IN_WIDE_GROUPS: dict[str, tuple[dict[str, Any], Maker]] = {
    "pack-quantized": (compressed("pack-quantized", num_bits=4, **PACKED | {"group_size": WIDE}), packed(4, size=WIDE)),
    "pack-quantized, zero points": (
        compressed("pack-quantized", num_bits=4, **PACKED | {"group_size": WIDE}),
        packed(4, asymmetric=True, size=WIDE),
    ),
    "awq": (AWQ | {"group_size": WIDE}, awq(WIDE)),
    "gptq": (GPTQ | {"group_size": WIDE}, gptq(size=WIDE)),
    "gptq, no zero points": (GPTQ | {"group_size": WIDE, "sym": True}, gptq(without=["qzeros"], size=WIDE)),
}


def save_quantized(
    folder: Path, name: str, architecture: str = "llama", in_wide_groups: bool = False, **overrides: Any
) -> dict[str, torch.Tensor]:
    """Write a checkpoint whose linear layers are quantized. Returns its matrices as they are meant, float64."""
    config, make = (IN_WIDE_GROUPS if in_wide_groups else QUANTIZED)[name]
    save(tiny_hf_model(architecture, **overrides), folder)
    path = folder / "model.safetensors"
    stored = load_file(path)
    random = np.random.default_rng(0)
    written: Tensors = {}
    meant: dict[str, torch.Tensor] = {}
    for key, tensor in stored.items():
        stem, _, last = key.rpartition(".")
        if last == "weight" and stem.rpartition(".")[2] in LINEAR:
            rows, columns = tensor.shape
            parts, matrix = make(rows, columns, random)
            written |= {f"{stem}.{part}": value for part, value in parts.items()}
            meant[key] = torch.from_numpy(matrix)
        else:
            written[key] = tensor
            meant[key] = tensor.double()
    save_file(written, path, {"format": "pt"})
    edit_config(folder, quantization_config=config)
    return meant
