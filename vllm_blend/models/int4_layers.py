"""Decide which linear layers keep the 4-bit weights of a checkpoint, and put those in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from vllm_blend.distributed.ranks import Ranks
from vllm_blend.layers.linear import Linear, PackedLinear
from vllm_blend.models.int4_layouts import INT4_LAYOUTS
from vllm_blend.models.stored import BadTensor, StoredTensor
from vllm_blend.models.weight_formats.base import DequantizedTensor
from vllm_blend.models.weight_formats.int4 import NotInt4

logger = logging.getLogger(__name__)


@dataclass
class KeptLayers:
    """What became of the quantized matrices of a checkpoint: the names of those that stay as they are, why others do
    not, and the bytes of the layers that keep them, beside those of the same layers dequantized."""

    kept_in: str = "4 bits"
    kept: set[str] = field(default_factory=set)
    reasons: dict[str, list[str]] = field(default_factory=dict)
    nbytes: int = 0
    dequantized_nbytes: int = 0

    def refuse(self, names: list[str], reason: str) -> None:
        self.reasons.setdefault(reason, []).extend(names)

    def log(self, model: str, dtype: str) -> None:
        """Say what stays quantized, and warn of what does not."""
        if self.kept:
            logger.info(
                "%d matrices of %s stay in %s: they take %.1f MiB instead of %.1f in %s",
                len(self.kept),
                model,
                self.kept_in,
                self.nbytes / 2**20,
                self.dequantized_nbytes / 2**20,
                dtype,
            )
        for reason, names in self.reasons.items():
            logger.warning(
                "%d quantized matrices of %s, such as %s, are dequantized to %s at load and take the memory of "
                "unquantized ones: %s",
                len(names),
                model,
                names[0],
                dtype,
                reason,
            )


def why_none(dtype: torch.dtype, device: torch.device, ranks: Ranks) -> str | None:
    """Return why no layer of a model can keep 4-bit weights, None if layers can."""
    if ranks.size > 1:
        return f"tensor_parallel_size={ranks.size} divides the layers, and 4-bit weights cannot be divided yet"
    return INT4_LAYOUTS[device.type].why_none(dtype, device)


def keep_int4_layers(
    model: nn.Module,
    stored: Mapping[str, StoredTensor],
    checkpoint_name: Callable[[str], str],
    device: torch.device,
) -> KeptLayers:
    """Give every linear layer whose matrices `stored` has in 4 bits those matrices, on `device`. `checkpoint_name`
    gives a parameter's name there. What is stored otherwise, or does not fit, is left to the loader."""
    layers = KeptLayers()
    others = {name for name, tensor in stored.items() if isinstance(tensor, DequantizedTensor)}
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            has_parts = isinstance(module, PackedLinear) and not module.is_fused
            prefix = path.rpartition(".")[0] if has_parts else path
            rows = {checkpoint_name(f"{prefix}.{own}"): count for own, count in module.checkpoint_weights().items()}
            others -= rows.keys()
            _keep(module, {name: stored.get(name) for name in rows}, rows, layers, device)
    if others:
        layers.refuse(sorted(others), "only linear layers keep 4-bit weights, not experts, heads and embeddings")
    return layers


def _keep(
    layer: Linear,
    found: Mapping[str, StoredTensor | None],
    rows: Mapping[str, int],
    layers: KeptLayers,
    device: torch.device,
) -> None:
    size = layer.weight.shape[1]
    sources = {name: tensor for name, tensor in found.items() if isinstance(tensor, DequantizedTensor)}
    names = list(sources)
    if any(tuple(tensor.shape) != (rows[name], size) for name, tensor in sources.items()):
        return None  # the loader says what does not fit
    if len(sources) < len(found):
        return layers.refuse(names, "matrices that are multiplied as one are not all quantized") if names else None
    try:
        parts = [tensor.int4(device) for tensor in sources.values()]
    except (NotInt4, BadTensor) as reason:  # the loader meets what is damaged again, and refuses it
        return layers.refuse(names, str(reason))
    if len({part.group_size for part in parts}) > 1:
        return layers.refuse(names, "matrices that are multiplied as one have groups of several sizes")
    dtype, *other_dtypes = {part.scales.dtype for part in parts}
    if other_dtypes:
        return layers.refuse(names, "matrices that are multiplied as one have scales of several types")
    layout = INT4_LAYOUTS[device.type]
    refusal = layout.why_not(sum(rows.values()), parts[0], dtype)
    if refusal is not None:
        return layers.refuse(names, refusal)
    matrix = layout.pack(parts, dtype)
    layers.kept.update(names)
    layers.dequantized_nbytes += layer.weight.nbytes
    layers.nbytes += matrix.nbytes
    return layer.keep_int4(matrix)
