"""Copying safetensors into parameters: every tensor is accounted for, and none is held in memory twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from vllm_blend.distributed.sharding import Layout
from vllm_blend.layers.embedding import LMHead
from vllm_blend.layers.experts import Experts
from vllm_blend.layers.linear import Linear, PackedLinear
from vllm_blend.layers.quantization import QuantizedDestination

INDEX_NAME = "model.safetensors.index.json"
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # stored by old checkpoints; here it follows from the config
NAMES_SHOWN = 8  # of a list in an error message


def find_weight_files(directory: Path) -> list[Path]:
    """Find the safetensors files of a checkpoint as transformers does: one file, else those of the index, else all.

    Raises FileNotFoundError if there are none or the index names a missing one, ValueError for a damaged index.
    """
    single, index = directory / "model.safetensors", directory / INDEX_NAME
    if single.is_file():
        return [single]
    if index.is_file():
        files = [directory / name for name in _indexed_names(index)]
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise FileNotFoundError(
                f"{index} names files that do not exist: {_list_names(missing)}: fetch the checkpoint again"
            )
        return files
    found = sorted(directory.glob("*.safetensors"))
    if found:
        return found
    if any(directory.glob("*.bin")) or any(directory.glob("*.pth")):
        raise FileNotFoundError(
            f"{directory} has PyTorch pickles only, which are not loaded because they run code: convert them to "
            "safetensors (AutoModelForCausalLM.from_pretrained(path).save_pretrained(new_path))"
        )
    raise FileNotFoundError(f"{directory} has no weights, which are *.safetensors files: fetch them, or save them so")


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
        layouts = layouts_of(module)
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:  # a tied parameter belongs to the first module that has it
                seen.add(id(parameter))
                destinations[f"{prefix}{name}"] = layouts.get(name, parameter.detach())
    renamed: Mapping[str, str] = getattr(model, "checkpoint_names", {})
    return {_renamed(name, renamed): destination for name, destination in destinations.items()}


def layouts_of(module: nn.Module) -> dict[str, Layout]:
    """Return the layouts of a module's own parameters, by name, of which it has one rank's share."""
    layouts: Callable[[], dict[str, Layout]] | None = getattr(module, "layouts", None)
    return {} if layouts is None else layouts()


def _renamed(name: str, parts: Mapping[str, str]) -> str:
    for ours, theirs in parts.items():
        name = name.replace(ours, theirs)
    return name


def fill_from_safetensors(model: nn.Module, files: Iterable[Path]) -> None:
    """Copy every tensor of `files` into `model`, one at a time, cast to the model's dtype.

    Raises ValueError for a file that safetensors cannot read, and for missing, unexpected or misshapen tensors, by
    name.
    """
    destinations = checkpoint_destinations(model)
    tied = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, LMHead) and module.tied}
    loaded: dict[str, Path] = {}
    unexpected: list[str] = []
    problems: list[str] = []
    for path in files:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                    if name.endswith(IGNORED_SUFFIXES) or name in tied:
                        continue
                    if name not in destinations:
                        unexpected.append(name)
                    elif name in loaded:
                        problems.append(f"{name} is in {loaded[name].name} and again in {path.name}")
                    else:
                        loaded[name] = path
                        problems += _fill(name, destinations[name], file.get_slice(name), file)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged or not a safetensors file ({error}): fetch it again") from error
    missing = sorted(destinations.keys() - loaded.keys())
    if missing:
        problems.append(f"missing: {_list_names(missing)}")
    if unexpected:
        problems.append(f"unexpected: {_list_names(sorted(unexpected))}")
    if problems:
        raise ValueError(f"the checkpoint does not fit {type(model).__name__} and its config: {'; '.join(problems)}")


def _fill(name: str, destination: Destination, stored: Any, file: Any) -> list[str]:
    """Copy one tensor, or the parts of it that are wanted, or return why it does not fit. `stored` is its safetensors
    slice, without the data."""
    shape = tuple(stored.get_shape())
    if shape != tuple(destination.shape):
        return [f"{name} has shape {shape}, the config asks for {tuple(destination.shape)}"]
    parts = destination.parts if isinstance(destination, Layout) else (((), destination),)
    for index, memory in parts:
        tensor = stored[index] if index else file.get_tensor(name)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            return [f"{name} is stored as {tensor.dtype}: quantized checkpoints are not supported"]
        memory.copy_(tensor)
    return []


def _indexed_names(index: Path) -> list[str]:
    """Return the file names in a safetensors index, each once, in order."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not a safetensors index with a 'weight_map': {error!r}") from error


def _parent_prefix(prefix: str) -> str:
    """ "layers.0.mlp.gate_up_proj." -> "layers.0.mlp."."""
    head = prefix.rstrip(".").rpartition(".")[0]
    return f"{head}." if head else ""


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
