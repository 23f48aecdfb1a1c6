"""Copying a checkpoint into parameters: every tensor is accounted for, and none is held in memory twice."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

from vllm_blend.distributed.sharding import Layout
from vllm_blend.layers.embedding import Embedding, LMHead
from vllm_blend.layers.experts import Experts
from vllm_blend.layers.linear import Linear, PackedLinear
from vllm_blend.layers.quantization import QuantizedDestination
from vllm_blend.models.block_layers import keep_block_layers
from vllm_blend.models.int4_layers import KeptLayers, keep_int4_layers
from vllm_blend.models.stored import BadTensor, PlainTensor, StoredTensor, opened
from vllm_blend.models.text_parts import TextPart, text_tensors
from vllm_blend.models.weight_formats.base import WeightFormat

logger = logging.getLogger(__name__)

# One file, the index of several, and the pattern of files without an index.
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json", "*.safetensors")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model*.bin")
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # stored by old checkpoints; here it follows from the config
HEAD = "lm_head"
EMBEDDING = "model.embed_tokens.weight"  # the end of its name
_OF_LAYER = re.compile(r"\blayers\.(\d{1,9})\.")
MAX_NAME = 255  # bytes of a file's name
NAMES_SHOWN = 8  # of a list in an error message


def find_weight_files(directory: Path) -> list[Path]:
    """Find the files of a checkpoint as transformers does: one safetensors file, else those of the index, else all,
    else PyTorch's pickles in the same way.

    Raises FileNotFoundError if there are none or the index names a missing one, ValueError for a damaged index.
    """
    for single, index, pattern in (SAFETENSORS, PICKLES):
        if (directory / single).is_file():
            return [directory / single]
        if (directory / index).is_file():
            return _indexed_files(directory / index)
        found = sorted(directory.glob(pattern))
        if found:
            return found
    convert = "convert them to safetensors (AutoModelForCausalLM.from_pretrained(path{}).save_pretrained(new_path))"
    gguf = sorted(directory.glob("*.gguf"))
    if gguf:
        raise FileNotFoundError(
            f"{directory} has GGUF weights only: give the path of the file, {str(gguf[0])!r}, as the model"
        )
    others = sorted(path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in directory.glob(pattern))
    if others:
        raise FileNotFoundError(
            f"{directory} has no weights in Hugging Face's layout, *.safetensors or pytorch_model*.bin, but "
            f"{_list_names(others)}: {convert.format('')}"
        )
    raise FileNotFoundError(f"{directory} has no weights, which are *.safetensors files: fetch them, or save them so")


def _indexed_files(index: Path) -> list[Path]:
    names = _indexed_names(index)
    for name in names:
        if not name or Path(name).is_absolute() or ".." in Path(name).parts or len(name.encode()) > MAX_NAME:
            raise ValueError(
                f"{index} names {name[:MAX_NAME]!r}, which is no file in its directory: fetch the checkpoint again"
            )
    files = [index.parent / name for name in names]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{index} names files that do not exist: {_list_names(missing)}: fetch the checkpoint again"
        )
    return files


Destination = torch.Tensor | QuantizedDestination | Layout


def checkpoint_destinations(model: nn.Module) -> dict[str, Destination]:
    """Return what each tensor of a Hugging Face checkpoint is copied into, by name (packed layers take several)."""
    destinations: dict[str, Destination] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, Linear | Experts):
            has_parts = isinstance(module, PackedLinear) and not module.is_fused
            beside = _parent_prefix(prefix) if has_parts else prefix
            destinations.update({f"{beside}{name}": view for name, view in module.checkpoint_views().items()})
            seen.update(id(parameter) for parameter in module.parameters())
            continue
        if isinstance(module, Embedding | LMHead) and module.blocks is not None:
            continue
        layouts = layouts_of(module)
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:  # a tied parameter belongs to the first module that has it
                seen.add(id(parameter))
                destinations[f"{prefix}{name}"] = layouts.get(name, parameter.detach())
    parts = _renamed_parts(model)
    return {_renamed(name, parts): destination for name, destination in destinations.items()}


def layouts_of(module: nn.Module) -> dict[str, Layout]:
    """Return the layouts of a module's own parameters, by name, of which it has one rank's share."""
    layouts: Callable[[], dict[str, Layout]] | None = getattr(module, "layouts", None)
    return {} if layouts is None else layouts()


def _renamed_parts(model: nn.Module) -> Mapping[str, str]:
    parts: Mapping[str, str] = getattr(model, "checkpoint_names", {})
    return parts


def _renamed(name: str, parts: Mapping[str, str]) -> str:
    for ours, theirs in parts.items():
        name = name.replace(ours, theirs)
    return name


def fill_from_files(
    model: nn.Module,
    files: Iterable[Path],
    weight_format: WeightFormat | None = None,
    int4_device: torch.device | None = None,
    keeps_blocks: bool = False,
) -> KeptLayers:
    """Copy every tensor of `files` into `model`, one at a time, cast to the model's dtype; matrices that are quantized
    by `weight_format` are dequantized, but with `int4_device` linear layers keep those of 4-bit integers there, where
    they can, and the rest of the model moves to that device before it is filled. Returns which layers keep them.

    Raises ValueError for a file that cannot be read, and for missing, unexpected or misshapen tensors, and those with
    numbers that are not finite, by name.
    """
    layers = KeptLayers()
    tied = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, LMHead) and module.tied}
    with opened(files) as found:
        if isinstance(model, TextPart):
            found, everything = text_tensors(found), len(found)
            logger.info(
                "only the text of %s is served: %d tensors of its other parts are not read",
                type(model).__name__,
                everything - len(found),
            )
        stored = found if weight_format is None else weight_format.combine(found)
        wanted = {name: tensor for name, tensor in stored.items() if not _is_ignored(name, tied)}
        if int4_device is not None:
            layers = keep_int4_layers(model, wanted, partial(_renamed, parts=_renamed_parts(model)), int4_device)
            model.to(int4_device)
            wanted = {name: tensor for name, tensor in wanted.items() if name not in layers.kept}
        if keeps_blocks:
            layers = keep_block_layers(model, wanted, partial(_renamed, parts=_renamed_parts(model)))
            wanted = {name: tensor for name, tensor in wanted.items() if name not in layers.kept}
        destinations = checkpoint_destinations(model)
        unexpected = sorted(wanted.keys() - destinations.keys())
        missing = sorted(destinations.keys() - wanted.keys())
        filled = [(name, tensor) for name, tensor in wanted.items() if name in destinations]
        problems = [problem for name, tensor in filled for problem in _fill(name, destinations[name], tensor)]
    if missing:
        problems.append(f"missing: {_list_names(missing)}")
    if unexpected:
        problems.append(f"unexpected: {_list_names(unexpected)}")
    if problems:
        raise ValueError(f"the checkpoint does not fit {type(model).__name__} and its config: {'; '.join(problems)}")
    return layers


def check_sizes(files: Iterable[Path], num_layers: int, vocab_size: int) -> None:
    """Raise ValueError if config.json names more layers, or a larger vocabulary, than a checkpoint has: a model of that
    size, which is built before the files are read, may fit no memory."""
    with opened(files) as found:
        stored = {int(match[1]) for match in map(_OF_LAYER.search, found) if match}
        embeddings = [(name, tensor.shape[0]) for name, tensor in found.items() if name.endswith(EMBEDDING)]
    if stored and num_layers > max(stored) + 1:
        raise ValueError(
            f"num_hidden_layers in config.json is {num_layers}, but the checkpoint has {max(stored) + 1} layers: the "
            f"tensors of model.layers.{max(stored) + 1} are missing; fetch both again"
        )
    for name, rows in embeddings:
        if vocab_size > rows:
            raise ValueError(
                f"vocab_size in config.json is {vocab_size}, but {name} in the checkpoint has {rows} rows: fetch both "
                "again"
            )


def has_own_head(files: Iterable[Path]) -> bool:
    """Return whether the checkpoint of a multimodal model has a language-model head apart from the embedding."""
    with opened(files) as found:
        return any(name.startswith(f"{HEAD}.") for name in text_tensors(found))


def _is_ignored(name: str, tied: set[str]) -> bool:
    return name.endswith(IGNORED_SUFFIXES) or name in tied


def _fill(name: str, destination: Destination, stored: StoredTensor) -> list[str]:
    """Copy one tensor, or the parts of it that are wanted, or return why it does not fit."""
    if tuple(stored.shape) != tuple(destination.shape):
        return [f"{name} has shape {tuple(stored.shape)}, the config asks for {tuple(destination.shape)}"]
    try:
        if isinstance(destination, QuantizedDestination):
            rows = stored.quantized_rows(destination.rows.values.device)
            if rows is not None:
                destination.keep(rows)
                return []
        parts = destination.parts if isinstance(destination, Layout) else (((), destination),)
        source = stored.source(_device(destination))
        for index, memory in parts:
            memory.copy_(source[index])
            if not _is_finite(memory):
                return [_not_finite(name, stored, memory)]
    except BadTensor as error:
        return [str(error)]
    return []


def _is_finite(memory: torch.Tensor | QuantizedDestination) -> bool:
    """Return whether all values are finite. Their sum is not if one of them is not, and takes one pass over them and no
    memory of its own; as it may overflow too, they are looked at then."""
    values = memory.rows.scales if isinstance(memory, QuantizedDestination) else memory
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def _not_finite(name: str, stored: StoredTensor, memory: torch.Tensor | QuantizedDestination) -> str:
    where = f" (in {stored.path.name})" if isinstance(stored, PlainTensor) else ""
    dtype = str(memory.dtype).removeprefix("torch.")
    return f"{name}{where} has NaN, or numbers that are infinite in {dtype}: fetch it again, or give another dtype"


def _device(destination: Destination) -> torch.device:
    if isinstance(destination, Layout):
        return destination.parts[0][1].device if destination.parts else torch.device("cpu")
    return destination.rows.values.device if isinstance(destination, QuantizedDestination) else destination.device


def _indexed_names(index: Path) -> list[str]:
    """Return the file names in an index, each once, in order."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
        if not names or not all(isinstance(name, str) for name in names):
            raise TypeError("weight_map has no names of files")
        return names
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is not an index of weights with a 'weight_map': {error!r}") from error


def _parent_prefix(prefix: str) -> str:
    """ "layers.0.mlp.gate_up_proj." -> "layers.0.mlp."."""
    head = prefix.rstrip(".").rpartition(".")[0]
    return f"{head}." if head else ""


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
