"""Decide which layers keep the matrices of a GGUF file in its blocks, and put those in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby

import torch
from torch import nn

from vllm_blend.distributed.ranks import Ranks
from vllm_blend.layers.embedding import Embedding, LMHead, keep_blocks
from vllm_blend.layers.experts import Experts
from vllm_blend.layers.linear import Linear, PackedLinear
from vllm_blend.models.gguf.tensors import FLOATS, FusedExperts, GGUFTensor
from vllm_blend.models.int4_layers import KeptLayers
from vllm_blend.models.stored import StoredTensor
from vllm_blend.ops import BlockMatrix, pack_blocks
from vllm_blend.ops.bindings import kernels_for
from vllm_blend.ops.blocks import why_not_blocks


def why_no_blocks(dtype: torch.dtype, device: torch.device, ranks: Ranks) -> str | None:
    """Return why no layer of a model can keep a GGUF file's blocks, None if layers can."""
    if device.type != "cpu":
        return "blocks are multiplied as they are on CPUs alone"
    if ranks.size > 1:
        return f"tensor_parallel_size={ranks.size} divides the layers, and blocks cannot be divided yet"
    if kernels_for(torch.empty(0, dtype=dtype)) is None:
        return "the compiled CPU kernels are not there"
    return None


def keep_block_layers(
    model: nn.Module, stored: Mapping[str, StoredTensor], checkpoint_name: Callable[[str], str]
) -> KeptLayers:
    """Give every linear layer, embedding, head and mixture of experts whose matrices `stored` has in blocks those
    blocks. `checkpoint_name` gives a parameter's name there. What is stored otherwise, or does not fit, is left to the
    loader."""
    layers = KeptLayers("the blocks of the file")
    others = {name for name, tensor in stored.items() if _is_quantized(tensor)}
    heads = [module for module in model.modules() if isinstance(module, LMHead) and module.tied]
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            has_parts = isinstance(module, PackedLinear) and not module.is_fused
            prefix = path.rpartition(".")[0] if has_parts else path
            rows = {checkpoint_name(f"{prefix}.{own}"): count for own, count in module.checkpoint_weights().items()}
        elif isinstance(module, Embedding) or (isinstance(module, LMHead) and not module.tied):
            rows = {checkpoint_name(f"{path}.weight"): len(module.weight)}
        elif isinstance(module, Experts):
            others -= _keep_experts(module, path, stored, checkpoint_name, layers)
            continue
        else:
            continue
        others -= rows.keys()
        before = module.weight.nbytes
        matrix = _matrix({name: stored.get(name) for name in rows}, rows, module.weight.shape[1], layers)
        if matrix is None:
            continue
        if isinstance(module, Linear):
            module.keep_blocks(matrix)
        else:
            keep_blocks(matrix, module, *(heads if isinstance(module, Embedding) else ()))
        layers.kept.update(rows)
        layers.nbytes += matrix.nbytes
        layers.dequantized_nbytes += before
    if others:
        layers.refuse(sorted(others), "only linear layers, experts, heads and embeddings keep blocks")
    return layers


def _keep_experts(
    module: Experts,
    path: str,
    stored: Mapping[str, StoredTensor],
    checkpoint_name: Callable[[str], str],
    layers: KeptLayers,
) -> set[str]:
    """Give a layer's experts their matrices in blocks, where all of them have some. Return the names of all."""
    seen: set[str] = set()
    kept: dict[str, list[BlockMatrix] | None] = {}
    for own in ("gate_up", "down"):
        parameter = getattr(module, own)
        whole = checkpoint_name(f"{path}.{own}_proj")
        fused = stored.get(whole)
        if isinstance(fused, FusedExperts):
            names, found, rows = _fused_parts(fused, whole, len(parameter), module.rows_of(own))
        else:
            rows = [
                {checkpoint_name(f"{path}.{name}"): count for name, count in expert.items()}
                for expert in module.expert_weights(own)
            ]
            names = {name for expert in rows for name in expert}
            found = [{name: stored.get(name) for name in expert} for expert in rows]
        seen |= names
        kept[own] = None
        size = parameter.shape[2]
        made = [_matrix(tensors, counts, size, layers) for tensors, counts in zip(found, rows, strict=True)]
        matrices = [matrix for matrix in made if matrix is not None]
        if len(matrices) == len(parameter):
            kept[own] = matrices
            layers.kept.update(names)
            layers.nbytes += sum(matrix.nbytes for matrix in matrices)
            layers.dequantized_nbytes += parameter.nbytes
    module.keep_blocks(kept["gate_up"], kept["down"])
    return seen


def _fused_parts(
    fused: FusedExperts, name: str, experts: int, rows: Mapping[str, int]
) -> tuple[set[str], list[dict[str, StoredTensor | None]], list[dict[str, int]]]:
    """Return the name of gpt-oss' tensor of all experts, and the matrices in it with their rows, expert by expert."""
    if fused.shape[0] != experts or len(rows) != fused.num_parts:
        return {name}, [{}], [{}]  # the loader says what does not fit
    found: list[dict[str, StoredTensor | None]] = []
    for number in range(experts):
        found.append({part.name: part for part in fused.parts(number)})
    return {name}, found, [dict(zip(parts, rows.values(), strict=True)) for parts in found]


def _matrix(
    found: Mapping[str, StoredTensor | None], rows: Mapping[str, int], size: int, layers: KeptLayers
) -> BlockMatrix | None:
    """Return the matrix of a layer in blocks, None if it has none or the kernels do not multiply them."""
    tensors = {name: tensor for name, tensor in found.items() if isinstance(tensor, GGUFTensor)}
    names = [name for name, tensor in tensors.items() if _is_quantized(tensor)]
    if not names or any(tuple(tensor.shape) != (rows[name], size) for name, tensor in tensors.items()):
        return None  # the loader says what does not fit
    if len(names) < len(found):
        layers.refuse(names, "matrices that are multiplied as one are not all quantized")
        return None
    refusals = filter(None, (why_not_blocks(tensor.kind, size) for tensor in tensors.values()))
    if (refusal := next(refusals, None)) is not None:
        layers.refuse(names, refusal)
        return None
    parts = []
    for kind, group in groupby(tensors.values(), lambda tensor: tensor.kind):
        alike = list(group)
        parts.append(pack_blocks(kind, [one.blocks() for one in alike], [one.row_order() for one in alike], size))
    return BlockMatrix(tuple(parts))


def _is_quantized(tensor: StoredTensor | None) -> bool:
    if isinstance(tensor, FusedExperts):
        return tensor.is_quantized
    return isinstance(tensor, GGUFTensor) and tensor.kind not in FLOATS
