"""Save a trained model as a Hugging Face model directory, written beside its place and moved there file by file."""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vllm_blend.pipeline.files import check_folder

CONFIG = "config.json"


def check_output(output: Path) -> None:
    """Raise FileExistsError if writing could spoil something at `output`, and another OSError if nothing can be
    written."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"--output {output} exists and is not an empty folder: choose another, or remove it")
    check_folder(output, f"--output {output}")


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    output: Path,
    trained: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write weights (in `dtype`), configuration and tokenizer; an earlier checkpoint there is replaced. `trained` are
    the weights, if they are others than the model's own: those with an adapter merged into them.

    The configuration comes last: a folder that has one has complete weights, those of the last checkpoint or these. (If
    the weights are in several files and replacing a checkpoint is interrupted, some may be newer than others.)
    """
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as name:
        folder = Path(name)
        given = model.state_dict() if trained is None else trained
        weights = {name: tensor.detach().to("cpu", dtype) for name, tensor in given.items()}
        if model.config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)
        config = copy.deepcopy(model.config)
        config.dtype = dtype
        config.save_pretrained(folder)
        for file in sorted(folder.iterdir(), key=lambda file: file.name == CONFIG):
            os.replace(file, output / file.name)
