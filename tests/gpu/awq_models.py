"""AWQ checkpoints of some size: one made of a trained model, one of random words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.quantized import LINEAR

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of outputs 0 to 7 in a word, 0 being its lowest four bits


def words_of_outputs(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers 0 to 15 [n, outputs] as AWQ's words [n, outputs / 8] int32."""
    eights = numbers.long().unflatten(1, (-1, 8))
    words = sum(eights[..., output] << (4 * place) for output, place in enumerate(PLACES))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).int().contiguous()


def quantized(matrix: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """Round a matrix [out, in] to 4 bits. Zero points are 7 to 9, and scales have 8 bits: kernels for GPUs round
    neither, so that the numbers are those of the dequantized matrix in bfloat16."""
    by_group = matrix.float().unflatten(1, (-1, group))
    zeros = torch.arange(by_group.shape[0] * by_group.shape[1]).view(by_group.shape[:2]) % 3 + 7
    scales = (by_group.abs().amax(2) / 6.5).bfloat16().clamp(min=2**-10)
    numbers = (by_group / scales[..., None].float()).round() + zeros[..., None]
    return {
        "qweight": words_of_outputs(numbers.clamp(0, 15).flatten(1).T),
        "qzeros": words_of_outputs(zeros.T),
        "scales": scales.half().T.contiguous(),
    }


def write_config(folder: Path, config: dict[str, Any], group: int) -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": awq}))


def quantize_model(source: Path, folder: Path, group: int) -> None:
    """Write the model in `source` with its linear layers in 4 bits."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stem, _, last = name.rpartition(".")
        if last == "weight" and stem.rpartition(".")[2] in LINEAR:
            tensors |= {f"{stem}.{part}": value for part, value in quantized(tensor, group).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_config(folder, json.loads((source / "config.json").read_text()), group)


def write_random_model(
    source: Path, folder: Path, layers: int, hidden: int, intermediate: int, group: int, **others: Any
) -> None:
    """Write a Llama model of this size of random words; its tokenizer, its vocabulary and whatever `others` do not say
    of config.json are those of `source`."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    heads = hidden // 128
    config |= {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 128} | others
    sizes = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    sizes |= {"mlp.gate_proj": (hidden, intermediate), "mlp.up_proj": (hidden, intermediate)}
    sizes |= {"mlp.down_proj": (intermediate, hidden)}
    tensors = {
        "model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden).bfloat16(),
        "model.norm.weight": torch.ones(hidden).bfloat16(),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(hidden).bfloat16()
        for name, (inputs, outputs) in sizes.items():
            words, groups = outputs // 8, inputs // group
            tensors |= {
                f"{prefix}{name}.qweight": torch.randint(-(2**31), 2**31, (inputs, words), dtype=torch.int32),
                f"{prefix}{name}.qzeros": torch.full((groups, words), -0x77777778, dtype=torch.int32),  # 8 everywhere
                f"{prefix}{name}.scales": torch.full((groups, outputs), 0.2 / inputs**0.5).half(),
            }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_config(folder, config, group)
